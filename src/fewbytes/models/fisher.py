"""The diagonal of a model's Fisher information from per-sample squared gradients, for little more than an epoch's cost.

A layer's gradient for one sample is the product of two matrices: the layer's input, and the gradient of the sample's
log-likelihood by the layer's output. One backward pass of a batch to the layers' outputs gives both for all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fewbytes.base.errors import UserError
from fewbytes.base.state import State
from fewbytes.models.layers import layers_of

Labels = Literal["empirical", "model"]
"""The labels of a sample: its own, or every class in turn, weighted by the model's probability of it."""
Layer = nn.Linear | nn.Conv2d


def fisher_diagonal(model: nn.Module, x: Tensor, y: Tensor, *, kind: Labels = "empirical", batch: int = 128) -> State:
    """F_j: the mean over samples of the squared derivative of log p(y_n | x_n) by theta_j (GENE-FL, Eq. 5).

    x (m, …), y (m,): samples and their classes; `model(x)` gives logits (m, classes), each row from its own sample.
    `kind`: the labels y_n. Returns F on the CPU by name, for the parameters of `layers_of(model)` that require
    gradients. The model runs in eval mode on the samples' device, `batch` samples at a time, and is not changed.
    Raises UserError if there are no samples.

    Fast if every layer is called once and is a Linear on vectors, or a Conv2d without groups and with zero padding
    given as numbers. Otherwise samples are processed one by one, which takes at least twice as long.
    """
    if not len(y):
        raise UserError("Fisher information needs at least one sample, but there is none")
    model.to(x.device)
    named = {name: model.get_parameter(name) for own in layers_of(model).values() for name in own}
    total: dict[Tensor, Tensor] = {p: torch.zeros_like(p) for p in named.values() if p.requires_grad}
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.enable_grad():
            if total and not _add_batches(total, model, x.split(batch), y.split(batch), kind):
                _add_one_by_one(total, model, x, y, kind)
    finally:
        for module in training:
            module.training = True
    mean = {name: total[p] / len(y) for name, p in named.items() if p in total}
    return {name: value.to("cpu", memory_format=torch.contiguous_format) for name, value in mean.items()}


def _add_one_by_one(total: dict[Tensor, Tensor], model: nn.Module, x: Tensor, y: Tensor, kind: Labels) -> None:
    """Add the squared gradients of each sample."""
    for sample, label in zip(x.split(1), y.split(1), strict=True):
        for gradients in _gradients(model(sample), label, kind, list(total)):
            for square, gradient in zip(total.values(), gradients, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)


def _add_batches(
    total: dict[Tensor, Tensor], model: nn.Module, xs: Sequence[Tensor], ys: Sequence[Tensor], kind: Labels
) -> bool:
    """Add each sample's squared gradients; returns False, without adding any, if a layer does not allow it."""
    users = [module for module in model.modules() if any(p in total for p in module.parameters(recurse=False))]
    layers = [module for module in users if _is_plain(module)]
    shared = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
    if shared or len(layers) < len(users):
        return False
    for x, y in zip(xs, ys, strict=True):
        logits, calls = _called(model, layers, x)
        once = len(calls) == len(layers) and {layer for layer, _, _ in calls} == set(layers)
        if not once or any((len(given), given.dim()) != (len(x), layer.weight.dim()) for layer, given, _ in calls):
            for square in total.values():
                square.zero_()
            return False
        for slopes in _gradients(logits, y, kind, [edge for _, _, edge in calls]):
            for (layer, given, _), slope in zip(calls, slopes, strict=True):
                if slope is not None:
                    _add_layer(total, layer, given, slope)
    return True


def _is_plain(layer: nn.Module) -> TypeGuard[Layer]:
    if type(layer) is nn.Conv2d:
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    else:
        plain = type(layer) is nn.Linear
    return plain and set(layer.parameters()) <= {layer.weight, layer.bias}  # else weight is computed from others


def _called(
    model: nn.Module, layers: Sequence[Layer], x: Tensor
) -> tuple[Tensor, list[tuple[Layer, Tensor, GradientEdge]]]:
    """model(x); and for each call of a layer its input, and its output's graph edge before in-place changes."""
    calls: list[tuple[Layer, Tensor, GradientEdge]] = []

    def keep(layer: Layer, given: tuple[Tensor, ...], output: Tensor) -> None:
        if given and output.requires_grad:
            calls.append((layer, given[0].detach(), get_gradient_edge(output)))

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        return model(x), calls
    finally:
        for hook in hooks:
            hook.remove()


def _gradients(
    logits: Tensor, y: Tensor, kind: Labels, by: list[Tensor] | list[GradientEdge]
) -> Iterator[tuple[Tensor | None, ...]]:
    """Gradients for which a sample's F is the sum of its squared contributions."""
    if kind == "empirical":
        values = [F.cross_entropy(logits, y, reduction="sum")]
    else:  # the gradient of sqrt(p) log p, squared, has the weight p
        logs = F.log_softmax(logits, 1)
        values = list((logs * logs.detach().div(2).exp()).sum(0))
    for value in values:
        yield torch.autograd.grad(value, by, retain_graph=value is not values[-1], allow_unused=True)


def _add_layer(total: dict[Tensor, Tensor], layer: Layer, given: Tensor, slope: Tensor) -> None:
    """Add a layer's squared per-sample gradients, from its input and the gradient by its output."""
    if layer.bias is not None and layer.bias in total:
        total[layer.bias] += slope.flatten(2).sum(2).square().sum(0) if slope.dim() > 2 else slope.square().sum(0)
    if layer.weight in total and isinstance(layer, nn.Conv2d):
        channels_last = total[layer.weight].movedim(1, -1)
        channels_last += _squares(slope.movedim(1, -1), _patches(layer, given, slope.shape[2:])).view_as(channels_last)
    elif layer.weight in total:
        total[layer.weight].addmm_(slope.square().T, given.square())


def _patches(layer: nn.Conv2d, x: Tensor, size: Sequence[int]) -> Tensor:
    """The patch that each output is computed from: a view (n, *size, kernel height, kernel width, channels) of x."""
    assert not isinstance(layer.padding, str)
    height, width = layer.padding
    x = F.pad(x, (width, width, height, height))
    sample, channel, row, column = x.stride()
    (down, right), (below, beside) = layer.stride, layer.dilation
    steps = (sample, row * down, column * right, row * below, column * beside, channel)
    return x.as_strided((len(x), *size, *layer.kernel_size, x.shape[1]), steps)


def _squares(slopes: Tensor, patches: Tensor) -> Tensor:
    """The sum over samples of the squares of slopes_n^T patches_n, (out, in): one row of both for each output position.

    One product at a time stays in the cache: writing all of them to memory takes longer than multiplying.
    """
    rows, out = slopes[0].flatten(0, 1).shape
    patch = patches.new_empty(patches.shape[1:])
    matrix = patch.view(rows, -1)
    product = patches.new_empty(out, matrix.shape[1])
    total = torch.zeros_like(product)
    for slope, view in zip(slopes.reshape(-1, rows, out), patches, strict=True):
        patch.copy_(view)
        torch.mm(slope.T, matrix, out=product)
        total.addcmul_(product, product)
    return total
