"""Lists the clients that a run left out, and those that joined later, for the report and the terminal.

The reasons come from the network, so they are cut like all untrusted text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow.compute as pc

from fewbytes.base.units import listed
from fewbytes.core.policy import ABSENT
from fewbytes.report.folder import RunFolder, when
from fewbytes.report.pieces import cut

_LINES, _NAMES, _CHARACTERS = (
    200,
    20,
    300,
)  # maximum: lines of a table, names of clients that joined, characters of a reason
_SCORING = ":score"  # the engine's name for scoring a client's own model; not in the ledger
_JOINING = "join"  # the run's name for a newcomer refused by the method; not in the ledger
_COLUMNS = ["round", "client", "handler", "outcome"]


class Left(NamedTuple):
    """An exchange whose reply, if any, was not used."""

    round: int
    client: int
    handler: str
    outcome: str
    when: str
    why: str


@dataclass(frozen=True)
class Absent:
    """The section's content for one run: sentences, exchanges left out, and the number of further ones."""

    label: str
    sentences: str
    left: list[Left]
    more: int


@dataclass(frozen=True)
class Section:
    """The section of the report, on runs with clients left out or joined."""

    title: str
    runs: list[Absent]


def left_out(run: RunFolder) -> list[Left]:
    """Every client left out of an exchange, in the order of rounds, with the reason from rounds.jsonl.

    Only the ledger has those of a step without a line: an interrupted round, or a client that left before it had
    joined.
    """
    found = [
        Left(row["round"], left["client"], left["handler"], left["outcome"], when(row), left["why"])
        for row in run.rounds
        for left in row.get("left_out", [])
    ]
    listed = Counter(left[: len(_COLUMNS)] for left in found)
    for entry in _unanswered(run):
        if listed[entry]:
            listed[entry] -= 1
        else:
            step = {"round": entry[0], "phase": "round" if entry[0] else "start"}
            found.append(Left(*entry, when(step), "unknown: the step was interrupted"))
    return sorted(found, key=lambda left: left.round)


def captions(runs: Sequence[RunFolder]) -> list[str]:
    """Lines of plain text for every run that left clients out."""
    lines = []
    for run in runs:
        exchanges, surplus, scorings, refused = _sorts(run)[:4]
        lines += [f"left out: {run.label}, {text}" if len(runs) > 1 else f"left out: {text}" for text in _absences(run)]
        asked = exchanges + surplus
        parts = [f"{_of_all(run, len(asked))} ({_tally(asked)})"] if asked else []
        parts += [f"{_counted(len(scorings), 'scoring')} ({_tally(scorings)})"] if scorings else []
        parts += [f"{_counted(len(refused), 'newcomer')} refused"] if refused else []
        name = f"{run.label}, " if len(runs) > 1 else ""
        lines += [f"stands out: {name}{text}" for text in _standing_out(run)]
        lines += [f"left out: {name}{', '.join(parts)}"] if parts else []
    return lines


def section(runs: Sequence[RunFolder]) -> Section | None:
    """The report's section; None if no client was left out or joined later."""
    absent = []
    for run in runs:
        if sentences := [*_sentences(run), *_capitals(_standing_out(run)), *_joined(run)]:
            # surplus ones last, as they are not failures
            found = sorted(left_out(run), key=lambda left: left.outcome == "surplus")
            shown = [left._replace(why=cut(left.why, _CHARACTERS)) for left in found[:_LINES]]
            absent.append(Absent(run.label, " ".join(sentences), shown, len(found) - len(shown)))
    title = (
        "Left out" if any(map(left_out, runs)) else "Stands out" if any(map(_standing_out, runs)) else "Joined later"
    )
    return Section(title, absent) if absent else None


# ---- words ----


def _sentences(run: RunFolder) -> list[str]:
    exchanges, surplus, scorings, refused = _sorts(run)[:4]
    sentences = _capitals(_absences(run))
    if exchanges:
        sentences.append(f"{_of_all(run, len(exchanges))} had no usable reply and were left out: {_tally(exchanges)}.")
    if surplus:
        were = "was" if len(surplus) == 1 else "were"
        sentences.append(f"{_of_all(run, len(surplus))} {were} surplus: more clients were asked than needed.")
    if scorings:
        sentences.append(f"{_counted(len(scorings), 'scoring')} of a client's own model failed: {_tally(scorings)}.")
    if refused:
        sentences.append(f"The method refused {_counted(len(refused), 'newcomer')}.")
    return sentences


def _joined(run: RunFolder) -> list[str]:
    refused = {left.client for left in _sorts(run)[3]}
    groups: dict[str, list[int | None]] = {}
    for row in run.rounds:
        if row["phase"] == "join" and (client := row.get("client")) not in refused:
            groups.setdefault(when(row), []).append(client)
    names = []
    for joined, clients in groups.items():
        known = [client for client in clients if client is not None]
        names += [f"client{'s' if len(known) > 1 else ''} {listed(known)} joined {joined}"] if known else []
        names += [f"a client joined {joined}"] * (len(clients) - len(known))
    more = [f"{len(names) - _NAMES:,} more later"] if len(names) > _NAMES else []
    text = ", ".join(names[:_NAMES] + more)
    turnover = (run.result or {}).get("turnover")
    gone = (
        [f"From round {turnover} on only they are present: earlier scores are those of the other clients."]
        if turnover
        else []
    )
    return [f"{text[0].upper()}{text[1:]}.", *gone] if text else []


def _absences(run: RunFolder) -> list[str]:
    """Clients that missed whole rounds, each with the last reason."""
    found: dict[int, list[Left]] = {}
    for left in _sorts(run)[4]:
        found.setdefault(left.client, []).append(left)
    rounds = sum(row["phase"] == "round" for row in run.rounds)
    texts = [
        f"client {client} missed {len(absences):,} of {rounds:,} rounds ({cut(absences[-1].why, _CHARACTERS)})"
        for client, absences in found.items()
    ]
    more = [f"{len(texts) - _NAMES:,} further clients missed some rounds"] if len(texts) > _NAMES else []
    return texts[:_NAMES] + more


def _standing_out(run: RunFolder) -> list[str]:
    """Clients whose updates are outliers."""
    outliers = (run.result or {}).get("stands_out", {})
    return [f"client {client} {cut(words, _CHARACTERS)}" for client, words in list(outliers.items())[:_NAMES]]


def _capitals(texts: Sequence[str]) -> list[str]:
    return [f"{text[0].upper()}{text[1:]}." for text in texts]


def _sorts(run: RunFolder) -> tuple[list[Left], list[Left], list[Left], list[Left], list[Left]]:
    """Exchanges without a usable reply, with a surplus reply, failed scorings, refused newcomers, and absences from
    whole rounds."""
    found = left_out(run)
    absent = [left for left in found if left.handler == ABSENT]
    refused = [left for left in found if left.handler == _JOINING]
    scorings = [left for left in found if left.handler == _SCORING]
    exchanges = [left for left in found if left.handler not in (_SCORING, _JOINING, ABSENT)]
    surplus = [left for left in exchanges if left.outcome == "surplus"]
    return [left for left in exchanges if left.outcome != "surplus"], surplus, scorings, refused, absent


def _tally(group: Sequence[Left]) -> str:
    counts = Counter(left.outcome for left in group)
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda it: (-it[1], it[0])))


def _of_all(run: RunFolder, count: int) -> str:
    return _counted(count, "exchange") if run.exchanges is None else f"{count:,} of {run.exchanges:,} exchanges"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _unanswered(run: RunFolder) -> list[tuple[int, int, str, str]]:
    """The ledger's exchanges without a used reply; none in ledgers of old versions."""
    if run.ledger is None or "outcome" not in run.ledger.column_names:
        return []
    rows = run.ledger.filter(pc.field("outcome") != "answered").select(_COLUMNS).to_pylist()
    return [(row["round"], row["client"], row["handler"], row["outcome"]) for row in rows]
