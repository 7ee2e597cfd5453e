"""Choosing a method: the Pareto front of score against bytes up and down, and a recommendation with its reason."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fewbytes.base.errors import listed as named
from fewbytes.base.units import size
from fewbytes.report.folder import Guess, RunFolder
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
    points = points_of(kind, groups, over=False)
    over = len(points_of(kind, groups, over=True))
    rest = f"; over the budget and left out: {over}" if over else ""
    none = f"For {WORDS[kind]}, use none of these methods"
    words = Words(runs[0])
    if not points:
        return Choice(kind, None, none, "all exceed the budget")
    guess, best = guessing(kind, [run for group in groups for run in group.runs]), front(points)[-1]
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


class Words:
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
    if not comparable(groups):
        return []
    return [kind for kind in WORDS if sum(len(points_of(kind, groups, over)) for over in (False, True)) > 1]


def comparable(groups: Sequence[Repeated]) -> bool:
    """Whether all runs have the same data set and metric, and the same partition, of repeated runs those of a seed."""
    runs = [run for group in groups for run in group.runs]
    by_seed = defaultdict[Any, list[RunFolder]](list)
    for run in runs:
        by_seed[run.fact("seed") if seeds_of(groups) else None].append(run)
    same = len(grouped_by(runs, lambda run: (run.fact("dataset"), run.metric))) == 1
    return same and all(len(grouped_by(each, lambda run: (run.partition,))) == 1 for each in by_seed.values())


def points_of(kind: str, groups: Sequence[Repeated], over: bool) -> list[Point]:
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


def guessing(kind: str, runs: Sequence[RunFolder]) -> Guess | None:
    """The score of guessing, if known for the runs' data; if these differ by seed, the hardest to beat."""
    found = [guess for run in runs if (guess := run.guessing(kind)) is not None]
    return max(found, key=lambda guess: guess.by_chance if guess.higher else -guess.by_chance, default=None)


def on_fronts(groups: Sequence[Repeated]) -> list[str]:
    """The labels of methods on the Pareto front of some kind of score."""
    points = (point for kind in compared_kinds(groups) for point in front(points_of(kind, groups, False)))
    return list(dict.fromkeys(point.label for point in points))
