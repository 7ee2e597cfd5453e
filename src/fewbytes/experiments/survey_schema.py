"""The schema of tables from a survey: pooled means and deviations, and the union of the sites' categories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from fewbytes.base.errors import UserError, listed, suggestion
from fewbytes.data.schema import COLUMNS
from fewbytes.data.tables import in_order
from fewbytes.experiments.groups import DataSettings
from fewbytes.experiments.loading import schema_of_settings
from fewbytes.methods.survey.figures import MEASURED, ColumnFigures
from fewbytes.report.survey_file import SurveyFile

TENTHS = np.arange(1, 10) / 10


def with_survey(settings: Mapping[str, Any], path: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Settings whose tables are read by a survey.json: numbers in pooled deviations from the pooled mean, categories as
    all sites have them. Other settings of tables apply, such as `target` (default: the survey's). Columns whose units
    seem to differ are noted. Raises UserError for a column that the survey does not describe."""
    whole, others = SurveyFile.read(path), {key: value for key, value in settings.items() if key != "schema"}
    asked = schema_of_settings(DataSettings.read(others))
    target, known = asked.target or tuple(whole.target), whole.pooled
    if not known:
        raise UserError(
            f"{path} describes no column, as no figure is of fewer than {whole.min_count} samples: survey again, with "
            "a smaller --min-count, or with sites that tell their figures"
        )
    if not target:
        raise UserError(f"{path} names no column to predict: give it (--target COLUMN)")
    for name in (*target, *asked.columns, *asked.leave_out):
        if name not in known:
            raise UserError(f"{path} describes no column {name!r}{suggestion(name, known)}: survey again, or change it")
    used = [name for name in asked.columns or known if name not in (*target, *asked.leave_out, asked.group)]
    measured = [name for name in used if known[name].mean is not None]
    categories = {name: tuple(in_order(known[name].categories)) for name in used if known[name].categories}
    if not measured and not categories:
        raise UserError(f"{path} describes no column of numbers or categories besides {listed(target)}: survey again")
    left = [name for name in used if name not in (*measured, *categories)]
    learns = _learns(path, {name: known[name] for name in target})
    numeric = [*measured, *(target if learns == "numbers" else ())]
    schema = msgspec.structs.replace(
        asked,
        target=target,
        learns=learns,
        numbers={name: (known[name].mean or 0.0, known[name].deviation or 1.0) for name in numeric},
        categories=categories,
        dates=tuple(name for name in numeric if known[name].kind == "dates"),
        cuts=_cuts(known[target[0]]) if learns == "numbers" else (),
        leave_out=tuple(dict.fromkeys((*asked.leave_out, *left))),
        unknown="none",
    )
    for each in whole.findings:
        if each.kind == "units" and each.column in numeric:
            note(f"the units of {each.column!r} seem to differ ({path}): correct them, or leave it out; {each.text}")
    if left:
        note(f"{listed([*map(repr, left)], COLUMNS)} are left out: {path} has no numbers or categories of them")
    found = {**others, "schema": msgspec.to_builtins(schema)}
    if learns == "classes":
        found["class_names"] = in_order(known[target[0]].categories)
    return found


def _learns(path: Path, target: Mapping[str, ColumnFigures]) -> Literal["classes", "labels", "numbers"]:
    """The kind of the target. Raises UserError for columns that cannot be learnt together."""
    if all(figures.kind in MEASURED and figures.mean is not None for figures in target.values()):
        return "numbers"
    if len(target) == 1 and next(iter(target.values())).categories:
        return "classes"
    if all(set(figures.categories) == {"0", "1"} for figures in target.values()):
        return "labels"
    raise UserError(
        f"{path} has no classes or numbers of {listed([*target])} that can be learnt: name others (--target)"
    )


def _cuts(figures: ColumnFigures) -> tuple[float, ...]:
    """The tenths of a column's values."""
    found = [figures.quantile(float(share)) for share in TENTHS]
    return tuple(np.unique([value for value in found if value is not None]).tolist())
