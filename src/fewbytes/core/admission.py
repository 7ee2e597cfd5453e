"""Admission of replies: what one may say before anything touches the server's state, and whose is not like most."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.base.ranges import OF_TRAINING, PART, SENT, WHOLE, wrong
from fewbytes.core.problem import Id
from fewbytes.wire.layout import DTYPES, Entry, Layout, entry_of
from fewbytes.wire.values import is_wire_value


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a reply before it comes: the client's model, what it was sent (None: nothing), how many samples
    it has to train on (None: not known), and the largest norm of all its numbers together."""

    layout: Layout
    sent: Any
    samples: int | None
    most: float


def admit(value: Any, size: float, known: Known) -> None:
    """Raises FrameError for a payload whose fields are not what their types say (`Meta(ge=0)`, `Samples`, `SENT`), or
    whose numbers are too large together: `size` is their norm."""
    samples, most = known.samples, known.most
    for marker, entries in _marked(value):
        _check_entries(entries, _expected(marker, known), every=marker != PART)
    for name, kind, item in _fields(value):
        if must := _wrong(kind, item):
            raise FrameError("values", f"{name} {must}, not {str(item)[:40]}")
        if OF_TRAINING in _metadata(kind) and samples is not None and item != samples:
            raise FrameError("values", f"{name} is {item}, but the client has {samples} samples to train on")
    if size > most:
        raise FrameError("values", f"its numbers are of norm {size:.3g}, more than {most:.3g} (--max-norm)")


def _marked(value: Any) -> list[tuple[str, dict[str, Tensor]]]:
    """What the types of wire values say of their entries, and these; those that are as sent, together."""
    found: list[tuple[str, dict[str, Tensor]]] = []
    sent: dict[str, Tensor] = {}
    for _, kind, item in _fields(value):
        metadata = _metadata(kind)
        if SENT in metadata:
            sent |= entries_of(item)
            found = [(marker, entries) for marker, entries in found if marker != SENT] + [(SENT, sent)]
        found += [(marker, dict(entries_of(item))) for marker in (WHOLE, PART) if marker in metadata]
    return found


def _expected(marker: str, known: Known) -> dict[str, Entry]:
    """The entries a marker stands for, by name; none where nothing was sent."""
    if marker != SENT:
        return {entry.name: entry for entry in known.layout.entries}
    sent: dict[str, Tensor] = {}
    if dataclasses.is_dataclass(known.sent):
        for f in dataclasses.fields(known.sent):
            sent |= entries_of(getattr(known.sent, f.name))
    return {name: entry_of(name, tensor) for name, tensor in sent.items()}


def _check_entries(entries: Mapping[str, Tensor], expected: Mapping[str, Entry], every: bool) -> None:
    if not expected:
        return
    if others := entries.keys() - expected.keys():
        raise FrameError("values", f"it has an entry {min(others)[:80]!r} too many")
    if every and (missing := expected.keys() - entries.keys()):
        raise FrameError("values", f"its entry {min(missing)!r} is missing")
    for name, tensor in entries.items():
        entry, wanted = entry_of(name, tensor), expected[name]
        # a change of narrow values, or what stands among wider ones, may travel as float32
        widest = max(4, DTYPES[wanted.dtype].itemsize)
        if entry.shape != wanted.shape or (tensor.is_floating_point() and tensor.dtype.itemsize > widest):
            raise FrameError(
                "values", f"its {name!r} is {entry.dtype} {entry.shape}, not {wanted.dtype} {wanted.shape}"
            )


def entries_of(value: Any) -> Mapping[str, Tensor]:
    """The tensors of a wire value by name; of anything else none."""
    if not is_wire_value(value):
        return {}
    return value.states() or next((held for held in vars(value).values() if isinstance(held, Mapping)), {})


def norm(value: Any) -> float:
    """The Euclidean norm of all floating-point numbers of a payload together; not finite if one is not."""
    return math.hypot(*(_norm(number) for _, number in _numbers(value)))


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
    for name, tensor in _numbers(value):
        if isinstance(tensor, Tensor):
            yield name, (tensor.dtype, tensor.ndim)


def said(kind: Kind) -> str:
    """A type and a number of axes, in words."""
    return f"of {str(kind[0]).removeprefix('torch.')} with {kind[1]} axes"


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | float]]:
    """The tensors and floats of a payload, with names that say where they stand; those in lists by their list."""
    if isinstance(value, Tensor | float):
        yield name, value
    elif is_wire_value(value):
        yield from _numbers(value.states() or vars(value), name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _numbers(getattr(value, f.name), f"{name}.{f.name}".removeprefix("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}[{key}]" if isinstance(key, str) else name)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, name)
