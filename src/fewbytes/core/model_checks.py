"""Checks that a model can be trained by several clients and can travel; one-line errors name the part and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewbytes.base.errors import UserError
from fewbytes.base.state import State, all_entries, copied, frozen_entries, trained_entries, trained_parameters
from fewbytes.core.entries import kind_of, named_module
from fewbytes.core.graphs import same_each_time
from fewbytes.core.training import Local

Entries = dict[str, tuple[bool, Tensor]]
"""For each entry, whether it travels, and a copy of it."""


def check_apart(one: nn.Module, other: nn.Module) -> None:
    """Raises UserError if two models from a task's function share something that changes in training, or an entry that
    travels starts with non-finite numbers."""
    others, still = _memory(other), {id(value) for value in frozen_entries(one).values()}
    for module in filter(same_each_time, one.modules()):  # constants made from a seed, which our own modules share
        still |= {id(module._buffers[name]) for name in module._non_persistent_buffers_set}
    shared = {
        name
        for name, value in (*one.named_parameters(), *one.named_buffers())
        if id(value) not in still and value.layout == torch.strided and value.untyped_storage().data_ptr() in others
    }
    shared |= {
        name
        for (name, module), (_, twin) in zip(one.named_modules(), other.named_modules(), strict=False)
        if module is twin and not same_each_time(module) and not _frozen(module)
    }
    if shared:
        name = min(shared)
        raise UserError(
            f"the function that makes the model gives the same {'module' if one is other else repr(name)} each time, "
            "so that clients would train one another's: make a new one each time, lambda: MyModel() or "
            "lambda: copy.deepcopy(model)"
        )
    for name, value in trained_entries(one).items():
        if not value.isfinite().all():
            raise UserError(
                f"{kind_of(name, value)} {name!r} of the model holds numbers that are not finite, before any training: "
                "give it finite ones, or, if it is constant, make it a buffer (register_buffer)"
            )


def check_float32(model: nn.Module, method: str) -> None:
    """Raises UserError for a model with trained entries of a floating-point type other than float32."""
    for name, value in trained_entries(model).items():
        if value.is_floating_point() and value.dtype != torch.float32:
            raise UserError(
                f"{method} computes in float32, and {kind_of(name, value)} {name!r} of the model is "
                f"{str(value.dtype).removeprefix('torch.')}: make the model float32 (precision='bf16' computes in "
                "bfloat16 nevertheless), or use another method"
            )


def check_optimiser(model: nn.Module, local: Local | None) -> None:
    """Raises UserError for Adam on float16, where its epsilon is 0 and a gradient of 0 is divided by 0."""
    if local is None or local.optimiser not in ("adam", "adamw"):
        return
    for name, p in trained_parameters(model).items():
        if p.dtype == torch.float16:
            raise UserError(
                f"{local.optimiser} does not work on float16, as parameter {name!r} of the model is (its epsilon, "
                "1e-8, is 0 there): make the model bfloat16 or float32, or use another optimiser"
            )


def kept(model: nn.Module) -> Entries:
    """A copy of the model's current entries."""
    travel = trained_entries(model).keys()
    return {name: (name in travel, copied(value)) for name, value in all_entries(model).items()}


def check_unchanged(model: nn.Module, before: Entries) -> None:
    """Raises UserError if using the model has changed its set of entries or their shapes since `before`, or any entry
    that does not travel."""
    now: State = all_entries(model)
    if others := now.keys() ^ before.keys():
        raise UserError(
            f"the model makes or drops {min(others)!r} as it is used: make all of it in __init__, or call the model on "
            "a sample in the function that makes it"
        )
    still = frozen_entries(model)
    for name, (travelled, old) in before.items():
        new = now[name]
        if new.shape != old.shape:
            raise UserError(
                f"{kind_of(name, new)} {name!r} of the model changes its shape in training, from {tuple(old.shape)} to "
                f"{tuple(new.shape)}: call the model on a sample in the function that makes it, so that it has its own "
                "from the start"
            )
        if travelled and not new.isfinite().all():
            raise UserError(
                f"{kind_of(name, new)} {name!r} of the model is no longer finite after a first pass in training, and "
                "so has no mean: keep it finite, or register_buffer(…, persistent=False)"
            )
        if not travelled and name in still and not _equal(new, old):
            why = "is not trained" if isinstance(new, nn.Parameter) else "does not travel"
            if not old.isfinite().all():
                why = "begins with numbers that are not finite, which have no mean,"
            raise UserError(
                f"{kind_of(name, new)} {name!r} of the model {why} and changes in training, so that clients would have "
                "different ones: keep it as it is, or let it travel (a parameter with requires_grad, a buffer that "
                "begins with finite numbers)"
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    one = one.detach().cpu()
    return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is not itself


@contextmanager
def entered(model: nn.Module) -> Iterator[list[str]]:
    """Yields the stack of modules being called, outermost first; when a pass fails, the last is the failing one."""
    within: list[str] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which has no hooks
                title = named_module(name, module)
                hooks.callback(module.register_forward_pre_hook(lambda *_, title=title: within.append(title)).remove)
                hooks.callback(module.register_forward_hook(lambda *_: within.pop() and None).remove)
        yield within


@contextmanager
def normalised(model: nn.Module) -> Iterator[list[str]]:
    """Yields the batch normalisations that, in training, see a single value per channel of each sample's maps."""
    seen: list[str] = []

    def look(name: str, inputs: tuple[Any, ...]) -> None:
        if isinstance(x := inputs[0] if inputs else None, Tensor) and x.dim() > 2 and prod(x.shape[2:]) == 1:
            seen.append(name)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                hook = module.register_forward_pre_hook(lambda _, inputs, name=name: look(name, inputs))
                hooks.callback(hook.remove)
        yield seen


def _frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(p.requires_grad for p in parameters)


def _memory(model: nn.Module) -> set[int]:
    """Addresses of parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return {value.untyped_storage().data_ptr() for value in tensors if value.layout == torch.strided and value.numel()}
