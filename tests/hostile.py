"""A client that lies: replies that are well-formed as frames and wrong in every other way, of any method."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import sklearn.cluster  # noqa: F401 (what it imports asks for the platform)
import torch
from cases import CASES, task_of
from torch import Tensor

import fewbytes as fb
from fewbytes.engines import handlers
from fewbytes.engines.handlers import Runner
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire.values import WireValue

Change = Callable[[Any], Any]
LIAR, ROUNDS = 1, 3


class Quiet(fb.Watcher):
    """Hears that rounds are taken again."""

    def note(self, text: str) -> None: ...


class Outcome(NamedTuple):
    """How a run ended: what it raised (nothing: it did not), the server's last state, the lines of rounds.jsonl."""

    raised: str
    state: bytes
    rows: list[dict]


class Lie(NamedTuple):
    """What a client replies in place of the truth: in payloads of a class this change."""

    kind: type[Any]
    what: str
    change: Change


def _states(state: dict[str, Tensor]) -> Iterator[tuple[str, Change]]:
    yield "an entry missing", lambda s: dict(list(s.items())[1:])
    yield "an entry more", lambda s: s | {"backdoor": torch.ones(3)}
    yield "an entry renamed", lambda s: {("x" + k if i == 0 else k): v for i, (k, v) in enumerate(s.items())}
    yield "no entry", lambda s: {}
    name = next(iter(state))
    for what, change in _tensors(state[name]):
        yield (
            f"an entry {what}",
            lambda s, change=change: {k: change(v) if i == 0 else v for i, (k, v) in enumerate(s.items())},
        )
    if any(v.is_floating_point() for v in state.values()):
        yield "all 1e30", lambda s: {k: torch.full_like(v, 1e30) if v.is_floating_point() else v for k, v in s.items()}


def _tensors(value: Tensor) -> Iterator[tuple[str, Change]]:
    yield "with an axis more", lambda v: v[None]
    yield "flat", lambda v: v.reshape(-1)
    yield "empty", lambda v: v.reshape(-1)[:0]
    yield "one value", lambda v: v.reshape(-1)[:1]
    yield "of another type", lambda v: v.double() if v.is_floating_point() else v.float()
    if value.is_floating_point():
        yield "with a NaN", lambda v: torch.full_like(v, torch.nan)
        yield "with 1e30", lambda v: torch.full_like(v, 1e30)
    elif value.dtype != torch.bool:
        yield "below zero", lambda v: torch.full_like(v, -1)
        yield "far too large", lambda v: torch.full_like(v, 100)


def _within(value: Any) -> Iterator[tuple[str, Change]]:
    """Changes of a value, and of what it holds, with names."""
    if isinstance(value, bool | str | bytes | None):
        return
    if isinstance(value, int):
        yield from ((str(n), lambda v, n=n: n) for n in (0, -1, 1 << 62))
    elif isinstance(value, float):
        yield from ((str(n), lambda v, n=n: n) for n in (float("nan"), float("inf"), 1e30, -1.0))
    elif isinstance(value, Tensor):
        yield from _tensors(value)
    elif isinstance(value, dict) and value and all(isinstance(v, Tensor) for v in value.values()):
        yield from _states(value)
    elif isinstance(value, dict) and value:
        yield "a key missing", lambda v: dict(list(v.items())[1:])
        yield "no keys", lambda v: {}
        for what, change in _within(next(iter(value.values()))):
            yield (
                f"first {what}",
                lambda v, change=change: {k: change(x) if i == 0 else x for i, (k, x) in enumerate(v.items())},
            )
    elif isinstance(value, list | tuple) and value:
        yield "one fewer", lambda v: v[:-1]
        yield "twice as many", lambda v: v + v
        yield "empty", lambda v: v[:0]
        for what, change in _within(value[0]):
            yield f"first {what}", lambda v, change=change: type(v)([change(v[0]), *v[1:]])
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            for what, change in _within(getattr(value, f.name)):
                yield (
                    f"{f.name} {what}",
                    lambda v, f=f.name, change=change: dataclasses.replace(v, **{f: change(getattr(v, f))}),
                )
            if not isinstance(value, WireValue):
                yield f"{f.name} None", lambda v, f=f.name: dataclasses.replace(v, **{f: None})


@contextmanager
def lying(change: Callable[[int, Any], Any]) -> Iterator[None]:
    """Every reply of a client as `change(client, reply)`."""
    run, pack = Runner.run, handlers.pack
    who: list[int] = []  # whose handler runs

    def noted(self, job, frames):
        who.append(job.client)
        try:
            return run(self, job, frames)
        finally:
            who.pop()

    def lied(value, **how):
        return pack(change(who[-1], value) if who else value, **how)

    platform = sys.platform
    Runner.run, handlers.pack = noted, lied
    sys.platform = "elsewhere"  # handlers run in this process
    try:
        yield
    finally:
        Runner.run, handlers.pack, sys.platform = run, pack, platform


def lies_of(name: str) -> list[Lie]:
    """What a client of a case can reply that can be packed."""
    seen: dict[type[Any], Any] = {}

    def note(client: int, reply: Any) -> Any:
        if client == LIAR:
            seen.setdefault(type(reply), reply)
        return reply

    handlers_pack = handlers.pack
    with lying(note):
        fb.run(CASES[name], task_of(name), rounds=2)
    lies = []
    for kind, reply in seen.items():
        for what, change in _within(reply):
            try:
                handlers_pack(change(reply))
            except Exception:
                continue  # cannot be said
            lies.append(Lie(kind, what, change))
    return lies


def outcome(name: str, lie: Lie | None, **settings: Any) -> Outcome:
    """A run of a case with a client that lies in every round, or, with no lie, an honest one."""

    def change(client: int, reply: Any) -> Any:
        if lie is None or client != LIAR or type(reply) is not lie.kind:
            return reply
        try:
            told = lie.change(reply)
            handlers_pack(told)
        except Exception:
            return reply
        return told

    handlers_pack = handlers.pack
    with tempfile.TemporaryDirectory() as folder, lying(change):
        try:
            out = Path(folder) / "run"
            result = fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=out, watcher=Quiet(), workers=1, **settings)
        except Exception as error:
            return Outcome(f"{type(error).__name__}: {error}", b"", [])
        return Outcome("", read_checkpoint(Path(folder) / "run").server, result.rounds)
