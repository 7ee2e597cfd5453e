"""Metrics known by name, and users' own metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbytes.base.errors import UserError, one_line, suggestion
from fewbytes.base.extras import needs
from fewbytes.core.metric_names import KNOWN, RANKED
from fewbytes.core.metrics import Measure, Metric
from fewbytes.data.split import IGNORED_PIXEL, IGNORED_TOKEN


def known_metric(kind: str, name: str) -> Metric:
    """The metric `name` for a kind of learning (a key of KNOWN). Raises UserError for an unknown name."""
    known = KNOWN[kind]
    if name not in known:
        raise UserError(f"there is no metric {name!r} here{suggestion(name, known)}; there are {', '.join(known)}")
    path, options, higher, share = known[name]
    return Metric(name, partial(_made, kind, path, options), higher, share, known=True)


def metrics_of(given: Mapping[str, Any]) -> tuple[Metric, ...]:
    """A user's own metrics by name: torchmetrics' objects, or classes or functions that create one without arguments.
    Raises UserError for anything else."""
    metrics = []
    for name, what in given.items():
        make = what.clone if hasattr(what, "clone") and not isinstance(what, type) else what
        if not callable(make):
            raise UserError(f"the metric {name!r} is a {type(what).__name__}: give one of torchmetrics', or its maker")
        try:
            one = make()
        except Exception as error:  # such as a class that needs arguments
            raise UserError(
                f"the metric {name!r} cannot be made ({one_line(error)}): give an instance, or a "
                "function that makes one without arguments"
            ) from None
        if not (hasattr(one, "update") and hasattr(one, "compute")):
            raise UserError(f"the metric {name!r} makes a {type(one).__name__}, which has no update and compute")
        higher = getattr(one, "higher_is_better", None) is not False
        bounds = getattr(one, "plot_lower_bound", None), getattr(one, "plot_upper_bound", None)
        metrics.append(Metric(str(name), partial(_of_ones_own, make), higher, bounds == (0.0, 1.0)))
    return tuple(metrics)


def check_installed(metrics: Sequence[Metric]) -> None:
    """Raises UserError if a metric's package is not installed."""
    for metric in metrics:
        if isinstance(metric.make, partial) and metric.make.func is _made:
            needs(f"the metric {metric.name}", "metrics", "torchmetrics")


def _of_ones_own(make: Callable[[], Measure], predictions: Tensor) -> Measure:
    return make()


def _made(kind: str, path: str, options: dict[str, Any], predictions: Tensor) -> Measure:
    needs(f"the metric {path}", "metrics", "torchmetrics")
    import torchmetrics  # slow to import
    import torchmetrics.text

    place: Any = torchmetrics
    for name in path.split("."):
        place = getattr(place, name)
    wide = predictions.shape[1] if predictions.dim() > 1 else 1
    match kind:
        case "multiclass":
            measure: Measure = place(task="multiclass", num_classes=wide, **options)
        case "multilabel":
            measure = place(task="multilabel", num_labels=wide, **options)
        case "segmentation":
            measure = place(task="multiclass", num_classes=wide, ignore_index=IGNORED_PIXEL, **options)
        case "text":
            measure = place(ignore_index=IGNORED_TOKEN, **options)
        case _:
            measure = place(**options)
    return _Ranked(measure) if options is RANKED else measure


class _Ranked:
    """The mean of a per-class measure, over classes with both positive and negative samples; it is undefined for
    others. NaN if there are none."""

    def __init__(self, measure: Measure) -> None:
        self._measure, self._targets = measure, list[Tensor]()

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self._measure.update(predictions, targets)
        given = F.one_hot(targets, predictions.shape[1]) if targets.dim() < predictions.dim() else targets
        self._targets.append(given.cpu())

    def compute(self) -> float:
        targets = torch.cat(self._targets).bool()
        defined = targets.any(0) & ~targets.all(0)
        if not defined.any():
            return math.nan
        with warnings.catch_warnings(action="ignore"):  # about the classes that are left out
            found: Tensor = self._measure.compute().cpu()
        return float(found[defined].mean())
