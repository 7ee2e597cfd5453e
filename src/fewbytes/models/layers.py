"""The layers of a model for layer-wise methods: convolutions and linear layers, without normalisation."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fewbytes.base.errors import UserError
from fewbytes.base.state import trained_entries, trained_parameters


def layers_of(model: nn.Module) -> dict[str, list[str]]:
    """Each Conv1d, Conv2d, Conv3d and Linear by name, in the order of `named_modules` -> names of its parameters.

    Parameter names are those of `model.named_parameters()`; frozen ones are omitted. A module with several names, and a
    parameter shared by several layers, belong to the first only. Raises UserError if there is no such layer.
    """
    names = {id(parameter): name for name, parameter in trained_parameters(model).items()}
    layers = {}
    for layer, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            own = [names.pop(id(parameter)) for parameter in module.parameters() if id(parameter) in names]
            if own:
                layers[layer] = own
    if not layers:
        raise UserError(f"a {type(model).__name__} has no Conv1d, Conv2d, Conv3d or Linear: use another model")
    return layers


def classifier(model: nn.Module) -> list[str]:
    """Names of the parameters of the model's last layer, linear or convolutional."""
    return list(layers_of(model).values())[-1]


def hidden_layers(model: nn.Module) -> list[str]:
    """Names of the convolutions larger than 1 x 1, in order; without any, of the linear layers except the last."""
    modules = dict(model.named_modules())
    names = list(layers_of(model))
    convolutions = [n for n in names if max(getattr(modules[n], "kernel_size", (0,))) > 1]
    return convolutions or names[:-1] or names


def square_layers(model: nn.Module) -> dict[int, list[str]]:
    """By width, the hidden layers with equal numbers of inputs and outputs, in order; all hidden layers if none has."""
    modules, found = dict(model.named_modules()), dict[int, list[str]]()
    hidden = hidden_layers(model)
    shapes = {name: modules[name].weight.shape for name in hidden}
    square = [name for name in hidden if shapes[name][0] == shapes[name][1]]
    for name in square or hidden:
        found.setdefault(int(shapes[name][0]), []).append(name)
    return found


def batch_norm_of(model: nn.Module, layer: str) -> list[str]:
    """Names of the entries, including statistics, of the batch normalisation after `layer`: between it and the next
    layer in the order of `named_modules`, with as many features as the layer has outputs; empty without one."""
    modules = dict(model.named_modules())
    names, width = list(modules), len(modules[layer].weight)
    for name in names[names.index(layer) + 1 :]:
        module = modules[name]
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)):
            break
        if isinstance(module, _BatchNorm) and module.num_features == width:
            return [entry for entry in trained_entries(model) if entry.rpartition(".")[0] == name]
    return []
