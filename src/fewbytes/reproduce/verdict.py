"""Verdicts, computed from the runs: whether rows have the paper's order, and whether its claims hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from statistics import fmean, stdev
from typing import Literal

from fewbytes.reproduce.found import CellRuns
from fewbytes.reproduce.grid import Claim

Side = Literal["above", "below", "level"]


def side(these: Mapping[int, float], those: Mapping[int, float], times: float = 1.0) -> Side | None:
    """Compares figures with `times` others of the same seeds; None if no seed has both.

    With several seeds, above or below if the mean difference exceeds its standard error: runs of one seed have the same
    data, so their difference varies less than either figure.
    """
    differences = [these[seed] - times * those[seed] for seed in sorted(these.keys() & those.keys())]
    if not differences:
        return None
    mean = fmean(differences)
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return "level" if abs(mean) <= error else "above" if mean > 0 else "below"


@dataclass(frozen=True)
class Order:
    """The numbers of pairs ranked by the paper that agree, are reversed, are too close to tell, or not run. Pairs are
    of rows, column by column, or of columns if there is only one row."""

    as_there: int = 0
    otherwise: int = 0
    close: int = 0
    missing: int = 0
    so_far: bool = False  # some run is not done
    of: Literal["rows", "columns"] = "rows"

    def __bool__(self) -> bool:
        return bool(self.as_there or self.otherwise or self.close)

    def sentence(self, seeds: int) -> str:
        """A sentence on whether the paper's order is seen."""
        if self.otherwise:
            seen = "is seen in part" if self.as_there else "is not seen"
        elif self.as_there:
            seen = "is seen, as far as it can be determined" if self.close else "is seen"
        else:
            seen = "cannot be determined"
        if self.so_far or self.missing:
            seen += " so far"
        pairs = self.as_there + self.otherwise + self.close
        counts = f"{self.as_there} agree, {self.otherwise} are reversed, {self.close} "
        close = "are too close to tell" if seeds > 1 else "are equal, by one seed"
        more = f"; {self.missing} more are not run" if self.missing else ""
        return f"The paper's order of {self.of} {seen}: of {pairs} pairs that it ranks, {counts}{close}{more}."


def order(found: Sequence[CellRuns]) -> Order:
    """Compares the order of each column's rows with the paper's, or of the columns of a table with one row."""
    counts = {"as_there": 0, "otherwise": 0, "close": 0, "missing": 0}
    rows = len({each.cell.row for each in found}) > 1
    so_far = False
    for one, other in combinations([each for each in found if each.cell.printed], 2):
        apart = rows and one.cell.column != other.cell.column
        if apart or not one.cell.printed or not other.cell.printed:
            continue
        if theirs := one.cell.printed.mean - other.cell.printed.mean:
            ours = side(one.counted, other.counted)
            if ours is None:
                kind = "missing"
            else:
                kind = "close" if ours == "level" else "as_there" if (ours == "above") == (theirs > 0) else "otherwise"
                so_far |= not (one.done and other.done)
            counts[kind] += 1
    return Order(**counts, so_far=so_far, of="rows" if rows else "columns")


@dataclass(frozen=True)
class Judged:
    """A claim with its numbers of comparisons that hold, do not hold, are too close to tell, or are not run.

    `so_far`: some of their runs are not done. `one_seed`: one comparison uses a single seed, though the figures depend
    on it. `cells`: all cells that the claim names.
    """

    claim: Claim
    holds: int
    fails: int
    close: int
    missing: int
    so_far: bool
    one_seed: bool
    cells: Sequence[CellRuns]

    @property
    def word(self) -> str:
        """seen, not seen, in part (with counts), too close to tell, or not run; "so far" if runs are missing or not
        done, with the number of comparisons not run, and whether only one seed was used."""
        every = self.holds + self.fails + self.close
        if not every:
            return "not run"
        details = [f"{self.close} too close to tell"] if 0 < self.close < every else []
        if self.holds == every:
            word = "seen"
        elif self.close == every:
            word = "too close to tell"
        elif self.fails == every:
            word = "not seen"
        else:
            word = f"seen in {self.holds} of {every}" if self.holds else f"not seen in any of {every}"
            word += " comparisons"
        details += [f"{self.missing} comparison{'s' if self.missing > 1 else ''} not run"] if self.missing else []
        details += ["by one seed"] if self.one_seed else []
        return ", ".join([f"so far {word}" if self.so_far or self.missing else word, *details])

    @property
    def sentence(self) -> str:
        """The claim and its verdict."""
        why = f" {self.claim.why}" if self.claim.why and (self.fails or self.close) else ""
        return f"{self.claim.text}: {self.word}.{why}"


def judged(claim: Claim, found: Sequence[CellRuns]) -> Judged:
    """Whether each cell of the rows `above` is at least `times` each of those `below`, column by column."""
    cells = [each for each in found if any(fnmatchcase(each.cell.column, c) for c in claim.columns)]
    upper, lower = (
        [each for each in cells if any(fnmatchcase(each.cell.row, pattern) for pattern in rows)]
        for rows in (claim.above, claim.below)
    )
    pairs = [
        (one, other)
        for one in upper
        for other in lower
        if one.cell.column == other.cell.column and one.cell.row != other.cell.row
    ]
    compared = [(a, b, where) for a, b in pairs if (where := side(a.counted, b.counted, claim.times))]
    sides = [where for *_, where in compared]
    return Judged(
        claim,
        sides.count("above"),
        sides.count("below"),
        sides.count("level"),
        missing=len(pairs) - len(compared),
        so_far=any(not each.done for one, other, _ in compared for each in (one, other)),
        one_seed=any(
            one.cell.figure.chance and len(one.counted.keys() & other.counted.keys()) == 1 for one, other, _ in compared
        ),
        cells=[each for each in cells if each in upper or each in lower],
    )
