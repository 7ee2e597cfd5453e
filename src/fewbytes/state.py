"""Named tensors: taking them from a model, putting them back, averaging them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fewbytes.errors import MethodError

State = dict[str, Tensor]
"""A model's tensors by name (parameters and buffers), or any other named tensors."""


def state_of(model: nn.Module, keep: Callable[[str], bool] | None = None) -> State:
    """A copy of the model's parameters and buffers, contiguous, on the CPU; `keep` chooses by name."""
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if keep is None or keep(name)
    }


def gradients_of(model: nn.Module) -> State:
    """A copy of the parameters' gradients, contiguous, on the CPU; zeros for a parameter that has none."""
    return {
        name: torch.zeros(p.shape, dtype=p.dtype)
        if p.grad is None
        else p.grad.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, p in model.named_parameters()
    }


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy `state` into the model's entries of the same names; the model's other entries stay as they are.

    Raises MethodError for a name the model does not have or a shape that differs (nothing is broadcast).
    """
    own = model.state_dict()
    with torch.no_grad():
        for name, value in state.items():
            if name not in own or own[name].shape != value.shape:
                have = tuple(own[name].shape) if name in own else "no such entry"
                raise MethodError(f"cannot load {name!r} of shape {tuple(value.shape)}: the model has {have}")
            own[name].copy_(value)


class Mean:
    """The weighted mean of states, added one at a time: memory of one model, however many are added.

    Floating-point entries are summed in their own type, in the order added; integer entries (counters) are
    summed in float64 and rounded. Calling it returns the mean.
    """

    def __init__(self) -> None:
        self._sum: State = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weight = 0.0

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one state. Raises MethodError if its names or shapes differ from the first one's."""
        if not weight > 0:
            raise MethodError(f"a mean needs weights above 0, got {weight}")
        first = not self._sum
        if first:
            self._dtypes = {name: value.dtype for name, value in state.items()}
            self._sum = {
                name: torch.zeros_like(value, dtype=None if value.is_floating_point() else torch.float64)
                for name, value in state.items()
            }
        differ = [
            name
            for name in self._sum.keys() | state.keys()
            if name not in self._sum or name not in state or self._sum[name].shape != state[name].shape
        ]
        if differ:
            raise MethodError(
                f"a mean needs the same entries in every state; these differ: {', '.join(sorted(differ))}"
            )
        floating = [name for name in self._sum if self._dtypes[name].is_floating_point]
        if floating:
            sums = [self._sum[name] for name in floating]
            values = [state[name].to(self._sum[name].dtype) for name in floating]
            torch._foreach_add_(sums, values, alpha=weight)
        for name in self._sum.keys() - set(floating):
            self._sum[name].add_(state[name].to(torch.float64), alpha=weight)
        self._weight += weight

    def __call__(self) -> State:
        """The mean of what was added. Raises MethodError if nothing was."""
        if not self._sum:
            raise MethodError("a mean of nothing: no client replied")
        mean = {}
        for name, total in self._sum.items():
            value = total / self._weight
            mean[name] = value if self._dtypes[name].is_floating_point else value.round().to(self._dtypes[name])
        return mean


class EntryMeans:
    """The weighted mean of each entry over the states that have it: memory of one model, however many are added.

    The mean of one value is that value, bit for bit.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self._sums: State = {}
        self._only: State = {}

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one state, of any entries."""
        for name, value in state.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(value, dtype=None if value.is_floating_point() else torch.float64)
                self.weights[name], self._only[name] = 0.0, value.clone()
            else:
                self._only.pop(name, None)
            self._sums[name].add_(value, alpha=weight)
            self.weights[name] += weight

    def over(self, old: State) -> State:
        """The means in place of `old`'s entries; those nobody sent stay. Raises MethodError for others."""
        if strange := self._sums.keys() - old.keys():
            raise MethodError(f"a client sent entries the server does not share: {', '.join(sorted(strange)[:3])}")
        new = dict(old)
        for name, total in self._sums.items():
            mean = self._only.get(name, total / self.weights[name])
            new[name] = mean if old[name].is_floating_point() else mean.round().to(old[name].dtype)
        return new
