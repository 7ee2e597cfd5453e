"""The local engine: clients' handlers in worker processes of this machine, or in this one process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from fewbytes.base.cores import available_cores
from fewbytes.base.errors import FrameError
from fewbytes.core.ledger import LeftOut
from fewbytes.core.method import Method
from fewbytes.core.metrics import Scores
from fewbytes.core.network import Handler
from fewbytes.core.policy import Policy, TooFewReplies
from fewbytes.core.problem import Id, Task
from fewbytes.engines.base import Engine, Resumed
from fewbytes.engines.handlers import SCORE, Done, Job, Runner
from fewbytes.engines.pool import WorkerPool, attempt, failed
from fewbytes.engines.requests import Requests
from fewbytes.engines.store import ClientStore

AHEAD = 4  # replies per worker that may wait for their turn


class LocalEngine(Engine):
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
        workers: int | None = None,
        policy: Policy | None = None,
        coded: bool = True,
        frames: Path | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        super().__init__(method, task, policy or Policy(), coded, frames, resumed)
        self.store = ClientStore(store)
        for client, number in self.versions.items():
            if number:
                self.store.check(client, number)
        self.runner = Runner(method, task, self.store, coded)
        self._measure_again = 0.0
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # so that no result depends on the machine's core count
        for client in self.problem.clients:
            self.problem.layout(client)  # made once, before the workers inherit it
        forked = sys.platform == "linux" and self.problem.device == "cpu"
        count = min(workers or available_cores(), len(self.problem.clients))
        self.pool = WorkerPool(self.runner, count) if forked else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch.set_num_threads(self._threads)
        if self.pool is not None:
            self.pool.close()

    def _exchange(self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any]) -> Iterator[tuple[Id, Any]]:
        if self.pool is None:
            requests = Requests(self, handler, messages, asked)
        else:
            requests = Requests(self, handler, messages, asked, self.pool.exchange.put, self.pool.exchange.free)
        failed: list[LeftOut] = []
        too_few: TooFewReplies | None = None  # raised when all jobs are done, so that none is left behind
        for job, done, reply in self._run(handler.name, asked, requests):
            request = requests.take(job.client)
            try:
                value = self.settle(handler, job.client, request, done, reply)
            except FrameError as error:
                self.leave_out(handler.name, job.client, request, "rejected", str(error), len(reply))
                failed.append(self.left_out[-1])
                try:
                    self.enough(handler.name, len(asked), failed)
                except TooFewReplies as error:
                    too_few = error
                continue
            if too_few is None:
                yield job.client, value
        if too_few is not None:
            raise too_few

    def make_durable(self, before: Mapping[Id, int]) -> None:
        """Those that are new, at once."""
        self.store.make_durable(self.versions.items() - before.items())

    def checkpointed(self, kept: Sequence[Mapping[Id, int]]) -> None:
        """Remove other states."""
        self.store.keep_only(*kept)

    def score_clients(self) -> dict[Id, Scores]:
        """Score the models in the workers."""
        if not self.method.has_local_models:
            return {}
        clients = [i for i in self.clients if len(self.task.data.clients[i].test)]
        return {job.client: done.scores for job, done, _ in self._run(SCORE, clients, None)}

    def save_models(self, folder: Path, about: dict[str, Any]) -> None:
        """Save them from this process."""
        for client in self.ever():
            self.runner.save_model(client, self.versions.get(client, 0), self.t, folder, about)

    def _run(self, name: str, asked: list[Id], requests: Requests | None) -> Iterator[tuple[Job, Done, memoryview]]:
        """Run jobs on the workers, ahead of the reader but not far; yields results in the order asked."""
        if self.pool is None:
            yield from self._run_here(name, asked, requests)
            return
        jobs: dict[int, Job] = {}
        ended: dict[int, Done] = {}
        first = self._numbers + 1
        self._numbers += len(asked)
        ahead, sent = AHEAD * len(self.pool.pids()), 0
        for turn in range(len(asked)):
            while sent < min(len(asked), turn + ahead):
                job = self._job(first + sent, name, asked[sent], requests)
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

    def _run_here(
        self, name: str, asked: list[Id], requests: Requests | None
    ) -> Iterator[tuple[Job, Done, memoryview]]:
        for client in asked:
            self._numbers += 1
            job = self._job(self._numbers, name, client, requests)
            sent = [] if requests is None else requests.open[client].parts
            frames = [memoryview(bytes(part.frame)) for part in sent if part.frame is not None]
            done, reply = attempt(self.runner, job, frames)
            if done.error:
                raise failed(job, done)
            yield job, done, memoryview(b"" if reply is None else bytes(reply))
            self._measure()

    def _job(self, number: int, name: str, client: Id, requests: Requests | None) -> Job:
        job = Job(number, name, client, self.t, self.scored, self.versions.get(client, 0))
        if self.pool is not None:
            job.reply_to = self.pool.exchange.new()
        if requests is not None:
            requests.write(client).fill(job)
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
