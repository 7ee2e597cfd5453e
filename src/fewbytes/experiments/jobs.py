"""Does the runs of a comparison, one after another or several at the same time in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec

from fewbytes.base.errors import error_text
from fewbytes.engines.workers import die_with_parent
from fewbytes.experiments.display import console, note
from fewbytes.running.signals import terminating

POLL = 2.0  # seconds between looks at runs of other processes


class Job(msgspec.Struct, frozen=True):
    """A run of a comparison: the method, the seed (None: that of the settings), tuned parameters, the place in the
    comparison's folder, and the place where an equal run may be. `trial`: others wait for its result."""

    method: str
    seed: int | None
    parameters: dict[str, Any]
    place: str
    like: str = ""
    trial: bool = False

    def __str__(self) -> str:
        values = [f"{key}={value}" for key, value in self.parameters.items()]
        return " ".join([self.method, *values, *([] if self.seed is None else [f"seed {self.seed}"])])


class Outcome(msgspec.Struct):
    """How a job ended: done, failed, left out (before it began), or taken by another process; the reason, and notes."""

    status: str
    why: str = ""
    notes: list[str] = []


Do = Callable[[Job, str], Outcome]
"""Does a job, given its position as in `2 of 3`. Processes get a picklable one."""
Chain = Iterator[list[Job]]
"""The jobs of a method, in batches: the next batch is taken when all jobs of the last have ended."""


def work(chains: Sequence[Chain], total: int, here: Do, there: tuple[Do, int], outcomes: dict[str, Outcome]) -> None:
    """Do the jobs of all chains, and add their outcomes by place to `outcomes`.

    `total`: their number. `here`: does a job in this process. `there`: does it in other processes, and their number
    (1: all jobs run here). Jobs that another process has taken are waited for if they are trials, else left to it.
    """
    waiting: dict[int, set[str]] = {number: set() for number in range(len(chains))}
    ready: list[Job] = []
    taken: list[Job] = []
    started: set[str] = set()
    with _workers(here, *there) as workers:
        while True:
            for number in list(waiting):
                while number in waiting and waiting[number] <= outcomes.keys():
                    batch = next(chains[number], None)
                    if batch is None:
                        del waiting[number]
                    else:
                        waiting[number] = {job.place for job in batch}
                        ready += batch
            ready.sort(key=lambda job: (not job.trial, job.seed or 0))  # data are read once for runs of one seed
            while ready and workers.free:
                job = ready.pop(0)
                started.add(job.place)
                workers.begin(job, f"{len(started)} of {total}")
            if workers.busy:
                for job, outcome in workers.ended():
                    if outcome.status == "taken":
                        taken.append(job)
                    else:
                        _report(job, outcome, outcomes, "" if there[1] == 1 else f"{len(outcomes) + 1} of {total}")
                        outcomes[job.place] = outcome
            elif taken:
                if not any(job.trial for job in taken):
                    outcomes |= {job.place: Outcome("taken") for job in taken}
                    taken = []
                    continue
                time.sleep(POLL)
                ready, taken = taken, []
            elif not ready and not waiting:
                return


def _report(job: Job, outcome: Outcome, before: dict[str, Outcome], position: str) -> None:
    """Print how a job ended: failures, the same reason once, and (given a position) what is done elsewhere."""
    for text in outcome.notes:
        note(f"{job}: {text}")
    if outcome.status == "done":
        if position:
            console.print(f"{job}: done ({position})", soft_wrap=True)
    elif not any(each.why == outcome.why and place.startswith(job.method) for place, each in before.items()):
        note(f"{job} {'failed' if outcome.status == 'failed' else 'is left out'}: {outcome.why}")


# Where jobs are done --------------------------------------------------------------------------------------------------


class _Here:
    """Does jobs in this process."""

    def __init__(self, do: Do) -> None:
        self._do, self._ended = do, list[tuple[Job, Outcome]]()

    @property
    def free(self) -> bool:
        return not self._ended

    @property
    def busy(self) -> bool:
        return bool(self._ended)

    def begin(self, job: Job, position: str) -> None:
        self._ended.append((job, self._do(job, position)))

    def ended(self) -> list[tuple[Job, Outcome]]:
        found, self._ended = self._ended, []
        return found


class _Processes:
    """Does jobs in processes, started when they are needed and replaced when they die."""

    def __init__(self, do: Do, number: int) -> None:
        self._do, self._number = do, number
        self._idle: list[tuple[Connection, BaseProcess]] = []
        self._running: dict[Connection, tuple[Job, BaseProcess]] = {}

    @property
    def free(self) -> bool:
        return len(self._running) < self._number

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def begin(self, job: Job, position: str) -> None:
        pipe, process = self._idle.pop() if self._idle else self._start()
        pipe.send_bytes(msgspec.msgpack.encode((job, position)))
        self._running[pipe] = (job, process)

    def ended(self) -> list[tuple[Job, Outcome]]:
        found = []
        for pipe in wait(list(self._running)):
            job, process = self._running.pop(pipe)  # type: ignore[call-overload]  # all of them are connections
            try:
                outcome = msgspec.msgpack.decode(pipe.recv_bytes(), type=Outcome)  # type: ignore[union-attr]
                self._idle.append((pipe, process))  # type: ignore[arg-type]
            except (EOFError, OSError):
                process.join()
                hint = ": out of memory?" if process.exitcode == -signal.SIGKILL else ""
                outcome = Outcome("failed", f"its process died (exit code {process.exitcode}{hint})")
            found.append((job, outcome))
        return found

    def close(self) -> None:
        """End the processes; runs under way are interrupted, and can be resumed."""
        processes = [process for _, process in (*self._idle, *self._running.values())]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()

    def _start(self) -> tuple[Connection, BaseProcess]:
        context = multiprocessing.get_context("spawn")  # this process has used torch's threads, which a fork lacks
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._do, os.getpid()))
        process.start()
        theirs.close()
        return mine, process


@contextmanager
def _workers(here: Do, there: Do, number: int) -> Iterator[_Here | _Processes]:
    if number == 1:
        yield _Here(here)
        return
    processes = _Processes(there, number)
    try:
        with terminating():
            yield processes
    finally:
        processes.close()


def _serve(pipe: Connection, do: Do, parent: int) -> None:
    """A process's loop: jobs in, outcomes out, until the pipe closes or it is terminated, or its parent dies."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent terminates it
    console.quiet = True  # several live lines would overwrite each other
    sys.stdout = sys.stderr  # of models and handlers
    try:
        with terminating():
            while True:
                job, position = msgspec.msgpack.decode(pipe.recv_bytes(), type=tuple[Job, str])
                try:
                    outcome = do(job, position)
                except Exception as error:  # such as a full disk
                    outcome = Outcome("failed", error_text(error))
                pipe.send_bytes(msgspec.msgpack.encode(outcome))
    except (EOFError, OSError, KeyboardInterrupt):
        return
