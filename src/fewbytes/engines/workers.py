"""Worker processes, one torch thread each, and the process that only forks them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import msgspec
import torch

from fewbytes.engines.exchange import Exchange
from fewbytes.engines.handlers import Done, Job, Runner
from fewbytes.engines.results import attempt

INLINE_REPLY = 1 << 16  # bytes: shorter frames go through the pipe
PATIENCE = 5.0  # seconds that a worker whose pipe has closed may take to end


class Worker:
    """A worker process, the pipe to it, and its jobs."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self.jobs: dict[int, Job] = {}  # unfinished jobs, oldest first


class ForkServer:
    """The process that forks workers. It is forked first and never opens a GPU, so that its workers can, however late
    they are forked; they inherit this process's state as of the pool's start."""

    def __init__(self, runner: Runner, exchange: Exchange) -> None:
        self._pipe, there = Pipe()
        parent = os.getpid()
        self.pid = forked(lambda: _serve_forks(runner, exchange, there, self._pipe, parent))
        there.close()

    def fork(self) -> Worker:
        """A worker. Raises OSError or EOFError if the fork server is gone."""
        self._pipe.send_bytes(b"fork")
        pid = int(self._pipe.recv_bytes())
        return Worker(pid, Connection(recv_handle(self._pipe)))

    def ended(self, pid: int) -> int | None:
        """The exit code of a worker that is ending, negative for a signal; None if it does not end or is unknown."""
        try:
            self._pipe.send_bytes(str(pid).encode())
            code = self._pipe.recv_bytes()
        except (OSError, EOFError):
            return None
        return int(code) if code else None

    def close(self) -> None:
        """End the fork server and all its workers."""
        with suppress(OSError):  # the fork server has died
            self._pipe.send_bytes(b"end")
        self._pipe.close()
        os.waitpid(self.pid, 0)


def forked(run: Callable[[], None]) -> int:
    """Fork a child process that calls `run` and ends; returns its id. The child ignores Ctrl-C."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child never uses our threads (a progress display)
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


def _serve_forks(runner: Runner, exchange: Exchange, pipe: Connection, other: Connection, parent: int) -> None:
    """The fork server's loop: forks workers and waits for their ends on request, until it is asked to end."""
    _end_with(parent)
    other.close()
    workers: set[int] = set()
    me = os.getpid()
    with suppress(EOFError, OSError):  # the parent has died
        while (asked := pipe.recv_bytes()) != b"end":
            if asked == b"fork":
                here, there = Pipe()  # created here, where no other pool can inherit the worker's end
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
    """A child's exit code; None if it did not end within PATIENCE and was killed."""
    until = time.monotonic() + PATIENCE
    with suppress(ChildProcessError):  # a child of an earlier fork server
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _end_with(parent: int) -> None:
    """End this process with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(parent)


def _work(runner: Runner, exchange: Exchange, pipe: Connection, others: Sequence[Connection], parent: int) -> None:
    """A worker's loop: jobs in, results out, until the pipe closes."""
    _end_with(parent)
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
        except OSError:  # the parent has died
            return


def keep_memory() -> None:
    """Keep freed memory in the process: each training step needs the same again (10 % of ResNet-8's time)."""
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
