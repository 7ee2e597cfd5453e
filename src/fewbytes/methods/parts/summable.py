"""Replies that can be summed: `Dense` tensors and a number of samples; conversion to one vector and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import OF_TRAINING
from fewbytes.core.problem import Id, Problem
from fewbytes.methods.parts.masks import Words
from fewbytes.wire import Dense
from fewbytes.wire.fields import entries_in
from fewbytes.wire.layout import DTYPES
from fewbytes.wire.schema import schema_of


def samples_field(kind: type[Any] | None) -> str | None:
    """The field of a reply with its number of samples; None: replies are unweighted."""
    fields = () if kind is None else schema_of(kind).fields
    return next((field.name for field in fields if OF_TRAINING in field.marks), None)


def weight_of(reply: Any) -> int:
    """A reply's weight in the mean."""
    name = samples_field(type(reply))
    return 1 if name is None else getattr(reply, name)


def tensors_of(reply: Any) -> dict[tuple[str, str], Tensor]:
    """All tensors of a reply by field and name, in alphabetical order. Raises MethodError for a reply with fields
    that cannot be averaged."""
    counted = samples_field(type(reply))
    found: dict[tuple[str, str], Tensor] = {}
    for f in dataclasses.fields(reply):
        value = getattr(reply, f.name)
        if isinstance(value, Dense):
            found |= {(f.name, name): tensor for name, tensor in value.state.items()}
        elif f.name != counted:
            raise MethodError(
                f"secure aggregation sums tensors and numbers of samples, not {type(reply).__name__}.{f.name}"
            )
    return dict(sorted(found.items()))


def types_of(message: Any, problem: Problem, client: Id) -> dict[str, torch.dtype]:
    """The dtypes of a reply's entries by name, as both ends know them: those of the message, else of the client's
    model; others are float32."""
    types = {entry.name: DTYPES[entry.dtype] for entry in problem.layout(client).entries}
    return types | {name: tensor.dtype for name, tensor in entries_in(message).items()}


def shapes(tensors: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], torch.Size]:
    """The shapes of named tensors."""
    return {key: value.shape for key, value in tensors.items()}


def words_of(tensors: Mapping[tuple[str, str], Tensor]) -> Words:
    """Integer tensors as one vector."""
    flat = [value.numpy().reshape(-1).view(np.uint32) for value in tensors.values()]
    return np.concatenate([np.zeros(0, np.uint32), *flat])


def split(words: Words, tensors: Mapping[tuple[str, str], Tensor]) -> Iterator[tuple[tuple[str, str], Words, Tensor]]:
    """Split a vector into pieces as long as these tensors; yields key, piece and tensor."""
    at = 0
    for key, tensor in tensors.items():
        yield key, words[at : at + tensor.numel()], tensor
        at += tensor.numel()


def remade(
    reply: Any, tensors: Mapping[tuple[str, str], Tensor], more: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """The reply with new tensors for the same keys, and other fields replaced."""
    fields = {
        f.name: Dense({name: tensors[f.name, name] for name in getattr(reply, f.name).state})
        for f in dataclasses.fields(reply)
        if isinstance(getattr(reply, f.name), Dense)
    }
    return dataclasses.replace(reply, **fields, **more)
