"""Runs repeated with other seeds: their means and deviations, and paired differences with intervals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from fewbytes.core.intervals import paired
from fewbytes.report.folder import RunFolder, distinctly_labelled, settings_of

OF_A_SEED = ("seed", "workers", "normalise", "schema", "class_names")
"""Settings in which repeated runs may differ: the seed, what follows from its data, and what changes no result."""
ENOUGH = 3  # seeds from which methods may be called indistinguishable: with two, an interval includes nearly anything


@dataclass(frozen=True)
class Repeated:
    """Runs that differ by their seed alone, in its order; or one run."""

    label: str
    runs: tuple[RunFolder, ...]

    @property
    def first(self) -> RunFolder:
        """The run with the lowest seed."""
        return self.runs[0]

    @property
    def done(self) -> list[RunFolder]:
        """The finished runs; one that is not repeated counts as it is."""
        return [run for run in self.runs if run.status == "done" or len(self.runs) == 1]

    def finals(self, kind: str | None, metric: str | None = None) -> dict[int, float]:
        """The final scores of a kind (default metric: the runs'), by seed, of the runs that are done."""
        scores = {_seed(run): run.score(kind, metric).final for run in self.done}
        return {seed: score for seed, score in scores.items() if score is not None}

    def mean(self, value: Callable[[RunFolder], float]) -> float:
        """The mean of a value of the finished runs, or of all if none is."""
        return fmean(map(value, self.done or self.runs))

    def written(self, values: Sequence[float | None], metric: str | None = None) -> str:
        """Values of the runs as text: one, or the mean ± the standard deviation; a dash if there is none."""
        known = [value for value in values if value is not None]
        mean = self.first.written(fmean(known) if known else None, metric)
        if len(known) < 2:
            return mean
        spread = 100 * stdev(known) if self.first.percent(metric) else stdev(known)
        return f"{mean} ± {f'{spread:.1f}' if self.first.percent(metric) else f'{spread:.2g}'}"


class Spread(NamedTuple):
    """Mean and sample standard deviation of some values, and their number; no deviation of fewer than two."""

    mean: float
    deviation: float | None
    of: int


def spread_of(values: Iterable[float]) -> Spread | None:
    """The mean and the deviation of values; None without any.

    >>> from fewbytes.report.repeats import spread_of
    >>> spread_of([1.0, 2.0, 3.0])
    Spread(mean=2.0, deviation=1.0, of=3)
    """
    values = list(values)
    if not values:
        return None
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


class Difference(NamedTuple):
    """How much better a method is than another (positive: better), on average over seeds, with the bounds of its 95 %
    interval, nan for one seed; and the number of seeds."""

    label: str
    mean: float
    low: float
    high: float
    seeds: int

    @property
    def apart(self) -> bool:
        """Whether the methods can be told apart: the interval is on one side of 0."""
        return self.low > 0 or self.high < 0

    def written(self, percent: bool) -> str:
        """As text: -1.2 (-2.0 to -0.4), in percentage points for shares."""
        mean, low, high = (f"{100 * value:+.1f}" if percent else f"{value:+.3g}" for value in self[1:4])
        return f"{mean} ({low} to {high})"


def repeated(runs: Sequence[RunFolder]) -> list[Repeated]:
    """The runs grouped by their settings without the seed, in the order of the first of each group."""
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        settings = {key: value for key, value in settings_of(run).items() if key not in OF_A_SEED}
        seed = run.fact("seed")
        groups.setdefault(repr((run.method, settings)) if seed is not None else str(run.path), []).append(run)
    found: list[list[RunFolder]] = []
    for group in groups.values():
        once = len({_seed(run) for run in group}) == len(group)  # else some of the runs were given twice
        found += [sorted(group, key=_seed)] if once else [[run] for run in group]
    if all(len(group) == 1 for group in found):
        return [Repeated(run.label, (run,)) for run in runs]
    labels = distinctly_labelled([group[0] for group in found], without=OF_A_SEED)
    return [Repeated(label, tuple(group)) for label, group in zip(labels, found, strict=True)]


def by_text(runs: Sequence[RunFolder], texts: Callable[[RunFolder], Iterable[str]]) -> list[tuple[list[Repeated], str]]:
    """The texts on runs, each once, in order, with its subjects: methods if it is on all of their seeds, else runs."""
    subjects: dict[str, set[Path]] = {}
    for run in runs:
        for text in texts(run):
            subjects.setdefault(text, set()).add(run.path)
    groups = repeated(runs)
    return [([each for group in groups for each in _among(group, paths)], text) for text, paths in subjects.items()]


def _among(group: Repeated, paths: Collection[Path]) -> list[Repeated]:
    """A method whose runs are all among these, else its runs that are."""
    found = [run for run in group.runs if run.path in paths]
    return [group] if len(found) == len(group.runs) else [Repeated(run.label, (run,)) for run in found]


def seeds_of(groups: Sequence[Repeated]) -> list[int]:
    """The seeds of repeated runs; none if no run is repeated."""
    if all(len(group.runs) == 1 for group in groups):
        return []
    return sorted({_seed(run) for group in groups for run in group.runs})


def difference(one: Repeated, other: Repeated, kind: str) -> Difference | None:
    """How much better one method is than another, over the seeds that both have; None without any."""
    ours, theirs = one.finals(kind), other.finals(kind)
    sign = 1 if one.first.higher() else -1
    values = [sign * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs]
    if not values:
        return None
    return Difference(one.label, fmean(values), *paired(values), len(values))


def _seed(run: RunFolder) -> int:
    seed = run.fact("seed")
    return seed if isinstance(seed, int) else 0
