"""Choosing a method: the Pareto front of score against bytes up and down, a recommendation with its reason, a chart."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from fewbytes.base.errors import listed as named
from fewbytes.base.units import moved, size
from fewbytes.report import pieces
from fewbytes.report.charts import DIRECTIONS, score_axis
from fewbytes.report.folder import Guess, RunFolder
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.report.repeats import ENOUGH, Difference, Repeated, difference, repeated, seeds_of
from fewbytes.report.table import grouped_by
from fewbytes.report.tuned import tuned_keys

CAVEAT = "Each method ran once: another seed may change the order of close results."
TRAINING = ("rounds", "epochs", "steps", "lr", "batch", "momentum", "fraction")
WITHIN = 0.01  # maximum distance of a recommendation from the best score; relative unless the metric is a share
WORDS = {"personalised": "personalised models", "global": "a global model"}
"""The kinds of score by which methods are chosen, in words. Scores of different kinds are not compared."""


class Point(NamedTuple):
    """Cost and result of a run: bytes of all clients, up and down together, and the final score (negated if lower is
    better). A client's own model costs nothing if clients received nothing: it comes from local training."""

    label: str
    nbytes: int
    score: float


class Choice(NamedTuple):
    """A recommendation for one kind of score: the label of a run (None: take none), the advice and its reason."""

    kind: str
    label: str | None
    advice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.advice}: {self.reason}."


def front(points: Iterable[Point]) -> list[Point]:
    """The Pareto front: points that no other point beats in both bytes and score, sorted by bytes."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.nbytes, -p.score, p.label)):
        if not kept or point.score > kept[-1].score or point[1:] == kept[-1][1:]:
            kept.append(point)
    return kept


def _never(one: Point, other: Point) -> bool:
    """For points of one run each."""
    return False


def recommended(
    points: Iterable[Point], within: float = WITHIN, same: Callable[[Point, Point], bool] = _never
) -> Point:
    """The point with the fewest bytes whose score is `within` of the best, or the `same` by chance. A point that costs
    bytes must also exceed those that cost none by more than `within`, and not be the same as the best of them."""
    points = front(points)
    best, free = points[-1], max((p for p in points if not p.nbytes), key=lambda p: p.score, default=None)
    near = (p for p in points if p.score >= best.score - within - 1e-9 or same(p, best))
    return next(
        p for p in near if not p.nbytes or free is None or (p.score > free.score + within + 1e-9 and not same(p, free))
    )


def choices(runs: Sequence[RunFolder]) -> list[Choice]:
    """A recommendation per kind of score that at least two methods have; none if the runs' data or metrics differ. Runs
    with several seeds count as one method, by their means."""
    groups = repeated(runs)
    return [_choice(kind, groups) for kind in compared_kinds(groups)]


def caveats(runs: Sequence[RunFolder]) -> list[str]:
    """Caveats of the recommendations: differences in training, and chance."""
    groups = repeated(runs)
    found = unequal({group.label: _training(group.first) for group in groups})
    found = {key: values for key, values in found.items() if key not in tuned_keys(runs)}
    texts = {key: ", ".join(f"{value} ({named(who, 3)})" for value, who in of) for key, of in found.items()}
    differences = "; ".join(f"{key} {text}" for key, text in texts.items())
    trained = f"They were trained differently, which may explain the results: {differences}."
    return [*([trained] if differences else []), _chance(groups)]


def _chance(groups: Sequence[Repeated]) -> str:
    """What is known about chance: nothing from one seed; from several, the differences."""
    seeds = seeds_of(groups)
    if not seeds:
        return CAVEAT
    listed = f"{len(seeds)} seeds ({', '.join(map(str, seeds))})"
    if len(seeds) < ENOUGH:
        return f"Scores are means over {listed}, too few to tell methods apart: the advice is by the means alone."
    return (
        f"Scores are means ± standard deviations over {listed}; methods cannot be told apart if the 95 % interval of "
        "their difference, paired by seed (Student's t), includes 0. Each interval is taken alone: among many methods, "
        "one in twenty differs by chance."
    )


def _training(run: RunFolder) -> dict[str, Any]:
    """A run's parameters, and the number of rounds requested: the method may set its own, a limit may end the run."""
    result, asked = run.result or {}, tomllib.loads(run.config).get("rounds")
    parameters: dict[str, Any] = result.get("parameters", {})
    whole = result.get("status") == "done" and not result.get("ended_by")
    if asked is not None and whole and result["rounds"] != asked:
        parameters = a_round(parameters, asked)
    return parameters | {"rounds": asked}


def a_round(parameters: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Parameters of a method that sets its own number of rounds, its local training spread over this many."""
    lengths = {key: parameters[key] / rounds for key in ("epochs", "steps") if parameters.get(key)}
    return {
        **parameters,
        **{key: int(value) if value == int(value) else round(value, 3) for key, value in lengths.items()},
    }


def unequal(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[Any, list[str]]]]:
    """Settings of local training that differ between methods: each value, with the methods that use it."""
    found = {}
    for key in TRAINING:
        have = {who: own[key] for who, own in parameters.items() if own.get(key) is not None}
        have = {who: value for who, value in have.items() if key != "epochs" or not parameters[who].get("steps")}
        values = list(dict.fromkeys(have.values()))
        if len(values) > 1:
            found[key] = [(value, [who for who in have if have[who] == value]) for value in values]
    return found


def _choice(kind: str, groups: Sequence[Repeated]) -> Choice:
    runs = [group.first for group in groups]
    points = _points(kind, groups, over=False)
    over = len(_points(kind, groups, over=True))
    rest = f"; over the budget and left out: {over}" if over else ""
    none = f"For {WORDS[kind]}, use none of these methods"
    words = _Words(runs[0])
    if not points:
        return Choice(kind, None, none, "all exceed the budget")
    guess, best = _guessing(kind, [run for group in groups for run in group.runs]), front(points)[-1]
    sign = 1 if runs[0].higher() else -1

    def beats(score: float) -> bool:
        return guess is None or guess.beaten(sign * score)

    if guess is not None and not beats(best.score):
        reason = f"none is better yet than {guess.words}: try more rounds, or another lr"
        if guess.words.startswith("always"):
            reason = guess.words
        return Choice(kind, None, none, f"{reason}{rest}")
    within = WITHIN * (1 if runs[0].share() else abs(best.score))
    compared = _Compared(kind, groups)
    taken = recommended([point for point in points if beats(point.score)], within, compared.same)
    if not taken.nbytes:
        silent = [point for point in points if point.label in _silent(groups)]
        if not silent:
            alone = f"{kind} {words.score(taken)} in {taken.label}, whose clients receive nothing"
            more = "" if compared.seeds < ENOUGH else f", by more than chance over {compared.seeds} seeds"
            return Choice(kind, None, none, f"none is {words.step} better than local training{more}, {alone}{rest}")
        taken = front(silent)[0]
    advice = f"For {WORDS[kind]}, use {taken.label}, {kind} {words.score(taken)} {_cost(taken)}"
    own = f"{words.score(best)} {'by local training, too' if best.nbytes == 0 else _cost(best)}"
    comes, near = f"comes within {words.step}", taken.score >= best.score - within - 1e-9
    comes += " or could be as good by chance" if compared.seeds >= ENOUGH else ""
    if taken.score == best.score:
        reason = f"it is the {words.best}"
        others = [point.label for point in points if point != taken and compared.same(point, taken)]
        reason += f" ({named(others, 3)} cannot be told apart from it)" if others else ""
    elif near:
        reason, comes = f"it is within {words.step} of the {words.best} ({best.label}, {own})", "is"
    elif compared.same(taken, best):
        apart = compared.difference(taken, best)
        reason = f"it cannot be told apart from the {words.best} ({best.label}, {own}; difference {apart})"
    else:
        reason = f"{best.label} is the {words.best}, {own}"
    cheaper = [point for point in points if point.nbytes < taken.nbytes]
    if not cheaper:
        reason += ", and none is cheaper"
    elif not any(point.score >= best.score - within - 1e-9 or compared.same(point, best) for point in cheaper):
        reason += f", and no cheaper method {comes}"
    elif not beats(max(point.score for point in cheaper)):
        reason += f", and no cheaper method {comes} and beats guessing"
    else:
        reason += f", and no cheaper method {comes} and is that much better than local training"
    return Choice(kind, taken.label, advice, f"{reason}{rest}")


class _Compared:
    """Comparisons of repeated runs by a kind of score, paired by seed; `seeds`: how many they share."""

    def __init__(self, kind: str, groups: Sequence[Repeated]) -> None:
        self._kind, self._groups = kind, {group.label: group for group in groups}
        self.seeds = len(seeds_of(groups))

    def same(self, one: Point, other: Point) -> bool:
        """Whether enough seeds have run, and two methods cannot be told apart."""
        found = self._difference(one, other)
        return found is not None and found.seeds >= ENOUGH and not found.apart

    def difference(self, one: Point, other: Point) -> str:
        """By how much one is better, as text."""
        found = self._difference(one, other)
        return "" if found is None else found.written(self._groups[one.label].first.percent())

    def _difference(self, one: Point, other: Point) -> Difference | None:
        return difference(self._groups[one.label], self._groups[other.label], self._kind)


class _Words:
    """Words for comparing runs by a metric."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self.step = "a percentage point" if run.percent() else "0.01" if run.share() else "1 %"

        self.best = "most accurate" if run.metric == "accuracy" else "best"

    def score(self, point: Point) -> str:
        """A point's score as text."""
        return self._run.written(abs(point.score) if not self._run.higher() else point.score)


def _silent(groups: Sequence[Repeated]) -> set[str]:
    """The labels of runs in which nothing was sent, up or down."""
    return {group.label for group in groups if not group.first.total_bytes("both")}


def _cost(point: Point) -> str:
    return f"with {size(point.nbytes)} in both directions" if point.nbytes else "with nothing sent"


def compared_kinds(groups: Sequence[Repeated]) -> list[str]:
    """The kinds of score that at least two methods have; none if their data or metrics differ."""
    by_seed = defaultdict[Any, list[RunFolder]](list)
    for run in (run for group in groups for run in group.runs):
        by_seed[run.fact("seed") if seeds_of(groups) else None].append(run)
    for runs in by_seed.values():
        if len(grouped_by(runs, lambda run: (run.fact("dataset"), run.partition, run.metric))) > 1:
            return []
    return [kind for kind in WORDS if sum(len(_points(kind, groups, over)) for over in (False, True)) > 1]


def _points(kind: str, groups: Sequence[Repeated], over: bool) -> list[Point]:
    """The methods with finished runs that have this kind of score, in the mean, within their budget or over it."""
    points = []
    for group in groups:
        done = [run for run in group.runs if run.status == "done"]
        if not done or any(run.over_budget for run in done) != over or not (finals := group.finals(kind)):
            continue
        free = kind != "global" and not any(run.total_bytes("downlink") for run in done)
        nbytes = 0 if free else round(fmean(run.total_bytes("both") for run in done))
        score = fmean(finals.values())
        points.append(Point(group.label, nbytes, score if group.first.higher() else -score))
    return points


def _guessing(kind: str, runs: Sequence[RunFolder]) -> Guess | None:
    """The score of guessing, if known for the runs' data; if these differ by seed, the hardest to beat."""
    found = [guess for run in runs if (guess := run.guessing(kind)) is not None]
    return max(found, key=lambda guess: guess.by_chance if guess.higher else -guess.by_chance, default=None)


# ---- the section of the page ----


@dataclass(frozen=True)
class Section:
    """Recommendations, views of the chart, labels on the Pareto fronts, whether runs have budgets, and how many runs
    reached theirs."""

    choices: list[Choice]
    views: dict[str, str]
    best: list[str]
    caveats: list[str]
    metric: str
    step: str
    budgets: bool
    ended: int


def section(runs: Sequence[RunFolder], charts: Charts) -> Section | None:
    """The report's section and its chart; None if there is nothing to choose between."""
    found, groups = choices(runs), repeated(runs)
    if not found:
        return None
    charts["choice"] = {choice.kind: _chart(choice, groups) for choice in found}
    ended = sum((run.result or {}).get("ended_by") == "budget" for run in runs)
    budgets = any(run.budget is not None for run in runs)
    views = {choice.kind: WORDS[choice.kind] for choice in found}
    return Section(found, views, on_fronts(groups), caveats(runs), runs[0].metric, _Words(runs[0]).step, budgets, ended)


def on_fronts(groups: Sequence[Repeated]) -> list[str]:
    """The labels of methods on the Pareto front of some kind of score."""
    points = (point for kind in compared_kinds(groups) for point in front(_points(kind, groups, False)))
    return list(dict.fromkeys(point.label for point in points))


def _chart(choice: Choice, groups: Sequence[Repeated]) -> tuple[list[Trace], Layout]:
    runs = [group.first for group in groups]
    inside, over = (_points(choice.kind, groups, over) for over in (False, True))
    best, guess = front(inside), _guessing(choice.kind, runs)
    guessing = None if guess is None else guess.score
    sent = [point.nbytes for point in [*inside, *over] if point.nbytes]
    axis, place = _axis(sent)
    left, right = place(0), place(max(sent, default=1_000_000))
    sign = 1 if runs[0].higher() else -1
    steps = [(place(p.nbytes), sign * p.score) for p in best] + ([(right, sign * best[-1].score)] if best else [])
    lines = [_rule([x for x, _ in steps], [y for _, y in steps], "solid")]
    heights = [sign * p.score for p in [*inside, *over]]
    low, high = min(heights), max(heights)
    margin = max(0.02 if runs[0].share() else 0.02 * abs(high), 0.08 * (high - low))
    if guessing is not None and guessing > low - (high - low) / 4:  # farther away it would compress the rest
        low = min(low, guessing)
    bottom, top = low - margin, high + margin
    if guessing is not None and guessing >= bottom:
        lines.append(_rule([left, right], [guessing, guessing], "dot"))
    index = {group.label: number for number, group in enumerate(groups)}
    names = _names([*best, *(point for point in [*inside, *over] if point not in best)])
    marks = [
        _mark(runs[index[point.label]], index[point.label], point, choice, place(point.nbytes))
        | _look(index[point.label], point, choice, names.get(point.label, ""), outside)
        | {"first": point in best}
        for points, outside in ((inside, False), (over, True))
        for point in points
    ]
    return lines + marks, {
        "xaxis": axis,
        "yaxis": score_axis(f"final {choice.kind} {runs[0].metric}", runs[0].percent()) | {"range": [bottom, top]},
        "hovermode": "closest",
    }


def _axis(sent: Sequence[int]) -> tuple[Layout, Callable[[int], float]]:
    """The axis of megabytes of both directions (logarithmic for a wide range), and the position of a byte count on it;
    0 has a position on either."""
    least, most = min(sent, default=1), max(sent, default=1_000_000)
    if most < 20 * least:
        return {
            "title": "both directions, MB",
            "range": [-0.1 * most / 1e6, 1.06 * most / 1e6],
        }, lambda count: count / 1e6
    low, zero = math.floor(math.log10(least / 1e6)), math.log10(least / 1e6) - 0.5
    steps = [one * 10.0**d for d in range(low, math.floor(math.log10(most / 1e6)) + 1) for one in (1, 2, 5)]
    steps = [step for step in steps if least <= 1e6 * step <= most]
    decades = [step for step in steps if f"{step:e}"[0] == "1"]
    steps = decades if len(decades) > 2 else steps
    ticks = {"tickvals": [10**zero, *steps], "ticktext": ["0", *(f"{step:g}" for step in steps)]}
    ends = {"range": [zero - 0.5, math.log10(most / 1e6) + 0.2]}
    axis = {"title": "both directions, MB (log scale)", "type": "log"} | ticks | ends
    return axis, lambda count: count / 1e6 if count else 10**zero


def _rule(x: list[float], y: list[float], dash: str) -> Trace:
    line = {"color": "#74839b", "width": 1.5, "dash": dash, "shape": "hv"}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}


def _mark(run: RunFolder, index: int, point: Point, choice: Choice, x: float) -> Trace:
    """A run's mark and its hover text."""
    over = ", over the budget" if run.over_budget else ""
    sent = moved(*map(run.total_bytes, DIRECTIONS)) if point.nbytes else size(0)  # own models by local training: none
    return {
        "type": "scatter",
        "x": [x],
        "y": [point.score if run.higher() else -point.score],
        "customdata": [[pieces.plain(point.label), sent]],
        "hovertemplate": f"%{{customdata[0]}}<br><b>%{{y:{'.1%' if run.percent() else '.4~g'}}}</b> "
        + f"{choice.kind}<br>%{{customdata[1]}}{over}<extra></extra>",
        "meta": index,
    }


def _names(points: Sequence[Point]) -> dict[str, str]:
    """Texts at marks, by the label of the first run at each position."""
    at: dict[tuple[float, float], list[str]] = {}
    for point in points:
        at.setdefault((point.nbytes, point.score), []).append(point.label)
    more = {labels[0]: f" and {len(labels) - 1} more" if len(labels) > 1 else "" for labels in at.values()}
    return {label: pieces.plain(label, 24) + rest for label, rest in more.items()}


def _look(index: int, point: Point, choice: Choice, name: str, over: bool) -> Trace:
    """The style of a mark. The page places the names, those of the Pareto front first, and drops those without room."""
    symbol = "star" if point.label == choice.label else pieces.symbol(index)
    return {
        "mode": "markers",
        "text": [name],
        "cliponaxis": False,
        "marker": {
            "color": pieces.colour(index),
            "symbol": f"{symbol}-open" if over else symbol,
            "size": 15 if point.label == choice.label else 9,
        },
    }
