"""A run's confusion matrix and intervals are kept in its result, and shown."""

from __future__ import annotations

import html
from pathlib import Path

import torch
from torch import nn

import fewbytes as fb
from fewbytes.core.of_classes import confusion
from fewbytes.report import read_runs, summary_table, write_report


def test_the_last_global_models_confusion_matrix_and_intervals_are_kept_and_shown(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(300, 2)
    y = (x[:, 0] + 0.7 * torch.randn(300) > 0.5).long()
    names = ["auc", "sensitivity", "sensitivity@specificity=0.9", "brier"]
    test = (x[200:], y[200:])
    task = fb.Task.of(lambda: nn.Linear(2, 2), [((x[:200], y[:200]), test)] * 2, test, metrics=names, positive=1)
    result = fb.run(fb.FedAvg(lr=0.1), task, rounds=3, out=tmp_path / "run", workers=1)
    kept = result.summary["global_model"]
    assert result.global_model is not None
    with torch.no_grad():
        assert kept["confusion"] == confusion(result.global_model(x[200:]), y[200:]).tolist()
    for name in names:
        low, high = kept["intervals"][name]
        assert low <= result.rounds[-1]["scores"][name]["global"] <= high
    assert [("details" in row) for row in result.rounds] == [False, False, True]
    caption = str(summary_table(read_runs([tmp_path / "run"])).caption)
    low, high = kept["intervals"]["auc"]
    assert f"auc {result.score:.4g} ({low:.4g} to {high:.4g})" in caption
    page = write_report(read_runs([tmp_path / "run"]), tmp_path / "report.html").read_text()
    assert "confusion matrix" in page
    interval = f"The 95 % bootstrap interval of the score is {low:.4g} to {high:.4g}."
    assert f"{interval}\nThe score is better than guessing, 0.5" in page
    assert f"<td>{kept['confusion'][1][0]}</td>" in page


def test_a_run_that_stops_early_has_them_of_its_last_round(tmp_path: Path) -> None:
    x, y = torch.eye(4), torch.arange(4)
    task = fb.Task.of(lambda: nn.Linear(4, 4), [((x, y), (x, y))], (x, y))
    result = fb.run(fb.FedAvg(lr=1.0, epochs=9), task, rounds=9, stop_when="global>=0.9", workers=1)
    assert result.summary["rounds"] < 9
    assert result.summary["global_model"]["confusion"] == torch.eye(4).int().tolist()


def test_charts_of_one_run_first_show_the_test_data_by_which_it_is_judged(tmp_path: Path) -> None:
    x, y = torch.eye(4), torch.arange(4)
    task = fb.Task.of(lambda: nn.Linear(4, 4), [((x, y), (x, y))] * 2, (x, y))
    for method, first, second in (
        (fb.FedAvg(), "on the server's test data", "on clients' own test data"),
        (fb.Ditto(), "on clients' own test data", "on the server's test data"),
    ):
        folder = tmp_path / type(method).__name__
        fb.run(method, task, rounds=1, out=folder, workers=1)
        page = html.unescape(write_report(read_runs([folder]), tmp_path / "report.html").read_text())
        assert page.index(f"<span>{first}</span>") < page.index(f"<span>{second}</span>")
