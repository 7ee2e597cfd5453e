"""The local engine: clients' handlers in worker processes of this machine, or in this one process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from fewbytes.base.cores import available_cores
from fewbytes.base.errors import FrameError
from fewbytes.core.ledger import Ledger, LeftOut
from fewbytes.core.method import Method
from fewbytes.core.network import Handler
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id, Task
from fewbytes.engines.base import EngineNetwork, Mail
from fewbytes.engines.handlers import SCORE, Done, Job, Runner
from fewbytes.engines.pool import Pool, attempt, failed
from fewbytes.engines.store import ClientStore

AHEAD = 4  # replies per worker that may wait for their turn


class LocalNetwork(EngineNetwork):
    """Moves payloads as frames between this process and its workers; every byte counted is a byte handed over.

    `workers`: processes (default: one per core; with a GPU, or where processes cannot be forked safely, handlers
    run in this process instead). `store`: the folder of client states. `policy`: how many replies must be finite.
    `coded`: lossless coding of the frames. A context manager: leaving it ends the workers.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        store: Path,
        *,
        policy: Policy | None = None,
        workers: int | None = None,
        coded: bool = True,
        ledger: Ledger | None = None,
        versions: dict[Id, int] | None = None,
        known: list[Id] | None = None,
        frames: Path | None = None,
    ) -> None:
        super().__init__(
            method, task, policy or Policy(), coded=coded, ledger=ledger, versions=versions, known=known, frames=frames
        )
        self.store = ClientStore(store)
        for client, number in self.versions.items():
            if number:
                self.store.check(client, number)
        self.store.keep_only(self.versions)
        self.runner = Runner(method, task, self.store, coded)
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
        if self.pool is None:
            mail = Mail(self, handler, messages, asked)
        else:
            mail = Mail(self, handler, messages, asked, self.pool.exchange.put, self.pool.exchange.free)
        failed: list[LeftOut] = []
        for job, done, reply in self._run(handler.name, asked, mail):
            letter = mail.take(job.client)
            try:
                value = self.settle(handler, job.client, letter, done, reply)
            except FrameError as error:
                if error.code != "values":
                    raise
                self.leave_out(handler.name, job.client, letter, "rejected", str(error), len(reply))
                failed.append(self.left_out[-1])
                self.enough(handler.name, len(asked), failed)
                continue
            yield job.client, value

    def checkpointed(self) -> None:
        self.store.keep_only(self.versions)

    def score_clients(self) -> dict[Id, tuple[int, int]]:
        if type(self.method).local_model is Method.local_model:
            return {}
        clients = [i for i in self.clients if len(self.task.data.clients[i].test)]
        return {job.client: done.score for job, done, _ in self._run(SCORE, clients, None)}

    def save_models(self, folder: Path, about: dict[str, Any]) -> None:
        for client in self.ever():
            self.runner.save_model(client, self.versions.get(client, 0), self.t, folder, about)

    def _run(self, name: str, asked: list[Id], mail: Mail | None) -> Iterator[tuple[Job, Done, memoryview]]:
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

    def _run_here(self, name: str, asked: list[Id], mail: Mail | None) -> Iterator[tuple[Job, Done, memoryview]]:
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

    def _job(self, number: int, name: str, client: Id, mail: Mail | None) -> Job:
        job = Job(number, name, client, self.t, self.scored, self.versions.get(client, 0))
        if self.pool is not None:
            job.reply_to = self.pool.exchange.new()
        if mail is not None:
            letter = mail.write(client)
            job.message, job.message_at, job.message_length = letter.number, letter.at, letter.length
        return job

    def _measure(self) -> None:
        """Memory of this process and its workers, shared pages counted once; takes half a percent of the time."""
        started = time.monotonic()
        if started >= self._measure_again:
            processes = [os.getpid(), *(self.pool.pids() if self.pool is not None else [])]
            self.peak_memory_bytes = max(self.peak_memory_bytes, sum(map(memory_bytes, processes)))
            now = time.monotonic()
            self._measure_again = now + 200 * (now - started)


def memory_bytes(pid: int) -> int:
    """Proportional share of memory of a process in bytes; 0 where the system does not tell."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0
