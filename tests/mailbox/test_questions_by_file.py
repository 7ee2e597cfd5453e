"""Surveys and evaluations whose orders and answers are carried as files: the figures of one machine, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from carried import NAMES, Federation
from surveyed import tables, write_tables

from fewbytes.experiments.pages import write_page
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.survey import survey_here
from fewbytes.report.survey_file import SurveyFile
from fewbytes.report.survey_page import notes_of

SURVEY = {"method": "survey", "partition": "local", "target": "ill", "leave_out": "patient_id,wieght"}


@pytest.fixture
def federation(tmp_path) -> Federation:
    """Three members with own tables, of which west tells its number of samples alone."""
    write_tables(tmp_path / "data", tables())
    made = Federation(tmp_path)
    for name in NAMES:
        file, tell = tmp_path / name / "node.toml", "sizes" if name == "west" else "figures"
        text = file.read_text().replace('tell = "sizes"\n', "")
        file.write_text(f'{text}tell = "{tell}"\nclient-data = "{tmp_path / "data" / name}"\n')
    return made


def asked(federation: Federation, out: str, **settings: object) -> Path:
    folder = federation.run(out, **settings)
    write_page(experiment_of(folder), folder, federation.names)
    return folder


def test_a_survey_by_files_has_the_figures_of_one_machine(federation):
    folder = asked(federation, "asked", model=None, parameters={}, **SURVEY)
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
