"""The page of a finished run, by what the method does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewbytes.data import client_folders, is_function
from fewbytes.experiments.settings import Experiment
from fewbytes.report import read_runs, write_report
from fewbytes.report.survey_page import write_survey


def write_page(experiment: Experiment, folder: Path, names: Sequence[str] = ()) -> Path:
    """Write the page of a run's folder: a report, or what a survey found; its path. `names`: of the clients' sites."""
    if experiment.build_method().promises.describes:
        return write_survey(folder, names or site_names(experiment))
    return write_report(read_runs([folder]), folder / "report.html")


def site_names(experiment: Experiment) -> list[str]:
    """The names of the clients' own data, if these are folders or files; else none."""
    place = experiment.data.client_data
    if experiment.partition.partition != "local" or place is None or is_function(place):
        return []
    return [path.name.partition(".")[0] for path in client_folders(place)]
