"""Names of metrics, and what is known of each without torch: whether higher is better, and how values are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DETECTED = ("mAP", "AP50", "AP75", "APM", "APL")
"""COCO's metrics of detections, as shares (`fewbytes.core.detection`)."""


class Traits(NamedTuple):
    """Whether higher is better, whether values lie from 0 to 1, and whether they are then shown in per cent."""

    higher: bool = True
    share: bool = True
    percent: bool = True


SHARE = Traits()
RATIO = Traits(percent=False)  # from 0 to 1, but no share of samples
LOSS = Traits(False, False, False)


@dataclass(frozen=True)
class Known:
    """A metric known by name: its traits, and torchmetrics' class with its options, or the name of our score of all
    predictions (`fewbytes.core.of_classes`). `of_one`: that of the positive class, if one is given."""

    traits: Traits
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    score: str = ""
    of_one: str = ""

    @property
    def needs_positive(self) -> bool:
        """Whether it is of a positive class alone."""
        return bool(self.of_one) and not self.score


def _ours(score: str, of_one: str = "", traits: Traits = SHARE) -> Known:
    return Known(traits, score=score, of_one=of_one)


KNOWN: Mapping[str, Mapping[str, Known]] = {
    "multiclass": {
        "accuracy": _ours("accuracy"),
        "balanced-accuracy": _ours("balanced_accuracy"),
        "sensitivity": _ours("", "sensitivity"),
        "specificity": _ours("", "specificity"),
        "sensitivity@specificity": _ours("", "sensitivity_at"),
        "specificity@sensitivity": _ours("", "specificity_at"),
        "f1": _ours("f1", "f1_of"),
        "precision": _ours("precision", "precision_of"),
        "recall": _ours("recall", "sensitivity"),
        "auc": _ours("auc", "auc", RATIO),
        "average-precision": _ours("average_precision", "average_precision", RATIO),
        "kappa": _ours("kappa", "", Traits(share=False)),
        "calibration-error": _ours("calibration_error", "calibration_error", Traits(False, True, False)),
        "brier": _ours("brier", "brier", Traits(False, False, False)),
    },
    "multilabel": {
        "f1": Known(SHARE, "F1Score", {"average": "macro"}),
        "accuracy": Known(SHARE, "Accuracy", {"average": "micro"}),
        "exact-match": Known(SHARE, "ExactMatch"),
        "auc": _ours("auc", "", RATIO),
        "average-precision": _ours("average_precision", "", RATIO),
        "precision": Known(SHARE, "Precision", {"average": "macro"}),
        "recall": Known(SHARE, "Recall", {"average": "macro"}),
    },
    "regression": {
        "mae": Known(LOSS, "MeanAbsoluteError"),
        "rmse": Known(LOSS, "MeanSquaredError", {"squared": False}),
        "mse": Known(LOSS, "MeanSquaredError"),
        "r2": Known(Traits(share=False), "R2Score"),
        "mape": Known(LOSS, "MeanAbsolutePercentageError"),
    },
    "segmentation": {
        "iou": Known(SHARE, "JaccardIndex", {"average": "macro"}),
        "accuracy": Known(SHARE, "Accuracy", {"average": "micro"}),
        "f1": Known(SHARE, "F1Score", {"average": "macro"}),
    },
    "text": {
        "perplexity": Known(LOSS, "text.Perplexity"),
    },
}
"""By kind of learning, metrics by name."""
CHANCE = {"auc": 0.5, "kappa": 0.0, "r2": 0.0}
"""Values of metrics for constant guesses, whatever the data; for r2 the guess is the mean."""
AT = "=0.9"  # the example of the level that a name like sensitivity@specificity=0.9 has


def traits(name: str) -> Traits:
    """The traits of the named metric; those of a share for unknown metrics, of a share in per cent for COCO's."""
    plain = name.partition("=")[0]
    found = next((known[plain].traits for known in KNOWN.values() if plain in known), None)
    return (Traits() if name in DETECTED else Traits(share=False)) if found is None else found
