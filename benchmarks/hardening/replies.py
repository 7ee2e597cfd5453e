"""What replies do to a run: those that lie, come twice, late, out of order, from few, or for long.

All in memory: nodes of a Flower grid without processes, or the local engine.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import hostile
import numpy as np
import torch
from cases import CASES, task_of
from flower_grid import CLIENTS, Fault, MemoryGrid, handler_of, run
from flwr.app import Error, Message
from runs import fingerprint

import fewbytes as fb
from fewbytes.core.ledger import OUTCOMES
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.flower.private.errors import NODE_UNAVAILABLE
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

logging.getLogger("flwr").setLevel(logging.CRITICAL)
warnings.simplefilter("ignore")
METHODS = "fedavg", "fedpurin", "fedkd"
MANY, COHORT = 20, 10  # clients, and how many a round needs


def kept(folder: Path) -> tuple[Any, ...]:
    """What a run has learnt: server's and clients' states, models."""
    left = fingerprint(folder)
    return left["server"], left["states"], left["models"]


class Told(NamedTuple):
    """What became of lies: how many were told; whose run died, or could not be resumed; how many were refused, and in
    how many runs nothing was left of them; which were accepted although more than numbers was wrong; the others."""

    told: int = 0
    died: tuple[str, ...] = ()
    refused: int = 0
    equal: int = 0
    shapes: tuple[str, ...] = ()
    taken: int = 0

    def __add__(self, other: Any) -> Told:
        return Told(*(mine + its for mine, its in zip(self, other, strict=True)))


def told_in(name: str, count: int) -> Told:
    """So many of the lies that a client of a configuration can tell, every other one on a Flower grid."""
    found, rng = Told(), random.Random(name)
    honest, without = None, dict[Any, bytes]()
    for i, lie in enumerate(hostile.lies_of(name, rng, count)):
        told = hostile.outcome(name, lie, flower=bool(i % 2))
        what = f"{name}: {lie.kind.__name__} {lie.what}"
        if told.raised:
            print(f"{what}: {told.raised}", file=sys.stderr)
            found += Told(1, died=(what,))
        elif told.refused:
            if (lie.kind, lie.turn) not in without:
                without[lie.kind, lie.turn] = hostile.outcome(name, lie, refused=True).state
            found += Told(1, refused=1, equal=int(told.state == without[lie.kind, lie.turn]))
        else:
            honest = hostile.outcome(name).state if honest is None else honest
            differs = lie.shape and told.state != honest
            found += Told(1, shapes=(what,)) if differs else Told(1, taken=1)
    return found


def lies(count: int) -> list[Figure]:
    """Row 4: about so many lies, as many of each configuration; each is told once, honest rounds follow, the run is
    stopped and resumed."""
    found = Told()
    for name in CASES:
        found += told_in(name, -(-count // len(CASES)))
    return figures_of(found)


def figures_of(found: Told) -> list[Figure]:
    """The figures of false replies."""
    whole = f"{found.told} false replies in {len(CASES)} configurations, half of them on Flower, one per run"
    return [
        Figure(f"{whole}: runs that died or could not be resumed", _listed(found.died), "0", not found.died),
        Figure(
            "states equal, bit for bit, to those of runs that refuse the true reply in its place",
            f"{found.equal} of {found.refused}",
            "all",
            found.equal == found.refused,
        ),
        Figure("accepted although more than numbers was wrong", _listed(found.shapes), "0", not found.shapes),
        Figure("accepted: numbers within their ranges", str(found.taken), "", None),
    ]


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} {'; '.join(names[:5])}".strip()


def duplicates(count: int) -> list[Figure]:
    """Row 6: so many replies that come again, at once or with later ones of their client."""
    given, equal, runs = 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        while given < count:
            method, before = METHODS[runs % 3], defaultdict[int, list[Message]](list)

            def again(message: Message, reply: Message, before: Any = before) -> list[Message]:
                nonlocal given
                if not handler_of(message):
                    return [reply]
                old = before[message.metadata.dst_node_id]
                old.append(reply)
                given += len(old[-5:])
                return [*old[-5:], reply]

            places = [Path(name) / f"{runs}-{how}" / "run" for how in ("twice", "once")]
            run(method, places[0], fault=again, rounds=10)
            run(method, places[1], rounds=10)
            equal += fingerprint(places[0]) == fingerprint(places[1])
            runs += 1
    what = f"{given} duplicate replies: runs equal, ledger included, to runs without any"
    return [Figure(what, f"{equal} of {runs}", "all", equal == runs)]


def late(count: int) -> list[Figure]:
    """Row 7: so many replies that come a round later, beside that round's."""
    given, equal, runs = 0, 0, 0
    policy = fb.Policy(round_timeout=0.2, connect_timeout=5)
    with tempfile.TemporaryDirectory() as name:
        while given < count:
            method, places = METHODS[runs % 3], [Path(name) / f"{runs}-{how}" / "run" for how in ("late", "never")]
            for comes in (True, False):
                held: list[Message] = []

                def fault(message: Message, reply: Message, held: Any = held, comes: bool = comes) -> list[Message]:
                    nonlocal given
                    if not handler_of(message) or message.metadata.dst_node_id != 1001:
                        return [reply]
                    if int(message.metadata.group_id) % 2:
                        held.append(reply)
                        return []
                    old = [held.pop() for _ in range(len(held))] if comes else []
                    given += len(old)
                    return [*old, reply]

                run(method, places[not comes], fault=fault, rounds=10, policy=policy)
            equal += kept(places[0]) == kept(places[1])
            runs += 1
    what = f"{given} replies a round late: runs equal to runs in which they never arrived"
    return [Figure(what, f"{equal} of {runs}", "all", equal == runs)]


class SlowGrid(MemoryGrid):
    """Nodes that take `seconds` to answer, those of the clients in `slow` ten times that."""

    seconds, slow = 0.3, frozenset[int]()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for number, message in zip(ids, messages, strict=True):
            factor = 10 if message.metadata.dst_node_id - 1000 in self.slow else 1
            self.ready[number] = time.monotonic() + (factor * self.seconds if handler_of(message) else 0)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        now = time.monotonic()
        return super().pull_messages([number for number in message_ids if self.ready[number] <= now])

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ready: dict[str, float] = {}


class ShuffledGrid(MemoryGrid):
    """Replies come in a drawn order, some later than others."""

    rng = random.Random(0)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        return super().pull_messages(self.rng.sample(ids, self.rng.randint(1, len(ids))))


def small_task(clients: int) -> fb.Task:
    """A linear model of eight numbers; a few samples a client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, 12, 8, generator=generator)
    y = (x.sum(2) > 0).long()
    own = [((x[i, :8], y[i, :8]), (x[i, 8:], y[i, 8:])) for i in range(clients)]
    return fb.Task.of(lambda: torch.nn.Linear(8, 2), own)


def sampled(kind: type[MemoryGrid], rounds: int, policy: fb.Policy, fault: Fault | None = None, **how: Any) -> Any:
    """FedAvg of a small model, of whose MANY clients a round needs COHORT: its result."""
    method, task = fb.FedAvg(epochs=1, lr=0.1, batch=8, fraction=COHORT / MANY), small_task(MANY)
    with tempfile.TemporaryDirectory() as name:
        grid = kind(client_app(method, task, Path(name)), MANY, fault)
        vars(grid).update(how)
        settings = Settings(rounds=rounds, out=Path(name) / "run", evaluate_every=rounds, save_models=False)
        return serve_run(grid, Run.of(method, task, settings, policy), exchange=Exchange(poll=0.002))


def stragglers(rounds: int) -> list[Figure]:
    """Row 13: so many rounds in which three tenths of the clients take ten times as long."""
    slow = frozenset(range(0, MANY, 3)) - {MANY - 2}  # 6 of 20
    waiting, closing = 60.0, 1.15 * SlowGrid.seconds

    def seconds(timeout: float, **how: Any) -> tuple[float, int]:
        policy = fb.Policy(over_selection=0.3, round_timeout=timeout, connect_timeout=60, min_replies=0.1)
        result = sampled(SlowGrid, rounds, policy, **how)
        outcomes = [OUTCOMES[i] for i in result.ledger.columns()["outcome"]]
        took = [row["seconds"] - row["seconds_scoring"] for row in result.rounds if row["phase"] == "round"]
        return statistics.fmean(took), sum(outcome in ("late", "surplus") for outcome in outcomes)

    (free, _), (alone, _), (closed, told) = seconds(waiting), seconds(waiting, slow=slow), seconds(closing, slow=slow)
    goal = "at most 1.2 times"
    return [
        Figure(
            "30 % stragglers, 130 % asked, without a deadline (of 13 asked 9 are fast, and 10 are awaited)",
            f"{alone / free:.2f} times",
            "",
            None,
        ),
        Figure(
            f"the same, with a deadline of 1.15 times a client's time ({told} replies were not awaited)",
            f"{closed / free:.2f} times",
            goal,
            closed / free <= 1.2,
        ),
    ]


def dropouts(rounds: int) -> list[Figure]:
    """Row 14: so many rounds of which clients drop out at random."""
    found = []
    for part, over, least in ((0.1, 0.3, 0.5), (0.3, 0.5, 0.5), (0.3, 0.5, 1.0)):
        rng = random.Random(1)

        def fault(message: Message, reply: Message, rng: Any = rng, part: float = part) -> list[Message]:
            gone = handler_of(message) and rng.random() < part
            return [Message(Error(NODE_UNAVAILABLE, "gone"), reply_to=message) if gone else reply]

        policy = fb.Policy(over_selection=over, round_timeout=60, connect_timeout=60, min_replies=least)
        columns = sampled(MemoryGrid, rounds, policy, fault).ledger.columns()
        answered = np.bincount(columns["round"][columns["outcome"] == 0], minlength=rounds + 1)[1:]
        done, reached = int((answered > 0).sum()), int((answered >= COHORT).sum())
        asked = round(COHORT * (1 + over))
        chance = sum(
            math.comb(asked, k) * part**k * (1 - part) ** (asked - k) for k in range(asked - COHORT + 1)
        )  # that so few drop out
        what = f"{part:.0%} drop out, {1 + over:.0%} asked: rounds done"
        if least == 1:  # a round with fewer is not a round
            what = f"the same with --min-replies 1, which retries a round: rounds done, each with {COHORT} replies"
        found.append(Figure(what, f"{done} of {rounds}", "all", done == rounds))
        if least < 1:
            what = f"of these with {COHORT} replies or more (chance alone lets {chance:.0%} have them)"
            goal, met = ("95 %", reached >= 0.95 * rounds) if chance >= 0.95 else ("", None)
            found.append(Figure(what, f"{reached} of {rounds}", goal, met))
    return found


def quorum(tries: int) -> list[Figure]:
    """Row 15: a round that too few answer so many times."""
    silent, deadline = tries * CLIENTS, 0.5

    def fault(message: Message, reply: Message) -> list[Message]:
        nonlocal silent
        if handler_of(message) != "train" or message.metadata.group_id != "3" or not silent:
            return [reply]
        silent -= 1
        return []

    with tempfile.TemporaryDirectory() as name:
        places = [Path(name) / how / "run" for how in ("few", "all")]
        policy = fb.Policy(round_timeout=deadline, connect_timeout=5, min_replies=1)
        run("fedpurin", places[0], fault=fault, policy=policy)
        run("fedpurin", places[1])
        rows = [json.loads(line) for line in (places[0] / "rounds.jsonl").read_text().splitlines()]
        equal = kept(places[0]) == kept(places[1])
    took = next(row["seconds"] for row in rows if row["round"] == 3)
    waited = 2.0**tries - 1  # 1, 2, 4, … seconds before each new try
    over = took - tries * deadline - waited
    return [
        Figure(
            f"too few answered {tries} times: states and models equal to those of a run in which all answered",
            "yes" if equal else "no",
            "yes",
            equal,
        ),
        Figure("seconds beyond deadlines and pauses", f"{over:.2f} s", "1 s each", over <= tries),
    ]


def orders(count: int) -> list[Figure]:
    """Row 24: runs with one, two and eight workers, and on Flower with replies in so many drawn orders."""
    equal, runs = 0, 0
    with tempfile.TemporaryDirectory() as name:
        for method in METHODS:
            first = None
            for i in range(3 + count):
                place, task = Path(name) / f"{method}-{i}" / "run", task_of(method)
                if i < 3:
                    fb.run(CASES[method], task, rounds=4, out=place, workers=(1, 2, 8)[i])
                else:
                    grid = ShuffledGrid(client_app(CASES[method], task, place.parent), CLIENTS)
                    run(method, place, task=task, grid=grid, policy=fb.Policy(round_timeout=60), rounds=4)
                first = fingerprint(place) if first is None else first
                equal += fingerprint(place) == first
                runs += 1
    what = f"runs of {len(METHODS)} methods by 1, 2 and 8 workers and, on Flower, in {count} orders: equal"
    return [Figure(what, f"{equal} of {runs}", "all", equal == runs)]


class _Memory(fb.Watcher):
    """The memory of this process after each round, in MiB, without what is free in its heap."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self._trim = ctypes.CDLL(None).malloc_trim

    def scored(self, row: dict[str, Any]) -> None:
        gc.collect()
        self._trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.taken.append(pages * 4096 / (1 << 20))


class ForgettingGrid(MemoryGrid):
    """A grid that does not keep what it was asked."""

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        self.asked.clear()
        return reply


def soak(clients: int) -> list[Figure]:
    """Row 18: fifty rounds of so many clients on the local engine; what its own process takes."""
    memory, rounds = _Memory(), 50
    how: dict[str, Any] = {"workers": 1, "evaluate_every": rounds, "save_models": False}
    result = fb.run(_simplest(), small_task(clients), rounds=rounds, watcher=memory, **how)
    return _grown("local engine", clients, memory.taken, result)


def soak_flower(clients: int) -> list[Figure]:
    """Row 18: fifty rounds of so many nodes of a Flower grid, which are in the server's own process."""
    memory, rounds, task = _Memory(), 50, small_task(clients)
    with tempfile.TemporaryDirectory() as name:
        grid = ForgettingGrid(client_app(_simplest(), task, Path(name)), clients)
        settings = Settings(
            rounds=rounds, out=Path(name) / "run", evaluate_every=rounds, save_models=False, watcher=memory
        )
        policy = fb.Policy(round_timeout=600, connect_timeout=60)
        result = serve_run(grid, Run.of(_simplest(), task, settings, policy), exchange=Exchange(poll=0.01))
    return _grown("Flower grid", clients, memory.taken, result)


def _simplest() -> fb.FedAvg:
    return fb.FedAvg(epochs=1, lr=0.1, batch=8)


def _grown(where: str, clients: int, memory: list[float], result: fb.Result) -> list[Figure]:
    rounds = len(memory)
    half = memory[rounds // 2 :]
    slope = 100 * statistics.linear_regression(range(len(half)), half).slope
    answered = int((result.ledger.columns()["outcome"] == 0).sum())
    what = f"{where}, {clients} clients, {rounds} rounds: growth in the second half"
    lost = rounds * clients - answered
    return [
        Figure(what, f"{slope:.2f} MiB per 100 rounds", "under 1 MB", slope < 1),
        Figure(f"replies lost of {rounds * clients}", str(lost), "0", not lost),
    ]
