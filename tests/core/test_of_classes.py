"""Metrics as medicine has them equal scikit-learn's and torchmetrics', on ties, rare classes and small sets, too."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.core.metric_names import traits
from fewbytes.core.metrics import value_of
from fewbytes.core.objectives import objective_for


def sk() -> Any:
    """scikit-learn's metrics."""
    from sklearn import metrics

    return metrics


def samples(classes: int, n: int, seed: int, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and labels; `rounded`: many probabilities are equal."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, classes, n))
    logits = torch.from_numpy(rng.normal(size=(n, classes))).float()
    logits[range(n), labels] += 0.8
    return (logits.mul(1 if rounded else 100).round().div(1 if rounded else 100)).softmax(1), labels


def value(name: str, predictions: torch.Tensor, labels: torch.Tensor, positive: int | None = None) -> float:
    (metric,) = objective_for("classes", [name], classes=predictions.shape[1], positive=positive).metrics
    measure = metric.make(predictions)
    for rows in (slice(0, 7), slice(7, None)):  # in batches
        measure.update(predictions[rows], labels[rows])
    return value_of(measure)


def sensitivity_at(y: np.ndarray, p: np.ndarray, level: float) -> float:
    fpr, tpr, _ = sk().roc_curve(y, p, drop_intermediate=False)
    return float(max(t for f, t in zip(fpr, tpr, strict=True) if 1 - f >= level - 1e-9))


OF_ONE = {
    "sensitivity": lambda y, p, guessed: sk().recall_score(y, guessed),
    "recall": lambda y, p, guessed: sk().recall_score(y, guessed),
    "specificity": lambda y, p, guessed: sk().recall_score(y, guessed, pos_label=0),
    "precision": lambda y, p, guessed: sk().precision_score(y, guessed),
    "f1": lambda y, p, guessed: sk().f1_score(y, guessed),
    "auc": lambda y, p, guessed: sk().roc_auc_score(y, p),
    "average-precision": lambda y, p, guessed: sk().average_precision_score(y, p),
    "brier": lambda y, p, guessed: sk().brier_score_loss(y, p),
    "sensitivity@specificity=0.9": lambda y, p, guessed: sensitivity_at(y, p, 0.9),
    "specificity@sensitivity=0.8": lambda y, p, guessed: sensitivity_at(1 - y, -p, 0.8),
}


@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.parametrize(("classes", "positive"), [(2, 1), (2, 0), (4, 2)])
@pytest.mark.parametrize("rounded", [False, True])
def test_metrics_of_one_class_are_scikit_learns(name: str, classes: int, positive: int, rounded: bool) -> None:
    for seed, n in ((0, 400), (1, 30)):
        predictions, labels = samples(classes, n, seed, rounded)
        y, p = (labels == positive).numpy().astype(int), predictions[:, positive].double().numpy()
        guessed = (predictions.argmax(1) == positive).numpy().astype(int)
        assert value(name, predictions, labels, positive) == pytest.approx(OF_ONE[name](y, p, guessed), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "of_them", "options"),
    [
        ("f1", "F1Score", {"average": "macro"}),
        ("precision", "Precision", {"average": "macro"}),
        ("recall", "Recall", {"average": "macro"}),
        ("kappa", "CohenKappa", {}),
        ("calibration-error", "CalibrationError", {}),
    ],
)
def test_metrics_of_all_classes_are_torchmetrics(name: str, of_them: str, options: dict[str, str]) -> None:
    import torchmetrics

    for seed, n in ((0, 400), (1, 12)):  # of few samples some classes lack
        predictions, labels = samples(5, n, seed)
        labels = labels.clamp(max=3)
        their = getattr(torchmetrics, of_them)(task="multiclass", num_classes=5, **options)(predictions, labels)
        assert value(name, predictions, labels) == pytest.approx(float(their), abs=1e-6)


def test_balanced_accuracy_is_over_classes_that_occur_and_recall_over_predicted_ones_too() -> None:
    predictions = torch.eye(3)[[0, 0, 1, 2]]
    labels = torch.tensor([0, 0, 1, 1])
    assert value("balanced-accuracy", predictions, labels) == pytest.approx(0.75)
    assert value("recall", predictions, labels) == pytest.approx(0.5)
    two, of_two = samples(2, 300, seed=5)
    mean = (value("sensitivity", two, of_two, 1) + value("specificity", two, of_two, 1)) / 2
    assert value("balanced-accuracy", two, of_two) == pytest.approx(mean)


def test_calibration_of_the_positive_class_sees_what_that_of_the_answer_hides() -> None:
    predictions = torch.tensor([[0.2, 0.8]]).repeat(100, 1)
    labels = (torch.arange(100) < 30).long()
    assert value("calibration-error", predictions, labels, positive=1) == pytest.approx(0.5, abs=1e-6)
    calibrated = torch.tensor([[0.7, 0.3]]).repeat(100, 1)
    assert value("calibration-error", calibrated, labels, positive=1) == pytest.approx(0, abs=1e-6)


def test_what_is_undefined_has_no_value() -> None:
    predictions, _ = samples(2, 20, seed=0)
    healthy = torch.zeros(20, dtype=torch.long)
    for name in ("auc", "average-precision", "sensitivity", "sensitivity@specificity=0.9"):
        assert math.isnan(value(name, predictions, healthy, positive=1))
    assert 0 <= value("specificity", predictions, healthy, positive=1) <= 1


def test_an_auc_is_no_percentage() -> None:
    shown = {name: (of.share, of.percent) for name in ("auc", "accuracy", "brier") if (of := traits(name))}
    assert shown == {"auc": (True, False), "accuracy": (True, True), "brier": (False, False)}
    assert traits("sensitivity@specificity=0.9").percent
    assert not traits("calibration-error").higher


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"metrics": ["sensitivity"]}, "sensitivity needs the positive class"),
        ({"metrics": ["sensitivity@specificity"], "positive": 1}, "there are .*sensitivity@specificity=0.9"),
        ({"metrics": ["sensitivity@specificity=90"], "positive": 1}, "level between 0 and 1, like sensitivity@"),
        ({"metrics": ["auc=0.5"]}, "no metric 'auc=0.5'"),
        ({"metrics": ["auc"], "positive": 2}, "number of a class, 0 to 1, not 2"),
        ({"metrics": ["auc"], "positive": "ill"}, "number of a class, 0 to 1, not 'ill'"),
        ({"positive": 1}, "positive is for metrics of one class"),
    ],
)
def test_errors(how: dict[str, object], says: str) -> None:
    x, y = torch.randn(8, 2), torch.arange(8) % 2
    with pytest.raises(UserError, match=says):
        fb.Task.of(lambda: torch.nn.Linear(2, 2), [((x, y), (x, y))], **how)
    with pytest.raises(UserError, match="the targets are numbers"):
        fb.Task.of(lambda: torch.nn.Linear(2, 1), [((x, x[:, 0]), (x, x[:, 0]))], metrics="mae", positive=1)
