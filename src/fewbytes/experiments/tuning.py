"""Tuning: the settings that a method is tried with, and the choice among them by scores on validation data."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fewbytes.base.errors import UserError
from fewbytes.base.extras import needs
from fewbytes.base.streams import stream
from fewbytes.base.units import written
from fewbytes.core.metric_names import traits
from fewbytes.experiments.settings import make_method, typed
from fewbytes.experiments.study import Chosen
from fewbytes.methods import method_class

LISTED = 8  # of the other settings, in the reason for a choice
VALIDATION = 0.1
"""Fraction of each client's training samples to validate on, unless the settings state one."""
RULE = (
    "each method's parameters are chosen on validation data ({share:.0%} of each client's training samples), never on "
    "test data: the highest score of the kind that its paper reports, after the last round, with {seed}; of equal "
    "settings the first. All seeds then run with them"
)


class Range(NamedTuple):
    """Values from `low` to `high`, sampled on a logarithmic scale."""

    low: float
    high: float


Space = dict[str, list[Any] | Range]
"""The values to try, by parameter."""


class Validated(NamedTuple):
    """The last score of a run on validation data."""

    value: float
    metric: str
    kind: str
    higher: bool


class Tried(NamedTuple):
    """Parameters that were tried, and their score."""

    parameters: dict[str, Any]
    score: Validated | None


def read_space(name: str, tune: Mapping[str, str], trials: int | None) -> Space:
    """The values to try for a method, from texts like 0.01,0.03 or 0.001..0.3. Raises UserError, also for values that
    the method refuses and for a range without a number of trials."""
    kinds, space = method_class(name).kinds(), Space()
    for key, text in tune.items():
        if not (ends := re.fullmatch(r"\s*(\S+?)\s*\.\.\s*(\S+)\s*", text)):
            parts = [part.strip() for part in text.split(",")]
            space[key] = list(dict.fromkeys(typed(name, kinds, {key: part})[key] for part in parts))
        else:
            low, high = (typed(name, kinds, {key: end})[key] for end in ends.groups())
            numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
            if not numbers or not 0 < low < high:
                raise UserError(f"--tune {key}={text}: a range goes from a number above 0 to a larger one")
            if trials is None:
                raise UserError(
                    f"--tune {key}={text} is a range: give the number of settings to try (--trials 20), or list values "
                    f"({key}={low},{high})"
                )
            space[key] = Range(low, high)
        for value in space[key]:
            make_method(name, {key: value})  # its ranges
    if trials is not None and space:
        needs("--trials", "tune", "optuna")
    return space


def grid(space: Space) -> list[dict[str, Any]]:
    """Every combination of listed values, the last parameter's changing fastest."""
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def suggested(space: Space, trials: int, seed: int) -> Generator[dict[str, Any], float | None, None]:
    """Settings that Optuna suggests, each after the score of the last was sent (higher is better; None: it has none).

    The same seed and scores give the same settings. Numbers of ranges have three significant digits.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=int(stream(seed, "tuning").integers(1 << 31)))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(trials):
        trial = study.ask()
        score = yield {key: _suggestion(trial, key, values) for key, values in space.items()}
        if score is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, score)


def _suggestion(trial: Any, key: str, values: list[Any] | Range) -> Any:
    if not isinstance(values, Range):
        return trial.suggest_categorical(key, values)
    if isinstance(values.low, int) and isinstance(values.high, int):
        return trial.suggest_int(key, values.low, values.high, log=True)
    value = float(f"{trial.suggest_float(key, values.low, values.high, log=True):.3g}")
    return min(max(value, values.low), values.high)


def validated(folder: Path) -> Validated | None:
    """The last score on validation data of the finished run in a folder, of the metric and the kind that it is judged
    by; None if it has none, or no finite one."""
    result = json.loads((folder / "result.json").read_text())
    metric, headline = result["score"]["metric"], result["score"]["kind"]
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    last: dict[str, Any] = next((row["validation"] for row in reversed(rows) if row.get("validation")), {})
    kinds: dict[str, float | None] = last.get(metric, {})
    kind = headline if headline in kinds else next(iter(kinds), "")
    value = kinds.get(kind)
    if value is None or not math.isfinite(value):
        return None
    higher = result.get("metrics", {}).get(metric, {}).get("higher", traits(metric).higher)
    return Validated(value, metric, kind, higher)


def chosen_of(name: str, space: Space, tried: Sequence[Tried]) -> Chosen | None:
    """The best of the tried parameters, the first of equal ones, with the reason; None if none has a score."""
    scored = [each for each in tried if each.score is not None]
    if not scored:
        return None
    best = max(scored, key=lambda each: signed(each.score))  # type: ignore[arg-type]  # none of them is None
    score: Validated = best.score  # type: ignore[assignment]
    share = traits(score.metric).share and traits(score.metric).percent
    others = [
        f"{in_words(each.parameters)}: {'no score' if each.score is None else written(each.score.value, share)}"
        for each in tried
        if each is not best
    ]
    rest = [f"{len(others) - LISTED} more"] if len(others) > LISTED else []
    compared = f" ({'; '.join([*others[:LISTED], *rest])})" if others else ""
    why = (
        f"{name}: {in_words(best.parameters)}, {score.kind} {score.metric} {written(score.value, share)} on validation "
        f"data, the best of {len(tried)}{compared}"
    )
    return Chosen(best.parameters, why + "".join(_at_an_end(space, best.parameters)))


def signed(score: Validated) -> float:
    """A score of which higher is better."""
    return score.value if score.higher else -score.value


def _at_an_end(space: Space, parameters: Mapping[str, Any]) -> list[str]:
    """Notes on parameters whose best value is the first or the last of three or more numbers."""
    notes = []
    for key, values in space.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if (
            isinstance(values, list)
            and len(numbers) == len(values) > 2
            and parameters[key] in (min(numbers), max(numbers))
        ):
            size = "smallest" if parameters[key] == min(numbers) else "largest"
            notes.append(f"; {key} {parameters[key]} is the {size} value tried, so values beyond it may be better")
    return notes


def in_words(parameters: Mapping[str, Any]) -> str:
    """Parameters as text: lr 0.03, mu 0.1."""
    return ", ".join(f"{key} {value}" for key, value in parameters.items())
