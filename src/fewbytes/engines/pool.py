"""Worker processes, one torch thread each, replaced when they die: a process that does nothing else forks them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle

import msgspec
import torch

from fewbytes.base.errors import FewbytesError, MethodError, UserError, public_text, raised_at, said
from fewbytes.base.files import ScratchFolder
from fewbytes.engines.frames import shared_memory
from fewbytes.engines.handlers import Done, Job, Runner
from fewbytes.engines.transport import Answer, Transport
from fewbytes.wire import Frame

INLINE_REPLY = 1 << 16  # bytes: shorter frames go through the pipe
ATTEMPTS = 3  # times a job may kill its worker
AHEAD = 4  # jobs for each worker that it is given before the first of them is needed
QUEUED = 2  # jobs a worker holds, so that it never waits for the next one
PATIENCE = 5.0  # seconds that a worker whose pipe has closed may take to end


class Exchange:
    """Frames handed between processes through files in shared memory, mapped once and used again."""

    def __init__(self) -> None:
        self._folder = ScratchFolder("exchange", shared_memory())
        self._maps: dict[str, mmap.mmap] = {}
        self._spare: list[str] = []
        self._made = 0

    def new(self) -> str:
        """The name of a file that nobody uses."""
        if self._spare:
            return self._spare.pop()
        self._made += 1
        return f"{self._folder.path}/{self._made}"

    def free(self, name: str) -> None:
        """Give a name back for the next `new`."""
        self._spare.append(name)

    def write(self, name: str, frame: Frame) -> None:
        """Write a frame at the start of the file, making room first (so that a full disk is an error, not a fault)."""
        mapped = self._maps.get(name)
        if mapped is None or len(mapped) < len(frame):
            with open(name, "ab") as file:
                os.posix_fallocate(file.fileno(), 0, len(frame))
            mapped = self._map(name)
        frame.write_into(memoryview(mapped))

    def put(self, frame: Frame) -> str:
        """Write a frame into a file nobody uses; returns its name."""
        name = self.new()
        self.write(name, frame)
        return name

    def read(self, name: str, length: int) -> memoryview:
        """The first `length` bytes of the file, valid until somebody writes it again."""
        mapped = self._maps.get(name)
        if mapped is None or len(mapped) < length:
            mapped = self._map(name)
        return memoryview(mapped)[:length]

    def _map(self, name: str) -> mmap.mmap:
        with open(name, "r+b") as file:
            self._maps[name] = mmap.mmap(file.fileno(), 0)
        return self._maps[name]

    def close(self) -> None:
        """Unmap the files and remove them."""
        self._maps.clear()
        self._folder.close()


class WorkerPool(Transport):
    """Runs jobs on worker processes. A worker that dies is replaced and its jobs run again from the same states.

    This process may open a GPU once there is a pool, not before.
    """

    def __init__(self, runner: Runner, workers: int) -> None:
        self.runner, self.exchange, self.ahead = runner, Exchange(), AHEAD * workers
        self._mother = _Mother(runner, self.exchange)
        self._queue: deque[Job] = deque()
        self._ended: dict[int, Done] = {}  # what came of jobs, by number, until it is asked for
        self._attempts: dict[int, int] = {}
        self._workers: list[_Worker] = []
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
        return [os.getpid(), *self.pids(), self._mother.pid]

    def close(self) -> None:
        """End the workers, whatever they are doing, and remove the exchange."""
        self._mother.close()
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

    def _replace(self, worker: _Worker) -> None:
        code = self._mother.ended(worker.pid)
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

    def _fork(self) -> _Worker:
        try:
            return self._mother.fork()
        except (OSError, EOFError):  # it was killed, and its workers with it
            if torch.device(self.runner.task.problem.device).type != "cpu" and torch.cuda.is_initialized():
                raise UserError(
                    "the process that forks the workers was killed, and this one has opened the GPU since, so that it "
                    "can fork none that could: the run can be resumed"
                ) from None
            self._mother.close()
            self._mother = _Mother(self.runner, self.exchange)
            return self._mother.fork()


class _Mother:
    """The process that forks workers. It is forked first, and trains nothing: so what it forks, at any time, may open a
    GPU, which no child can of a process that has, and is as this process was when the pool began."""

    def __init__(self, runner: Runner, exchange: Exchange) -> None:
        self._pipe, there = Pipe()
        parent = os.getpid()
        self.pid = forked(lambda: _bear(runner, exchange, there, self._pipe, parent))
        there.close()

    def fork(self) -> _Worker:
        """A worker. Raises OSError or EOFError if the mother is gone."""
        self._pipe.send_bytes(b"fork")
        pid = int(self._pipe.recv_bytes())
        return _Worker(pid, Connection(recv_handle(self._pipe)))

    def ended(self, pid: int) -> int | None:
        """The exit code of a worker that is ending, negative for a signal; None if it does not, or nobody knows."""
        try:
            self._pipe.send_bytes(str(pid).encode())
            told = self._pipe.recv_bytes()
        except (OSError, EOFError):
            return None
        return int(told) if told else None

    def close(self) -> None:
        """End all its workers, and it."""
        with suppress(OSError):  # of a mother that is gone
            self._pipe.send_bytes(b"end")
        self._pipe.close()
        os.waitpid(self.pid, 0)


def forked(run: Callable[[], None]) -> int:
    """The id of a child process that runs this and ends; Ctrl-C is for its parent alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of ours (a progress display) are never used there
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _bear(runner: Runner, exchange: Exchange, pipe: Connection, other: Connection, parent: int) -> None:
    """The mother's life: workers forked and waited for as asked, until it is told to end."""
    _serve(parent)
    other.close()
    workers: set[int] = set()
    me = os.getpid()
    with suppress(EOFError, OSError):  # its parent is gone
        while (asked := pipe.recv_bytes()) != b"end":
            if asked == b"fork":
                here, there = Pipe()  # made where no other pool can inherit the worker's end
                pid = forked(lambda: _work(runner, exchange, there, (pipe, here), me))  # noqa: B023 (called at once)
                there.close()
                workers.add(pid)
                pipe.send_bytes(str(pid).encode())
                send_handle(pipe, here.fileno(), parent)
                here.close()
            else:
                pid = int(asked)
                code = _waited(pid)
                workers.discard(pid)
                pipe.send_bytes(b"" if code is None else str(code).encode())
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    for pid in workers:
        os.waitpid(pid, 0)


def _waited(pid: int) -> int | None:
    """A child's exit code, once it has ended; None, and killed, if it has not in time."""
    until = time.monotonic() + PATIENCE
    with suppress(ChildProcessError):  # that of a mother before
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _serve(parent: int) -> None:
    """A process of the pool ends with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)


def _cause(code: int | None) -> str:
    if code is None:
        return "nobody saw how"
    if code >= 0:
        return f"exit code {code}"
    return f"{signal.Signals(-code).name}{': out of memory?' if code == -signal.SIGKILL else ''}"


class _Worker:
    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self.jobs: dict[int, Job] = {}  # what it was given and has not ended, oldest first


def failed(job: Job, done: Done) -> Exception:
    """The error to raise for a job that did not end well, with its client, round and handler."""
    where = f"client {job.client}, round {job.round}, handler {job.handler!r}"
    if done.error.startswith("OSError: [Errno 28]"):
        return OSError(28, f"No space left on device ({where})")
    if not done.trace:
        return UserError(f"{where}: {done.error}")
    error = MethodError(f"{where}: {done.error}")
    error.add_note(done.trace)
    return error


def attempt(runner: Runner, job: Job, frames: Sequence[memoryview]) -> tuple[Done, Frame | None]:
    """Run a job; what it raises becomes its result."""
    try:
        return runner.run(job, frames)
    except (Exception, SystemExit) as error:  # whatever a handler raises is reported with its client and round
        return unable(job, error), None


def unable(job: Job, error: BaseException) -> Done:
    """The result of a job that raised an error: its class, unless it is one of ours, its words, in one line, and where
    in a handler's code it was raised; and what a server is told of it."""
    text = str(error) if isinstance(error, FewbytesError) else said(error)
    trace = "" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    line = text.replace("\n", " ") or type(error).__name__
    where = raised_at(error, own_code=True) if trace else ""
    return Done(job.number, error=f"{line} ({where})" if where else line, trace=trace, public=public_text(error))


def _work(runner: Runner, exchange: Exchange, pipe: Connection, others: Sequence[Connection], parent: int) -> None:
    """A worker's life: jobs in, results out, until the pipe closes."""
    _serve(parent)
    keep_memory()
    for other in others:
        other.close()
    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            job = msgspec.msgpack.decode(pipe.recv_bytes(), type=Job)
        except (EOFError, OSError):
            return
        done, frame = attempt(runner, job, [exchange.read(part.at, part.length) for part in job.parts])
        if frame is not None:
            if len(frame) <= INLINE_REPLY:
                done.reply = bytes(frame)
            else:
                try:
                    exchange.write(job.reply_to, frame)
                except OSError as error:
                    done = Done(job.number, error=f"OSError: {error}")
                done.length = len(frame)
        try:
            pipe.send_bytes(msgspec.msgpack.encode(done))
        except OSError:  # nobody is there
            return


def keep_memory() -> None:
    """Keep what is freed: each training step asks for the same memory again (10 % of the time of ResNet-8)."""
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallopt"):  # the GNU C library
        trim_threshold, mmap_threshold = -1, -3
        allocator.mallopt(trim_threshold, 1 << 30)
        allocator.mallopt(mmap_threshold, 1 << 30)


def die_with_parent(parent: int) -> None:
    """Have the system end this process when its parent dies, even by kill -9 (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
