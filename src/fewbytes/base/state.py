"""Named tensors: taking them from a model, putting them back, averaging them."""

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
"""A model's tensors by name (parameters and buffers), or any other named tensors."""
EXTRA = "_extra_state"  # how PyTorch names a module's extra state


def mark_trained(model: nn.Module) -> None:
    """Note of every parameter whether it is trained (requires gradients), and which buffers hold numbers that are not
    finite, such as a causal mask's: what is not trained, and what has no mean, neither travels nor changes."""
    for p in model.parameters():
        p.trained = p.requires_grad  # type: ignore[attr-defined]
    for module in model.modules():
        kept = ((n, b) for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set)
        constant = [name for name, buffer in kept if not buffer.isfinite().all()]
        if constant:
            module.constant_buffers = tuple(constant)  # type: ignore[assignment]


def all_entries(model: nn.Module) -> State:
    """Every tensor of the model's state dict by name, the model's own wherever it is one.

    Extra state (PyTorch's `get_extra_state`) that is no tensor of numbers is left out.
    """
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not (name.endswith(EXTRA) and value.dtype == torch.uint8)  # a pickle's bytes
    }


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained by name, of shared ones the first."""
    return {name: p for name, p in model.named_parameters() if _trained(p)}


def trained_entries(model: nn.Module) -> State:
    """The model's own tensors that travel, by name: parameters that are trained, and the buffers beside them.

    A buffer (batch normalisation's statistics) belongs to its module; where that has no parameters, to the innermost
    module around it that has some. It travels if one of those is trained, and its numbers were all finite when the
    model was made. What has several names (tied weights) travels by the first.
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
    """32 characters that are equal for models whose `frozen_entries` are; empty if there are none."""
    still = {name: copied(value) for name, value in frozen_entries(model).items()}
    return blake3(save(still)).hexdigest()[:32] if still else ""


def in_training(model: M) -> M:
    """The model in training mode, but for modules whose buffers do not travel: statistics that no other end of the
    wire would have stand still, and normalise as they will when the model is used."""
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
    """A copy of the model's entries that travel (`trained_entries`), contiguous, on the CPU; `keep` chooses by name.

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
    """Zeros like a tensor, in float32 if it is of narrower numbers, in which sums and moments would be lost."""
    return torch.zeros_like(value, dtype=torch.promote_types(value.dtype, torch.float32))


def gradients_of(model: nn.Module) -> State:
    """A copy of the parameters' gradients, contiguous, on the CPU; zeros for a parameter that has none."""
    return {
        name: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else copied(p.grad)
        for name, p in model.named_parameters()
    }


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the model's entries of the same names; the model's other entries stay as they are.

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
        model.load_state_dict(extra, strict=False)  # extra state, and what else modules make for their state dict


class EntryMeans:
    """The weighted mean of each entry over the states that have it: memory of a few models, however many are added.

    Sums are in float64, in the order added; a mean is rounded once, to the entry's type, of counters to whole numbers.
    The mean of equal values is that value, bit for bit: what float64 cannot hold wider is summed as it differs from the
    first value added.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._sums: State = {}
        self._first: State = {}  # of float64 and integers

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one state, of any entries, which counts as `weight` of them."""
        for name, value in state.items():
            new = name not in self._sums
            if new and (value.dtype == torch.float64 or not value.is_floating_point()):
                self._first[name] = value.clone()
            if name in self._first:
                first = self._first[name]
                wide = value.double() - first.double() if value.is_floating_point() else value.long() - first.long()
                value = wide.masked_fill_(value == first, 0).double()  # an infinite one less itself is not 0
            if new:
                self._sums[name], self._dtypes[name] = value.double() * weight, state[name].dtype
                self.weights[name] = weight
            else:
                self._sums[name].add_(value, alpha=weight)
                self.weights[name] += weight

    def means(self) -> State:
        """The means of what was added, by entry."""
        return {name: self._mean(name) for name in self._sums}

    def _mean(self, name: str) -> Tensor:
        mean, dtype = self._sums[name] / self.weights[name], self._dtypes[name]
        if name in self._first:
            first, away = self._first[name], mean
            if dtype.is_floating_point:
                mean = torch.where(away == 0, first, first + away)
            else:  # rounded as a whole, so that the order of clients does not matter, where float64 can hold it
                whole = first.long()
                mean = torch.where(whole.abs() < 1 << 52, (whole + away).round().long(), whole + away.round().long())
        return mean.to(dtype)

    def over(self, old: State) -> State:
        """The means in place of `old`'s entries; those nobody sent stay. Raises MethodError for others."""
        if unknown := self._sums.keys() - old.keys():
            raise MethodError(f"a client sent entries the server does not share: {', '.join(sorted(unknown)[:3])}")
        return old | {name: mean.to(old[name].dtype) for name, mean in self.means().items()}


class Mean:
    """The weighted mean of states with the same entries, added one at a time, as `EntryMeans` has it of each.

    Calling it returns the mean.

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
        """Add one state with a `weight` above 0. Raises MethodError if names or shapes differ from the first one's."""
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
        """The mean of what was added. Raises MethodError if nothing was."""
        if not self._shapes:
            raise MethodError("a mean of nothing: no client replied")
        return self._means.means()
