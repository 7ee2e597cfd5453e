"""Metrics known by name, and users' own metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from fewbytes.base.errors import UserError, one_line, suggestion
from fewbytes.base.extras import needs
from fewbytes.core import of_classes
from fewbytes.core.metric_names import AT, KNOWN
from fewbytes.core.metrics import Measure, Metric
from fewbytes.core.of_classes import OfAll
from fewbytes.data.split import IGNORED_PIXEL, IGNORED_TOKEN


def known_metric(kind: str, name: str, positive: int | None = None) -> Metric:
    """The metric `name` for a kind of learning (a key of KNOWN). `positive`: the positive class, of which metrics then
    are. Raises UserError for an unknown name, a level that is not between 0 and 1, or a missing positive class."""
    known = KNOWN[kind]
    plain, equals, level = name.partition("=")
    if plain not in known or bool(equals) != ("@" in plain):
        names = [f"{each}{AT}" if "@" in each else each for each in known]
        raise UserError(f"there is no metric {name!r} here{suggestion(name, names)}; there are {', '.join(names)}")
    what = known[plain]
    if what.needs_positive and positive is None:
        raise UserError(f"the metric {name} needs the positive class: name it (--positive CLASS)")
    if not (what.score or what.of_one):
        make: Callable[[Tensor], Measure] = partial(_made, kind, what.path, dict(what.options))
    else:
        of_one: dict[str, Any] = {} if positive is None or not what.of_one else {"positive": positive}
        score = getattr(of_classes, what.of_one if of_one else what.score)
        if equals:
            of_one[plain.partition("@")[2]] = _level(name, level)
        make = partial(OfAll, partial(score, **of_one))
    return Metric(plain + equals + level, make, *what.traits, known=True)


def check_metrics_named(names: Sequence[str], positive: bool) -> None:
    """Raises UserError for a name that is a metric of no kind of learning, and as `known_metric` for a name of one kind
    only. `positive`: whether there is a positive class."""
    for name in names:
        kinds = [kind for kind, known in KNOWN.items() if name.partition("=")[0] in known]
        if len(kinds) == 1:
            known_metric(kinds[0], name, 0 if positive else None)
        if not kinds:
            every = sorted({each for known in KNOWN.values() for each in known})
            raise UserError(f"there is no metric {name!r}{suggestion(name, every)}; there are {', '.join(every)}")


def _level(name: str, text: str) -> float:
    """The level in a metric's name. Raises UserError."""
    with suppress(ValueError):
        if 0 < (level := float(text)) < 1:
            return level
    raise UserError(f"the metric {name}: give a level between 0 and 1, like {name.partition('=')[0]}{AT}")


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
        of_ranks = type(one).__name__.endswith(("AUROC", "AveragePrecision", "CalibrationError"))
        metrics.append(Metric(str(name), partial(_of_ones_own, make), higher, bounds == (0.0, 1.0), not of_ranks))
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
        case "multilabel":
            measure: Measure = place(task="multilabel", num_labels=wide, **options)
        case "segmentation":
            measure = place(task="multiclass", num_classes=wide, ignore_index=IGNORED_PIXEL, **options)
        case "text":
            measure = place(ignore_index=IGNORED_TOKEN, **options)
        case _:
            measure = place(**options)
    return _FromTwo(measure) if path == "R2Score" else measure


class _FromTwo:
    """A measure that is undefined, NaN, for a single sample: torchmetrics' raises an error then."""

    def __init__(self, measure: Measure) -> None:
        self._measure, self._samples = measure, 0

    def update(self, predictions: Tensor, targets: Tensor) -> Any:
        self._measure.update(predictions, targets)
        self._samples += len(targets)

    def compute(self) -> Any:
        return self._measure.compute() if self._samples > 1 else math.nan
