"""Surveys and evaluations whose orders and answers are carried as files: the figures of one machine, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import pandas as pd
from carried import NAMES, Federation
from places import SITES
from surveyed import patients, tables, write_tables

from fewbytes.base.errors import UserError
from fewbytes.core import intervals, tested
from fewbytes.experiments.evaluate import Evaluating, evaluate
from fewbytes.experiments.evaluating import evaluating, into_runs, repeats
from fewbytes.experiments.pages import write_page
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.survey import survey_here
from fewbytes.methods.evaluation import evaluation
from fewbytes.models.export import export_model
from fewbytes.report.survey_file import SurveyFile
from fewbytes.report.survey_page import notes_of

SURVEY = {"method": "survey", "partition": "local", "target": "ill", "leave_out": "patient_id,wieght"}


@pytest.fixture(autouse=True, scope="module")
def _fewer_resamples():
    """A tenth of them, as tests of intervals are elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (intervals, tested, evaluation):
            patch.setattr(module, "RESAMPLES", 100)
        yield


def members(folder: Path, frames: dict[str, pd.DataFrame], tell: dict[str, str]) -> Federation:
    """A federation of members with own tables, and what each tells."""
    write_tables(folder / "data", frames)
    made = Federation(folder, [*frames])
    for name in frames:
        file = folder / name / "node.toml"
        text = file.read_text().replace('tell = "sizes"\n', "")
        file.write_text(f'{text}tell = "{tell[name]}"\nclient-data = "{folder / "data" / name}"\n')
    return made


def asked(federation: Federation, out: str, **settings: object) -> Path:
    folder = federation.run(out, **{"model": None, "parameters": {}, **settings})
    write_page(experiment_of(folder), folder, federation.names)
    return folder


def test_a_survey_by_files_has_the_figures_of_one_machine(tmp_path):
    federation = members(tmp_path, tables(), {**dict.fromkeys(NAMES, "figures"), "west": "sizes"})
    folder = asked(federation, "asked", **SURVEY)
    here = survey_here(
        {**SURVEY, "client_data": str(federation.folder / "data"), "leave_out": "patient_id"},
        federation.folder / "here", ["figures", "figures", "sizes"],
    )  # fmt: skip
    by_file, local = (json.loads((each / "survey.json").read_text()) for each in (folder, here))
    assert by_file["pooled"] == local["pooled"]
    assert by_file["left_out"] == local["left_out"] == ["west"]
    figures = [[(site["name"], site["columns"]) for site in each["sites"]] for each in (by_file, local)]
    assert figures[0] == figures[1]
    notes = [*notes_of(SurveyFile.read(folder / "survey.json"))]
    [unknown] = [text for text in notes if "has a column" in text]
    assert unknown == "No site has a column 'wieght': correct --target, --columns or --leave-out, and survey again."


HOW = Evaluating(alone=True, without=("south",), by="sex")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run, and its evaluation here and by files: north has few of one sex, and west tells less."""
    root = tmp_path_factory.mktemp("evaluated")
    frames = {name: patients(n, n / 40 - 5, n) for name, n in zip(NAMES, (300, 240, 120), strict=True)}
    frames["north"].loc[frames["north"].index[::12], "sex"] = "x"  # too few to be reported in the test samples
    federation = members(root, frames, {"north": "figures", "south": "figures", "west": "sizes"})
    patients(100, 0, 30).to_csv(root / "server.csv", index=False)
    settings = {"method": "fedavg", "partition": "local", "target": "ill", "leave_out": "sex", "rounds": 2}
    settings |= {"dataset": str(root / "server.csv"), "metrics": "accuracy", "parameters": {"lr": 0.1}}
    PreparedRun({**settings, "client_data": str(root / "data"), "workers": 1}).execute(root / "runs" / "one", False)
    _, here = evaluate([root / "runs" / "one"], HOW)
    beside = {}
    for each in repeats([root / "runs" / "one"], HOW):
        federation.names = each.sites
        beside[each.name] = federation.run(f"beside-{len(beside)}", **{"model": None, **each.settings})
    federation.names = NAMES
    folder = asked(federation, "asked", **evaluating([root / "runs" / "one"], HOW, beside))
    return here, into_runs(folder), root / "runs" / "one"


def test_an_evaluation_by_files_has_the_figures_of_one_machine(evaluated):
    here, found, run = evaluated
    assert [each["name"] for each in found["models"]] == ["shared model", "training alone", "without south"]
    own = {(c["models"], c["site"]): c["scores"] for c in here["cells"] if c["of"] in (None, c["site"])}
    assert {(c["models"], c["site"]): c["scores"] for c in found["cells"]} == own  # to the bit
    gains = {(g["over"], g["site"]): g["gain"] for g in here["gains"]}
    at_sites = {(g["over"], g["site"]): g["gain"] for g in found["gains"]}
    assert at_sites.keys() == gains.keys()
    assert {over for over, _ in gains} == {"training alone", "without south"}
    assert all(at_sites[key] == gains[key] for key in gains if key[1] is not None)
    for key in gains:
        assert at_sites[key]["value"] == pytest.approx(gains[key]["value"])
    assert json.loads((run / "evaluation.json").read_text())["unreported"] == found["unreported"]
    assert "By site" in (run / "report.html").read_text()


def test_subgroups_are_reported_by_sites_that_tell_figures_and_never_of_few_samples(evaluated):
    here, found, run = evaluated
    of = {(g["models"], g["group"], g["site"]): g for g in here["groups"]}
    reported = {(g["group"], g["site"]) for g in found["groups"]}
    assert found["by"] == "sex"
    assert of["shared model", "x", "north"]["samples"] < 10
    assert reported == {("f", "south"), ("m", "south"), *(t for t in reported if t[1] == "north")}
    assert len(reported) == 3  # north's smaller group is hidden, too: with it, that of x would follow from all samples
    assert all(g == of[g["models"], g["group"], g["site"]] for g in found["groups"])
    page = (run / "evaluation.html").read_text()
    assert "f at south" in page
    assert "Groups of fewer samples than a site" in page
    assert [text for text in found["unreported"] if "subgroups" in text] == [
        "No subgroups by 'sex' of west: tell is not figures there."
    ]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (Evaluating(pooled=True), "--pooled needs all sites' samples on one machine, .* use --alone"),
        (Evaluating(sites="others"), "--sites names data on this machine: leave it out"),
        (Evaluating(without=("sout",)), r"--without sout: there is no such site \(did you mean 'south'\?\)"),
    ],
)
def test_what_nodes_cannot_be_asked_is_one_line(evaluated, how, error):
    with pytest.raises(UserError, match=error):
        repeats([evaluated[2]], how)


def test_a_file_of_a_picture_model_is_tested_by_files_as_here(places):
    """The server has none of the pictures."""
    federation = Federation(places / "home", [*SITES])
    for name in SITES:
        with open(federation.folder / name / "node.toml", "a") as file:
            file.write(f'min-count = 1\nclient-data = "{places / "sites" / name}"\n')
    how = {"method": "fedavg", "partition": "local", "dataset": "cells", "client_data": str(places / "sites")}
    PreparedRun({**how, "rounds": 1, "workers": 1, "parameters": {"batch": 10}}).execute(places / "run", False)
    (places / "server" / "cells").rename(places / "elsewhere")
    export_model(places / "run", formats=["safetensors"], out=places / "export")
    found = into_runs(asked(federation, "asked", **evaluating([places / "export" / "model.safetensors"])))
    here = json.loads((places / "run" / "evaluation.json").read_text())
    assert [site["name"] for site in found["sites"]] == [*SITES]
    assert {c["site"]: c["scores"] for c in found["cells"]} == {c["site"]: c["scores"] for c in here["cells"]}
