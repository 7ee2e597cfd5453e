"""The page of a finished run, by what the method does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewbytes.experiments.loading import site_names_of
from fewbytes.experiments.settings import Experiment
from fewbytes.report import read_runs, write_report
from fewbytes.report.evaluation_of_sites import write_evaluation_of_sites
from fewbytes.report.survey_page import write_survey


def write_page(experiment: Experiment, folder: Path, names: Sequence[str] = ()) -> Path:
    """Write the page of a run's folder: a report, or what a survey found; its path. `names`: of the clients' sites."""
    if experiment.build_method().promises.describes:
        own = site_names_of(experiment.data) if experiment.partition.partition == "local" else ()
        return write_survey(folder, names or own)
    if experiment.build_method().promises.evaluates:
        [run] = read_runs([folder])
        return write_evaluation_of_sites(run, names)
    return write_report(read_runs([folder]), folder / "report.html")
