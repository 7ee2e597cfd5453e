"""States as people have them, as payloads: tensors by name, NumPy arrays by name, or NumPy arrays in order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewbytes.base.errors import FrameError, LikelyMistake, UserError, with_article
from fewbytes.wire import Dense, Layout, payload

Array = NDArray[Any]
AnyState = Mapping[str, Tensor] | Mapping[str, Array] | Sequence[Array]
"""What is encoded: a state dict of torch tensors, NumPy arrays by name, or NumPy arrays in order."""
S = TypeVar("S", bound=AnyState)
FirstState = AnyState | Callable[[], AnyState] | None
"""First weights that both ends hold, or what makes them; None: there are none."""
Exact = Callable[[str], bool] | Collection[str | int] | None
"""Which tensors are not rounded: a function of the name, names, or positions; None: statistics of normalisation."""
STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""How the names of normalisation layers' statistics end."""


@payload
class Tensors:
    """Torch tensors by name."""

    values: Dense


@payload
class Arrays:
    """NumPy arrays by name."""

    values: Dense


@payload
class NumberedArrays:
    """NumPy arrays in order; their names are their positions."""

    values: Dense


Packable = Tensors | Arrays | NumberedArrays
KINDS: dict[str, type[Packable]] = {kind.__name__: kind for kind in (Tensors, Arrays, NumberedArrays)}


def packable(state: AnyState) -> Packable:
    """A state as a payload. Raises TypeError, naming the entry, for a value that cannot travel."""
    if isinstance(state, Mapping):
        if not all(isinstance(name, str) for name in state):
            raise TypeError("a state's names must be strings")
        if any(isinstance(value, np.ndarray | np.generic) for value in state.values()):
            return Arrays(Dense({name: _tensor_of_array(name, value) for name, value in state.items()}))
        return Tensors(Dense({name: _tensor(name, value) for name, value in state.items()}))
    if isinstance(state, Sequence) and not isinstance(state, str | bytes):
        return NumberedArrays(Dense({str(i): _tensor_of_array(str(i), value) for i, value in enumerate(state)}))
    raise TypeError(f"a state is a dict of tensors or of arrays, or a list of arrays, not {with_article(type(state))}")


def unpackable(packed: Packable) -> Any:
    """Undo `packable`. Raises FrameError for tensors that the kind of state cannot hold."""
    state = packed.values.dense()
    if isinstance(packed, Tensors):
        return state
    if any(value.dtype == torch.bfloat16 for value in state.values()):
        raise FrameError("type", "NumPy arrays cannot be of type bfloat16")
    arrays = {name: value.numpy() for name, value in state.items()}
    if isinstance(packed, Arrays):
        return arrays
    if list(arrays) != [str(i) for i in range(len(arrays))]:
        raise FrameError("type", "the arrays are not numbered from 0")
    return list(arrays.values())


def copied(packed: Packable) -> Packable:
    """The same values in memory of their own: whoever has the original may change it in place."""
    return type(packed)(Dense({name: value.clone() for name, value in packed.values.dense().items()}))


def first_state(first: FirstState) -> AnyState | None:
    """The first weights, made if need be: a seed that makes them leaves torch's numbers on the CPU as they were. Raises
    UserError for anything else."""
    if isinstance(first, torch.nn.Module):
        raise UserError("first is a model: give its weights (first=model.state_dict()), or a function that makes them")
    with torch.random.fork_rng(devices=[]):
        made = first() if callable(first) else first
    if made is None and not callable(first):
        return None
    try:
        packable(made)  # type: ignore[arg-type]
    except TypeError as error:
        raise UserError(
            f"first must be weights, such as model.state_dict() or a list of arrays, or a function that returns them: "
            f"{error}"
        ) from None
    return made


def layout_of(packed: Packable) -> Layout:
    """The names, types and shapes of a state."""
    return Layout.of(packed.values.dense())


def path_of(packed: Packable) -> str:
    """Where its tensors stand in the payload, as rounding errors are kept by."""
    return f"{type(packed).__name__}.values"


def check_exact(exact: Exact) -> None:
    """Raises UserError for what names no tensors: a text, or a number."""
    if exact is not None and (isinstance(exact, str) or not (callable(exact) or isinstance(exact, Collection))):
        raise UserError(
            f"exact must be a function of a name, or names or positions such as {{'norm.bias'}}, not {exact!r}"
        )


def exact_names(packed: Packable, exact: Exact) -> frozenset[str]:
    """The names of the tensors that are not rounded. Raises UserError for a name or position that is not there."""
    names = packed.values.dense().keys()
    if exact is None:
        if names and all(name.isdecimal() for name in names):
            warnings.warn(
                "numbered arrays do not say which of them are statistics of normalisation layers, so all are rounded: "
                "name those with exact={position, …}, or exact=() if there are none",
                LikelyMistake,
                stacklevel=4,
            )
            return frozenset()
        return frozenset(name for name in names if name.rpartition(".")[2] in STATISTICS)
    if callable(exact):
        return frozenset(name for name in names if exact(name))
    chosen = frozenset(map(str, exact))
    if missing := sorted(chosen - names):
        raise UserError(f"exact names {missing[0]!r}, which is not in the state")
    return chosen


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name!r}: {with_article(type(value))} is not a tensor: leave it out, or send it beside")
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"{name!r}: sparse and quantised tensors cannot travel: give a dense one")
    return value.detach().cpu()


def _tensor_of_array(name: str, value: Any) -> Tensor:
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{name!r}: {with_article(type(value))} is not a NumPy array")
    native = np.array(value, value.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise TypeError(f"{name!r}: arrays of type {value.dtype} cannot travel") from None
