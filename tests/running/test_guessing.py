"""The scores of guessing, by any metric: of the best constant answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fewbytes as fb
from fewbytes.report import choices, read_runs
from fewbytes.report.table import summary_table


def task(y: torch.Tensor, outputs: int, **how: Any) -> fb.Task:
    """A task whose samples say nothing about its targets."""
    torch.manual_seed(0)
    x = torch.randn(len(y), 2)
    return fb.Task.of(lambda: nn.Linear(2, outputs), [((x, y), (x, y))] * 2, (x, y), **how)


ILL = (torch.arange(200) % 5 == 0).long()  # a fifth
OF_ILL = {
    "accuracy": None,  # has its own entry
    "balanced-accuracy": 0.5,
    "f1": 1 / 3,  # of the ill, if all are called ill: precision 0.2, recall 1
    "precision": 0.2,
    "sensitivity": 1.0,
    "specificity": 1.0,
    "auc": 0.5,
    "average-precision": 0.2,
    "sensitivity@specificity=0.9": 0.1,
    "brier": 0.16,
    "calibration-error": 0.0,
}


def test_guesses_of_one_class():
    result = fb.run(fb.FedAvg(lr=1e-9), task(ILL, 2, metrics=list(OF_ILL), positive=1), rounds=1, workers=1)
    for metric, value in OF_ILL.items():
        guessed = result.summary["guessing"].get(metric)
        wanted = None if value is None else pytest.approx({"global": value, "personalised": value}, abs=1e-6)
        assert guessed == wanted, metric
    assert result.summary["majority_class_accuracy"]["global"] == pytest.approx(0.8)


def test_guesses_of_other_targets():
    y = torch.tensor([0.0, 1.0, 5.0])
    result = fb.run(fb.FedAvg(lr=1e-9), task(y, 1, metrics=["mae", "mse", "rmse"]), rounds=1, workers=1)
    assert result.summary["guessing"]["mae"]["global"] == pytest.approx(5 / 3)  # of the median
    assert result.summary["guessing"]["mse"]["global"] == pytest.approx(14 / 3)  # of the mean, 2
    labels = torch.stack([ILL == 1, ILL == 0], 1)
    result = fb.run(fb.FedAvg(lr=1e-9), task(labels, 2, metrics=["f1", "auc"]), rounds=1, workers=1)
    assert result.summary["guessing"]["f1"]["global"] == pytest.approx((1 / 3 + 8 / 9) / 2)
    pixels = torch.zeros(4, 8, 8, dtype=torch.long)
    pixels[:, :2] = 1
    torch.manual_seed(0)
    x = torch.randn(4, 1, 8, 8)
    of_pixels = fb.Task.of(lambda: nn.Conv2d(1, 2, 1), [((x, pixels), (x, pixels))], (x, pixels))
    result = fb.run(fb.FedAvg(lr=1e-9), of_pixels, rounds=1, workers=1)
    assert result.summary["guessing"]["iou"]["global"] == pytest.approx(0.75 / 2)


@pytest.mark.parametrize("metric", ["accuracy", "balanced-accuracy", "f1", "auc", "brier", "sensitivity", "kappa",
                                    "calibration-error", "sensitivity@specificity=0.9"])  # fmt: skip
def test_runs_that_have_learnt_nothing_are_not_recommended_by_any_metric(metric: str, tmp_path: Path):
    for name in ("fedavg", "fedprox"):
        method = fb.METHODS[name](lr=1e-9)
        positive = None if metric in ("accuracy", "balanced-accuracy", "kappa") else 1
        how = {"metrics": [metric], "positive": positive} if positive else {"metrics": [metric]}
        fb.run(method, task(ILL, 2, **how), rounds=1, workers=1, out=tmp_path / name)
    runs = read_runs([tmp_path / "fedavg", tmp_path / "fedprox"])
    found = {choice.kind: choice for choice in choices(runs)}
    assert found["global"].label is None
    assert "use none of these methods" in str(found["global"])
    if metric == "sensitivity":
        assert "always answering one class has sensitivity 100.0%: judge by it beside" in str(found["global"])
    assert summary_table(runs).caption


def test_a_run_that_has_learnt_is_recommended_by_a_score_that_is_better_lower(tmp_path: Path):
    torch.manual_seed(0)
    y = torch.randn(200)
    x = torch.stack([y, torch.randn(200)], 1)
    for name in ("fedavg", "fedprox"):
        given = fb.Task.of(lambda: nn.Linear(2, 1), [((x, y), (x, y))] * 2, (x, y))
        fb.run(fb.METHODS[name](lr=0.05), given, rounds=5, workers=1, out=tmp_path / name)
    assert choices(read_runs([tmp_path / "fedavg", tmp_path / "fedprox"]))[0].label in ("fedavg", "fedprox")
