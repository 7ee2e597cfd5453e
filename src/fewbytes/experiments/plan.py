"""Estimates what a run costs, in bytes and in time over given links, from real messages of a few clients."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from rich.table import Table

from fewbytes.base.errors import UserError
from fewbytes.base.units import size
from fewbytes.core.ledger import Ledger
from fewbytes.core.method import Method
from fewbytes.core.task import Task
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.run import run
from fewbytes.running.checkpoint import Checkpoints, read_checkpoint
from fewbytes.running.promises.budget import HEADROOM
from fewbytes.running.rounding import rounded
from fewbytes.running.watcher import Watcher

PROBED_CLIENTS, PROBED_ROUNDS = 4, 3
MORE_ROUNDED = 2  # rounds more, as the sizes of rounded messages differ from round to round
FEW_SPLIT = 10  # number of clients to split the data among if they are too few for all
TRANSFERS = 5  # a recommended round lasts at least as many times as its transfers, so that most of it is training
ROUND_TIMES = [
    count * unit for unit, counts in ((1, (1, 2, 5, 10, 20, 30)), (60, (1, 2, 5, 10, 20, 30)), (3600, (1, 2, 3, 6, 12)))
    for count in counts
]  # fmt: skip
"""Lengths of rounds, in seconds, that a plan recommends."""
EXCHANGE_SECONDS = 0.2
"""Overhead of an exchange with a resident node, besides transfer and training: benchmarks/flower/exchange.py."""


@dataclass(frozen=True)
class Plan:
    """The cost of a round for one client (bytes, seconds on one core of this machine), and of the whole run.

    `clients`: average number of clients per round. `cohort`: those sampled of them. `asked`: rounds requested; a budget
    may allow fewer. `first_up`, `first_down`: bytes of a client's `first_rounds` and before them, beyond those of as
    many later rounds (negative: fewer, as of first messages that both ends can make). The last
    four: for runs that round values, as in result.json. `any_steps`: whether the method can have rounds of a stated
    length.
    """

    clients: int
    cohort: int
    rounds: int
    asked: int
    probed: int
    up: float
    down: float
    nominal_up: float
    nominal_down: float
    train_seconds: float
    uplink: float
    downlink: float
    first_up: float = 0.0
    first_down: float = 0.0
    first_rounds: int = 0
    waiting_seconds: float = 0.0
    over_budget: bool = False
    uplink_bits_per_value: float | None = None
    uplink_rounding_error: float | None = None
    downlink_bits_per_value: float | None = None
    downlink_rounding_error: float | None = None
    any_steps: bool = False

    @property
    def round_time(self) -> int | None:
        """The recommended length of a round in seconds, for such a method: the shortest of ROUND_TIMES that has room
        for the method's own training, and of which transfers take at most a fifth; None: no such method, or none is
        long enough."""
        moving = self.round_seconds - self.train_seconds
        needed = max(self.round_seconds, TRANSFERS * moving)
        return next((length for length in ROUND_TIMES if length >= needed), None) if self.any_steps else None

    @property
    def round_seconds(self) -> float:
        """Seconds to wait, download, train and upload; clients work in parallel, each on its own link."""
        return self.waiting_seconds + self.down / self.downlink + self.train_seconds + self.up / self.uplink

    @property
    def total(self) -> tuple[float, float]:
        """Bytes of the run, up and down; clients that are never sampled have no first round."""
        rounds = self.cohort * self.rounds
        beginners = self.clients * (1 - (1 - self.cohort / self.clients) ** self.rounds)
        up, down = self.up * rounds + self.first_up * beginners, self.down * rounds + self.first_down * beginners
        return max(0.0, up), max(0.0, down)  # with few rounds, clients may take part less often than `first_rounds`

    def table(self) -> Table:
        """The plan as a table for the terminal."""
        table = Table("", "uplink", "downlink", title="the plan", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        table.add_row("per client and round", size(self.up), size(self.down))
        table.add_row("  nominal (as papers count)", size(self.nominal_up), size(self.nominal_down))
        bits = self.uplink_bits_per_value, self.downlink_bits_per_value
        errors = self.uplink_rounding_error, self.downlink_rounding_error
        if bits != (None, None):
            table.add_row("  bits per value", *("" if b is None else f"{b:.2f}" for b in bits))
            table.add_row("  rounding error / squared norm", *("" if e is None else f"{e:.2g}" for e in errors))
        if max(abs(self.first_up), abs(self.first_down)) >= 0.01 * (self.up + self.down):
            name = (
                "  in a client's first round" if (n := self.first_rounds) == 1 else f"  in a client's first {n} rounds"
            )
            table.add_row(name, size(n * self.up + self.first_up), size(n * self.down + self.first_down))
        table.add_row(
            f"in total: {self.cohort} of {self.clients} clients, {self.rounds} round{'s' if self.rounds > 1 else ''}"
            + (f" (of {self.asked}, limited by the budget)" if self.rounds < self.asked else "")
            + (": more than the budget" if self.over_budget else ""),
            *map(size, self.total),
        )
        table.add_row("  both directions", "", size(sum(self.total)))
        table.add_row(
            "seconds per round on the link", f"{self.up / self.uplink:.2f}", f"{self.down / self.downlink:.2f}"
        )
        table.add_section()
        if self.waiting_seconds:
            table.add_row("seconds per round of overhead", f"{self.waiting_seconds:.2f}", "")
        table.add_row("seconds per round with training", f"{self.round_seconds:.2f}", "")
        if (length := self.round_time) is not None:
            table.add_row("recommended --round-time", in_units(length), "")
        table.add_row("hours in total", f"{self.round_seconds * self.rounds / 3600:.2f}", "")
        table.caption = (
            f"measured in real rounds of {self.probed} clients, each with one core of this "
            f"machine ({self.train_seconds:.2f} s per round)"
        )
        return table


def make_plan(
    method: Method,
    task: Task,
    rounds: int,
    uplink: float,
    downlink: float,
    exchange_seconds: float = 0.0,
    budget: int | None = None,
    rounding: Mapping[str, Any] = MappingProxyType({}),
    clients: int | None = None,
) -> Plan:
    """Run a few real rounds on the first few clients and extrapolate; links in bytes per second.

    `exchange_seconds`: overhead of an exchange. `budget`: as in `fewbytes.run`. `rounding`: as `Settings.rounding`.
    `clients`: number of clients to plan for, if the task has fewer. Raises UserError then for a method whose messages
    depend on all clients.
    """
    fraction = method.parameters.get("fraction", 1.0)
    few = task.data.clients[:PROBED_CLIENTS]
    probed = method.changed(fraction=1.0) if fraction != 1.0 else method
    small = task.with_data(replace(task.data, clients=few, presence=None))
    planned = method.planned_rounds(rounds)
    there = clients or round(fmean(len(task.problem.clients_in(t)) for t in range(1, planned + 1)))
    if clients and method.own_rounds:
        raise UserError(f"the messages of {method.method_name} depend on all clients: give data for all of them")
    more = MORE_ROUNDED if rounding else 0
    ledger, rows = _probe(probed, small, PROBED_ROUNDS + more, rounding, whole=False)
    seconds = [row["seconds"] - row["seconds_scoring"] for row in rows if row["phase"] == "round"]
    if method.own_rounds:  # messages may depend on the number of clients: take all, with little to train on
        ledger, rows = _probe(
            method.quick(planned), _scant(task), planned, rounding, whole=method.promises.finish_exchanges
        )
        measured, first = len(task.problem.clients) * planned, 0
    else:
        first = min(PROBED_ROUNDS, planned + 1)
        measured = (PROBED_ROUNDS + more + 1 - first) * probed.cohort(len(few))
    columns = ledger.columns()
    moved = {name: values[columns["round"] >= first] for name, values in columns.items()}
    before = {name: values[columns["round"] < first] for name, values in columns.items()}
    up, down = (moved[way].sum() / measured for way in ("bytes_up", "bytes_down"))
    cohort, fitting = method.cohort(there), planned
    if budget is not None and up and not method.own_rounds:  # as a run ends before a round that might exceed it
        fitting = min(planned, max(1, int(budget / (up * cohort) - (HEADROOM - 1))))
    return Plan(
        clients=there,
        cohort=cohort,
        rounds=fitting,
        asked=planned,
        probed=len(few),
        up=up,
        down=down,
        first_up=before["bytes_up"].sum() / len(few) - max(0, first - 1) * up,
        first_down=before["bytes_down"].sum() / len(few) - max(0, first - 1) * down,
        first_rounds=max(0, first - 1),
        nominal_up=(moved["value_bytes_up"] + (moved["mask_bits_up"] + 7) // 8).sum() / measured,
        nominal_down=(moved["value_bytes_down"] + (moved["mask_bits_down"] + 7) // 8).sum() / measured,
        train_seconds=fmean(seconds[1:] or seconds) / len(few),
        uplink=uplink,
        downlink=downlink,
        over_budget=bool(budget is not None and up * cohort * fitting > budget),
        waiting_seconds=exchange_seconds * len(moved["bytes_up"]) / measured,
        any_steps=method.promises.normalises_steps,
        **rounded([row for row in rows if row["round"] >= first]),
    )


def in_units(seconds: int) -> str:
    """A length of a round as `--round-time` reads it.

    >>> from fewbytes.experiments.plan import in_units
    >>> in_units(30), in_units(600), in_units(7200)
    ('30s', '10m', '2h')
    """
    unit, size = next((name, size) for name, size in (("h", 3600), ("m", 60), ("s", 1)) if seconds % size == 0)
    return f"{seconds // size}{unit}"


def prepared_for_plan(settings: dict[str, Any]) -> tuple[PreparedRun, int | None, list[str]]:
    """The experiment, or if the data are too few for its clients, one with fewer clients, the number to plan for, and a
    note about it."""
    try:
        return PreparedRun(settings), None, []
    except UserError as error:
        clients = settings.get("clients")
        if not isinstance(clients, int) or clients <= FEW_SPLIT or settings.get("newcomers"):
            raise
        try:
            job = PreparedRun(settings | {"clients": FEW_SPLIT})
        except UserError:
            raise error from None
        why = str(error).partition(";")[0]
        return job, clients, [f"{why}: this plan assumes that each client holds 1/{FEW_SPLIT} of the data"]


def _scant(task: Task) -> Task:
    """The task with two training samples per client and class, and no test samples."""
    clients = []
    for client in task.data.clients:
        labels = client.train.labels
        rows = [int(i) for c in labels.unique() for i in (labels == c).nonzero().flatten()[:2]]
        clients.append(replace(client, train=client.train.take(sorted(rows)), test=client.test.take([])))
    return task.with_data(replace(task.data, clients=tuple(clients), presence=None))


class _Enough(Exception):
    """Raised after the last round to measure."""


def _probe(
    method: Method, task: Task, rounds: int, rounding: Mapping[str, Any], whole: bool
) -> tuple[Ledger, list[dict[str, Any]]]:
    """Run a few rounds; returns the ledger, and the lines of rounds.jsonl.

    Unless `whole`, the run ends after its rounds, without the method's final step, which may take hours.
    """

    class Stop(Watcher):
        def scored(self, row: dict[str, Any]) -> None:
            if row["round"] == method.planned_rounds(rounds) and not whole:
                raise _Enough

    with tempfile.TemporaryDirectory() as folder:
        with suppress(_Enough):
            run(
                method, task, rounds=rounds, out=folder, workers=1, evaluate_every=10**6, save_models=False,
                watcher=Stop(), **rounding,
            )  # fmt: skip
        checkpoint, kept = read_checkpoint(Path(folder)), Checkpoints(Path(folder))
        ledger, rows = kept.ledger.read(checkpoint.ledger), kept.rows.read(checkpoint.rows)
    return Ledger.frombytes(ledger, checkpoint.handlers), [json.loads(line) for line in rows.splitlines()]
