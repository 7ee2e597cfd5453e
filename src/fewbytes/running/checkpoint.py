"""Checkpoints: what a run needs to resume, and the check that it may."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from fewbytes.base.errors import FrameError, UserError
from fewbytes.base.files import SIDE_BY_SIDE, begin_syncing, check_own, make_all_durable, make_durable, replacing
from fewbytes.codec.delta import DeltaStream
from fewbytes.core.ledger import Ledger
from fewbytes.core.method import Method
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.data.split import transform_name
from fewbytes.engines.downlink import Acknowledged
from fewbytes.engines.engine import Engine
from fewbytes.engines.terms import Named, Origin, UnderWay
from fewbytes.engines.waiting import Waiting
from fewbytes.running.growing import Beginning, GrowingFile
from fewbytes.wire import Parsed, pack_state, unpack_state

VERSION = version("fewbytes")


@dataclass
class Checkpoint:
    """Everything a run needs to resume as if it had never stopped, except client states and waiting messages, which
    have their own files."""

    fewbytes: str
    nonce: bytes  # drawn when the run began
    starts: int  # number of resumptions
    fingerprint: str
    round: int  # the last whole round; 0: after the start
    known: Tensor  # the clients that take part, int64
    finished: bool
    server: bytes  # the server's state as a frame; empty: none
    waiting: list[Waiting]  # messages that wait for their clients' next request
    under_way: UnderWay  # clients working for a stream
    clock: float  # simulated seconds since the run began
    lines: list[DeltaStream]  # the last rounded messages
    heard: bytes  # clients' positions in the delta streams, as msgpack
    versions: Tensor  # of client states: (client, version) rows, int64
    ledger: Beginning  # of the file of exchanges
    handlers: list[str]
    rows: Beginning  # of the file of lines of rounds.jsonl
    seconds: float
    peak_memory_bytes: int
    columns: int = 10  # of the ledger; the default is of the first checkpoints of 0.9

    def named(self) -> dict[Id, int]:
        """The versions of client states that it names."""
        return dict(self.versions.tolist())

    def files(self) -> Named:
        """All files that it names."""
        return Named(self.named(), frozenset(number for each in self.waiting for number in each.files))

    def origin(self) -> Origin:
        """The state of an engine that resumes from it."""
        heard = msgspec.msgpack.decode(self.heard, type=dict[Id, Acknowledged])
        return Origin(
            self.nonce, self.starts, self.named(), self.known.tolist(), self.waiting, self.under_way,
            self.clock, self.lines, heard,
        )  # fmt: skip


class Progress(NamedTuple):
    """A run's progress: the last finished phase, and the server's `state` after it."""

    fingerprint: str
    starts: int
    seconds: float
    round: int
    phase: str
    state: Any


SAFE, UNSYNCED = "state", "unsynced"
"""The suffixes of checkpoint files: durable with all files that it names, and not durable yet."""


@dataclass
class _Unsynced:
    """A checkpoint that is not yet durable: its round, the files it names, the paths to sync, and the pending syncs."""

    round: int
    named: Named
    places: list[Path]
    syncing: list[Future[None]] | None = None


class Checkpoints:
    """The checkpoints in a run folder, one for each of its last rounds, `most` of them (None: all), and `spared` ones:
    `checkpoint/round-<t>.state`. The exchanges and the lines of rounds.jsonl so far, which only grow, lie beside them.

    If `durable`, each is synced to disk while the run continues. Until then it is called `.unsynced`; at most one is,
    and older ones stay. A process that crashes loses none, as the system has the files.
    """

    def __init__(self, folder: Path, durable: bool = True, most: int | None = None) -> None:
        self._folder, self._durable, self._most = folder / "checkpoint", durable, most
        self.ledger = GrowingFile(self._folder / "ledger")
        self.rows = GrowingFile(self._folder / "rows")
        self.spared: Callable[[Iterable[int]], set[int]] = lambda kept: set()
        """Given the last rounds with checkpoints, others whose checkpoints are kept, too."""
        self._safe: dict[int, Named] = {}  # the files that the checkpoint after a round names
        self._unsynced: _Unsynced | None = None
        # these threads only sync and hold no lock of ours, so that forks are safe
        self._threads = ThreadPoolExecutor(SIDE_BY_SIDE)

    def path(self, t: int) -> Path:
        """The file of the last checkpoint after round t."""
        unsynced = self._file(t, UNSYNCED)
        return unsynced if unsynced.exists() else self._file(t, SAFE)

    def _file(self, t: int, kind: str) -> Path:
        return self._folder / f"round-{t}.{kind}"

    def rounds(self) -> list[int]:
        """The rounds after which there are checkpoints, ascending."""
        names = (re.fullmatch(rf"round-(\d+)\.({SAFE}|{UNSYNCED})", path.name) for path in self._folder.glob("*"))
        return sorted({int(name[1]) for name in names if name})

    def starts(self) -> int:
        """How often the run has been resumed."""
        found = 0
        for path in self._folder.glob("round-*"):
            with suppress(UserError):
                found = max(found, self._read(path).starts)
        return found

    def read(self, t: int) -> Checkpoint:
        """The last checkpoint after round t that is whole. Raises UserError if it is damaged or cannot be read; one
        that is not synced also if something that it names is."""
        unsynced, safe = self._file(t, UNSYNCED), self._file(t, SAFE)
        if unsynced.exists():
            try:
                found = self._read(unsynced)
                self._check_named(unsynced, found)
                return found
            except UserError:
                if not safe.exists():
                    raise
        return self._read(safe)

    def _read(self, path: Path) -> Checkpoint:
        begin = f"remove {self._folder.parent}, and start again"
        try:
            parsed = Parsed(path.read_bytes(), None)
            if parsed.version.startswith("1."):
                raise UserError(
                    f"the checkpoint {path} was written by another version of fewbytes, {parsed.fields[0]}, in "
                    f"format {parsed.version}, which cannot be resumed: resume with that version, or {begin}"
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

    def _check_named(self, path: Path, checkpoint: Checkpoint) -> None:
        """Raises UserError if a file that it names is missing or damaged; states may be on nodes instead."""
        store, waiting = self._folder / "clients", self._folder / "waiting"
        named = checkpoint.files()
        states = [store / f"{i}-{version}.state" for i, version in named.versions.items() if version and store.is_dir()]
        for each in (*states, *(waiting / f"{number}.state" for number in named.messages)):
            try:
                Parsed(each.read_bytes(), None)
            except (FrameError, OSError) as error:
                raise UserError(f"the checkpoint {path} names {each}, which is gone or damaged ({error})") from None

    def build(self, engine: Engine, progress: Progress, exchanges: int, rows: str) -> Checkpoint:
        """A checkpoint of a run. Appends the new `rows`, and the ledger's rows after `exchanges`, to the append-only
        files."""
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
            lines=list(engine.outbox.downlink.streams.values()),
            heard=msgspec.msgpack.encode(engine.outbox.downlink.acknowledged),
            versions=torch.tensor(sorted(engine.roster.versions.items()), dtype=torch.int64).view(-1, 2),
            ledger=self.ledger.grow(engine.ledger.tobytes(exchanges)),
            handlers=engine.ledger.handlers,
            rows=self.rows.grow(rows.encode()),
            seconds=progress.seconds,
            peak_memory_bytes=engine.memory.peak,
            columns=len(Ledger.COLUMNS),
        )

    def write(self, checkpoint: Checkpoint, engine: Engine) -> None:
        """Write a checkpoint; if it is to be durable, `sync` and `settle` come before the next."""
        t, named = checkpoint.round, checkpoint.files()
        path = self._file(t, UNSYNCED if self._durable else SAFE)
        self._pack(checkpoint, path)
        if self._durable:
            before = self._safe[max(self._safe)] if self._safe else Named({}, frozenset())
            places = [path, self.ledger.path, self.rows.path, self._folder, *engine.places(before)]
            self._unsynced = _Unsynced(t, named, places)
        else:
            self._keep(t, named)

    def sync(self) -> None:
        """Start syncing the written checkpoint to disk."""
        if self._unsynced is not None and self._unsynced.syncing is None:
            self._unsynced.syncing = begin_syncing(self._unsynced.places, self._threads)

    def write_again(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint from which the run is about to resume; if durable, it is synced at once with all it
        names."""
        unsynced = self._file(checkpoint.round, UNSYNCED)
        if self._durable and unsynced.exists():  # what a run wrote that was killed
            make_all_durable(self._folder)
        self._pack(checkpoint, self._file(checkpoint.round, SAFE), self._durable)
        unsynced.unlink(missing_ok=True)

    def _pack(self, checkpoint: Checkpoint, path: Path, sync: bool = False) -> None:
        with replacing(path, sync=sync) as file:
            for part in pack_state(checkpoint).parts:
                file.write(part)

    def settle(self) -> None:
        """Wait until the last checkpoint is durable, then remove older ones. Raises OSError if syncing fails."""
        self.sync()
        if self._unsynced is not None:
            for each in self._unsynced.syncing or ():
                each.result()
            t, named = self._unsynced.round, self._unsynced.named
            self._file(t, UNSYNCED).replace(self._file(t, SAFE))
            self._unsynced = None
            self._keep(t, named)

    def _keep(self, t: int, named: Named) -> None:
        """Note that a checkpoint is safe, and remove older ones."""
        self._safe[t] = named
        older = sorted(self._safe)[: -self._most if self._most else 0]
        spared = self.spared(sorted(self._safe)[len(older) :])
        for each in (each for each in older if each not in spared):
            self._file(each, SAFE).unlink()
            del self._safe[each]

    def named(self) -> list[Named]:
        """The files that each checkpoint names."""
        return [*self._safe.values(), *([] if self._unsynced is None else [self._unsynced.named])]

    def close(self) -> None:
        """Wait for pending syncs; a checkpoint whose sync fails stays unsynced."""
        with suppress(OSError):
            self.settle()
        self._threads.shutdown()

    def restore(self, t: int) -> bool:
        """Forget the checkpoints after round t, and damaged ones; whether there were any after it."""
        later = [each for each in self.rounds() if each > t]
        for each in later:
            self._remove(each)
        if later and self._durable:
            make_durable(self._folder)
        for each in self.rounds():
            try:
                self._safe[each] = self.read(each).files()
            except UserError:
                self._remove(each)
        return bool(later)

    def _remove(self, t: int) -> None:
        for kind in (SAFE, UNSYNCED):
            self._file(t, kind).unlink(missing_ok=True)


def read_checkpoint(folder: Path, from_round: int | None = None) -> Checkpoint:
    """The last intact checkpoint of a run folder, or the one after `from_round`. Raises UserError if there is none."""
    kept = Checkpoints(folder)
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} is not a run folder (it has no config.toml): name one of those under runs/")
    check_own(folder)
    rounds = kept.rounds()
    if not rounds:
        raise UserError(f"{folder} has no checkpoint to resume from: the run ended before its first round")
    if from_round is not None:
        if from_round not in rounds:
            there = f"{'those' if len(rounds) > 1 else 'that'} of {' and '.join(map(str, rounds))}"
            raise UserError(
                f"{folder} keeps no checkpoint of round {from_round} to go back to, only {there} (--keep-checkpoints "
                "sets how many recent rounds a run keeps)"
            )
        return kept.read(from_round)
    for t in reversed(rounds[1:]):
        with suppress(UserError):
            return kept.read(t)
    return kept.read(rounds[0])


def check(checkpoint: Checkpoint, fingerprint: str, folder: Path, rounds: int) -> None:
    """Raises UserError if a run of this fingerprint and length cannot resume from the checkpoint."""
    if rounds < checkpoint.round or (checkpoint.finished and rounds > checkpoint.round):
        state = "has ended" if checkpoint.finished else "is already further"
        raise UserError(f"the run in {folder} {state}, after {checkpoint.round} rounds: start a new one for {rounds}")
    if checkpoint.fewbytes.split(".")[:2] != VERSION.split(".")[:2]:
        raise UserError(f"the checkpoint in {folder} was written by fewbytes {checkpoint.fewbytes}; this is {VERSION}")
    if checkpoint.columns != len(Ledger.COLUMNS):
        raise UserError(
            f"the checkpoint in {folder} was written by another build of fewbytes {VERSION}, whose ledger has "
            f"{checkpoint.columns} columns, not {len(Ledger.COLUMNS)}: resume with that build, or start a new run"
        )
    if checkpoint.fingerprint != fingerprint:
        raise UserError(
            f"the checkpoint in {folder} is of another configuration (method, parameters, data, model, seed or "
            "device): resume it with the configuration it was made with, or start a new run"
        )


def fingerprint(method: Method, task: Task, how: str) -> str:
    """A digest of everything a run's results depend on; `how`: the run's part, besides method and task."""
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
        "2",  # the format of frames when these parts were laid down: one of 0.9
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
