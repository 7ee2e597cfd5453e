"""The local engine: runs clients' handlers in worker processes, or in this process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fewbytes.base.cores import available_cores
from fewbytes.core.problem import Id
from fewbytes.core.speeds import Speeds
from fewbytes.core.task import Task
from fewbytes.engines.dispatcher import Dispatcher
from fewbytes.engines.engine import Engine
from fewbytes.engines.handlers import Job, Runner
from fewbytes.engines.pool import WorkerPool
from fewbytes.engines.results import attempt, failed
from fewbytes.engines.roster import Roster
from fewbytes.engines.store import ClientStore
from fewbytes.engines.terms import Origin, Terms
from fewbytes.engines.transport import Answer, Sites, Transport


@contextmanager
def local_engine(terms: Terms, origin: Origin | None = None, workers: int | None = None) -> Iterator[Engine]:
    """An engine that sends payloads as frames between this process and its workers; every counted byte is really sent.

    `workers`: number of processes (default: one per core). Handlers run in this process where processes cannot be
    forked safely, and on a GPU unless `workers` is given and this process has not opened the GPU. By default, each
    client takes one second of a simulated clock.
    """
    problem, origin = terms.task.problem, origin or Origin.start(terms.task.problem)
    if terms.seconds is None:
        terms = replace(terms, seconds=Speeds().seconds(len(problem.clients), problem.seed))
    store = ClientStore(terms.states)
    for client, number in origin.versions.items():
        if number:
            store.check(client, number)
    runner = Runner(terms.method, terms.task, store, terms.coded)
    with one_thread():
        pool = _pool(runner, terms.task, workers)
        try:
            transport = Here(runner) if pool is None else pool
            roster = Roster(terms.task, terms.policy, origin)
            dispatcher = Dispatcher(transport, roster, terms, origin)
            yield Engine(terms, dispatcher, LocalSites(runner, roster), origin)
        finally:
            if pool is not None:
                pool.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, so that results do not depend on the machine's core count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pool(runner: Runner, task: Task, workers: int | None) -> WorkerPool | None:
    """A worker pool, or None where handlers run in this process."""
    problem = task.problem
    for client in problem.clients:
        problem.layout(client)  # cached here, for the workers to inherit
    on_gpu = torch.device(problem.device).type != "cpu"
    forked = sys.platform == "linux" and (not on_gpu or (workers or 1) > 1)
    if forked and on_gpu and torch.cuda.is_initialized():
        warnings.warn("no workers: this process has opened the GPU before the run, and trains there", stacklevel=4)
        forked = False
    return WorkerPool(runner, min(workers or available_cores(), len(problem.clients))) if forked else None


class Here(Transport):
    """Runs jobs in this process, each when its answer is needed."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._frames: dict[int, Sequence[bytes]] = {}  # of jobs that have not run yet

    def submit(self, job: Job, frames: Sequence[bytes], call: int) -> bool:
        """Keep the job until its answer is needed."""
        self._frames[job.number] = frames
        return True

    def poll(self, jobs: Sequence[Job], most: int) -> dict[int, Answer]:
        """Run the first job. Raises the error of `failed` if it fails."""
        job = jobs[0]
        done, reply = attempt(self._runner, job, [memoryview(frame) for frame in self._frames.pop(job.number)])
        if done.error:
            raise failed(job, done)
        return {job.number: Answer("answered", done=done, frame=memoryview(b"" if reply is None else bytes(reply)))}

    def end(self, jobs: Sequence[Job]) -> None:
        """Cancel the jobs that have not run."""
        for job in jobs:
            self._frames.pop(job.number, None)


class LocalSites(Sites):
    """The sites of clients in this process and its workers, which are always present."""

    def __init__(self, runner: Runner, roster: Roster) -> None:
        self._runner, self._roster, self._store = runner, roster, runner.store

    def places(self, before: Mapping[Id, int]) -> list[Path]:
        """The new state files."""
        return self._store.places(self._roster.versions.items() - before.items())

    def keep(self, kept: Sequence[Mapping[Id, int]], busy: Collection[Id]) -> None:
        """Remove other states, except those of busy clients, which a worker may be writing."""
        self._store.keep_only(*kept, busy=busy)

    def save_models(self, folder: Path, about: dict[str, Any], t: int) -> None:
        """Save the models from this process."""
        for client in self._roster.ever():
            self._runner.save_model(client, self._roster.versions.get(client, 0), t, folder, about)
