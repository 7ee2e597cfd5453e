"""Paired differences of repeated runs to the best of them, as a table and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from fewbytes.base.errors import listed
from fewbytes.report.choice import compared_kinds
from fewbytes.report.folder import RunFolder
from fewbytes.report.repeats import ENOUGH, Repeated, difference, repeated, seeds_of
from fewbytes.report.table import figures_table


class Row(NamedTuple):
    """A method: its mean and deviation, its difference to the best, and what that says, as texts."""

    label: str
    score: str
    difference: str
    verdict: str


@dataclass(frozen=True)
class Differences:
    """The methods by one kind of score, best first; `metric`, and in what unit differences are."""

    kind: str
    metric: str
    unit: str
    seeds: list[int]
    rows: list[Row]

    @property
    def same(self) -> list[str]:
        """The methods that cannot be told apart from the best."""
        return [row.label for row in self.rows if row.verdict == SAME]

    @property
    def sentence(self) -> str:
        """What the differences say, in a sentence."""
        best, by = self.rows[0].label, f"By {self.kind} {self.metric}"
        over = f"over seeds {', '.join(map(str, self.seeds))}"
        if len(self.seeds) < ENOUGH:
            return f"{by}, {best} is best in the mean {over}, too few to tell methods apart"
        if self.same:
            return f"{by}, {listed(self.same, 6)} cannot be told apart from {best}, the best, {over}"
        return f"{by}, {best} is better than {listed([row.label for row in self.rows[1:]], 6)} {over}"


SAME, WORSE, BEST, UNKNOWN = "cannot be told apart", "worse", "best", "too few seeds"


def differences(runs: Sequence[RunFolder]) -> list[Differences]:
    """The differences by each kind of score that several methods have; none unless runs are repeated."""
    groups = repeated(runs)
    if not (seeds := seeds_of(groups)):
        return []
    return [_by(kind, [group for group in groups if group.finals(kind)], seeds) for kind in compared_kinds(groups)]


def _by(kind: str, groups: Sequence[Repeated], seeds: list[int]) -> Differences:
    sign, percent = (1 if groups[0].first.higher() else -1), groups[0].first.percent()
    ranked = sorted(groups, key=lambda group: -sign * fmean(group.finals(kind).values()))
    rows = []
    for group in ranked:
        score = group.written(list(group.finals(kind).values()))
        found = difference(group, ranked[0], kind)
        if group is ranked[0]:
            rows.append(Row(group.label, score, "", BEST))
        elif found is None or found.seeds < 2:
            rows.append(Row(group.label, score, "—", UNKNOWN))
        else:
            verdict = UNKNOWN if found.seeds < ENOUGH else WORSE if found.apart else SAME
            rows.append(Row(group.label, score, found.written(percent), verdict))
    return Differences(kind, groups[0].first.metric, "points" if percent else "", seeds, rows)


def differences_table(found: Differences) -> Table:
    """The differences for the terminal."""
    unit = f" in percentage {found.unit}" if found.unit else ""
    caption = f"difference to the best{unit}, with its 95 % interval over {len(found.seeds)} seeds; positive is better"
    table = figures_table(caption, ["method"], [f"{found.kind}\n{found.metric}", "difference", ""])
    for row in found.rows:
        table.add_row(Text(row.label), *map(Text, row[1:]))
    return table
