"""The local engine: clients' handlers in worker processes of this machine, or in this one process."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from fewbytes.base.cores import available_cores
from fewbytes.base.errors import FrameError
from fewbytes.base.rate import ALL, Rate
from fewbytes.core.ledger import LeftOut
from fewbytes.core.method import Method
from fewbytes.core.metrics import Scores
from fewbytes.core.network import Handler
from fewbytes.core.policy import Policy, TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.core.speeds import Speeds
from fewbytes.core.task import Task
from fewbytes.core.uplink import Uplink
from fewbytes.engines.base import Engine, Resumed
from fewbytes.engines.handlers import SCORE, Done, Job, Runner
from fewbytes.engines.pool import WorkerPool, attempt, failed
from fewbytes.engines.requests import Request, Requests
from fewbytes.engines.store import ClientStore
from fewbytes.engines.underway import Work
from fewbytes.wire import Frame

AHEAD = 4  # replies per worker that may wait for their turn


class LocalEngine(Engine):
    """Moves payloads as frames between this process and its workers; every byte counted is a byte handed over.

    `workers`: processes (default: one per core; with a GPU, unless some are asked for and this process has not opened
    it, or where processes cannot be forked safely, handlers run in this process instead). `store`: the folder of client
    states, beside which that of waiting messages is made. `policy`: how many replies must be finite.
    `coded`: lossless coding of the frames. `speeds`: how long clients take by a simulated clock (default: all alike).
    `uplink`, `downlink`: how much is kept of the values in replies, and in messages (default: all).
    A context manager: leaving it ends the workers.
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
        speeds: Speeds | None = None,
        uplink: Uplink | None = None,
        downlink: Rate = ALL,
    ) -> None:
        super().__init__(
            method, task, policy or Policy(), coded, frames, resumed, uplink, downlink, waiting=store.parent / "waiting"
        )
        self._seconds = (speeds or Speeds()).seconds(len(self.problem.clients), self.problem.seed)
        self._jobs: dict[Id, Job] = {}  # of clients that are at work for a stream, once they are to be run
        self._ended: dict[int, Done] = {}  # what came of jobs, by number, until it is their turn
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
        on_gpu = torch.device(self.problem.device).type != "cpu"
        forked = sys.platform == "linux" and (not on_gpu or (workers or 1) > 1)
        if forked and on_gpu and torch.cuda.is_initialized():
            warnings.warn("no workers: this process has opened the GPU before the run, and trains there", stacklevel=2)
            forked = False
        count = min(workers or available_cores(), len(self.problem.clients))
        self.pool = WorkerPool(self.runner, count) if forked else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        torch.set_num_threads(self._threads)
        if self.pool is not None:
            self.pool.close()

    def _exchange(
        self, handler: Handler, asked: list[Id], messages: Mapping[Id, Any], own: bool
    ) -> Iterator[tuple[Id, Any]]:
        requests = Requests(self, handler, messages, asked, own)
        self.clock += max(map(self.takes, asked), default=0.0)
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

    def _next(self, handler: Handler) -> tuple[Work, Any]:
        """Who is done first by the simulated clock; of several, who was asked first."""
        turns = sorted(self._at_work, key=lambda work: work.until)
        self.clock, client = max(self.clock, turns[0].until), turns[0].client
        for work in turns if self.pool is not None else turns[:1]:
            if work.client not in self._jobs and (work is turns[0] or len(self._jobs) < self._ahead()):
                self._numbers += 1
                request = self._at_work.request(work.client)
                job = self._job(self._numbers, handler.name, work.client, request, work.round, work.scored)
                self._jobs[work.client] = job
                if self.pool is not None:
                    self.pool.submit(job)
        job, request = self._jobs.pop(client), self._at_work.request(client)
        done, reply = self._run_one(job, request) if self.pool is None else self._done(self.pool, job)
        work, _ = self._at_work.take(client)
        try:
            return work, self.settle(handler, client, request, done, reply)
        except FrameError as error:
            self.leave_out(handler.name, client, request, "rejected", str(error), len(reply))
            return work, self.left_out[-1]
        finally:
            if self.pool is not None:
                self.pool.release(job)

    def _given_up(self, clients: Sequence[Id]) -> None:
        """What a worker has begun is waited for, as it writes the client's state."""
        jobs = [self._jobs.pop(client) for client in clients if client in self._jobs]
        if self.pool is not None:
            for job in [job for job in jobs if not self.pool.cancel(job)]:
                self._done(self.pool, job)
            for job in jobs:
                self.pool.release(job)

    def takes(self, client: Id) -> float:
        """As the run's speeds say."""
        return self._seconds[client]

    def put(self, frame: Frame) -> str:
        """Where workers read it."""
        return super().put(frame) if self.pool is None else self.pool.exchange.put(frame)

    def free(self, at: str) -> None:
        """For other frames."""
        if self.pool is not None:
            self.pool.exchange.free(at)

    def _make_states_durable(self, before: Mapping[Id, int]) -> None:
        """Those that are new, at once."""
        self.store.make_durable(self.versions.items() - before.items())

    def _keep_states(self, kept: Sequence[Mapping[Id, int]]) -> None:
        """Remove other states."""
        self.store.keep_only(*kept, busy=self._jobs)

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
        first = self._numbers + 1
        self._numbers += len(asked)
        ahead, sent = self._ahead(), 0
        for turn in range(len(asked)):
            while sent < min(len(asked), turn + ahead):
                request = None if requests is None else requests.write(asked[sent])
                job = self._job(first + sent, name, asked[sent], request, self.t, self.scored)
                jobs[job.number] = job
                self.pool.submit(job)
                sent += 1
            job = jobs.pop(first + turn)
            yield job, *self._done(self.pool, job)
            self.pool.release(job)

    def _ahead(self) -> int:
        """How many jobs the workers are given before the first of them is needed."""
        return 1 if self.pool is None else AHEAD * len(self.pool.pids())

    def _done(self, pool: WorkerPool, job: Job) -> tuple[Done, memoryview]:
        """What came of a job of the workers', and its reply, which is valid until it is released."""
        while job.number not in self._ended:
            self._ended.update({done.number: done for done in pool.collect()})
            self._measure()
        done = self._ended.pop(job.number)
        return done, pool.reply(job, done)

    def _run_here(
        self, name: str, asked: list[Id], requests: Requests | None
    ) -> Iterator[tuple[Job, Done, memoryview]]:
        for client in asked:
            self._numbers += 1
            request = None if requests is None else requests.write(client)
            job = self._job(self._numbers, name, client, request, self.t, self.scored)
            yield job, *self._run_one(job, request)

    def _run_one(self, job: Job, request: Request | None) -> tuple[Done, memoryview]:
        """Run a job in this process."""
        sent = [] if request is None else request.parts
        frames = [memoryview(bytes(part.frame)) for part in sent if part.frame is not None]
        done, reply = attempt(self.runner, job, frames)
        if done.error:
            raise failed(job, done)
        self._measure()
        return done, memoryview(b"" if reply is None else bytes(reply))

    def _job(self, number: int, name: str, client: Id, request: Request | None, t: int, scored: bool) -> Job:
        job = Job(number, name, client, t, scored, self.versions.get(client, 0), rate=self.uplink.rate(client))
        if self.pool is not None:
            job.reply_to = self.pool.exchange.new()
        if request is not None:
            request.fill(job)
        return job

    def _measure(self) -> None:
        """Memory of this process and its workers, shared pages counted once; takes half a percent of the time."""
        started = time.monotonic()
        if started >= self._measure_again:
            processes = [os.getpid(), *(self.pool.processes() if self.pool is not None else [])]
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
