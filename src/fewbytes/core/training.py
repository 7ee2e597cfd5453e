"""The one training loop and the one evaluation loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.state import in_training
from fewbytes.data import Transform
from fewbytes.data.split import LazySamples

M = TypeVar("M", bound=nn.Module)
Precision = Literal["float32", "bf16"]
Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) to the mean loss of a batch; the outputs are whatever the model gives."""
EVALUATION_BATCH = 250  # samples
Order = Literal["shuffled", "stored"]
"""Of a client's samples: shuffled anew each epoch; or as they are stored, leaving out the incomplete last batch."""
Optimiser = Literal["sgd", "adam"]
FINDS_NO_OBJECTS = (
    "objects are found by detectors, such as the model yolox-s, and by methods that train a client's model by its own "
    "loss and do not look at labels or logits, such as fedavg: take such a model and method"
)
KEPT_BYTES = 2 << 30  # the most that outputs of a frozen part may take to be kept over the epochs


def arithmetic(precision: Precision, device: str) -> AbstractContextManager[object]:
    """The context in which forward passes run: mixed bfloat16 where asked for."""
    if precision == "bf16":
        return torch.autocast(torch.device(device).type, torch.bfloat16)
    return nullcontext()


def prepared(model: M) -> M:
    """The model, channels-last if it has convolutions: they are faster so.

    1x1 convolutions with a stride and fewer than 16 input channels are handed only the pixels they use: on CPUs the
    gradients of their weights else overwrite memory that is not theirs, channels-last (oneDNN, issue 6035).
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and _overwrites(module):
            module.register_forward_pre_hook(functools.partial(_used_pixels, module.stride))
            module.stride = (1, 1)
    convolves = any(p.dim() == 4 for p in model.parameters())
    return model.to(memory_format=torch.channels_last) if convolves else model


def _overwrites(layer: nn.Conv2d) -> bool:
    of_pixels = layer.kernel_size == (1, 1) and layer.padding == (0, 0) and layer.groups == 1
    return of_pixels and layer.in_channels < 16 and max(layer.stride) > 1


def _used_pixels(stride: tuple[int, ...], layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """The pixels of (…, height, width) that a 1x1 convolution of that stride uses."""
    return inputs[0][..., :: stride[0], :: stride[1]]


def ready(x: Tensor) -> Tensor:
    """Images (n, channels, height, width) channels-last, as `prepared` models like them; other samples as they are."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def annealed(lr: float, t: int, rounds: int) -> float:
    """The learning rate of round t = 1, 2, …: it falls from `lr` to 0 by half a cosine; `rounds` 0: stays `lr`."""
    return lr * (1 + math.cos(math.pi * min(t - 1, rounds) / rounds)) / 2 if rounds else lr


def batches(samples: int, size: int) -> list[tuple[int, int]]:
    """Bounds of consecutive batches; the last may be short, but a single left-over sample joins the one before.

    (A batch of one has no variance for batch normalisation to divide by.)
    """
    bounds = [(start, min(start + size, samples)) for start in range(0, samples, size)]
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] == 1:
        bounds[-2:] = [(bounds[-2][0], samples)]
    return bounds


def whole_batches(samples: int, size: int) -> list[tuple[int, int]]:
    """Bounds of consecutive batches of exactly `size`; of fewer samples one short batch, of a single one none."""
    full = [(start, start + size) for start in range(0, samples - size + 1, size)]
    return full or [(0, samples)] * (samples > 1)


def clip_each(norm: float, *modules: nn.Module) -> None:
    """Scale each module's gradients, as one vector, down to `norm`."""
    for module in modules:
        nn.utils.clip_grad_norm_(module.parameters(), norm)


def fit(
    model: nn.Module,
    x: Tensor | LazySamples,
    y: Tensor,
    *,
    epochs: int,
    lr: float,
    batch: int,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss | None = None,
    extra: Callable[[nn.Module], Tensor] | None = None,
    frozen: nn.Module | None = None,
    optimiser: Optimiser = "sgd",
    order: Order = "shuffled",
    before_step: Callable[[], None] | None = None,
    after_step: Callable[[], None] | None = None,
    precision: Precision = "float32",
    transform: Transform | None = None,
) -> float:
    """Train `model` in place on (x, y); returns the mean loss over the last epoch's batches (0 for none).

    `loss`: by default the model's own, a method `loss(outputs, y)`, if it has one, else the cross-entropy of labels.
    Shuffled from torch's global generator; the optimiser starts anew. `momentum` is SGD's; Adam has 0.9 and 0.999.
    `extra(model)` is added to every batch's loss. `before_step` is called when a batch's gradients are there, for
    example to clip them, and `after_step` when the parameters have moved. Afterwards each parameter's `.grad` is the
    gradient of the very last batch. Parameters that do not require gradients, or have none in the first batch, stay as
    they are. `transform` is applied to every batch as it is cut; then samples pass `frozen`, in eval mode and without
    gradients. What that gives is computed once for all epochs if there is no transform and it takes at most
    `KEPT_BYTES`. Raises UserError if objects' boxes are to be learnt by a loss or a model for labels.
    """
    objective = loss_of(model, y, loss)
    model.to(x.device)
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    velocity: list[Tensor] | None = None
    adam = torch.optim.Adam(parameters, lr, weight_decay=weight_decay) if optimiser == "adam" else None
    bounds = batches(len(y), batch) if order == "shuffled" else whole_batches(len(y), batch)
    context = arithmetic(precision, str(x.device))
    total = torch.zeros((), device=x.device)
    in_training(model)
    if (
        frozen is not None
        and transform is None
        and isinstance(x, Tensor)
        and epochs > 1
        and len(y) * _output_bytes(frozen, x[:1], precision) <= KEPT_BYTES
    ):
        x, frozen = outputs(frozen, x, precision), None
    for _ in range(epochs):
        chosen = torch.randperm(len(y)).to(x.device) if order == "shuffled" else None
        total = torch.zeros((), device=x.device)
        for start, stop in bounds:
            rows = slice(start, stop) if chosen is None else chosen[start:stop]
            samples, labels = x[rows], y[rows]
            if transform is not None:
                samples = transform(samples, labels)
            for p in parameters:
                p.grad = None
            if frozen is not None:
                samples = outputs(frozen, samples, precision)
            with context:
                value = objective(model(samples), labels)
                if extra is not None:
                    value = value + extra(model)
            value.backward()
            total += value.detach()
            if before_step is not None:
                before_step()
            if adam is not None:
                adam.step()
            else:
                moved = [p for p in parameters if p.grad is not None]
                velocity = _sgd(moved, velocity, lr, momentum, weight_decay)
            if after_step is not None:
                after_step()
    return float(total) / len(bounds) if bounds else 0.0


def loss_of(model: nn.Module, y: Tensor, given: Loss | None) -> Loss:
    """What to train `model` with on targets `y`, as `fit` says. Raises UserError."""
    brought = getattr(model, "loss", None)
    own: Loss | None = brought if callable(brought) else None
    if y.dim() == 3 and (given is not None or own is None):
        raise UserError(FINDS_NO_OBJECTS)
    return given or own or F.cross_entropy


@torch.no_grad()
def _sgd(
    moved: list[Tensor], velocity: list[Tensor] | None, lr: float, momentum: float, weight_decay: float
) -> list[Tensor] | None:
    """One step, in place; returns the velocity to come back with."""
    step: list[Tensor] = [p.grad for p in moved if p.grad is not None]
    if weight_decay:
        step = list(torch._foreach_add(step, moved, alpha=weight_decay))
    if momentum:
        if velocity is None:
            velocity = [g.clone() for g in step]
        else:
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, step)
        step = velocity
    torch._foreach_add_(moved, step, alpha=-lr)
    return velocity


def outputs(model: nn.Module, x: Tensor | LazySamples, precision: Precision = "float32") -> Tensor:
    """The model's outputs for samples x (n, …), float32 (n, …), in eval mode and without gradients."""
    training = model.training
    model.to(x.device).eval()
    kept = torch.empty(0)
    with torch.no_grad(), arithmetic(precision, str(x.device)):
        for start in range(0, len(x), EVALUATION_BATCH):
            part: Tensor = model(x[start : start + EVALUATION_BATCH]).float()
            if start == 0:
                if len(part) == len(x):
                    kept = part
                    break
                layout = torch.channels_last if part.dim() == 4 else torch.contiguous_format
                kept = torch.empty((len(x), *part.shape[1:]), device=x.device, memory_format=layout)
            kept[start : start + len(part)] = part
    in_training(model) if training else model.eval()
    return kept


def _output_bytes(model: nn.Module, x: Tensor, precision: Precision) -> int:
    return outputs(model, x, precision).nbytes


def evaluate(
    model: nn.Module, x: Tensor | LazySamples, y: Tensor, precision: Precision = "float32"
) -> tuple[int, float]:
    """(number of samples whose class with the largest output is the label, sum of cross-entropy), in eval mode."""
    training = model.training
    model.to(x.device).eval()
    correct, loss = 0, 0.0
    with torch.no_grad(), arithmetic(precision, str(x.device)):
        for start in range(0, len(y), EVALUATION_BATCH):
            outputs = model(x[start : start + EVALUATION_BATCH]).float()
            labels = y[start : start + EVALUATION_BATCH]
            correct += int((outputs.argmax(1) == labels).sum())
            loss += float(F.cross_entropy(outputs, labels, reduction="sum"))
    in_training(model) if training else model.eval()
    return correct, loss
