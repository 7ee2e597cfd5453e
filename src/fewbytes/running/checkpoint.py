"""Checkpoints: all that a run needs to go on, and whether it may."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError, UserError
from fewbytes.base.files import check_own, make_durable, replacing
from fewbytes.core.method import Method
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.data.split import transform_name
from fewbytes.engines.downlink import Heard, Line
from fewbytes.engines.engine import Engine
from fewbytes.engines.terms import Named, Origin
from fewbytes.engines.underway import UnderWay
from fewbytes.engines.waiting import Waiting
from fewbytes.running.growing import Beginning, GrowingFile
from fewbytes.wire import Parsed, pack_state, unpack_state
from fewbytes.wire.frame import MAJOR

VERSION = version("fewbytes")


@dataclass
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped, but for client states and messages that wait, which
    lie in files of their own."""

    fewbytes: str
    nonce: bytes  # drawn when the run began
    starts: int  # how often it has been gone on with
    fingerprint: str
    round: int  # the last whole round; 0: after the start
    known: Tensor  # the clients that take part, int64
    finished: bool
    server: bytes  # the server's state as a frame; empty: none
    waiting: list[Waiting]  # messages that wait for their clients' next request
    under_way: UnderWay  # clients that are at work for a stream
    clock: float  # simulated seconds since the run began
    lines: list[Line]  # what rounded messages were last
    heard: bytes  # which of them clients hold, as msgpack
    versions: Tensor  # of client states: (client, version) rows, int64
    ledger: Beginning  # of the file of exchanges
    handlers: list[str]
    rows: Beginning  # of the file of what is in rounds.jsonl
    seconds: float
    peak_memory_bytes: int

    def named(self) -> dict[Id, int]:
        """The versions of client states that it names."""
        return dict(self.versions.tolist())

    def files(self) -> Named:
        """All files that it names."""
        return Named(self.named(), frozenset(number for each in self.waiting for number in each.files))

    def origin(self) -> Origin:
        """Where an engine stands that goes on from it."""
        heard = msgspec.msgpack.decode(self.heard, type=dict[Id, Heard])
        return Origin(
            self.nonce, self.starts, self.named(), self.known.tolist(), self.waiting, self.under_way,
            self.clock, self.lines, heard,
        )  # fmt: skip


class Progress(NamedTuple):
    """How far a run is: the phase that it has just gone through, and the server's `state` after it."""

    fingerprint: str
    starts: int
    seconds: float
    round: int
    phase: str
    state: Any


class Checkpoints:
    """The checkpoints in a run folder, one for each of its last rounds: `checkpoint/round-<t>.state`.

    Each survives a loss of power, if `durable`, before an older one goes. The exchanges and the lines of rounds.jsonl
    so far, which only grow, lie beside them, once.
    """

    def __init__(self, folder: Path, durable: bool = True) -> None:
        self._folder, self._durable = folder / "checkpoint", durable
        self.ledger = GrowingFile(self._folder / "ledger", durable)
        self.rows = GrowingFile(self._folder / "rows", durable)
        self.files: dict[int, Named] = {}
        """The files that the checkpoint after a round names."""

    def path(self, t: int) -> Path:
        """The file of the checkpoint after round t."""
        return self._folder / f"round-{t}.state"

    def rounds(self) -> list[int]:
        """The rounds after which there are checkpoints, ascending."""
        names = (re.fullmatch(r"round-(\d+)\.state", path.name) for path in self._folder.glob("*"))
        return sorted(int(name[1]) for name in names if name)

    def starts(self) -> int:
        """How often the run has been gone on with."""
        found = 0
        for t in self.rounds():
            with suppress(UserError):
                found = max(found, self.read(t).starts)
        return found

    def read(self, t: int) -> Checkpoint:
        """The checkpoint after round t. Raises UserError if it is damaged or cannot be read."""
        path = self.path(t)
        begin = f"remove {self._folder.parent}, and begin anew"
        try:
            parsed = Parsed(path.read_bytes(), None)
            if parsed.version.partition(".")[0] != str(MAJOR):
                raise UserError(
                    f"the checkpoint {path} was written by another version of fewbytes, {parsed.header.fields[0]}, in "
                    f"format {parsed.version}, and this one has {MAJOR}: go on with that one, or {begin}"
                )
            found = unpack_state(Checkpoint, parsed)
        except FrameError as error:
            raise UserError(f"the checkpoint {path} is damaged ({error}); {begin}") from None
        except OSError as error:
            raise UserError(f"the checkpoint {path} cannot be read: {error}") from None
        try:
            self.ledger.read(found.ledger)
            self.rows.read(found.rows)
            return found
        except UserError as error:
            raise UserError(f"the checkpoint {path} is damaged ({error}); {begin}") from None
        except OSError as error:
            raise UserError(f"the checkpoint {path} cannot be read: {error}") from None

    def made(self, engine: Engine, progress: Progress, exchanges: int, rows: str) -> Checkpoint:
        """A checkpoint of a run. What is new in it is added to the files that only grow: the `rows`, and what the
        ledger has after so many `exchanges`."""
        return Checkpoint(
            fewbytes=VERSION,
            nonce=engine.nonce,
            starts=progress.starts,
            fingerprint=progress.fingerprint,
            round=progress.round - (progress.phase in ("join", "finish")),
            known=torch.tensor(engine.roster.clients, dtype=torch.int64),
            finished=progress.phase == "finish",
            server=b"" if progress.state is None else bytes(pack_state(progress.state)),
            waiting=engine.outbox.waiting.packed(),
            under_way=engine.streaming.at_work.packed(),
            clock=engine.streaming.clock.now,
            lines=list(engine.outbox.downlink.lines.values()),
            heard=msgspec.msgpack.encode(engine.outbox.downlink.heard),
            versions=torch.tensor(sorted(engine.roster.versions.items()), dtype=torch.int64).view(-1, 2),
            ledger=self.ledger.grow(engine.ledger.tobytes(exchanges)),
            handlers=engine.ledger.handlers,
            rows=self.rows.grow(rows.encode()),
            seconds=progress.seconds,
            peak_memory_bytes=engine.memory.peak,
        )

    def write(self, checkpoint: Checkpoint, most: int | None) -> None:
        """Write a checkpoint; of earlier ones so many stay that there are `most` (None: all)."""
        with replacing(self.path(checkpoint.round), sync=self._durable) as file:
            for part in pack_state(checkpoint).parts:
                file.write(part)
        self.files[checkpoint.round] = checkpoint.files()
        for t in self.rounds()[: -most if most else 0]:
            self.path(t).unlink()
            self.files.pop(t, None)

    def go_back(self, t: int) -> bool:
        """Forget the checkpoints after round t, and damaged ones; whether there were any after it."""
        later = [each for each in self.rounds() if each > t]
        for each in later:
            self.path(each).unlink()
        if later and self._durable:
            make_durable(self._folder)
        for each in self.rounds():
            try:
                self.files[each] = self.read(each).files()
            except UserError:
                self.path(each).unlink()
        return bool(later)


def read_checkpoint(folder: Path, from_round: int | None = None) -> Checkpoint:
    """The last checkpoint of a run folder that is not damaged, or the one after `from_round`. Raises UserError if there
    is none."""
    kept = Checkpoints(folder)
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} is not a run folder (it has no config.toml): name one of those under runs/")
    check_own(folder)
    rounds = kept.rounds()
    if not rounds:
        raise UserError(f"{folder} has no checkpoint to go on from: the run ended before its first round")
    if from_round is not None:
        if from_round not in rounds:
            there = f"{'those' if len(rounds) > 1 else 'that'} of {' and '.join(map(str, rounds))}"
            raise UserError(
                f"{folder} keeps no checkpoint of round {from_round} to go back to, only {there} (a run keeps its last "
                "so many, --keep-checkpoints)"
            )
        return kept.read(from_round)
    for t in reversed(rounds[1:]):
        with suppress(UserError):
            return kept.read(t)
    return kept.read(rounds[0])


def check(checkpoint: Checkpoint, fingerprint: str, folder: Path, rounds: int) -> None:
    """Raises UserError if a run of this fingerprint and length cannot go on from the checkpoint."""
    if rounds < checkpoint.round or (checkpoint.finished and rounds > checkpoint.round):
        state = "has ended" if checkpoint.finished else "is already further"
        raise UserError(f"the run in {folder} {state}, after {checkpoint.round} rounds: start a new one for {rounds}")
    if checkpoint.fewbytes.split(".")[:2] != VERSION.split(".")[:2]:
        raise UserError(f"the checkpoint in {folder} was written by fewbytes {checkpoint.fewbytes}; this is {VERSION}")
    if checkpoint.fingerprint != fingerprint:
        raise UserError(
            f"the checkpoint in {folder} is of another configuration (method, parameters, data, model, seed or "
            "device): resume it with the configuration it was made with, or start a new run"
        )


def fingerprint(method: Method, task: Task, how: str) -> str:
    """A digest of all that a run's numbers depend on: `how` is what the run adds to method and task."""
    counts, objective = task.data.label_counts(), task.problem.objective
    splits = [client.train for client in task.data.clients]
    if task.data.public is not None:
        splits.append(task.data.public)
    labels = [split.labels.numpy().tobytes() for split in splits]
    layouts = [task.problem.layout(client).hash.hex() for client in task.problem.clients]
    parts = [
        repr(method),
        how,
        str(task.problem.seed),
        task.problem.precision,
        str(MAJOR),
        repr(objective),
        "" if objective.criterion is None else transform_name(objective.criterion),
        json.dumps(counts),
        *(layouts if len(set(layouts)) > 1 else layouts[:1]),
    ]
    parts += [f"{what}: {value}" for what, value in sorted(task.problem.agreed.items())]
    if task.problem.pretrained is not None:
        parts.append(f"weights {task.problem.pretrained.digest}")
    if (kind := torch.device(task.problem.device).type) != "cpu":
        parts.append(f"device {kind}")  # its sums round differently
    parts += sorted({frozen for client in task.problem.clients if (frozen := task.problem.frozen(client))})
    if task.data.presence is not None:
        parts.append(f"presence {json.dumps(task.data.presence)}")
    targets = [split.targets.numpy().tobytes() for split in splits if split.learnt is not None]
    transforms = [client.train.transform for client in task.data.clients]
    if any(transforms):
        parts.append(json.dumps([transform and transform_name(transform) for transform in transforms]))
    return hashlib.sha256("\n".join(parts).encode() + b"".join(labels + targets)).hexdigest()
