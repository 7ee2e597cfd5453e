"""Runs jobs on worker processes, which are replaced when they die."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait

import msgspec
import torch

from fewbytes.base.errors import MethodError, UserError
from fewbytes.engines.exchange import Exchange
from fewbytes.engines.handlers import Done, Job, Runner
from fewbytes.engines.results import failed
from fewbytes.engines.transport import Answer, Transport
from fewbytes.engines.workers import ForkServer, Worker
from fewbytes.wire import Frame

ATTEMPTS = 3  # times a job may kill its worker
AHEAD = 4  # jobs for each worker that it is given before the first of them is needed
QUEUED = 2  # jobs a worker holds, so that it never waits for the next one


class WorkerPool(Transport):
    """Runs jobs on worker processes. A worker that dies is replaced and its jobs run again from the same states.

    This process may open a GPU once there is a pool, not before.
    """

    def __init__(self, runner: Runner, workers: int) -> None:
        self.runner, self.exchange, self.ahead = runner, Exchange(), AHEAD * workers
        self._forks = ForkServer(runner, self.exchange)
        self._queue: deque[Job] = deque()
        self._ended: dict[int, Done] = {}  # the results of jobs, by number, until asked for
        self._attempts: dict[int, int] = {}
        self._workers: list[Worker] = []
        self.replaced = 0
        for _ in range(workers):
            self._workers.append(self._fork())

    def put(self, frame: Frame) -> str:
        """Where workers read it."""
        return self.exchange.put(frame)

    def free(self, at: str) -> None:
        """For other frames."""
        self.exchange.free(at)

    def submit(self, job: Job, frames: Sequence[bytes], call: int) -> bool:
        """Queue a job; its messages lie in the exchange."""
        job.reply_to = self.exchange.new()
        self._queue.append(job)
        self._feed()
        return True

    def poll(self, jobs: Sequence[Job], most: int) -> dict[int, Answer]:
        """Wait for jobs to end. Raises MethodError for a handler that raised or keeps killing its worker."""
        if not any(job.number in self._ended for job in jobs):
            self._collect()
        ended = {job.number: (job, self._ended.pop(job.number)) for job in jobs if job.number in self._ended}
        for job, done in ended.values():
            if done.error:
                raise failed(job, done)
        return {n: Answer("answered", done=done, frame=self._reply(job, done)) for n, (job, done) in ended.items()}

    def end(self, jobs: Sequence[Job]) -> None:
        """Their places may be used again. What a worker has been given is waited for, as it writes the client's
        state."""
        for job in [job for job in jobs if job in self._queue]:
            self._queue.remove(job)
        for job in jobs:
            while any(job.number in worker.jobs for worker in self._workers):
                self._collect()
            self._ended.pop(job.number, None)
            self.exchange.free(job.reply_to)

    def _collect(self) -> None:
        """Wait for some jobs to end. Raises MethodError for a handler that keeps killing its worker."""
        ready = wait([w.pipe for w in self._workers])
        for worker in [w for w in self._workers if w.pipe in ready]:
            try:
                result = msgspec.msgpack.decode(worker.pipe.recv_bytes(), type=Done)
            except (EOFError, OSError):
                self._replace(worker)
                continue
            worker.jobs.pop(result.number)
            self._ended[result.number] = result
        self._feed()

    def _reply(self, job: Job, done: Done) -> memoryview:
        """A job's reply frame (empty: none), valid until the job is ended."""
        if done.reply or not done.length:
            return memoryview(done.reply)
        return self.exchange.read(job.reply_to, done.length)

    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [w.pid for w in self._workers]

    def processes(self) -> list[int]:
        """This process, the workers, and what forks them."""
        return [os.getpid(), *self.pids(), self._forks.pid]

    def close(self) -> None:
        """End the workers, whatever they are doing, and remove the exchange."""
        self._forks.close()
        for worker in self._workers:
            worker.pipe.close()
        self._workers = []
        self.exchange.close()

    def _feed(self) -> None:
        while self._queue:
            worker = min(self._workers, key=lambda w: len(w.jobs))
            if len(worker.jobs) >= QUEUED:
                return
            job = self._queue.popleft()
            worker.jobs[job.number] = job
            try:
                worker.pipe.send_bytes(msgspec.msgpack.encode(job))
            except OSError:
                self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        code = self._forks.ended(worker.pid)
        worker.pipe.close()
        self._workers.remove(worker)
        if worker.jobs:
            job = next(iter(worker.jobs.values()))
            self._attempts[job.number] = self._attempts.get(job.number, 0) + 1
            if self._attempts[job.number] >= ATTEMPTS:
                raise MethodError(
                    f"client {job.client}, round {job.round}, handler {job.handler!r}: its worker process died "
                    f"{ATTEMPTS} times ({_cause(code)})"
                )
        self._queue.extendleft(reversed(worker.jobs.values()))
        self.replaced += 1
        self._workers.append(self._fork())

    def _fork(self) -> Worker:
        try:
            return self._forks.fork()
        except (OSError, EOFError):  # it was killed, and its workers with it
            if torch.device(self.runner.task.problem.device).type != "cpu" and torch.cuda.is_initialized():
                raise UserError(
                    "the process that forks the workers was killed, and this process has since opened the GPU, so it "
                    "cannot fork new ones: resume the run"
                ) from None
            self._forks.close()
            self._forks = ForkServer(self.runner, self.exchange)
            return self._forks.fork()


def _cause(code: int | None) -> str:
    if code is None:
        return "unknown cause"
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.Signals(-code).name}{': out of memory?' if code == -signal.SIGKILL else ''}"
