"""Chains: models of consecutive convolutions and linear layers, whose neurons can be permuted and added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.base.state import State, load_state, trained_entries
from fewbytes.models.blocks import classifier_of, units_of

Layer = nn.Conv2d | nn.Linear


def chain_of(model: nn.Module) -> dict[str, Layer]:
    """The layers of a chain in order, by name; the last is the classifier.

    Each layer takes the output of the one before, with a neuron's outputs adjacent. Between layers only modules without
    entries are allowed: ReLU, pooling, dropout, flattening. Modules before the first layer may be anything untrained.
    Raises UserError for a model that is not a chain.
    """
    names, own = {id(module): name for name, module in model.named_modules()}, trained_entries(model)
    entries = {id(value) for value in own.values()}
    found: list[Layer] = []
    for part in [*_parts(units_of(model).values()), classifier_of(model)]:
        values = {id(value) for value in part.state_dict(keep_vars=True).values()}
        if isinstance(part, nn.Conv2d | nn.Linear) and getattr(part, "groups", 1) == 1 and values <= entries:
            found.append(part)
        elif values and (found or values & entries):
            raise _no_chain(model, f"a {type(part).__name__}" + (" that is not trained" if values - entries else ""))
    if {id(value) for layer in found for value in layer.parameters()} != entries or len(set(found)) < len(found):
        raise _no_chain(model, "trained parameters beside its layers")
    for before, after in pairwise(found):
        if after.weight[0].numel() % len(before.weight) or (isinstance(after, nn.Conv2d) and not _fit(before, after)):
            raise _no_chain(model, "a layer whose inputs do not match the outputs of the one before")
    return {names[id(layer)]: layer for layer in found}


def resized(model: nn.Module, state: State) -> nn.Module:
    """Resize the layers of `model` to those of `state`, load its values, and return the model. Raises MethodError."""
    for name, layer in chain_of(model).items():
        for kind in ("weight", "bias"):
            if (value := state.get(f"{name}.{kind}")) is not None:
                setattr(layer, kind, nn.Parameter(value.to(layer.weight.device, copy=True)))
        if isinstance(layer, nn.Conv2d):
            layer.out_channels, layer.in_channels = layer.weight.shape[:2]
        else:
            layer.out_features, layer.in_features = layer.weight.shape
    load_state(model, state)
    model.recipe = {"kind": "resized"}  # type: ignore[assignment]  # saved in the model's file, for reading it again
    return model


def resized_network(recipe: Mapping[str, Any], state: State, model: Callable[[int], nn.Module]) -> nn.Module:
    """Rebuild a resized chain from a file's state; `model(client)` builds it in its original size."""
    return resized(model(0), state)


def _parts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules in order; each Sequential is replaced by its contents."""
    for module in modules:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            yield from _parts(module)
        else:
            yield module


def _fit(before: Layer, after: nn.Conv2d) -> bool:
    return isinstance(before, nn.Conv2d) and before.out_channels == after.in_channels


def _no_chain(model: nn.Module, has: str) -> UserError:
    return UserError(
        f"a {type(model).__name__} is not a chain of convolutions and linear layers, it has {has}: use vgg9, cnn4, "
        "lenet or mlp"
    )
