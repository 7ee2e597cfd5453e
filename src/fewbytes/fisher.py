"""The diagonal of a model's Fisher information, from squared gradients of single samples, at little more than an epoch.

A layer's gradient for one sample is the product of two matrices: what the layer was given, and the gradient of the
sample's log-likelihood by what it gave. One backward pass of a batch to the layers' outputs has these of all samples.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fewbytes.errors import UserError
from fewbytes.models.layers import layers_of
from fewbytes.state import State

Labels = Literal["empirical", "model"]
"""The labels a sample is given: its own, or each one in turn, weighted by the model's probability of it."""
Call = tuple[nn.Module, Tensor, GradientEdge]
"""A layer, its input, and where in the graph its output is (also after an operation in place on that)."""


def fisher_diagonal(model: nn.Module, x: Tensor, y: Tensor, *, kind: Labels = "empirical", batch: int = 64) -> State:
    """F_j: the mean over samples of the squared derivative of log p(y_n | x_n) by theta_j (GENE-FL, Eq. 5).

    x (m, …), y (m,): samples and their classes; `model(x)` gives logits (m, classes), each row from its own sample.
    Returns F for those parameters of `layers_of(model)` that require gradients, by name, on the CPU. The model runs in
    eval mode on the samples' device, `batch` samples at a time, and stays as it was. Raises UserError for no samples.

    Fast if every layer is a Linear, or a Conv2d without groups and padded with zeros by a number, and is called once,
    with samples along the first dimension. Otherwise samples go one by one, which takes two to three times as long.
    """
    if not len(y):
        raise UserError("Fisher information needs at least one sample, and there is none")
    model.to(x.device)
    named = {name: model.get_parameter(name) for own in layers_of(model).values() for name in own}
    total = {p: torch.zeros_like(p) for p in named.values() if p.requires_grad}
    layers = [m for m in model.modules() if any(p in total for p in m.parameters(recurse=False))]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.random.fork_rng([x.device] if x.is_cuda else []), torch.enable_grad():
            if _batchable(model, layers, x[:1]):
                for samples, labels in zip(x.split(batch), y.split(batch), strict=True):
                    _add_batch(total, model, layers, samples, labels, kind)
            elif total:
                for sample, label in zip(x.split(1), y.split(1), strict=True):
                    _add_sample(total, model, sample, label, kind)
    finally:
        for module in training:
            module.training = True
    mean = {name: total[p] / len(y) for name, p in named.items() if p in total}
    return {name: value.to("cpu", memory_format=torch.contiguous_format) for name, value in mean.items()}


def _batchable(model: nn.Module, layers: Collection[nn.Module], sample: Tensor) -> bool:
    """Whether gradients of the layers' parameters follow from one call of each, with samples first."""
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        return False
    for layer in layers:
        convolution = type(layer) is nn.Conv2d and layer.groups == 1
        zeros = type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        own = {name for name, _ in layer.named_parameters()}
        if not (type(layer) is nn.Linear or (convolution and zeros)) or not own <= {"weight", "bias"}:
            return False
    _, calls = _called(model, layers, sample)
    once = len(calls) == len(layers) and {layer for layer, _, _ in calls} == set(layers)
    return once and all(len(given) == 1 for _, given, _ in calls)


def _called(model: nn.Module, layers: Collection[nn.Module], x: Tensor) -> tuple[Tensor, list[Call]]:
    """model(x), and the calls of the layers that led to it."""
    calls: list[Call] = []

    def keep(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if given and output.requires_grad:
            calls.append((layer, given[0].detach(), get_gradient_edge(output)))

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        return model(x), calls
    finally:
        for hook in hooks:
            hook.remove()


def _log_likelihoods(logits: Tensor, y: Tensor, kind: Labels) -> list[Tensor]:
    """Scalars, each a sum over samples, such that the squares of one sample's gradients of all add up to its F."""
    logs = F.log_softmax(logits, 1)
    if kind == "empirical":
        return [logs.gather(1, y[:, None]).sum()]
    return list((logs * logs.detach().div(2).exp()).sum(0))  # sqrt(p) log p: its gradient squared is weighted by p


def _add_sample(total: dict[nn.Parameter, Tensor], model: nn.Module, x: Tensor, y: Tensor, kind: Labels) -> None:
    """Add the squared gradients of one sample, x (1, …), y (1,)."""
    for value in _log_likelihoods(model(x), y, kind):
        gradients = torch.autograd.grad(value, list(total), retain_graph=True, allow_unused=True)
        for square, gradient in zip(total.values(), gradients, strict=True):
            if gradient is not None:
                square.addcmul_(gradient, gradient)


def _add_batch(
    total: dict[nn.Parameter, Tensor],
    model: nn.Module,
    layers: Collection[nn.Module],
    x: Tensor,
    y: Tensor,
    kind: Labels,
) -> None:
    """Add the squared gradients of each of a batch's samples."""
    logits, calls = _called(model, layers, x)
    for value in _log_likelihoods(logits, y, kind):
        slopes = torch.autograd.grad(value, [edge for *_, edge in calls], retain_graph=True, allow_unused=True)
        for (layer, given, _), slope in zip(calls, slopes, strict=True):
            if slope is None:
                continue
            channels_last = slope.movedim(1, -1) if isinstance(layer, nn.Conv2d) else slope
            rows = channels_last.reshape(len(x), -1, channels_last.shape[-1])
            if layer.bias in total:
                total[layer.bias] += rows.sum(1).square().sum(0)
            if layer.weight in total and isinstance(layer, nn.Conv2d):
                square = _squares(rows, _patches(layer, given, slope.shape[2:]))
                out, channels, *kernel = layer.weight.shape
                total[layer.weight] += square.view(out, *kernel, channels).movedim(-1, 1)
            elif layer.weight in total:
                total[layer.weight] += _squares(rows, given)


def _patches(layer: nn.Conv2d, x: Tensor, size: torch.Size) -> Tensor:
    """What each output was computed from: a view (n, *size, kernel height, kernel width, channels) of padded x."""
    (height, width), (down, right) = layer.padding, layer.stride
    x = F.pad(x, (width, width, height, height))
    sample, channel, row, column = x.stride()
    steps = (sample, row * down, column * right, row * layer.dilation[0], column * layer.dilation[1], channel)
    return x.as_strided((len(x), *size, *layer.kernel_size, x.shape[1]), steps)


def _squares(slopes: Tensor, given: Tensor) -> Tensor:
    """The sum over samples of (slopes_n^T given_n)^2, (out, in): slopes (n, positions, out), given (n, …, in).

    One sample's product at a time, so that it stays in the cache: writing many out to memory takes longer than
    multiplying.
    """
    samples, positions, out = slopes.shape
    if positions == 1:
        return slopes[:, 0].square().T @ given.reshape(samples, -1).square()
    rows = given.new_empty(given.shape[1:])
    matrix = rows.view(positions, -1)
    product = given.new_empty(out, matrix.shape[1])
    total = torch.zeros_like(product)
    for slope, values in zip(slopes, given, strict=True):
        rows.copy_(values)
        torch.mm(slope.T, matrix, out=product)
        total.addcmul_(product, product)
    return total
