"""A client that lies once, of any method, among clients that hold unlike data: its reply is well-formed as a frame and
wrong in another way; honest rounds follow, and the run is stopped and resumed."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import CASES, Chain, OwnNet, TinyNet
from flower_grid import MemoryGrid
from torch import Tensor

import fewbytes as fb
from fewbytes.base.errors import FrameError
from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.engines import handlers, replies
from fewbytes.engines.handlers import Runner
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings
from fewbytes.wire import Masked
from fewbytes.wire.value import WireValue

Change = Callable[[Any], Any]
LIAR, ROUNDS, STOPPED = 1, 4, 2  # whose reply it is; rounds in all; after which the run is stopped
SIZES = 24, 13, 31, 18
COUNTS = (1 << 31) - 1, 1 << 40


class Quiet(fb.Watcher):
    """Hears that rounds are taken again."""

    def note(self, text: str) -> None: ...


class Stop(Quiet):
    """Stops a run after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def scored(self, row: dict[str, Any]) -> None:
        if row["round"] == self.after:
            raise KeyboardInterrupt


@dataclasses.dataclass(frozen=True)
class Scaled(fb.FedAvg):
    """FedAvg with malicious clients, which send their update times a factor."""

    factor: float = 1.0
    malicious: tuple[int, ...] = (3,)

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        reply = super().train(state, message, site)
        if site.me not in self.malicious:
            return reply
        start, theta = message.theta.dense(), reply.theta.dense()
        sent = {name: start[name] + self.factor * (value - start[name]) for name, value in theta.items()}
        return Trained(fb.Dense(sent), reply.samples)


class Outcome(NamedTuple):
    """How a run ended: what it raised (nothing: it did not), the server's last state, the lines of rounds.jsonl."""

    raised: str
    state: bytes
    rows: list[dict]

    @property
    def refused(self) -> bool:
        """Whether a reply of the malicious client's was."""
        left = [left for row in self.rows for left in row.get("left_out", []) if left["client"] == LIAR]
        return any(each["outcome"] != "surplus" for each in left)  # at work when the last round ended


class Lie(NamedTuple):
    """What a client replies in place of the truth: of its replies of a class the `turn`-th, changed. `shape`: whether
    other things than numbers are changed, which nobody can take for the truth."""

    kind: type[Any]
    what: str
    change: Change
    turn: int
    shape: bool


def task_of(name: str) -> fb.Task:
    """Four clients of unlike sizes, that hold the three classes by a Dirichlet draw, the malicious one only two;
    with unlike models where the method takes them."""
    rng, g = np.random.default_rng(7), torch.Generator().manual_seed(7)

    def split(y: Tensor) -> Split:
        x = 0.3 * torch.randn(len(y), 1, 4, 4, generator=g)
        x[torch.arange(len(y)), 0, y] += 1
        return Split(x, y)

    members = []
    for client, size in enumerate(SIZES):
        shares = rng.dirichlet([1.0] * 3) + 0.1
        shares[2] *= client != LIAR
        labels = torch.from_numpy(rng.choice(3, size, p=shares / shares.sum()))
        members.append(ClientData(split(labels), split(torch.arange(4 + client) % 3)))
    data = FederatedData(tuple(members), split(torch.arange(30) % 3), ("a", "b", "c"))
    if CASES[name].promises.models_differ:
        return fb.Task.on(data, lambda client: OwnNet(2 + client))
    return fb.Task.on(data, Chain if isinstance(CASES[name], fb.FedMA) else TinyNet)


def _states(state: dict[str, Tensor], model: dict[str, Tensor]) -> Iterator[tuple[str, Change]]:
    others = {name: value for name, value in model.items() if name not in state}
    if state:
        yield "an entry missing", lambda s: dict(list(s.items())[1:])
        yield "an entry renamed", lambda s: {("x" + k if i == 0 else k): v for i, (k, v) in enumerate(s.items())}
        yield "no entry", lambda s: {}
    yield "an entry more", lambda s: s | {"backdoor": torch.ones(3)}
    if others:
        yield "all of the model's entries", lambda s: s | others
    for name in state:
        for what, change in _tensors(state[name]):
            yield (
                f"{name} {what}",
                lambda s, n=name, change=change: {k: change(v) if k == n else v for k, v in s.items()},
            )
    if any(v.is_floating_point() for v in state.values()):
        for factor in (-30.0, 1e30):
            yield (
                f"times {factor:g}",
                lambda s, factor=factor: {k: v * factor if v.is_floating_point() else v for k, v in s.items()},
            )


def _tensors(value: Tensor) -> Iterator[tuple[str, Change]]:
    yield "with an axis more", lambda v: v[None]
    yield "longer", lambda v: torch.cat([v.reshape(-1), v.reshape(-1)])
    yield "empty", lambda v: v.reshape(-1)[:0]
    if value.dim() > 1:
        yield "a row more", lambda v: torch.cat([v, v[:1]])
        yield "a column fewer", lambda v: v[:, :-1].contiguous()
    yield "of another type", lambda v: v.double() if v.is_floating_point() else v.float()
    if value.is_floating_point():
        yield "of integers", lambda v: torch.full(v.shape, 1 << 40)
        for number in (math.nan, math.inf, 1e30, -1e5):
            yield f"of {number:g}", lambda v, n=number: torch.full_like(v, n)
    elif value.dtype == torch.bool:
        yield "of ones", lambda v: torch.ones_like(v)
    else:
        for number in (-1, 100, *COUNTS):
            if number <= torch.iinfo(value.dtype).max and (number >= 0 or value.dtype.is_signed):
                yield f"of {number}", lambda v, n=number: torch.full_like(v, n)


def _within(value: Any, model: dict[str, Tensor]) -> Iterator[tuple[str, Change]]:
    """Changes of a value, and of what it holds, with names."""
    if isinstance(value, bool | str | bytes | None):
        return
    if isinstance(value, int):
        yield from ((f"of {n}", lambda v, n=n: n) for n in (0, -1, *COUNTS, 1 << 62))
    elif isinstance(value, float):
        yield from ((f"of {n:g}", lambda v, n=n: n) for n in (math.nan, math.inf, 1e30, -1.0))
    elif isinstance(value, Tensor):
        yield from _tensors(value)
    elif isinstance(value, dict) and all(isinstance(v, Tensor) for v in value.values()):
        yield from _states(value, model)
    elif isinstance(value, dict):
        yield "a key missing", lambda v: dict(list(v.items())[1:])
        yield "no keys", lambda v: {}
        if all(isinstance(key, int) for key in value):
            yield "a key more", lambda v: v | {max(v) + 1: next(iter(v.values()))}
        for what, change in _within(next(iter(value.values())), model):
            yield (
                f"first {what}",
                lambda v, change=change: {k: change(x) if i == 0 else x for i, (k, x) in enumerate(v.items())},
            )
    elif isinstance(value, list | tuple) and value:
        yield "one fewer", lambda v: v[:-1]
        yield "twice as many", lambda v: v + v
        yield "no item", lambda v: v[:0]
        for what, change in _within(value[0], model):
            yield f"first {what}", lambda v, change=change: type(v)([change(v[0]), *v[1:]])
    elif dataclasses.is_dataclass(value):
        if isinstance(value, Masked):
            yield "masks of ones", lambda v: Masked.of(v.dense(), {k: torch.ones_like(m) for k, m in v.mask.items()})
            yield "every value of the model", lambda v: _whole(model | v.dense())
        for f in dataclasses.fields(value):
            for what, change in _within(getattr(value, f.name), model):
                if f.name == "indices" and what.endswith(tuple(map(str, COUNTS))):
                    continue  # it takes a minute to pack
                yield (
                    f"{f.name} {what}",
                    lambda v, f=f.name, change=change: dataclasses.replace(v, **{f: change(getattr(v, f))}),
                )
            if not isinstance(value, WireValue):
                yield f"{f.name} of None", lambda v, f=f.name: dataclasses.replace(v, **{f: None})


def _whole(state: dict[str, Tensor]) -> Masked:
    return Masked.of(state, {name: torch.ones(value.shape, dtype=torch.bool) for name, value in state.items()})


@contextmanager
def lying(change: Callable[[int, Any], Any]) -> Iterator[None]:
    """Every reply of a client as `change(client, reply)`."""
    import sklearn.cluster  # noqa: F401 (what it imports asks for the platform)

    run, pack = Runner.run, handlers.pack
    who: list[int] = []  # whose handler runs

    def noted(self, job, frames):
        who.append(job.client)
        try:
            return run(self, job, frames)
        finally:
            who.pop()

    def changed(value, **how):
        return pack(change(who[-1], value) if who else value, **how)

    platform = sys.platform
    Runner.run, handlers.pack = noted, changed
    sys.platform = "elsewhere"  # handlers run in this process
    try:
        yield
    finally:
        Runner.run, handlers.pack, sys.platform = run, pack, platform


def lies_of(name: str, rng: random.Random, most: int | None = None) -> list[Lie]:
    """What a client of a case can reply that can be packed, in a drawn order; at most so many."""
    seen: dict[type[Any], list[Any]] = {}
    handlers_pack, task = handlers.pack, task_of(name)
    model = CASES[name].adapted(task).problem.first_state(LIAR)

    def note(client: int, reply: Any) -> Any:
        if client == LIAR and not isinstance(reply, handlers.Kept):
            seen.setdefault(type(reply), []).append(reply)
        return reply

    with lying(note):
        fb.run(CASES[name], task, rounds=ROUNDS, workers=1)
    possible = [
        (reply, Lie(type(reply), what, change, turn, " of " not in what and "times" not in what))
        for replies in seen.values()
        for turn, reply in enumerate(replies[:-1])
        for what, change in _within(reply, model)
    ]
    rng.shuffle(possible)
    lies: list[Lie] = []
    for reply, lie in possible:
        if len(lies) == most:
            break
        with suppress(Exception):  # else it cannot be said
            handlers_pack(lie.change(reply))
            lies.append(lie)
    return lies


def outcome(name: str, lie: Lie | None = None, refused: bool = False, flower: bool = False) -> Outcome:
    """A run of a case, stopped after a round and resumed, with a client that lies once, or, with no lie, an honest one;
    `refused`: instead of the lie the truth comes, and is refused. Locally, or on nodes of a Flower grid in memory."""
    left = 0 if lie is None else lie.turn + 1  # replies until the lie is told
    now = False  # it is

    def change(client: int, reply: Any) -> Any:
        nonlocal left, now
        if lie is None or client != LIAR or type(reply) is not lie.kind:
            return reply
        left -= 1
        now = left == 0
        return lie.change(reply) if now and not refused else reply

    def admit(*arguments: Any) -> None:
        nonlocal now
        if now and refused:
            now = False
            raise FrameError("values", "refused")
        admitted(*arguments)

    admitted, method, task = replies.admit, CASES[name], task_of(name)
    how: dict[str, Any] = {"rounds": ROUNDS, "save_models": False}
    with tempfile.TemporaryDirectory() as folder, lying(change):
        out = Path(folder) / "run"
        replies.admit = admit

        def run(resume: bool, watcher: fb.Watcher) -> None:
            if not flower:
                fb.run(method, task, out=out, resume=resume, watcher=watcher, workers=1, **how)
                return
            grid = MemoryGrid(client_app(method, task, Path(folder)), len(SIZES))
            settings = Settings(out=out, resume=resume, watcher=watcher, **how)
            policy = fb.Policy(round_timeout=60, connect_timeout=60, retries=0)
            serve_run(grid, Run.of(method, task, settings, policy), (), exchange=Exchange(poll=0.001))

        try:
            with suppress(KeyboardInterrupt):
                run(False, Stop(STOPPED))
            run(True, Quiet())
            rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
            return Outcome("", read_checkpoint(out).server, rows)
        except Exception as error:
            return Outcome(f"{type(error).__name__}: {error}", b"", [])
        finally:
            replies.admit = admitted
