"""A survey in one process, of a data set's partition or of several sites' data."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.data.surveyed import SiteTerms
from fewbytes.experiments.new_folders import new_folder, unless_refused
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.surveying import TELL, survey_task


def survey_here(settings: dict[str, Any], out: Path, tell: Sequence[str]) -> Path:
    """Survey the clients of these settings, each with its own data or its part of a data set; the folder with
    survey.json and survey.html. `tell`: what each tells, or all. Raises UserError."""
    if "client_data" in settings:
        settings = {"partition": "local", **settings}
    experiment = make_experiment(settings)
    for each in tell:
        if each not in TELL:
            raise UserError(f"--tell is one of {', '.join(TELL)}, for all sites or one for each, not {each!r}")
    count = experiment.partition.clients
    reported = list(tell) * count if len(tell) == 1 else list(tell)
    if len(reported) != count:
        raise UserError(
            f"--tell names {len(tell)} sites, and there are {count}: give one word for all, or one for each"
        )
    salt = secrets.token_hex(16) if experiment.parameters.get("duplicates") else ""
    terms = [SiteTerms(each, 1, salt) for each in reported]  # type: ignore[arg-type]
    job = PreparedRun(settings, survey_task(experiment, None, terms.__getitem__))
    job.check()
    folder = new_folder(out, "survey")
    with unless_refused(folder, folder):
        job.execute(folder, False)
    return folder
