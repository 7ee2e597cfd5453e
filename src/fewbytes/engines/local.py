"""The local engine: clients' handlers in worker processes of this machine, or in this one process."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from fewbytes.engines.handlers import SCORE, Done, Job, Runner, packed, unchanged
from fewbytes.engines.pool import Pool, attempt, failed
from fewbytes.engines.store import ClientStore
from fewbytes.method import Id, Method, Task
from fewbytes.net import Handler, Ledger, Network, Row
from fewbytes.wire import Base, Counted, Frame, unpack

AHEAD = 4  # replies per worker that may wait for their turn


class LocalNetwork(Network):
    """Moves payloads as frames between this process and its workers; every byte counted is a byte handed over.

    `workers`: processes (default: one per core; with a GPU, or where processes cannot be forked safely, handlers
    run in this process instead). `store`: the folder of client states. `coded`: lossless coding of the frames.
    A context manager: leaving it ends the workers.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        store: Path,
        *,
        workers: int | None = None,
        coded: bool = True,
        ledger: Ledger | None = None,
        versions: dict[Id, int] | None = None,
        frames: Path | None = None,
    ) -> None:
        super().__init__(method, task, ledger)
        self.coded = coded
        self.store = ClientStore(store)
        self.versions: dict[Id, int] = dict(versions or {})
        self.store.keep_only(self.versions)
        self.runner = Runner(method, task, self.store, coded)
        self.peak_memory_bytes = 0
        self._frames = frames
        self._numbers = 0
        self._measure_again = 0.0
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that no result depends on the machine's core count
        for client in task.clients:
            task.layout(client)  # made once, before the workers inherit it
        forked = sys.platform == "linux" and task.device == "cpu"
        count = min(workers or available_cores(), len(task.clients))
        self.pool = Pool(self.runner, count) if forked else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch.set_num_threads(self._threads)
        if self.pool is not None:
            self.pool.close()

    def _exchange(self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any]) -> Iterator[tuple[Id, Any]]:
        mail = _Mail(self, handler, messages, asked)
        for job, done, reply in self._run(handler.name, asked, mail):
            letter = mail.take(job.client)
            value = None
            if handler.reply is not None:
                unchanged(letter.base)
                value = unpack(handler.reply, reply, layout=self.task.layout(job.client), base=letter.base)
            self._keep(job.client, handler.name, "up", reply)
            self.versions[job.client] = done.version
            for name, record in done.records.items():
                self.records.setdefault(name, {})[job.client] = record
            row = Row(self.t, handler.name, job.client, letter.length, len(reply), letter.counted, Counted(*done.up))
            self.ledger.add(row)
            yield job.client, value

    def score_clients(self) -> dict[Id, tuple[int, int]]:
        if type(self.method).local_model is Method.local_model:
            return {}
        clients = [i for i in self.clients if len(self.task.data.clients[i].test)]
        return {job.client: done.score for job, done, _ in self._run(SCORE, clients, None)}

    def local_model(self, client: Id) -> nn.Module | None:
        """A client's own model as it stands, if the method has one."""
        return self.runner.local_model(client, self.versions.get(client, 0), self.t)

    def _run(self, name: str, asked: list[Id], mail: _Mail | None) -> Iterator[tuple[Job, Done, memoryview]]:
        """Run jobs on the workers, ahead of the reader but not far; yields results in the order asked."""
        if self.pool is None:
            yield from self._run_here(name, asked, mail)
            return
        jobs: dict[int, Job] = {}
        ended: dict[int, Done] = {}
        first = self._numbers + 1
        self._numbers += len(asked)
        ahead, sent = AHEAD * len(self.pool.pids()), 0
        for turn in range(len(asked)):
            while sent < min(len(asked), turn + ahead):
                job = self._job(first + sent, name, asked[sent], mail)
                jobs[job.number] = job
                self.pool.submit(job)
                sent += 1
            number = first + turn
            while number not in ended:
                ended.update({done.number: done for done in self.pool.collect()})
                self._measure()
            job, done = jobs.pop(number), ended.pop(number)
            yield job, done, self.pool.reply(job, done)
            self.pool.release(job)

    def _run_here(self, name: str, asked: list[Id], mail: _Mail | None) -> Iterator[tuple[Job, Done, memoryview]]:
        for client in asked:
            self._numbers += 1
            job = self._job(self._numbers, name, client, mail)
            letter = None if mail is None else mail.letters[client]
            message = None if letter is None or letter.frame is None else memoryview(bytes(letter.frame))
            done, reply = attempt(lambda job=job, message=message: self.runner.run(job, message), job.number)  # type: ignore[misc]
            if done.error:
                raise failed(job, done)
            yield job, done, memoryview(b"" if reply is None else bytes(reply))
            self._measure()

    def _job(self, number: int, name: str, client: Id, mail: _Mail | None) -> Job:
        job = Job(number, name, client, self.t, self.scored, self.versions.get(client, 0))
        if self.pool is not None:
            job.reply_to = self.pool.exchange.new()
        if mail is not None:
            letter = mail.write(client)
            job.message, job.message_at, job.message_length = letter.number, letter.at, letter.length
            self._keep(client, name, "down", letter.frame)
        return job

    def number(self) -> int:
        """A number no job or message of this run has had."""
        self._numbers += 1
        return self._numbers

    def _keep(self, client: Id, handler: str, way: str, frame: memoryview | Frame | None) -> None:
        """Keep a frame as a file, if asked to."""
        if self._frames is not None and frame is not None and len(frame):
            self._frames.mkdir(parents=True, exist_ok=True)
            (self._frames / f"{self.t}-{handler}-{client}-{way}.frame").write_bytes(bytes(frame))

    def _measure(self) -> None:
        """Memory of this process and its workers, shared pages counted once; takes half a percent of the time."""
        started = time.monotonic()
        if started >= self._measure_again:
            processes = [os.getpid(), *(self.pool.pids() if self.pool is not None else [])]
            self.peak_memory_bytes = max(self.peak_memory_bytes, sum(map(_memory_bytes, processes)))
            now = time.monotonic()
            self._measure_again = now + 200 * (now - started)


@dataclass
class _Letter:
    """One message as it travels, to however many clients."""

    number: int
    frame: Frame | None
    length: int
    counted: Counted
    base: Base | None
    at: str
    left: int  # clients that have not answered yet


class _Mail:
    """The messages of one call: each packed once, when it is first sent, and dropped with its last reply."""

    def __init__(self, net: LocalNetwork, handler: Handler, messages: Mapping[Id, Any], asked: list[Id]) -> None:
        self.letters: dict[Id, _Letter] = {}
        self._net, self._handler, self._messages = net, handler, messages
        self._key = {i: (id(messages[i]), net.task.architecture(i)) for i in asked}
        self._uses = Counter(self._key.values())
        self._packed: dict[Any, _Letter] = {}

    def write(self, client: Id) -> _Letter:
        """The client's message, packed and put where its worker finds it."""
        key, message = self._key[client], self._messages[client]
        if key not in self._packed:
            net, at = self._net, ""
            frame, counted = packed(self._handler, message, net.task.layout(client), net.coded)
            if frame is not None and net.pool is not None:
                at = net.pool.exchange.new()
                net.pool.exchange.write(at, frame)
            base = None if frame is None or self._handler.reply is None else Base.of(frame.digest, message)
            number, length = (0, 0) if frame is None else (net.number(), len(frame))
            self._packed[key] = _Letter(number, frame, length, counted, base, at, self._uses[key])
        self.letters[client] = self._packed[key]
        return self.letters[client]

    def take(self, client: Id) -> _Letter:
        """The client's message, once its reply is here."""
        letter = self.letters.pop(client)
        letter.left -= 1
        if letter.left == 0:
            del self._packed[self._key[client]]
            if letter.at and self._net.pool is not None:
                self._net.pool.exchange.free(letter.at)
        return letter


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes(pid: int) -> int:
    """Proportional share of memory of a process in bytes; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0
