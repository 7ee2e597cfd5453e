"""The report's summary: scores and bytes of each method, and sentences on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from fewbytes.base.units import unit_of
from fewbytes.report import scores
from fewbytes.report.charts import DIRECTIONS, unique
from fewbytes.report.choice import comparable, guessing
from fewbytes.report.folder import Direction, when
from fewbytes.report.repeats import Repeated, seeds_of
from fewbytes.report.table import OF_SERVER, badges_of, best_models, intervals_of, majority_rows, mixed, of_clients


@dataclass(frozen=True)
class Moved:
    """Bytes of a run in one direction: total, per client and round, as papers count them; None if unknown. Of several
    seeds the means."""

    total: int
    each: float | None
    nominal: int | None


@dataclass(frozen=True)
class SummaryRow:
    """A method in the summary: scores as text, of the run's main kind unless stated; of several seeds, means and
    deviations."""

    label: str
    badges: list[str]
    kind: str | None
    final: str
    best: str
    best_when: str
    of_server: str  # final, of the server's model
    of_clients: str  # final, of the clients' own models
    further: list[str]  # final, by other metrics
    uplink: Moved
    downlink: Moved
    both: int  # bytes
    seconds: float


@dataclass(frozen=True)
class Highest:
    """The method with the best final score, that score and its kind; `by`: the metric of the comparison, in words;
    `higher`: whether higher is better."""

    by: str
    label: str
    score: str
    kind: str | None
    higher: bool


@dataclass(frozen=True)
class Summary:
    """Scores and bytes of every method, the metrics, and the score of guessing the majority class, by kind; `sure`: of
    a single method, sentences on how sure its score is."""

    metric: str
    further: list[str]
    rows: list[SummaryRow]
    majorities: list[tuple[str, dict[str, float | None]]]
    highest: Highest | None
    cheapest: SummaryRow
    best_models: list[str]
    sure: list[str]
    apart: bool = False  # judged on different test data

    @property
    def units(self) -> dict[str, str]:
        """The units of bytes: of totals, and of a client's in a round."""
        ways = [moved for row in self.rows for moved in (row.uplink, row.downlink)]
        totals = chain([row.both for row in self.rows], *((moved.total, moved.nominal) for moved in ways))
        return {"total": unit_of(totals), "each": unit_of(moved.each for moved in ways)}


def section(groups: Sequence[Repeated]) -> Summary:
    """The section's values."""
    runs = [run for group in groups for run in group.runs]
    apart = mixed(runs)
    more = unique(metric for run in runs for metric in run.metrics[1:])
    further = [(metric, kind) for metric in more for kind in (("global", "personalised") if apart else ("",))]
    rows = [_summary_row(group, groups, further) for group in groups]
    cheapest = min(rows, key=lambda row: row.both)
    best = [] if seeds_of(groups) else best_models(runs)
    heads = [f"{metric} {kind}".strip() for metric, kind in further]
    metric = scores.main_metric(groups)
    sure = _sure(groups[0]) if len(groups) == 1 else []
    return Summary(metric, heads, rows, majority_rows(runs), _highest(groups), cheapest, best, sure, apart)


def _summary_row(group: Repeated, groups: Sequence[Repeated], further: Sequence[tuple[str, str]]) -> SummaryRow:
    """`further`: metrics, each with a kind ("": the main one). Where runs are judged on different test data, no column
    has the scores by which each is judged."""
    run, done = group.first, group.done
    kind = None if mixed([each.first for each in groups]) else run.kind
    found = [each.score(kind) for each in done]
    uplink, downlink = (_moved(group, way) for way in DIRECTIONS)
    best_row = found[0].best_row if len(found) == 1 else None
    return SummaryRow(
        label=group.label,
        badges=badges_of(group, groups),
        kind=run.kind,
        final=group.written([score.final for score in found]),
        best=group.written([score.best for score in found]),
        best_when="" if best_row is None else when(best_row),
        of_server=group.written([each.score("global").final for each in done]),
        of_clients=group.written([of_clients(each) for each in done]),
        further=[
            group.written([each.score(of or kind, metric).final for each in done], metric) for metric, of in further
        ],
        uplink=uplink,
        downlink=downlink,
        both=round(group.mean(lambda each: each.total_bytes("both"))),
        seconds=group.mean(lambda each: each.seconds),
    )


def _moved(group: Repeated, direction: Direction) -> Moved:
    """Means over the runs; None if unknown for one of them."""
    runs = group.done or list(group.runs)
    each = [run.bytes_per_client_round(direction) for run in runs]
    nominal = [run.nominal_bytes(direction) for run in runs]
    return Moved(
        round(group.mean(lambda run: run.total_bytes(direction))),
        None if None in each else fmean(count or 0 for count in each),
        None if None in nominal else round(fmean(count or 0 for count in nominal)),
    )


def _sure(group: Repeated) -> list[str]:
    """The interval of a method's score, or what it is of several seeds; and whether it is better than guessing."""
    run, finals = group.first, group.finals(group.first.kind)
    if run.kind is None or not finals:
        return []
    sentences = []
    if len(finals) > 1:
        sentences.append(f"The score is the mean ± standard deviation over seeds {', '.join(map(str, finals))}.")
    elif run.kind == OF_SERVER and (interval := intervals_of(group.done[0]).get(run.metric)):
        sentences.append(f"The 95 % bootstrap interval of the score is {interval}.")
    if guess := guessing(run.kind, group.runs):
        better = "better" if guess.beaten(fmean(finals.values())) else "no better"
        always = guess.words.startswith("always")
        words = f"{guess.words[0].upper()}{guess.words[1:]}" if always else f"The score is {better} than {guess.words}"
        sentences.append(f"{words}.")
    return sentences


def _highest(groups: Sequence[Repeated]) -> Highest | None:
    """None if the runs' data, test data or metrics differ, or nothing was scored."""
    if not comparable(groups):
        return None
    firsts = [group.first for group in groups]
    kinds = {group.label: group.first.kind for group in groups}
    by = ""
    if len(set(kinds.values())) > 1:
        shared = [k for k in ("personalised", "global") if all(run.score(k).final is not None for run in firsts)]
        kinds |= dict.fromkeys(kinds, shared[0]) if shared else {}
        name = scores.main_metric(groups)
        if not shared and mixed(firsts):
            return None
        by = f"By the {name} all runs have measured, " if shared else f"Each by its own kind of {name}, "
    finals = {g.label: list(found.values()) for g in groups if (found := g.finals(kinds[g.label]))}
    if not finals:
        return None
    best = (max if firsts[0].higher() else min)(finals, key=lambda label: fmean(finals[label]))
    score = next(group for group in groups if group.label == best).written(finals[best])
    return Highest(by, best, score, kinds[best], firsts[0].higher())
