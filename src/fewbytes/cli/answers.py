"""Prints what a run, a survey or an evaluation has found when it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fewbytes.cli.shared import print_results, print_terms
from fewbytes.experiments.display import printed

if TYPE_CHECKING:
    from fewbytes.report.records import Evaluation as Results


def print_ended(folder: Path, as_json: bool) -> None:
    """Print what a deployment in a folder has found. Results of an evaluation are copied to the runs', first."""
    from fewbytes.experiments.evaluating import into_runs
    from fewbytes.methods.evaluation.evaluation import Evaluation
    from fewbytes.methods.survey.survey import Survey

    result = json.loads((folder / "result.json").read_text())
    if result["method"] == Survey().method_name:
        print_survey(folder, as_json)
    elif result["method"] == Evaluation().method_name:
        print_evaluation(folder, into_runs(folder), as_json)
    else:
        print_results(folder, result, as_json)


def print_evaluation(folder: Path, found: Results, as_json: bool) -> None:
    """Print the tables of an evaluation and its sentences, or all of it as JSON, and the path of its page."""
    from fewbytes.report.evaluation import PAGE
    from fewbytes.report.evaluation_tables import evaluation_table, group_table
    from fewbytes.report.evaluation_words import verdicts

    if as_json:
        print(json.dumps(found, indent=2))
        return
    for metric in found["metrics"]:
        printed.print(evaluation_table(found, metric))
    for text in verdicts(found):
        printed.print(text, soft_wrap=True)
    if (groups := group_table(found)) is not None:
        printed.print(groups)
    printed.print(f"evaluation: {folder / PAGE}", soft_wrap=True)
    print_terms()


def print_survey(folder: Path, as_json: bool) -> None:
    """Print survey.json as it is, or what the survey found, and the path of its page."""
    from fewbytes.report.survey_file import NAME, SurveyFile
    from fewbytes.report.survey_page import PAGE, facts_of, notes_of

    if as_json:
        print((folder / NAME).read_text("utf-8"))
        return
    whole = SurveyFile.read(folder / NAME)
    printed.print(", ".join(facts_of(whole)), soft_wrap=True, markup=False)
    for text in (*(each.text for each in whole.findings), *notes_of(whole)):
        printed.print(text, soft_wrap=True, markup=False)
    printed.print(f"survey: {folder / PAGE}", soft_wrap=True, markup=False)
    print_terms()
