"""Reuse one module for client after client, each time as if it were new."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewbytes.base.state import frozen_entries
from fewbytes.core.graphs import same_each_time

_OF_EVERY_MODULE = vars(nn.Module()).keys()


class Reused:
    """A model with its initial values outside the state dict, or that do not travel: buffers, and attributes of
    modules, such as counters in Python."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._plain = model, _plain(model)
        if self._plain:
            return
        self._attributes = _attributes(model)
        self._buffers = {name: (value.clone(), value._version) for name, value in self._still().items()}
        self._names = _names(model)
        self._versions = _versions(model)

    def again(self) -> nn.Module | None:
        """The model in its initial state, except for trained entries; None if it cannot be restored."""
        if self._plain:
            return self.model
        if self._names != _names(self.model) or self._versions != _versions(self.model):
            return None
        if not _same(self._attributes, _attributes(self.model, copied=False)):
            return None
        for name, value in self._still().items():
            first, version = self._buffers[name]
            if value.shape != first.shape:
                return None
            if value._version != version or not _same(value, first):
                value.copy_(first)
                self._buffers[name] = first, value._version
        return self.model

    def _still(self) -> dict[str, Tensor]:
        """Buffers with the same values at the start of every training: those that do not travel."""
        frozen = frozen_entries(self.model)
        kept = self.model.state_dict(keep_vars=True).keys() - frozen.keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name not in kept}


def _plain(model: nn.Module) -> bool:
    """Whether all of the model's state is in its state dict and changes only in training, as in PyTorch's modules and
    our own, except embeddings that renormalise their rows."""
    return same_each_time(model) and all(getattr(module, "max_norm", None) is None for module in model.modules())


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """Undo changes by a use of the model, such as a counter, a buffer or renormalised rows of an embedding, so that
    scoring does not affect training."""
    if _plain(model):
        yield
        return
    values = [(value, value._version, value.detach().clone()) for value in (*model.parameters(), *model.buffers())]
    parts = [(module, set(vars(module)), dict(module._buffers)) for module in model.modules()]
    attributes = _attributes(model)
    yield
    with torch.no_grad():
        for value, version, old in values:
            if value._version != version:
                value.copy_(old)
    for (module, names, buffers), attribute_values in zip(parts, attributes, strict=True):
        module._buffers.update(buffers)
        now = vars(module)
        for name in now.keys() - names:
            del now[name]
        for name, kept in attribute_values.items():
            if name in names and not isinstance(kept, _Unknown) and not _same(kept, now.get(name)):
                now[name] = kept


def _names(model: nn.Module) -> set[tuple[str, type]]:
    """Names and types of all modules, parameters and buffers: some models create them on use."""
    every = (*model.named_modules(), *model.named_parameters(), *model.named_buffers())
    return {(name, type(each)) for name, each in every}


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Addresses of untrained parameters, and counts of their in-place changes."""
    return [(p.data_ptr(), p._version) for p in model.parameters() if not getattr(p, "trained", True)]


class _Unknown:
    """A value that cannot be copied or compared, and so never counts as the same."""


def _attributes(model: nn.Module, copied: bool = True) -> list[dict[str, Any]]:
    """Attributes of each module besides the standard ones; without modules, parameters and buffers."""
    own = {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
    return [
        {
            **{
                name: _copied(value, own) if copied else value
                for name, value in vars(module).items()
                if name not in _OF_EVERY_MODULE and id(value) not in own
            },
            **{f"hook {i}": _Unknown() for i, hook in enumerate(_hooks(module)) if _closes_over(hook)},
        }
        for module in model.modules()
    ]


def _hooks(module: nn.Module) -> list[Any]:
    """Hooks called before and after passes."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _closes_over(value: Any) -> bool:
    """Whether a user's function may have hidden state."""
    ours = getattr(value, "__module__", "").split(".")[0] in ("torch", "torchvision", "fewbytes")
    return isinstance(value, FunctionType) and value.__closure__ is not None and not ours


def _copied(value: Any, own: dict[int, Any]) -> Any:
    if id(value) in own:
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if _closes_over(value):
        return _Unknown()
    if type(value) in (list, tuple, set, deque):
        return type(value)(_copied(each, own) for each in value)
    if type(value) is dict:
        return {key: _copied(each, own) for key, each in value.items()}
    try:
        return copy.deepcopy(value, dict(own))
    except Exception:  # raised by any object in a user's module
        return _Unknown()


def _same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values are known to be equal; False if unknown."""
    if type(one) is not type(other) or depth > 20 or isinstance(one, _Unknown):
        return False
    if one is other:
        return True
    if isinstance(one, nn.Module):
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.layout == other.layout
        return (
            alike and one.layout == torch.strided and bool(((one == other) | ((one != one) & (other != other))).all())
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(
            _same(mine, theirs, depth + 1) for mine, theirs in zip(one, other, strict=True)
        )
    try:
        if one == other:
            return True
        # also state in slots, or below Python
        mine, theirs = (each.__reduce_ex__(4) for each in (one, other))
        return not isinstance(mine, str) and all(
            _same(tuple(a) if isinstance(a, Iterator) else a, tuple(b) if isinstance(b, Iterator) else b, depth + 1)
            for a, b in zip(mine, theirs, strict=True)
        )
    except Exception:  # raised by any object in a user's module
        return False
