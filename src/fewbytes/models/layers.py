"""The layers of a model as layer-wise methods count them: convolutions and linear layers, without normalisation."""

from __future__ import annotations

from torch import nn

from fewbytes.errors import UserError


def layers_of(model: nn.Module) -> dict[str, list[str]]:
    """Each Conv1d, Conv2d, Conv3d and Linear by name, in the order of `named_modules` -> names of its parameters.

    Parameter names are those of `model.named_parameters()`. A module used under several names, and a parameter shared
    by several layers, belong to the first only. Raises UserError if there is no such layer.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = {}
    for layer, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            own = [names.pop(id(parameter)) for parameter in module.parameters() if id(parameter) in names]
            if own:
                layers[layer] = own
    if not layers:
        raise UserError(f"a {type(model).__name__} has no Conv1d, Conv2d, Conv3d or Linear: take another model")
    return layers
