"""What models learn: the loss, how samples come, what is scored, how predictions are shown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fewbytes.base.errors import UserError, named, one_line
from fewbytes.base.state import in_training
from fewbytes.core.devices import Precision, arithmetic
from fewbytes.core.metrics import Measure, Metric, Scores, value_of, values
from fewbytes.core.outputs import takes_whole
from fewbytes.core.training import EVALUATION_BATCH, Loss, own_loss, ready
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import Items, LazySamples, Split

ClassWeights = tuple[float, ...] | Literal["balanced"]
"""Of classes in a loss: one each, or the inverse of how often a client has them."""
Show = Callable[[str, Any], None]
"""`Network.show`."""


@dataclass(frozen=True)
class Objective(ABC):
    """What models learn of samples and their targets.

    `metrics`: what tells how good predictions are; the first is what tables call the score. `criterion`: a loss of
    one's own, (outputs, targets) to the mean of a batch.
    """

    metrics: tuple[Metric, ...] = ()
    criterion: Loss | None = field(default=None, compare=False, repr=False)

    suits: ClassVar[str]
    """Which models and methods can learn it, in words for who took another."""
    has_head: ClassVar[bool] = True
    """Whether models have a last layer that is the task's own, which is trained whole beside adapters."""

    def loss(self, model: nn.Module, given: Loss | None, targets: Tensor) -> Loss:
        """What the model is trained with on data of these targets: what a method gives, the criterion, the model's own,
        a method `loss(outputs, targets)`, or the usual. Raises UserError if it cannot learn this."""
        if given is not None and self.criterion is not None:
            raise UserError(
                "the method trains by a loss of its own, which would take the place of yours: leave yours out"
            )
        return given or self.criterion or own_loss(model) or self.usual(targets)

    @property
    def whole(self) -> bool:
        """Whether the criterion takes the whole output of a model."""
        return takes_whole(self.criterion)

    @property
    def any_scale(self) -> bool:
        """Whether targets may be of any scale, and with them the parameters of a model: also where the loss is one's
        own."""
        return self.criterion is not None

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics that measures compute."""
        return self.metrics

    @abstractmethod
    def usual(self, targets: Tensor) -> Loss:
        """The usual loss, for data of these targets."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """What metrics take, of a model's outputs."""
        return outputs.float()

    def truth(self, targets: Tensor) -> Tensor:
        """What metrics take, of targets."""
        return targets

    def check(self, model: nn.Module, outputs: Any, targets: Tensor) -> None:
        """Raises UserError if what the model gives for some samples suits neither the loss nor the metrics."""
        if not isinstance(outputs, Tensor):
            more = "" if self.whole else "; a loss of your own may take all of it, with output='whole'"
            raise UserError(f"the model gives {named(outputs)}: let it give a tensor, or something with `logits`{more}")
        usually = self.criterion is None and own_loss(model) is None
        by_name = any(metric.known for metric in self.metrics)
        if (usually or by_name) and (wanted := self.wanted(outputs, targets)):
            raise UserError(f"the model gives outputs of shape {tuple(outputs.shape)}, and {wanted}")
        loss = self.loss(model, None, targets)
        if self.criterion is None:
            return
        called = f"the loss {_called(loss)}"
        try:
            value: Any = loss(outputs, targets)
        except Exception as error:  # the user's code
            shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
            raise UserError(f"{called} cannot be computed of {shapes}: {one_line(error)}") from None
        if not isinstance(value, Tensor) or value.numel() != 1:
            made = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else named(value)
            raise UserError(f"{called} gives {made}: let it give one number, the mean of a batch")
        if not value.isfinite():
            raise UserError(f"{called} gives {float(value.detach())} before any training: correct it")
        if outputs.requires_grad and not value.requires_grad:
            raise UserError(f"{called} has no gradient: compute it of the outputs, with torch's operations")

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """What outputs of some samples should be, where usual losses and metrics cannot be computed of them; else
        nothing."""
        return ""

    @property
    def hint(self) -> str:
        """Why training may give numbers that are not finite."""
        own = "" if self.criterion is None else f", or does the loss {_called(self.criterion)} give such?"
        return f"is lr too high{own or '?'}"

    def tensors(self, data: Split, device: str) -> tuple[Tensor, Tensor]:
        """All samples (n, …) and targets on the device, untransformed, images channels-last. Raises UserError if they
        cannot be used so."""
        x, y = data.load(device)
        return ready(x), y

    def samples(self, data: Split, device: str) -> tuple[Tensor | NamedTensors | LazySamples, Tensor]:
        """As `tensors`, but those of a data set of one's own are read as they are indexed, and some are of several
        tensors."""
        if isinstance(data.x, NamedTensors):
            return data.gathered(device), data.aimed(device)
        return data.lazy(device) if isinstance(data.x, Items) else self.tensors(data, device)

    def evaluate(
        self, model: nn.Module, x: Tensor | NamedTensors | LazySamples, y: Tensor, precision: Precision = "float32"
    ) -> tuple[Scores, float]:
        """The metrics of a model's predictions, in eval mode, and the sum of the losses.

        `precision`: of the forward passes; the losses are summed from float32.
        """
        loss, total = self.loss(model, None, y), 0.0
        measures: dict[str, Measure] = {}

        def take(outputs: Any, targets: Tensor) -> None:
            nonlocal total
            total += float(loss(outputs, targets)) * len(targets)
            predictions = self.predictions(outputs)
            if not measures:
                measures.update({m.name: m.make(predictions) for m in self.metrics})
            for measure in measures.values():
                measure.update(predictions.cpu(), self.truth(targets).cpu())

        evaluated(model, x, y, precision, take)
        found = {name: value_of(measure) for name, measure in measures.items()}
        return {name: (value * len(y), len(y)) for name, value in found.items() if value == value}, total

    def score(
        self, model: nn.Module, test: Split, device: str, precision: Precision, show: Show | None
    ) -> dict[str, float]:
        """By metric, what the server's test set tells of a model, if it has samples. `show`: pictures of predictions
        for people."""
        return values(self.evaluate(model, *test.lazy(device), precision)[0]) if len(test) else {}


def evaluated(
    model: nn.Module,
    x: Tensor | NamedTensors | LazySamples,
    y: Tensor,
    precision: Precision,
    take: Callable[[Any, Tensor], None],
) -> None:
    """Have `take` look at what the model gives for each batch of samples, in eval mode, and its targets; the forward
    passes are in that precision."""
    training = model.training
    model.to(x.device).eval()
    with torch.no_grad(), arithmetic(precision, str(x.device)):
        for start in range(0, len(y), EVALUATION_BATCH):
            rows = slice(start, start + EVALUATION_BATCH)
            take(model(x[rows]), y[rows])
    in_training(model) if training else model.eval()


def _called(loss: Loss) -> str:
    """A loss as people know it."""
    return getattr(loss, "__qualname__", type(loss).__name__)
