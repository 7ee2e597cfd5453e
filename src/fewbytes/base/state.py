"""Named tensors: reading them from a model, loading them into it, averaging them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from blake3 import blake3
from safetensors.torch import save
from torch import Tensor, nn

from fewbytes.base.errors import MethodError

M = TypeVar("M", bound=nn.Module)
State = dict[str, Tensor]
"""A model's tensors by name (parameters and buffers), or other named tensors."""
EXTRA = "_extra_state"  # PyTorch's name for a module's extra state


def mark_trained(model: nn.Module) -> None:
    """Mark every parameter as trained (requires gradients) or not, and buffers with non-finite numbers, such as a
    causal mask, as constant. Untrained and constant entries neither travel nor change."""
    for p in model.parameters():
        p.trained = p.requires_grad  # type: ignore[attr-defined]
    for module in model.modules():
        kept = ((n, b) for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set)
        constant = [name for name, buffer in kept if not buffer.isfinite().all()]
        if constant:
            module.constant_buffers = tuple(constant)  # type: ignore[assignment]


def mark_own(module: nn.Module) -> None:
    """Mark the parameters of a part of a model as a client's own: they are trained, and never sent."""
    for p in module.parameters():
        p.own = True  # type: ignore[attr-defined]


def own_entries(model: nn.Module) -> set[str]:
    """Names of the trained parameters that are a client's own (`mark_own`)."""
    return {name for name, p in trained_parameters(model).items() if getattr(p, "own", False)}


def all_entries(model: nn.Module) -> State:
    """All tensors of the model's state dict by name; the model's own tensors, not copies, where possible.

    Leaves out extra state (PyTorch's `get_extra_state`) that is not a tensor of numbers.
    """
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not (name.endswith(EXTRA) and value.dtype == torch.uint8)  # a pickle's bytes
    }


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name; shared ones under their first name."""
    return {name: p for name, p in model.named_parameters() if _trained(p)}


def trained_entries(model: nn.Module) -> State:
    """The model's own tensors that travel, by name: trained parameters and the buffers that belong to them.

    A buffer (batch normalisation's statistics) belongs to its module; if that has no parameters, to the innermost
    enclosing module that has some. It travels if one of those is trained and its numbers were finite when the model was
    made. A tensor with several names (tied weights) travels under the first.
    """
    entries: State = {}
    seen = {
        id(module.get_buffer(name)) for module in model.modules() for name in getattr(module, "constant_buffers", ())
    }
    for name, value in all_entries(model).items():
        if id(value) not in seen:
            entries[name] = value
            seen.add(id(value))
    if all(_trained(p) for p in model.parameters()):
        return entries
    return {
        name: value
        for name, value in entries.items()
        if (_trained(value) if isinstance(value, nn.Parameter) else _learns(model, name.rpartition(".")[0]))
    }


def frozen_entries(model: nn.Module) -> State:
    """The model's own tensors that do not travel, by name."""
    travel = {id(value) for value in trained_entries(model).values()}
    return {name: value for name, value in all_entries(model).items() if id(value) not in travel}


def frozen_digest(model: nn.Module) -> str:
    """32 characters that are equal for models with equal `frozen_entries`; empty if there are none."""
    still = {name: copied(value) for name, value in frozen_entries(model).items()}
    return blake3(save(still)).hexdigest()[:32] if still else ""


def in_training(model: M) -> M:
    """The model in training mode, except for modules whose buffers do not travel: their statistics are missing at the
    other end, so they stay fixed and normalise as they will in use."""
    model.train()
    if not all(_trained(p) for p in model.parameters()):
        for name, module in model.named_modules():
            if any(True for _ in module.buffers(recurse=False)) and not _learns(model, name):
                module.training = False
    return model


def _trained(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "trained", True))


def _learns(model: nn.Module, name: str) -> bool:
    """Whether a module's buffers travel."""
    parameters = list(model.get_submodule(name).parameters())
    if not parameters and name:
        return _learns(model, name.rpartition(".")[0])
    return not parameters or any(map(_trained, parameters))


def state_of(model: nn.Module, keep: Callable[[str], bool] | None = None) -> State:
    """A contiguous copy of the model's entries that travel (`trained_entries`), on the CPU; `keep` selects by name.

    >>> import fewbytes as fb
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    >>> list(fb.state_of(model, keep=lambda name: name.startswith("0.")))
    ['0.weight', '0.bias']
    """
    return {name: copied(value) for name, value in trained_entries(model).items() if keep is None or keep(name)}


def copied(value: Tensor) -> Tensor:
    """A copy on the CPU, contiguous."""
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def zeros_for_sums(value: Tensor) -> Tensor:
    """Zeros like a tensor, at least in float32: sums and moments would lose precision in narrower types."""
    return torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))


def gradients_of(model: nn.Module) -> State:
    """A contiguous copy of the parameters' gradients, on the CPU; zeros for a parameter without a gradient."""
    return {
        name: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else copied(p.grad)
        for name, p in model.named_parameters()
    }


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the model's entries with the same names; other entries keep their values.

    Raises MethodError for a name the model does not have or a shape that differs (nothing is broadcast).
    """
    own = all_entries(model)
    for name, value in state.items():
        if name not in own or own[name].shape != value.shape:
            have = tuple(own[name].shape) if name in own else "no such entry"
            raise MethodError(f"cannot load {name!r} of shape {tuple(value.shape)}: the model has {have}")
    if not state:
        return
    own_tensors = {id(value) for value in (*model.parameters(), *model.buffers())}
    present = [name for name in state if id(own[name]) in own_tensors]
    if present:
        with torch.no_grad():
            torch._foreach_copy_([own[name].detach() for name in present], [state[name] for name in present])
    if extra := {name: value for name, value in state.items() if id(own[name]) not in own_tensors}:
        model.load_state_dict(extra, strict=False)  # extra state, and others that modules create


class EntryMeans:
    """The weighted mean of each entry over the states that have it; takes the memory of a few models.

    Sums are in float64, in the order added. A mean is rounded once, to the entry's type; counters to whole numbers. The
    mean of equal values is exactly that value: types that float64 cannot widen are summed as differences from the first
    value.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._sums: State = {}
        self._first: State = {}  # for float64 and integers

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one state, with any entries, with a `weight`."""
        for name, value in state.items():
            new = name not in self._sums
            if new and (value.dtype == torch.float64 or not value.is_floating_point()):
                self._first[name] = value.clone()
            if name in self._first:
                first = self._first[name]
                wide = value.double() - first.double() if value.is_floating_point() else value.long() - first.long()
                value = wide.masked_fill_(value == first, 0).double()  # infinity minus itself is not 0
            if new:
                self._sums[name], self._dtypes[name] = value.double() * weight, state[name].dtype
                self.weights[name] = weight
            else:
                self._sums[name].add_(value, alpha=weight)
                self.weights[name] += weight

    def means(self) -> State:
        """The mean of each entry."""
        return {name: self._mean(name) for name in self._sums}

    def _mean(self, name: str) -> Tensor:
        mean, dtype = self._sums[name] / self.weights[name], self._dtypes[name]
        if name in self._first:
            first, away = self._first[name], mean
            if dtype.is_floating_point:
                mean = torch.where(away == 0, first, first + away)
            else:  # rounded as a whole, independent of the clients' order, where float64 is exact
                whole = first.long()
                mean = torch.where(whole.abs() < 1 << 52, (whole + away).round().long(), whole + away.round().long())
        return mean.to(dtype)

    def over(self, old: State) -> State:
        """`old` with its entries replaced by means where a client sent them. Raises MethodError for unknown entries."""
        if unknown := self._sums.keys() - old.keys():
            raise MethodError(f"a client sent entries the server does not share: {', '.join(sorted(unknown)[:3])}")
        return old | {name: mean.to(old[name].dtype) for name, mean in self.means().items()}


class Mean:
    """The weighted mean of states with the same entries, added one at a time; see `EntryMeans`.

    Call it to get the mean.

    >>> import fewbytes as fb
    >>> import torch
    >>> mean = fb.Mean()
    >>> mean.add({"w": torch.tensor([0.0, 4.0])}, weight=3)
    >>> mean.add({"w": torch.tensor([4.0, 0.0])}, weight=1)
    >>> mean()
    {'w': tensor([1., 3.])}
    """

    def __init__(self) -> None:
        self._means = EntryMeans()
        self._shapes: dict[str, torch.Size] | None = None

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one state with a `weight` above 0. Raises MethodError if names or shapes differ from the first's."""
        if not weight > 0:
            raise MethodError(f"a mean needs weights above 0, got {weight}")
        shapes = {name: value.shape for name, value in state.items()}
        first = self._shapes = shapes if self._shapes is None else self._shapes
        if differ := {name for name, _ in first.items() ^ shapes.items()}:
            raise MethodError(
                f"a mean needs the same entries in every state; these differ: {', '.join(sorted(differ))}"
            )
        self._means.add(state, weight)

    def __call__(self) -> State:
        """The mean of all added states. Raises MethodError if there is none."""
        if not self._shapes:
            raise MethodError("nothing to average: no client replied")
        return self._means.means()
