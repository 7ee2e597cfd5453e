"""Splits a model into blocks: ordered, named units and a classifier, with cuts after named units."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from itertools import chain, pairwise
from typing import Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.state import State, copied, load_state, trained_entries
from fewbytes.models.normalise import units_with_normalisation


class Splittable(Protocol):
    """A model that can be cut: `forward(x)` applies all units in order, then `classifier`.

    A unit maps one tensor to one tensor. Everything between the input and the classifier belongs to a unit, including
    pooling and flattening. The classifier maps features (n, D) to logits. A model may define `default_cuts`, `{blocks:
    (unit, …)}`: the units after which it is cut into that number of blocks. Without it, blocks have similar numbers of
    units. The name "a" also means the last of the units "a.…".
    """

    @property
    def classifier(self) -> nn.Module:
        """The classifier: features (n, D) to logits (n, classes)."""

    def units(self) -> dict[str, nn.Module]:
        """The units before the classifier, by name and in order."""


def is_splittable(model: nn.Module) -> TypeGuard[Splittable]:
    """Whether the model has units() and a classifier, as property or layer (which `isinstance` does not check)."""
    return hasattr(model, "units") and hasattr(model, "classifier")


class Block(nn.Module):
    """Consecutive units of a model, sharing its parameters; its `state` has the names of the model's entries."""

    def __init__(self, units: Sequence[nn.Module], names: dict[int, str], travels: Set[str]) -> None:
        super().__init__()
        self.units = nn.Sequential(*units)
        saved = {id(value) for value in self.state_dict(keep_vars=True).values()}
        own = [value for value in chain(self.parameters(), self.buffers()) if id(value) in saved]
        if any(id(value) not in names for value in own):
            raise UserError("units() returns layers that are not the model's: create them once, in its __init__")
        self.names = [(names[id(value)], value) for value in own if names[id(value)] in travels]

    def forward(self, x: Tensor) -> Tensor:
        """Map the previous block's output to the next block's input, (n, …) both."""
        out: Tensor = self.units(x)
        return out

    def state(self) -> State:
        """Copies on the CPU of the parameters and buffers that are sent, by the model's names."""
        return {name: copied(value) for name, value in self.names}


def cut(model: nn.Module, blocks: int, after: Sequence[str] = ()) -> list[Block]:
    """Cut the model into ordered blocks `after` these units, or at its default cuts for that number of blocks.

    A block may have no parameters. Raises UserError if the model has no units or cannot be cut there.
    """
    units = units_of(model)
    ends = [unit_number(units, name) for name in after] if after else _default_ends(model, units, blocks)
    if sorted(set(ends)) != ends or (ends and ends[-1] == len(units) - 1) or not (after or len(ends) == blocks - 1):
        where = f"cuts {', '.join(after)}" if after else f"the default cuts into {blocks} blocks"
        raise UserError(f"{where} must be different units in order, without the last, of {', '.join(units)}")
    rows, bounds = list(units.values()), [0, *(end + 1 for end in ends), len(units)]
    return [_block(rows[a:b], model) for a, b in pairwise(bounds)]


def features_of(model: nn.Module) -> Block:
    """Everything before the classifier as one block: samples to flattened features (n, D).

    `shapes([features_of(model)], sample)` is [(D,)]. Raises UserError if the model has no units.
    """
    if not has_units(model):
        raise UserError(
            f"a {type(model).__name__} has no features: define units(), a dict of its parts in order by name, and "
            "classifier, the last layer; or use a Sequential that ends in a Linear, or name the model with @512"
        )
    return _block([*units_of(model).values(), nn.Flatten()], model)


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The model's units in order, by name; a Sequential that ends in a Linear needs no units(). Raises UserError."""
    if not has_units(model):
        raise UserError(
            f"a {type(model).__name__} cannot be cut into blocks: define units(), its parts in order by name, "
            "and classifier, the last layer"
        )
    if not is_splittable(model):
        return units_with_normalisation(model, {name: model.get_submodule(name) for name in _layers(model)[:-1]})
    units, whole = model.units(), cast(nn.Module, model)
    if not (isinstance(units, dict) and units and all(isinstance(unit, nn.Module) for unit in units.values())):
        raise UserError(f"units() of {type(model).__name__} must return its modules by name in a dict")
    return units_with_normalisation(whole, units)


def unit_number(units: Collection[str], name: str) -> int:
    """The index of the unit `name`, or of the last unit `name.…`, in `units`. Raises UserError."""
    found = [i for i, unit in enumerate(units) if unit == name or unit.startswith(f"{name}.")]
    if not found:
        raise UserError(f"the model has no unit {name!r}{suggestion(name, units)}; it has {', '.join(units)}")
    return found[-1]


def head_of(model: nn.Module) -> nn.Module:
    """The model's classifier, features to logits. Raises UserError if there are no units."""
    features_of(model)
    return model.classifier if is_splittable(model) else model.get_submodule(_layers(model)[-1])


def head_sizes(model: nn.Module) -> tuple[int, int]:
    """(K', C): the head's numbers of input features and of classes. Raises UserError."""
    layers = [layer for layer in head_of(model).modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise UserError(f"the classifier of a {type(model).__name__} has no Linear: name the model with @512")
    return layers[0].in_features, layers[-1].out_features


def classifier_of(model: nn.Module) -> nn.Linear:
    """The model's last layer, features to logits. Raises UserError if it is not a Linear, or there are no units."""
    last = head_of(model)
    if not isinstance(last, nn.Linear):
        raise UserError(f"the classifier must be a Linear, not a {type(last).__name__}")
    return last


def linear_of(state: State) -> nn.Linear:
    """A Linear with the given `weight` and, if there is one, `bias`."""
    outputs, inputs = state["weight"].shape
    linear = nn.Linear(inputs, outputs, bias="bias" in state)
    load_state(linear, state)
    return linear


def shapes(blocks: Sequence[nn.Module], sample: tuple[int, ...], device: str = "cpu") -> list[tuple[int, ...]]:
    """Each block's output shape for one sample, without the batch dimension; runs zeros through them on `device`."""
    x, found = torch.zeros(1, *sample, device=device), []
    with torch.no_grad():
        for block in blocks:
            training = block.training
            x = block.to(device).eval()(x)
            block.train(training)
            found.append(tuple(x.shape[1:]))
    return found


def check_trains(head: nn.Module, model: nn.Module) -> None:
    """Raises UserError if the classifier of a model, which the method sends, is frozen, even partly."""
    if trained_entries(head).keys() != head.state_dict().keys():
        raise UserError(
            f"the classifier of a {type(model).__name__} is frozen, and this method sends it: set requires_grad on "
            "all its parameters"
        )


def has_units(model: nn.Module) -> bool:
    """Whether `units_of` finds any: the model is splittable, or a Sequential that ends in a Linear."""
    ends_linear = isinstance(model, nn.Sequential) and len(model) > 1 and isinstance(model[-1], nn.Linear)
    return is_splittable(model) or ends_linear


def _layers(model: nn.Module) -> list[str]:
    """The names of a Sequential's layers, including repeated ones, which named_children() omits."""
    return list(model._modules)


def _block(units: Sequence[nn.Module], model: nn.Module) -> Block:
    names = {id(value): name for name, value in chain(model.named_parameters(), model.named_buffers())}
    return Block(units, names, trained_entries(model).keys())


def _default_ends(model: nn.Module, units: dict[str, nn.Module], blocks: int) -> list[int]:
    default = getattr(model, "default_cuts", {})
    if blocks in default:
        return [unit_number(units, name) for name in default[blocks]]
    if not 1 <= blocks <= len(units):
        raise UserError(
            f"a model with the units {', '.join(units)} cannot be cut into {blocks} blocks; "
            "take fewer blocks, or a deeper model such as resnet18:width=32, vgg9 or mlp:layers=4"
        )
    return [round(i * len(units) / blocks) - 1 for i in range(1, blocks)]
