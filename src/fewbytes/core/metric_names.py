"""Names of metrics, and what is known of each without torch: whether higher is better, and whether it is a share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DETECTED = ("mAP", "AP50", "AP75", "APM", "APL")
"""COCO's metrics of detections, as shares (`fewbytes.core.detection`)."""
RANKED: dict[str, Any] = {"average": "none"}  # over classes with both positive and negative samples: see `_Ranked`
KNOWN: Mapping[str, Mapping[str, tuple[str, dict[str, Any], bool, bool]]] = {
    "multiclass": {
        "accuracy": ("Accuracy", {"average": "micro"}, True, True),
        "balanced-accuracy": ("Accuracy", {"average": "macro"}, True, True),
        "f1": ("F1Score", {"average": "macro"}, True, True),
        "precision": ("Precision", {"average": "macro"}, True, True),
        "recall": ("Recall", {"average": "macro"}, True, True),
        "auc": ("AUROC", RANKED, True, True),
        "average-precision": ("AveragePrecision", RANKED, True, True),
        "kappa": ("CohenKappa", {}, True, False),
        "calibration-error": ("CalibrationError", {}, False, True),
    },
    "multilabel": {
        "f1": ("F1Score", {"average": "macro"}, True, True),
        "accuracy": ("Accuracy", {"average": "micro"}, True, True),
        "exact-match": ("ExactMatch", {}, True, True),
        "auc": ("AUROC", RANKED, True, True),
        "average-precision": ("AveragePrecision", RANKED, True, True),
        "precision": ("Precision", {"average": "macro"}, True, True),
        "recall": ("Recall", {"average": "macro"}, True, True),
    },
    "regression": {
        "mae": ("MeanAbsoluteError", {}, False, False),
        "rmse": ("MeanSquaredError", {"squared": False}, False, False),
        "mse": ("MeanSquaredError", {}, False, False),
        "r2": ("R2Score", {}, True, False),
        "mape": ("MeanAbsolutePercentageError", {}, False, False),
    },
    "segmentation": {
        "iou": ("JaccardIndex", {"average": "macro"}, True, True),
        "accuracy": ("Accuracy", {"average": "micro"}, True, True),
        "f1": ("F1Score", {"average": "macro"}, True, True),
    },
    "text": {
        "perplexity": ("text.Perplexity", {}, False, False),
    },
}
"""By kind of learning, metrics by name: torchmetrics' class, options, whether higher is better, whether a share."""


CHANCE = {"auc": 0.5, "kappa": 0.0, "r2": 0.0}
"""Values of metrics for constant guesses, whatever the data; for r2 the guess is the mean."""


def traits(name: str) -> tuple[bool, bool]:
    """Whether higher is better for the named metric, and whether it is a share; (yes, no) for unknown metrics."""
    found = next((known[name] for known in KNOWN.values() if name in known), None)
    return (True, name in DETECTED) if found is None else found[2:]
