"""Learning objectives: loss, form of samples, metrics, and pictures of predictions."""

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
"""Class weights in a loss: one per class, or the inverse of each client's class frequency."""
Show = Callable[[str, Any], None]
"""`Network.show`."""


@dataclass(frozen=True)
class Objective(ABC):
    """A learning objective, for samples and their targets.

    `metrics`: of predictions; tables call the first one the score. `criterion`: the user's loss, (outputs, targets) to
    a batch's mean.
    """

    metrics: tuple[Metric, ...] = ()
    criterion: Loss | None = field(default=None, compare=False, repr=False)

    suits: ClassVar[str]
    """The models and methods that can learn it, in words for error texts."""
    has_head: ClassVar[bool] = True
    """Whether models have a task-specific last layer, which is trained whole beside adapters."""

    def loss(self, model: nn.Module, given: Loss | None, targets: Tensor) -> Loss:
        """The training loss of the model on data with these targets: the method's, the criterion, the model's own
        method `loss(outputs, targets)`, or the usual one. Raises UserError if it cannot be learnt so."""
        if given is not None and self.criterion is not None:
            raise UserError(
                "the method trains by a loss of its own, which would take the place of yours: leave yours out"
            )
        return given or self.criterion or own_loss(model) or self.usual(targets)

    @property
    def whole(self) -> bool:
        """Whether the criterion takes a model's whole output."""
        return takes_whole(self.criterion)

    @property
    def any_scale(self) -> bool:
        """Whether targets, and with them a model's parameters, may have any scale: also with the user's loss."""
        return self.criterion is not None

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics computed by measures."""
        return self.metrics

    @abstractmethod
    def usual(self, targets: Tensor) -> Loss:
        """The usual loss for data with these targets."""

    def predictions(self, outputs: Tensor) -> Tensor:
        """The metrics' input from a model's outputs."""
        return outputs.float()

    def truth(self, targets: Tensor) -> Tensor:
        """The metrics' input from targets."""
        return targets

    def check(self, model: nn.Module, outputs: Any, targets: Tensor) -> None:
        """Raises UserError if a model's outputs for some samples do not fit the loss or the metrics."""
        if not isinstance(outputs, Tensor):
            more = "" if self.whole else "; a loss of your own may take all of it, with output='whole'"
            raise UserError(f"the model returns {named(outputs)}: return a tensor, or an object with `logits`{more}")
        usually = self.criterion is None and own_loss(model) is None
        by_name = any(metric.known for metric in self.metrics)
        if (usually or by_name) and (wanted := self.wanted(outputs, targets)):
            raise UserError(f"the model returns outputs of shape {tuple(outputs.shape)}, and {wanted}")
        loss = self.loss(model, None, targets)
        if self.criterion is None:
            return
        called = f"the loss {_called(loss)}"
        try:
            value: Any = loss(outputs, targets)
        except Exception as error:  # the user's code
            shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
            raise UserError(f"{called} cannot be computed from {shapes}: {one_line(error)}") from None
        if not isinstance(value, Tensor) or value.numel() != 1:
            result = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else named(value)
            raise UserError(f"{called} returns {result}: return one number, the mean of a batch")
        if not value.isfinite():
            raise UserError(f"{called} returns {float(value.detach())} before any training: correct it")
        if outputs.requires_grad and not value.requires_grad:
            raise UserError(f"{called} has no gradient: compute it from the outputs, with torch's operations")

    def wanted(self, outputs: Tensor, targets: Tensor) -> str:
        """The required form of outputs for some samples if the usual losses and metrics do not fit them; else empty."""
        return ""

    @property
    def hint(self) -> str:
        """The likely reason for non-finite numbers in training."""
        own = "" if self.criterion is None else f", or does the loss {_called(self.criterion)} give such?"
        return f"is lr too high{own or '?'}"

    def tensors(self, data: Split, device: str) -> tuple[Tensor, Tensor]:
        """All samples (n, …) and targets on the device, untransformed, images channels-last. Raises UserError if they
        cannot be used so."""
        x, y = data.load(device)
        return ready(x), y

    def samples(self, data: Split, device: str) -> tuple[Tensor | NamedTensors | LazySamples, Tensor]:
        """Like `tensors`, but samples of users' data sets are read on access, and samples may have several tensors."""
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
        """Each metric of a model on the server's test set, if that has samples. `show`: receives pictures of
        predictions."""
        return values(self.evaluate(model, *test.lazy(device), precision)[0]) if len(test) else {}

    def details(self, model: nn.Module, test: Split, device: str, precision: Precision, seed: int) -> dict[str, Any]:
        """More about a model's predictions of the server's test set than the metrics: nothing by default."""
        return {}


def evaluated(
    model: nn.Module,
    x: Tensor | NamedTensors | LazySamples,
    y: Tensor,
    precision: Precision,
    take: Callable[[Any, Tensor], None],
) -> None:
    """Call `take` with the model's outputs for each batch, in eval mode, and its targets; forward passes run in
    `precision`."""
    training = model.training
    model.to(x.device).eval()
    with torch.no_grad(), arithmetic(precision, str(x.device)):
        for start in range(0, len(y), EVALUATION_BATCH):
            rows = slice(start, start + EVALUATION_BATCH)
            take(model(x[rows]), y[rows])
    in_training(model) if training else model.eval()


def _called(loss: Loss) -> str:
    """A loss's name for people."""
    return getattr(loss, "__qualname__", type(loss).__name__)
