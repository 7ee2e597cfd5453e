"""Results by site in words and on pages."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from cases import tiny_task
from rich.console import Console

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.report import read_runs, write_report
from fewbytes.report.evaluation import FILE, evaluation_of, read_evaluation
from fewbytes.report.evaluation_page import FEW_MODELS, section, write_evaluation
from fewbytes.report.evaluation_tables import evaluation_table, site_rows
from fewbytes.report.evaluation_words import verdicts
from fewbytes.report.pieces import Charts

NAMES = ("north", "<b>south", "west")


def figure(value: float | None, around: float = 0.05) -> dict[str, float | None]:
    ends = (None, None) if value is None else (value - around, value + around)
    return {"value": value, "low": ends[0], "high": ends[1]}


def evaluation(gains: dict[tuple[str, str], list[float]], share: bool = True, around: float = 0.05) -> dict[str, Any]:
    """An evaluation with gains of models over others at three sites; the interval of a mean is half as wide."""
    kinds = {"shared model": "shared", "own models": "own", "training alone": "alone", "pooled data": "pooled"}
    names = dict.fromkeys(["shared model", *(name for pair in gains for name in pair)])
    models = [{"name": name, "kind": kinds.get(name.split(": ")[-1], "without"), "run": "fedavg"} for name in names]
    scores = {"accuracy": figure(0.8)}
    cells = [
        {"models": each["name"], "of": None, "site": site, "scores": scores, "confusion": [[3, 1], [1, 3]]}
        for each in models
        for site in NAMES
    ]  # fmt: skip
    of_sites = [
        {"models": models, "over": over, "site": site, "gain": figure(value, around)}
        for (models, over), values in gains.items()
        for site, value in zip(NAMES, values, strict=True)
    ]
    means = [
        {"models": models, "over": over, "site": None, "gain": figure(sum(values) / 3, around / 2)}
        for (models, over), values in gains.items()
    ]
    return {
        "runs": ["run"],
        "metrics": {"accuracy": {"higher": True, "share": share, "percent": True}},
        "level": 0.95,
        "sites": [{"name": name, "samples": 8, "trained": True} for name in NAMES],
        "models": models,
        "cells": cells,
        "gains": of_sites + means,
        "by": None,
        "groups": [],
        "classes": ["no", "yes"],
    }


def test_a_gain_above_chance_is_said_to_help():
    [words] = verdicts(evaluation({("shared model", "training alone"): [0.12, 0.0, 0.06]}))
    assert words == (
        "Federating helps: by accuracy, the shared model is 6.0 percentage points (95 % interval 3.5 to 8.5) better "
        "than training alone on average over 3 sites' test sets; by site: better at north, west; not distinguishable "
        "at 1 of 3."
    )


def test_a_loss_is_said_to_harm():
    [words] = verdicts(evaluation({("shared model", "training alone"): [-0.12, -0.06, 0.0]}))
    assert words.startswith("Federating hurts: by accuracy, the shared model is 6.0 percentage points (95 % interval")
    assert "3.5 to 8.5) worse than training alone" in words
    assert "worse at north, <b>south" in words


def test_what_may_be_chance_is_open():
    [words] = verdicts(evaluation({("shared model", "training alone"): [0.01, 0.02, 0.0]}))
    assert words.startswith(
        "It is unclear whether federating helps: by accuracy, the shared model is 1.0 percentage points"
    )
    assert words.endswith("by site: not distinguishable at 3 of 3.")


def test_of_many_methods_the_best_of_each_kind_is_named():
    found = evaluation(
        {
            ("fedavg: shared model", "training alone"): [0.1, 0.1, 0.1],
            ("fedprox: shared model", "training alone"): [0.2, 0.2, 0.2],
            ("fedbn: own models", "training alone"): [0.0, 0.0, 0.0],
        }
    )
    shared, own = verdicts(found)
    assert shared.startswith("Federating helps with one shared model: ")
    assert own.startswith("It is unclear whether federating helps with a model for each site: ")
    assert "fedprox's shared model is 20.0 percentage points" in shared
    assert "(the best of 2 methods, which flatters it)" in shared
    assert "fedbn's own models are 0.0 percentage points" in own


def test_many_models_have_rows_in_the_table_and_the_best_of_them_are_drawn():
    names = [f"m{i}: own models" for i in range(20)]
    charts: Charts = {}
    found = section(evaluation({(name, "training alone"): [i / 100] * 3 for i, name in enumerate(names)}), charts)
    assert found.turned
    assert len(found.columns) == 22
    drawn = {*names[-FEW_MODELS + 1 :], "training alone"}
    assert {name for _, name in found.drawn} == {trace["name"] for trace in charts["sites"]["accuracy"][0]} == drawn
    assert [number for number, _ in found.drawn] == list(range(FEW_MODELS))  # of colours
    assert {name for _, name in found.compared["gains"]} == drawn - {"training alone"}
    few = section(evaluation({("m0: own models", "training alone"): [0.1] * 3}), {})
    assert not few.turned
    assert len(few.drawn) == len(few.columns) == 3


def test_without_training_alone_nothing_is_claimed():
    found = evaluation({("shared model", "without north"): [0.1, -0.1, 0.0]})
    unknown, contribution = verdicts(found)
    assert unknown.startswith("Whether federating helps is not known")
    assert contribution == (
        "Contribution of north: with it, the shared model's accuracy is 0.0 percentage points (95 % interval -2.5 to "
        "2.5) better on average over 3 sites, which may be chance; 10.0 percentage points (95 % interval 5.0 to 15.0) "
        "better at north itself."
    )


def test_of_a_metric_that_is_no_share_differences_are_numbers():
    [words] = verdicts(evaluation({("shared model", "training alone"): [0.1, 0.1, 0.1]}, share=False))
    assert "the shared model is 0.1 (95 % interval 0.075 to 0.125) better" in words


def test_the_mean_is_of_sites_that_trained():
    found = evaluation({("shared model", "training alone"): [0.1, 0.1, 0.1]})
    found["sites"][2]["trained"] = False
    for cell in found["cells"]:
        cell["scores"] = {"accuracy": figure({"north": 0.5, "<b>south": 0.7, "west": 0.9}[cell["site"]])}
    rows = site_rows(found, "accuracy")
    assert [row.name for row in rows] == ["north", "<b>south", "west *", "mean of the sites"]
    assert rows[-1].cells[0] == ("60.0%", "")
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(evaluation_table(found))
    assert "90.0% (85.0 to 95.0)" in console.export_text()


def test_pages_escape_what_sites_are_called(tmp_path):
    page = write_evaluation(evaluation({("shared model", "training alone"): [0.1, 0.1, 0.1]}), tmp_path).read_text()
    assert "<b>south" not in page
    assert "&lt;b&gt;south" in page
    assert page.count("<td>3</td>") >= 2  # of confusion matrices


def run_of(folder: Path) -> Path:
    fb.run(fb.FedAvg(epochs=1, lr=0.1, batch=4), tiny_task(), rounds=2, out=folder)
    return folder


def test_an_evaluation_of_other_runs_is_not_shown(tmp_path):
    runs = [run_of(tmp_path / "run")]
    found = evaluation({("shared model", "training alone"): [0.1, 0.1, 0.1]})
    (tmp_path / "run" / FILE).write_text(json.dumps(found))
    assert evaluation_of(read_runs(runs)) == found
    assert "Federating helps" in write_report(read_runs(runs), tmp_path / "page.html").read_text()
    (tmp_path / "run" / FILE).write_text(json.dumps(found | {"runs": ["another"]}))
    assert evaluation_of(read_runs(runs)) is None
    assert "Federating helps" not in write_report(read_runs(runs), tmp_path / "page.html").read_text()


def test_what_sites_reported_is_shown_without_an_evaluation(tmp_path):
    """As of a deployment, whose data are at the sites."""
    folder = run_of(tmp_path / "run")
    counts = json.loads((folder / "partition.json").read_text())
    names = [f"clinic {i}" for i in range(len(counts["train"]))]
    (folder / "partition.json").write_text(json.dumps(counts | {"names": names}))
    [run] = read_runs([folder])
    found = evaluation_of([run])
    assert found is not None
    assert [site["name"] for site in found["sites"]] == names
    by_client = run.rounds[-1]["by_client"]["accuracy"]["personalised"]
    assert [c["scores"]["accuracy"]["value"] for c in found["cells"]] == list(by_client.values())
    text = write_report([run], tmp_path / "page.html").read_text()
    assert "as the sites reported them last" in text
    assert "clinic 1" in text
    assert "Each site&#39;s score over rounds" in text or "Each site's score over rounds" in text
    assert verdicts(found) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": ["a"]}'])
def test_a_damaged_evaluation_is_one_line(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="run fewbytes evaluate again"):
        read_evaluation(tmp_path)


def test_names_that_do_not_match_the_clients_are_refused(tmp_path):
    folder = run_of(tmp_path / "run")
    counts = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(counts | {"names": ["one"]}))
    with pytest.raises(UserError, match="do not match its classes and clients"):
        read_runs([folder])
