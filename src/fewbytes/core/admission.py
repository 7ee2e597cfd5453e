"""Admission of replies: what one may say before anything touches the server's state, and whose is not like most."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError
from fewbytes.base.ranges import (
    COUNTS,
    HELD,
    LEARNT,
    MOST_SAMPLES,
    OF_TRAINING,
    PART,
    SENT,
    STATISTICS,
    WHOLE,
    wrong,
)
from fewbytes.base.state import State
from fewbytes.core.problem import Id
from fewbytes.wire.bits import Bits
from fewbytes.wire.layout import DTYPES, Entry, Layout, entry_of
from fewbytes.wire.masked import Masked
from fewbytes.wire.values import is_wire_value

GROWTH = 1000.0
"""How many times the norm of what it was sent, or of its first model, the parameters in a client's reply may have,
where targets are not of any scale."""


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a reply before it comes: the client's model, which names are not of its parameters, the message
    it answers (None: nothing was sent), the tensors of all messages that came with it, how many samples the client has
    to train on, in all and of each class (None: not known), the norm of its first model, and the largest norm of all
    the reply's numbers; how many times the norm of what the client was sent its parameters may have; and whether values
    are hidden by masks, so that their types say nothing."""

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


def admit(value: Any, size: float, known: Known) -> None:
    """Raises FrameError for a payload whose fields are not what their types say (`Meta(ge=0)`, and the marks of
    `fewbytes.base.ranges`), or whose numbers are too large together: `size` is their norm."""
    try:
        marked = _marked(value)
        for marks, entries in marked:
            _check_entries(entries, _expected(marks, known), PART not in marks, MIXED in marks, known.hidden)
        for name, kind, item in _fields(value):
            if must := _wrong(kind, item):
                raise MethodError(f"{name} {must}, not {str(item)[:40]}")
            _check_data(name, _metadata(kind), item, known)
        for name, number in numbers_in(value):
            if isinstance(number, Tensor) and not known.hidden:
                _check_range(name, number)
        if size > known.growth * known.first:
            _check_growth(norm([entries for _, entries in marked], known.statistics), known)
    except MethodError as error:
        raise FrameError("values", str(error)) from None
    if size > known.most:
        raise FrameError("values", f"its numbers are of norm {size:.3g}, more than {known.most:.3g} (--max-norm)")


def like(**fields: State | None) -> Callable[[Any, Any], None]:
    """A check for `Network.call`: that wire values of a reply have the entries of these states, in their types and
    shapes, and no other; None: that there is no such value."""
    expected = {name: _entries(state or {}) for name, state in fields.items()}

    def check(client: Any, reply: Any) -> None:
        for name, state in fields.items():
            value = getattr(reply, name)
            if (value is None) != (state is None):
                raise MethodError(f"{name} {'is missing' if value is None else 'is not asked for'}")
            _check_entries(entries_of(value), expected[name])

    return check


def check_like(entries: Mapping[str, Tensor], state: State) -> None:
    """Raises MethodError unless these are the entries of the state, in their types and shapes."""
    _check_entries(entries, _entries(state))


def _entries(state: Mapping[str, Tensor]) -> dict[str, Entry]:
    return {name: entry_of(name, tensor) for name, tensor in state.items()}


Marks = frozenset[str]
MIXED = "of one type"
"""A mark of values that all travel as one type, whatever types the model's entries are of."""


def _marked(value: Any) -> list[tuple[Marks, dict[str, Tensor]]]:
    """How wire values are marked, and their entries; of those that are as sent, of all that are marked alike."""
    found: list[tuple[Marks, dict[str, Tensor]]] = []
    sent: dict[Marks, dict[str, Tensor]] = {}
    for _, kind, item in _fields(value):
        metadata = _metadata(kind)
        marks = frozenset(mark for mark in (SENT, WHOLE, PART, LEARNT, STATISTICS) if mark in metadata)
        if not marks:
            continue
        marks |= {MIXED} if isinstance(item, Masked) else set()
        entries = item.dense() if isinstance(item, Bits) else entries_of(item)
        if SENT in marks:
            sent.setdefault(marks, {}).update(entries)
        else:
            found.append((marks, dict(entries)))
    return [*found, *sent.items()]


def _expected(marks: Marks, known: Known) -> dict[str, Entry] | None:
    """The entries that marks stand for, by name; None where nothing was sent, or they do not say."""
    if marks <= {LEARNT}:
        return None
    expected = {entry.name: entry for entry in known.layout.entries}
    if SENT in marks:
        if known.sent is None:
            return None
        sent = [entries_of(getattr(known.sent, f.name)) for f in dataclasses.fields(known.sent)]
        expected = _entries({name: tensor for entries in sent for name, tensor in entries.items()})
    if LEARNT in marks:
        return {name: entry for name, entry in expected.items() if name not in known.statistics}
    if STATISTICS in marks:
        return {name: entry for name, entry in expected.items() if name in known.statistics}
    return expected


def _check_entries(
    entries: Mapping[str, Tensor],
    expected: Mapping[str, Entry] | None,
    every: bool = True,
    mixed: bool = False,
    hidden: bool = False,
) -> None:
    if expected is None:
        return
    if others := entries.keys() - expected.keys():
        raise MethodError(f"it has an entry {min(others)[:80]!r} too many")
    if every and (missing := expected.keys() - entries.keys()):
        raise MethodError(f"its entry {min(missing)!r} is missing")
    together = {DTYPES[each.dtype] for each in expected.values()} if mixed else set()
    for name, tensor in entries.items():
        entry, wanted = entry_of(name, tensor), expected[name]
        # changes of values of other types may travel as float32; values of several types together as that, or as one of
        # these, of which numbers are
        as_float = tensor.dtype == torch.float32 and (mixed or DTYPES[wanted.dtype].is_floating_point)
        as_float = as_float or (tensor.is_floating_point() and tensor.dtype in together)
        if entry.shape != wanted.shape or not (entry.dtype == wanted.dtype or as_float or hidden):
            raise MethodError(f"its {name!r} is {entry.dtype} {entry.shape}, not {wanted.dtype} {wanted.shape}")


def _check_growth(size: float, known: Known) -> None:
    """Raises MethodError for parameters of a norm that no training gives them in a round: clients that were sent their
    mean would train on to numbers that are refused, too."""
    before = max(known.first, norm(known.tensors))
    if size > known.growth * before:
        raise MethodError(
            f"its parameters are of norm {size:.3g}, more than {known.growth:g} times the {before:.3g} of what it was "
            "sent (a larger --max-norm allows more)"
        )


def _check_data(name: str, marks: tuple[Any, ...], item: Any, known: Known) -> None:
    """Raises MethodError for a field that says other things of the client's training samples than are known."""
    samples, classes = known.samples, known.classes
    if OF_TRAINING in marks and samples is not None and item != samples:
        raise MethodError(f"{name} is {item}, but the client has {samples} samples to train on")
    if HELD in marks:
        there = None if classes is None else {c for c, n in enumerate(classes) if n}
        if any(a >= b for a, b in itertools.pairwise(item)) or any(c < 0 for c in item):
            raise MethodError(f"{name} are not classes in ascending order")
        if there is not None and (others := set(item) - there):
            raise MethodError(f"{name} have class {min(others)}, of which the client has no sample")
    if COUNTS in marks and item is not None:
        counts = next(iter(entries_of(item).values()), torch.zeros(0))
        if counts.is_floating_point() or counts.dim() != 1 or not len(counts) or counts.min() < 0:
            raise MethodError(f"{name} are not numbers of samples")
        numbers = counts.tolist()
        total = sum(numbers)
        if total != samples if samples is not None else not 0 < total <= MOST_SAMPLES:
            raise MethodError(
                f"{name} are of {total} samples, but the client has {samples or 'hardly so many'} to train on"
            )
        if classes is not None and any(a != b for a, b in itertools.zip_longest(numbers, classes, fillvalue=0)):
            raise MethodError(f"{name} are other than the client's node has said")


def _check_range(name: str, tensor: Tensor) -> None:
    """Raises MethodError for what no honest client's tensor of that name has: a variance below zero, a count beyond
    all."""
    if tensor.is_floating_point():
        if name.endswith("running_var]") and bool((tensor < 0).any()):
            raise MethodError(f"{name} is a variance below 0")
    elif tensor.dtype != torch.bool and tensor.numel() and max(abs(int(n)) for n in tensor.aminmax()) > MOST_SAMPLES:
        raise MethodError(f"{name} has whole numbers beyond {MOST_SAMPLES}")


def entries_of(value: Any) -> Mapping[str, Tensor]:
    """The tensors of a wire value by name; of anything else none."""
    if not is_wire_value(value):
        return {}
    return value.states() or next((held for held in vars(value).values() if isinstance(held, Mapping)), {})


def norm(value: Any, without: Set[str] = frozenset()) -> float:
    """The Euclidean norm of all floating-point numbers of a payload together, but for entries of some names; not finite
    if one is not."""
    return math.hypot(*(_norm(number) for _, number in numbers_in(value, without=without)))


def _norm(tensor: Tensor | float) -> float:
    """In the tensor's own type, which is fast, unless that cannot hold it."""
    if isinstance(tensor, float):
        return tensor
    if not tensor.is_floating_point():
        return 0.0
    short = float(torch.linalg.vector_norm(tensor))
    return short if math.isfinite(short) else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def shape(value: Any) -> Hashable:
    """What two payloads have in common that differ in their numbers alone: fields, entries, types, shapes."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if is_wire_value(value):
        return type(value).__name__, shape(value.states() or vars(value))
    if dataclasses.is_dataclass(value):
        return tuple(shape(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return frozenset((key, shape(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(shape, value))
    return type(value).__name__


Kind = tuple[torch.dtype, int]
"""A tensor's type and number of axes."""


class Looks:
    """What the replies of a step look like, by handler and model, to tell whose is unlike the others'."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, Hashable], dict[Id, int]] = {}  # as hashes
        self._types: dict[str, dict[frozenset[tuple[str, Kind]], list[Id]]] = {}

    def add(self, handler: str, architecture: Hashable, client: Id, reply: Any) -> None:
        """Remember how a client's reply to a handler looks; `architecture`: of its model."""
        self._shapes.setdefault((handler, architecture), {})[client] = hash(shape(reply))
        self._types.setdefault(handler, {}).setdefault(frozenset(_types(reply)), []).append(client)

    def odd(self) -> list[Id]:
        """The clients whose replies have other fields, entries, types or shapes than more than half of all with their
        model, or, if all agree with those, than more than half of all; none where there is no such half."""
        alike: dict[Hashable, dict[Id, int]] = {}
        for (handler, _), shapes in self._shapes.items():
            alike.setdefault(handler, {}).update(shapes)
        return _minority(self._shapes.values()) or _minority(alike.values())

    def strange(self) -> dict[Id, str]:
        """The clients whose tensors are of another type or number of axes than those of the same name of more than half
        of all, and which: never so where all are honest and have one model."""
        found: dict[Id, str] = {}
        for groups in self._types.values():
            if len(groups) < 2:
                continue
            count = Counter(pair for types, clients in groups.items() for pair in types for _ in clients)
            every = Counter(name for types, clients in groups.items() for name, _ in types for _ in clients)
            for types, clients in groups.items():
                for name, kind in sorted(types, key=str):
                    kinds = {k: m for (n, k), m in count.items() if n == name}
                    usual = next((k for k, m in kinds.items() if 2 * m > every[name]), kind)
                    if kind != usual:
                        found |= dict.fromkeys(clients, f"{name} is a tensor {said(kind)}, the others' {said(usual)}")
        return found


def _minority(groups: Iterable[Mapping[Id, int]]) -> list[Id]:
    found: set[Id] = set()
    for shapes in groups:
        usual, count = Counter(shapes.values()).most_common(1)[0]
        if 2 * count > len(shapes):
            found |= {client for client, one in shapes.items() if one != usual}
    return sorted(found)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field of a payload, those of payloads in its lists and dicts too: name, type, value."""
    if isinstance(value, Tensor) or is_wire_value(value):
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, kind in _hints(type(value)).items():
            item = getattr(value, name)
            yield f"{path}{name}", kind, item
            yield from _fields(item, f"{path}{name}.")
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _fields(item, path)


def _wrong(kind: Any, value: Any) -> str:
    """What a value must be that its type, or the type of what it holds, says; nothing if it is."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (list, tuple) and isinstance(value, list | tuple):
        return next((must for item in value if (must := _wrong(arguments[0], item))), "")
    if typing.get_origin(kind) is dict and isinstance(value, Mapping):
        pairs = [(arguments[0], key) for key in value] + [(arguments[1], item) for item in value.values()]
        return next((must for each, item in pairs if (must := _wrong(each, item))), "")
    return "" if isinstance(value, Tensor) or is_wire_value(value) else wrong(kind, value)


def _metadata(kind: Any) -> tuple[Any, ...]:
    return getattr(kind, "__metadata__", ())


def _types(value: Any) -> Iterator[tuple[str, Kind]]:
    """The tensors of a payload by name, their types and numbers of axes."""
    for name, tensor in numbers_in(value):
        if isinstance(tensor, Tensor):
            yield name, (tensor.dtype, tensor.ndim)


def said(kind: Kind) -> str:
    """A type and a number of axes, in words."""
    return f"of {str(kind[0]).removeprefix('torch.')} with {kind[1]} axes"


def numbers_in(value: Any, name: str = "", without: Set[str] = frozenset()) -> Iterator[tuple[str, Tensor | float]]:
    """The tensors and floats of a payload, with names that say where they stand; those in lists by their list."""
    if isinstance(value, Tensor | float):
        yield name, value
    elif is_wire_value(value):
        yield from numbers_in(value.states() or vars(value), name, without)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from numbers_in(getattr(value, f.name), f"{name}.{f.name}".removeprefix("."), without)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in without:
                yield from numbers_in(item, f"{name}[{key}]" if isinstance(key, str) else name, without)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers_in(item, name, without)
