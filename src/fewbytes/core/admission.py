"""Admission of replies: checks before a reply can touch the server's state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError
from fewbytes.base.ranges import (
    COUNTS,
    LEARNT,
    MOST_SAMPLES,
    OF_TRAINING,
    PART,
    PRESENT,
    SENT,
    STATISTICS,
    WHOLE,
)
from fewbytes.base.state import State
from fewbytes.wire.bits import Bits
from fewbytes.wire.fields import check_finite, entries_in
from fewbytes.wire.layout import Forms, Layout, forms_of
from fewbytes.wire.masked import Masked
from fewbytes.wire.schema import Leaf, Marks
from fewbytes.wire.value import entries_of

GROWTH = 1000.0
"""Maximum norm of the parameters in a client's reply, as a multiple of the norm of the message or of the first model,
unless targets may have any scale."""


@dataclass(frozen=True)
class Expected:
    """Known facts about a reply before it arrives. `layout`: of the client's model; `statistics`: its entries that are
    not parameters. `sent`: the answered message (None: none); `tensors`: of all messages that came with it. `samples`,
    `classes`: numbers of training samples, in all and per class (None: unknown). `first`: the first model's norm;
    `most`: the maximum norm of all the reply's numbers. `growth`: the maximum norm of its parameters, as a multiple of
    the message's. `hidden`: whether masks hide values, so that types are meaningless."""

    layout: Layout
    statistics: Set[str]
    sent: Any
    tensors: Mapping[str, Tensor]
    samples: int | None
    classes: Sequence[int] | None
    first: float
    most: float
    growth: float = GROWTH
    hidden: bool = False


def finite_norm(leaves: Sequence[Leaf], hint: str) -> float:
    """The Euclidean norm of all floating-point numbers of a payload together, given its leaves. Raises FrameError if a
    number is not finite; `hint`: the likely reason."""
    size = norm(
        (tensor for leaf in leaves for tensor in leaf.tensors.values()),
        (number for leaf in leaves for number in leaf.floats),
    )
    if not math.isfinite(size):  # the numbers may be finite, but too large for a finite norm
        check_finite(leaves, hint)
    return size


def admit(leaves: Sequence[Leaf], size: float, known: Expected) -> None:
    """Raises FrameError for a payload, given its leaves, whose fields violate their types (`Meta(ge=0)`, and the marks
    of `fewbytes.base.ranges`), or whose norm `size` is too large."""
    try:
        marked = _marked(leaves)
        for (marks, mixed), entries in marked:
            if (expected := _expected(marks, known)) is not None:
                _check_entries(entries, expected, PART not in marks, mixed, known.hidden)
        for leaf in leaves:
            if leaf.kind.ranged and (must := leaf.kind.wrong(leaf.value)):
                raise MethodError(f"{leaf.path} {must}, not {str(leaf.value)[:40]}")
            if leaf.marks:
                _check_data(leaf, known)
            if not known.hidden:
                _check_numbers(leaf)
        if size > known.growth * known.first:
            _check_growth([entries for _, entries in marked], known)
    except MethodError as error:
        raise FrameError("values", str(error)) from None
    if size > known.most:
        raise FrameError("values", f"its numbers are of norm {size:.3g}, more than {known.most:.3g} (--max-norm)")


def like(**fields: State | None) -> Callable[[Any, Any], None]:
    """A check for `Network.call`: wire values of a reply have exactly the entries of these states, in their types and
    shapes; None: the reply has no such value."""
    expected = {name: forms_of(state or {}) for name, state in fields.items()}

    def check(client: Any, reply: Any) -> None:
        for name, state in fields.items():
            value = getattr(reply, name)
            if (value is None) != (state is None):
                raise MethodError(f"{name} {'is missing' if value is None else 'is not asked for'}")
            _check_entries(entries_of(value), expected[name])

    return check


def check_like(entries: Mapping[str, Tensor], state: State) -> None:
    """Raises MethodError unless these are exactly the entries of the state, in their types and shapes."""
    _check_entries(entries, forms_of(state))


def norm(tensors: Iterable[Tensor], numbers: Iterable[float] = ()) -> float:
    """The Euclidean norm of all floating-point tensors and numbers together; not finite if one of them is not."""
    floating, numbers = [tensor for tensor in tensors if tensor.is_floating_point()], list(numbers)
    sizes = [float(size) for size in torch._foreach_norm(floating)] if floating else []
    if not math.isfinite(found := math.hypot(*sizes, *numbers)):  # own types are fast, but may overflow
        sizes = [float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in floating]
        found = math.hypot(*sizes, *numbers)
    return found


ENTRIES: Marks = frozenset({SENT, WHOLE, PART, LEARNT, STATISTICS})
"""The marks about a wire value's entries."""
Marked = tuple[tuple[Marks, bool], dict[str, Tensor]]
"""The marks of wire values, whether all travel as one type whatever the model's types, and their entries."""


def _marked(leaves: Sequence[Leaf]) -> list[Marked]:
    """The wire values with marks; those marked SENT with equal marks are merged."""
    found: list[Marked] = []
    sent: dict[tuple[Marks, bool], dict[str, Tensor]] = {}
    for leaf in leaves:
        if marks := leaf.marks & ENTRIES:
            key = marks, isinstance(leaf.value, Masked)
            entries = dict(leaf.value.dense() if isinstance(leaf.value, Bits) else leaf.tensors)
            if SENT in marks:
                sent.setdefault(key, {}).update(entries)
            else:
                found.append((key, entries))
    return [*found, *sent.items()]


def _expected(marks: Marks, known: Expected) -> Forms | None:
    """The expected entries by name, given marks; None if nothing was sent, or the marks leave them open."""
    if marks == {LEARNT} or (SENT in marks and known.sent is None):
        return None
    expected = forms_of(entries_in(known.sent)) if SENT in marks else known.layout.forms
    if LEARNT in marks:
        return {name: form for name, form in expected.items() if name not in known.statistics}
    if STATISTICS in marks:
        return {name: form for name, form in expected.items() if name in known.statistics}
    return expected


def _check_entries(
    entries: Mapping[str, Tensor], expected: Forms, every: bool = True, mixed: bool = False, hidden: bool = False
) -> None:
    if others := entries.keys() - expected.keys():
        raise MethodError(f"it has an unexpected entry {min(others)[:80]!r}")
    if every and (missing := expected.keys() - entries.keys()):
        raise MethodError(f"its entry {min(missing)!r} is missing")
    for name, tensor in entries.items():
        sent, (dtype, shape) = tensor.dtype, expected[name]
        if tensor.shape != shape or not (sent == dtype or hidden or _may_be(sent, name, expected, mixed)):
            raise MethodError(f"its {name!r} is {_described(sent, tensor.shape)}, not {_described(dtype, shape)}")


def _may_be(dtype: torch.dtype, name: str, expected: Forms, mixed: bool) -> bool:
    """Whether an entry may have a type other than the expected one. Floats may travel as float32; several types
    together may travel as float32, or as one of their floating-point types."""
    if dtype == torch.float32 and (mixed or expected[name][0].is_floating_point):
        return True
    return mixed and dtype.is_floating_point and dtype in {each for each, _ in expected.values()}


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _check_growth(marked: Sequence[Mapping[str, Tensor]], known: Expected) -> None:
    """Raises MethodError for parameters of a norm that no training reaches in a round: clients that were sent their
    mean would train on to numbers that are refused, too."""
    size = norm(value for entries in marked for name, value in entries.items() if name not in known.statistics)
    before = max(known.first, norm(known.tensors.values()))
    if size > known.growth * before:
        raise MethodError(
            f"its parameters are of norm {size:.3g}, more than {known.growth:g} times the {before:.3g} of what it was "
            "sent (a larger --max-norm allows more)"
        )


def _check_data(leaf: Leaf, known: Expected) -> None:
    """Raises MethodError for a field that contradicts the known facts about the client's training samples."""
    samples, classes, name, value = known.samples, known.classes, leaf.path, leaf.value
    if OF_TRAINING in leaf.marks and value is not None and samples is not None and value != samples:
        raise MethodError(f"{name} is {value}, but the client has {samples} samples to train on")
    if PRESENT in leaf.marks:
        present = None if classes is None else {c for c, n in enumerate(classes) if n}
        if any(a >= b for a, b in itertools.pairwise(value)) or any(c < 0 for c in value):
            raise MethodError(f"{name} are not classes in ascending order")
        if present is not None and (others := set(value) - present):
            raise MethodError(f"{name} have class {min(others)}, but the client has no sample of it")
    if COUNTS in leaf.marks and value is not None:
        counts = next(iter(leaf.tensors.values()), torch.zeros(0))
        if counts.is_floating_point() or counts.dim() != 1 or not len(counts) or counts.min() < 0:
            raise MethodError(f"{name} are not numbers of samples")
        numbers = counts.tolist()
        total = sum(numbers)
        if total != samples if samples is not None else not 0 < total <= MOST_SAMPLES:
            raise MethodError(f"{name} are of {total} samples, but the client has {samples or 'fewer'} to train on")
        if classes is not None and any(a != b for a, b in itertools.zip_longest(numbers, classes, fillvalue=0)):
            raise MethodError(f"{name} differ from those the client's node reported")


def _check_numbers(leaf: Leaf) -> None:
    """Raises MethodError for tensors that no honest client has: a negative variance, or a counter beyond all limits."""
    for name, tensor in leaf.tensors.items():
        if tensor.is_floating_point():
            if name.endswith("running_var") and tensor.numel() and float(tensor.min()) < 0:
                raise MethodError(f"{leaf.name(name)} is a variance below 0")
        elif tensor.dtype != torch.bool and _largest(tensor) > MOST_SAMPLES:
            raise MethodError(f"{leaf.name(name)} has whole numbers beyond {MOST_SAMPLES}")


def _largest(whole: Tensor) -> int:
    """The maximum magnitude of integers."""
    if whole.numel() < 2:
        return abs(int(whole)) if whole.numel() else 0
    return max(abs(int(end)) for end in whole.aminmax())
