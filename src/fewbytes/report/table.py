"""The summary of runs as a table for the terminal, and the formats of its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from statistics import fmean
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fewbytes.base.errors import listed
from fewbytes.base.units import in_unit, unit_of, written
from fewbytes.core.promise import Privacy
from fewbytes.data.schema import DOUBT
from fewbytes.report import left_out, notes
from fewbytes.report.folder import Both, Direction, RunFolder
from fewbytes.report.repeats import Repeated, by_text, repeated, seeds_of
from fewbytes.running.promises.promise import RECEIVED
from fewbytes.running.rounding import rounded
from fewbytes.running.settings import ROUNDING

T = TypeVar("T")
GLOSSARY = "https://fewbytes.readthedocs.io/en/latest/glossary.html"
TOTALS: tuple[Direction | Both, ...] = ("uplink", "downlink", "both")
KINDS = {
    "global": "the global model, on the server's test data",
    "personalised": "each client's own model after local training, on its own test data; mean over clients",
    "micro": "clients' own models, over all their test samples together",
    "sparse": "the masked model that a client sent, on its own test data; mean over clients",
    "combined": "the model that a client received, before training, on its own test data; mean over clients",
    "cohort": "as personalised, for the clients of the last scored round",
    "inherited": "a newcomer's model as it joins, before training, on its own test data",
    "newcomers": "as personalised, for the clients that joined later",
}
"""The meaning of each kind of score."""


RECEIVED_WORDS = "the shared model's"
OF_SERVER = "global"
"""The only kind of score on the server's test data; all others are on clients' own."""


def mixed(runs: Sequence[RunFolder]) -> bool:
    """Whether runs are judged on different test data, the server's and clients' own: no column or chart has both."""
    return len({run.kind == OF_SERVER for run in runs if run.kind}) > 1


def of_clients(run: RunFolder) -> float | None:
    """The final score on clients' own test data: personalised, else of the kind that the run is judged by."""
    own = run.score("personalised").final
    return run.score(run.kind).final if own is None and run.kind != OF_SERVER else own


PERSONALISED = "personal-\nised"
WAYS = ("up", "down", "both")
COLUMNS = ("final", "best", PERSONALISED, "global", *WAYS, "s")
FOLDED = 10  # characters of a method's name in a line, at least
LEAST = ("s", "both", "best", "global", PERSONALISED)
"""Columns that a narrow terminal drops, in this order."""


def figures_table(caption: str, texts: Sequence[str], figures: Sequence[str]) -> Table:
    """An empty table for the terminal with a line under it: columns of texts, then of figures, by their heads."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption=caption, caption_justify="left")
    for name in texts:
        table.add_column(name)
    for name in figures:
        table.add_column(name, justify="right")
    return table


def summary_table(runs: Sequence[RunFolder], width: int = 100) -> Table:
    """One row per run, or per method if runs are repeated with other seeds (means ± standard deviations).

    Columns: final and best score of the run's main kind, final personalised and global score, bytes up, down and both
    over the whole run, seconds. Of runs that are judged on different test data only the latter two scores are shown.
    The last row is the score of guessing the majority class. Below are the kinds' meanings, further metrics, simulated
    seconds, rounding, clients left out and the method's notes. If `width` is too small, columns are dropped: seconds,
    both directions' bytes, the best score, then those of the two kinds.
    """
    fits = (n for n in range(len(LEAST)) if _width(_table(runs, LEAST[:n], FOLDED)) <= width)
    table = _table(runs, LEAST[: next(fits, len(LEAST))])
    if lines := [
        *_meanings(runs),
        *_seeds(runs),
        *_further(runs),
        *([] if seeds_of(repeated(runs)) else [*intervals(runs), *best_models(runs)]),
        *_turnovers(runs),
        *_clocks(runs),
        *_rounded(runs),
        *_guesses(runs),
        *left_out.captions(runs),
        *(f"note: {note}" for note in notes.noted(runs)),
    ]:
        table.caption, table.caption_justify = Text("\n".join(lines)), "left"
    return table


def _width(table: Table) -> int:
    return Console(width=1000).measure(table).maximum


def _table(runs: Sequence[RunFolder], gone: Sequence[str], names: int = 26) -> Table:
    """The figures of runs, without the columns `gone`; names are folded to `names` characters."""
    metrics = list(dict.fromkeys(run.metric for run in runs))
    narrow = mixed(runs) and PERSONALISED in gone  # columns name the kinds then
    if mixed(runs):
        gone = ["final", "best", *(name for name in gone if name not in (PERSONALISED, "global"))]
        gone += ["down"] if narrow else []
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.add_column("method", overflow="fold", min_width=FOLDED, max_width=names)
    if not narrow:
        table.add_column(metrics[0] if len(metrics) == 1 else "score", no_wrap=True, max_width=12)
    shown = [name for name in COLUMNS if name not in gone]
    groups = repeated(runs)
    sent = [[group.mean(partial(RunFolder.total_bytes, direction=way)) for way in TOTALS] for group in groups]
    unit = unit_of(chain(*sent))
    for name in shown:
        table.add_column(f"{unit}\n{name}" if name in WAYS else name, justify="right", no_wrap=True)
    for group, counts in zip(groups, sent, strict=True):
        run, done = group.first, group.done
        cells = dict(
            zip(
                COLUMNS,
                (
                    group.written([each.score(each.kind).final for each in done]),
                    group.written([each.score(each.kind).best for each in done]),
                    group.written([of_clients(each) for each in done]),
                    group.written([each.score("global").final for each in done]),
                    *(in_unit(count, unit) for count in counts),
                    seconds(group.mean(lambda each: each.seconds)),
                ),
                strict=True,
            )
        )
        table.add_row(
            Text(" ".join([group.label, *(f"({badge})" for badge in badges_of(group, groups))])),
            *([] if narrow else [Text(" ".join([*([run.metric] if len(metrics) > 1 else []), run.kind or "—"]))]),
            *(cells[name] for name in shown),
        )
    for name, majority in majority_rows(runs):
        guessed = {PERSONALISED: "personalised", "global": "global"}
        texts = [percent(majority.get(guessed[each])) if each in guessed else "" for each in shown]
        table.add_row(Text(name), *([] if narrow else [""]), *texts, style="dim")
    return table


def _guesses(runs: Sequence[RunFolder]) -> list[str]:
    """Lines on runs that are no better than guessing, one for all with the same guess and remedy."""
    lines = []
    for about, text in by_text(runs, _guess):
        names = [
            f"{each.label if len(runs) > 1 else ''} {each.first.kind} "
            + each.written([run.score(run.kind).final for run in each.runs])
            for each in about
        ]
        lines.append(f"{listed([name.strip() for name in names], notes.NAMED)}: {text}")
    return lines


def _guess(run: RunFolder) -> Iterator[str]:
    """The guess that a run does not beat, and a remedy."""
    guess, final = run.guessing(run.kind), run.score(run.kind).final
    if guess is None or final is None or guess.beaten(final):
        return
    remedy = "; try another lr, smaller batches, or more epochs or rounds"
    if doubts := [note for note in run.fact("notes") or () if f": {DOUBT} column" in note]:
        remedy = f"; {'; '.join(doubts[:3])}"
    yield guess.words if guess.words.startswith("always") else f"no better than {guess.words}{remedy}"


def _meanings(runs: Sequence[RunFolder]) -> list[str]:
    """A line for every kind of score in the table, with its meaning."""
    kinds = {run.kind for run in runs}
    kinds |= {kind for kind in ("personalised", "global") for run in runs if run.score(kind).final is not None}
    return [f"{kind}: {meaning}" for kind, meaning in KINDS.items() if kind in kinds]


def _further(runs: Sequence[RunFolder]) -> list[str]:
    """A line for every method with several metrics, with its scores by the others."""
    return [
        f"{group.label}, {group.first.kind}: "
        + ", ".join(
            f"{metric} {group.written([run.score(run.kind, metric).final for run in group.done], metric)}"
            for metric in group.first.metrics[1:]
        )
        for group in repeated(runs)
        if group.first.metrics[1:]
    ]


def _seeds(runs: Sequence[RunFolder]) -> list[str]:
    """What the figures of repeated runs are."""
    seeds = seeds_of(repeated(runs))
    return [f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}"] if seeds else []


def badges_of(group: Repeated, groups: Sequence[Repeated]) -> list[str]:
    """As `badges`, of repeated runs; they differ from those of others in which seeds are done."""
    if len(group.runs) == 1 and not seeds_of(groups):
        return badges(group.first)
    shown = dict.fromkeys(badge for run in group.done for badge in badges(run))
    whole = len(group.done) == len(seeds_of(groups))
    return [*shown, *([] if whole else [f"{len(group.done)} of {len(seeds_of(groups))} seeds"])]


def badges(run: RunFolder) -> list[str]:
    """Properties of a run beside its figures: its aggregation rule, if not the mean; its rounding; its privacy budget,
    and the spent part; its status, if not done; whether it exceeded its budget or was ended early."""
    by = {"budget": "by the budget", "stop_when": f"by {run.fact('stop_when')}"}.get(str(run.fact("ended_by")))
    ended = [f"ended at round {run.fact('rounds')}, {by}"] if by else []
    rule = [str(run.fact("aggregate"))] if run.fact("aggregate") else []
    rule += _roundings(run)
    if run.fact("dp"):
        spent = next((row["privacy"]["epsilon"] for row in reversed(run.rounds) if "privacy" in row), 0.0)
        rule.append(f"epsilon {spent:.2f} of {Privacy.read(run.fact('dp')).epsilon:g}")
    return rule + [run.status] * (run.status != "done") + ["over the budget"] * run.over_budget + ended


def _roundings(run: RunFolder) -> list[str]:
    """How a run rounds values; if that changed when it was resumed, every way it did, in order, in one text."""
    last = {key: value for key in ("bits", *chain(*ROUNDING.values())) if (value := run.fact(key))}
    rows = [row for row in run.rounds if row["phase"] == "round"]
    if not any("rounding" in row for row in rows):  # of an earlier version, or exact
        return _rounding(last)
    texts = [" and ".join(_rounding(each)) for each in (*(row.get("rounding", {}) for row in rows), last)]
    changes = [text or "exact" for text, _ in groupby(texts)]
    return [", then ".join(changes)] if len(changes) > 1 else _rounding(last)


def _rounding(settings: Mapping[str, Any]) -> list[str]:
    texts = [_bits(format(bits, "g"))] if (bits := settings.get("bits")) else []
    texts += [_bits(str(up).partition("=")[0])] if (up := settings.get("uplink_bits")) else []
    texts += [f"steps of {step:g}"] if (step := settings.get("uplink_step")) else []
    return texts + ([f"{_bits(format(down, 'g'))} down"] if (down := settings.get("downlink_bits")) else [])


def _bits(count: str) -> str:
    return f"{count} bit{'' if count == '1' else 's'}"


def intervals(runs: Sequence[RunFolder]) -> list[str]:
    """A line for every run with bootstrap intervals of its global model's scores."""
    lines = []
    for run in runs:
        texts = [
            f"{metric} {run.written(run.score(OF_SERVER, metric).final, metric)} ({interval})"
            for metric, interval in intervals_of(run).items()
        ]
        name = f"{run.label}, " if len(runs) > 1 else ""
        lines += [f"{name}global, with 95 % bootstrap intervals: {', '.join(texts)}"] if texts else []
    return lines


def intervals_of(run: RunFolder) -> dict[str, str]:
    """By metric, the 95 % bootstrap interval of the global model's last score, as text."""
    found = (run.result or {}).get("global_model", {}).get("intervals", {})
    return {
        metric: f"{run.written(low, metric)} to {run.written(high, metric)}" for metric, (low, high) in found.items()
    }


def best_models(runs: Sequence[RunFolder]) -> list[str]:
    """A line for every run that kept its best model: its round, how it was chosen, and its score on the test data."""
    lines = []
    for run in runs:
        if not (best := (run.result or {}).get("best_model")):
            continue
        rows = (row for row in run.rounds if row["phase"] == "round" and row["round"] == best["round"])
        tested = next(rows, {}).get("scores", {}).get(best["metric"], {}).get(best["kind"])
        validated = best["chosen_on"] == "validation"
        on = "validation data" if validated else "these test data, which is too optimistic"
        lines.append(
            f"{f'{run.label}, ' if len(runs) > 1 else ''}best model: round {best['round']}, by "
            f"{RECEIVED_WORDS if best['kind'] == RECEIVED else best['kind']} "
            f"{best['metric']} {run.written(best['value'], best['metric'])} on {on}"
            + (f"; on test data {run.written(tested, best['metric'])}" if validated and tested is not None else "")
        )
    return lines


def _turnovers(runs: Sequence[RunFolder]) -> list[str]:
    """A line for every run whose first clients all left, with their last score."""
    lines = []
    for run in runs:
        before = (run.result or {}).get("score_before", {}).get(run.kind)
        if before is not None:
            name = f"{run.label}, " if len(runs) > 1 else ""
            lines.append(
                f"newcomers only from round {run.fact('turnover')}; before: {name}{run.kind} {run.written(before)}"
            )
    return lines


def _clocks(runs: Sequence[RunFolder]) -> list[str]:
    """A line with the durations of runs that have a simulated clock."""
    took = [(run.label, seconds(run.rounds[-1]["simulated_seconds"])) for run in runs if run.timed]
    named = ", ".join(f"{label} {time} s" if len(runs) > 1 else f"{time} s" for label, time in took)
    return [f"by the simulated clock: {named}"] if took else []


def _rounded(runs: Sequence[RunFolder]) -> list[str]:
    """A line per direction with the runs' rounding, from rounds.jsonl."""
    lines: dict[str, list[str]] = {}
    for run in runs:
        measured, name = rounded(run.rounds), f"{run.label} " if len(runs) > 1 else ""
        for way, keys in ROUNDING.items():
            if (bits := measured.get(f"{way}_bits_per_value")) is not None:
                error = measured[f"{way}_rounding_error"]
                lines.setdefault(way, []).append(f"{name}to {bits:.2f} bits per value, error {error:.2g}")
            elif run.rounds and any(run.fact(key) for key in keys):
                lines.setdefault(way, []).append(f"{name}nothing, all values were sent in full")
    return [f"{way} rounded: {'; '.join(each)}" for way, each in lines.items()]


def majority_rows(runs: Sequence[RunFolder]) -> list[tuple[str, dict[str, float | None]]]:
    """The accuracy of always guessing the majority class, by kind; one row unless the runs' data differ."""
    groups = grouped_by(runs, lambda run: (run.result or {}).get("majority_class_accuracy") or None)
    if seeds_of(repeated(runs)) and groups:
        found = [value for _, value in groups]
        known = {kind: [each[kind] for each in found if each.get(kind) is not None] for kind in found[0]}
        return [("majority class", {kind: fmean(values) if values else None for kind, values in known.items()})]
    return [
        ("majority class" if len(groups) == 1 else f"majority class: {', '.join(run.label for run in group)}", value)
        for group, value in groups
    ]


def grouped_by(runs: Sequence[RunFolder], value: Callable[[RunFolder], T | None]) -> list[tuple[list[RunFolder], T]]:
    """The runs grouped by equal values, in order; runs without one are left out."""
    groups: list[tuple[list[RunFolder], T]] = []
    for run in runs:
        mine = value(run)
        if mine is None:
            continue
        for group, theirs in groups:
            if theirs == mine:
                group.append(run)
                break
        else:
            groups.append(([run], mine))
    return groups


def percent(fraction: float | None) -> str:
    """A fraction 0..1 as percent with one decimal; a dash for None."""
    return written(fraction, share=True)


def whole(count: float | None) -> str:
    """A count with thousands separators; a dash for None."""
    return "—" if count is None else f"{count:,.0f}"


def seconds(count: float) -> str:
    """Seconds, with a decimal below a hundred, and no unit."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.1f}"


def decibels(value: float | None) -> str:
    """A PSNR as text; it is infinite for equal images."""
    return "equal" if value is None or math.isinf(value) else f"{value:.1f} dB"
