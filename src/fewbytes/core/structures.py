"""Structures of replies, regardless of their numbers, and clients whose replies differ from most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fewbytes.core.problem import Id
from fewbytes.wire.schema import Leaf, leaves_of

Kind = tuple[torch.dtype, int]
"""A tensor's type and number of axes."""


class Structures:
    """The structures of a step's replies, by handler and model, to find clients that differ from the others."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[str, Hashable], dict[Id, int]] = {}  # as hashes
        self._types: dict[str, dict[frozenset[tuple[str, Kind]], list[Id]]] = {}

    def add(self, handler: str, architecture: Hashable, client: Id, reply: Any) -> None:
        """Store the structure of a client's reply to a handler; `architecture`: of its model."""
        leaves = leaves_of(reply)
        self._shapes.setdefault((handler, architecture), {})[client] = hash(_shape(leaves))
        self._types.setdefault(handler, {}).setdefault(_types(leaves), []).append(client)

    def odd(self) -> list[Id]:
        """The clients whose replies have other fields, entries, types or shapes than more than half of those with their
        model or, if these agree, than more than half of all; empty without such a majority."""
        by_handler: dict[Hashable, dict[Id, int]] = {}
        for (handler, _), shapes in self._shapes.items():
            by_handler.setdefault(handler, {}).update(shapes)
        return _minority(self._shapes.values()) or _minority(by_handler.values())

    def outliers(self) -> dict[Id, str]:
        """The clients with a tensor of another type or number of axes than more than half of those of the same name,
        and which tensor. Never happens if all are honest and have one model."""
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
                        found |= dict.fromkeys(
                            clients, f"{name} is a tensor {_described(kind)}, the others' {_described(usual)}"
                        )
        return found


def _minority(groups: Iterable[Mapping[Id, int]]) -> list[Id]:
    found: set[Id] = set()
    for shapes in groups:
        usual, count = Counter(shapes.values()).most_common(1)[0]
        if 2 * count > len(shapes):
            found |= {client for client, one in shapes.items() if one != usual}
    return sorted(found)


def _shape(leaves: Sequence[Leaf]) -> Hashable:
    """The structure of a payload without its numbers: fields, entries, types, shapes."""
    return tuple((leaf.path, _form(leaf.value), frozenset(_forms(leaf.tensors))) for leaf in leaves)


def _forms(tensors: Mapping[str, Tensor]) -> Iterator[Hashable]:
    return ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def _form(value: Any) -> Hashable:
    """The type of a plain value and, for a container, its length."""
    return type(value).__name__, len(value) if isinstance(value, list | tuple | dict) else 0


def _types(leaves: Sequence[Leaf]) -> frozenset[tuple[str, Kind]]:
    """The tensors of a payload by name, with types and numbers of axes."""
    return frozenset(
        (leaf.name(entry), (tensor.dtype, tensor.ndim)) for leaf in leaves for entry, tensor in leaf.tensors.items()
    )


def _described(kind: Kind) -> str:
    """A type and a number of axes, in words."""
    return f"of {str(kind[0]).removeprefix('torch.')} with {kind[1]} axes"
