"""Whether a run survives a loss of power, kill -9 and a full disk.

Loss of power: a run writes on an ext4 image; at drawn moments the image is copied as the disk holds it, without what
the system still holds in memory. Each copy is mounted and its run gone on with. Kill -9: runs are killed at drawn
moments, in all their processes, and gone on with. Full disk: runs write on a tmpfs that is too small by ever less; it
is made larger, and they are gone on with. Whatever happened, a run ends as the uninterrupted one does, bit for bit.
Loss of power and the full disk need root, to mount.
"""

from __future__ import annotations

import contextlib
import filecmp
import functools
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from figures import Figure
from torch import nn

import fewbytes as fb
from fewbytes.running.checkpoint import Checkpoints
from fewbytes.wire import Parsed

ROUNDS, CLIENTS = 12, 8
MEGABYTES = 48  # of an image
torch.set_num_threads(1)


def work() -> tuple[fb.Method, fb.Task]:
    """FedPURIN, whose clients keep states, on noise; a round takes a tenth of a second."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(50, 64, generator=generator) for _ in range(CLIENTS)]
    y = torch.arange(50) % 4
    clients = [((x[:40], y[:40]), (x[40:], y[40:])) for x in drawn]
    build = lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))  # noqa: E731
    return fb.FedPURIN(epochs=2, lr=0.05, batch=20), fb.Task.of(build, clients)


def run(folder: Path, resume: bool = False, watcher: fb.Watcher | None = None) -> str:
    """Run, or go on; a digest of all that came of it."""
    method, task = work()
    watcher = watcher or _Quiet()
    fb.run(method, task, rounds=ROUNDS, out=folder, workers=1, evaluate_every=4, resume=resume, watcher=watcher)
    return digest(folder)


def digest(folder: Path) -> str:
    """SHA-256 of the server's state, the ledger, the clients' states and the models of a run that is done."""
    kept = Checkpoints(folder)
    last = kept.read(kept.rounds()[-1])
    states = [f"checkpoint/clients/{client}-{version}.state" for client, version in last.named().items()]
    models = sorted(f"models/{path.name}" for path in (folder / "models").iterdir())
    parts = [(folder / name).read_bytes() for name in [*states, *models]]
    return hashlib.sha256(b"".join([last.server, kept.ledger.read(last.ledger), *parts])).hexdigest()


class _Quiet(fb.Watcher):
    def note(self, text: str) -> None: ...


class _Tell(_Quiet):
    """Says each round that is done."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def scored(self, row: dict[str, Any]) -> None:
        self.pipe.send(row["round"])


def _begin(folder: Path, pipe: Any) -> None:
    os.setsid()  # its workers are its group
    try:
        run(folder, watcher=_Tell(pipe))
    except (fb.FewbytesError, OSError):
        os._exit(1)


@contextlib.contextmanager
def begun(folder: Path) -> Iterator[tuple[Any, Any]]:
    """A process that runs in a folder, and what tells its rounds; it is gone afterwards."""
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_begin, args=(folder, there))
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        with contextlib.suppress(ProcessLookupError):
            signalled(process.pid, signal.SIGKILL)
        process.join()
        here.close()


def told(pipe: Any) -> int:
    """The last round a run has told of; 0: none yet."""
    last = 0
    with contextlib.suppress(EOFError):
        while pipe.poll():
            last = pipe.recv()
    return last


@contextlib.contextmanager
def mounted(at: Path, *arguments: str) -> Iterator[Path]:
    """A file system, by the arguments of `mount`."""
    at.mkdir(exist_ok=True)
    command = ["mount", *arguments, str(at)]
    for _ in range(20):  # loop devices are few, and free only once nobody holds what was on them
        if not subprocess.run(command, capture_output=True).returncode:
            break
        time.sleep(0.5)
    else:
        subprocess.run(command, check=True, capture_output=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def made_disk(image: Path) -> Path:
    """An empty ext4 file system in a file."""
    with open(image, "wb") as file:
        file.truncate(MEGABYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    return image


def copied_disk(image: Path, to: Path) -> None:
    """The image as the disk holds it at one moment: copied until two copies are equal."""
    for _ in range(100):
        for path in (to, to.with_suffix(".again")):
            subprocess.run(["cp", "--sparse=always", str(image), str(path)], check=True)
        if filecmp.cmp(to, to.with_suffix(".again"), shallow=False):
            break
    to.with_suffix(".again").unlink()


def signalled(group: int, number: int) -> None:
    """Send a process group a signal, and wait until it has stopped or killed all of it."""
    os.killpg(group, number)
    while any(state not in ("TZX" if number == signal.SIGSTOP else "ZX") for state in _states(group)):
        time.sleep(0.001)


def _states(group: int) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/task/*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(") ")[2].split()
            if int(fields[2]) == group:
                yield fields[0]


def can_mount() -> str:
    """Why no file system can be mounted here; empty if one can."""
    if os.geteuid() or not Path("/proc/self/stat").exists():
        return "mounting needs root, on Linux"
    if not shutil.which("mkfs.ext4"):
        return "there is no mkfs.ext4 here"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with mounted(Path(folder) / "disk", "-o", "loop", str(made_disk(Path(folder) / "image"))):
                return ""
        except subprocess.CalledProcessError as error:
            return f"an image cannot be mounted here: {error.stderr.decode().strip()}"


def in_a_folder(measure: Callable[[Path, int], list[Figure]]) -> Callable[[int], list[Figure]]:
    """A measurement in a folder that is gone afterwards."""

    @functools.wraps(measure)
    def measured(count: int) -> list[Figure]:
        with tempfile.TemporaryDirectory() as folder:
            return measure(Path(folder), count)

    return measured


@in_a_folder
def power_loss(folder: Path, images: int) -> list[Figure]:
    """Of so many copies of the disk in mid-run, how many can be gone on with and end as the uninterrupted run."""
    wanted, dice = run(folder / "whole"), random.Random(0)
    copies: list[Path] = []
    while len(copies) < images:
        image = made_disk(folder / "image")
        with mounted(folder / "disk", "-o", "loop", str(image)) as disk, begun(disk / "run") as (process, pipe):
            first = pipe.poll(60) and pipe.recv()  # a run that has not ended a round is begun anew
            while first and process.is_alive() and len(copies) < images:
                time.sleep(dice.uniform(0.0, 0.3))
                signalled(process.pid, signal.SIGSTOP)
                copies.append(folder / f"copy-{len(copies)}")
                copied_disk(image, copies[-1])
                os.killpg(process.pid, signal.SIGCONT)
    good = 0
    for copy in copies:
        with mounted(folder / "disk", "-o", "loop", str(copy)) as disk:
            good += _ends_as(wanted, lambda disk=disk: run(disk / "run", resume=True))
        copy.unlink()
    return [Figure("power lost in mid-run: resumed, equal bit for bit", f"{good} of {images}", "all", good == images)]


def _ends_as(wanted: str, go_on: Callable[[], str]) -> bool:
    try:
        return go_on() == wanted
    except (fb.FewbytesError, OSError) as error:
        print(error, file=sys.stderr)
        return False


@in_a_folder
def kills(folder: Path, times: int) -> list[Figure]:
    """Of so many runs killed in all their processes, how many end, gone on with, as the uninterrupted run; rounds that
    were done again, and seconds until a run was ready to go on, at most."""
    started = time.monotonic()
    wanted = run(folder / "whole")
    long, dice, good, again, ready = time.monotonic() - started, random.Random(1), 0, 0, 0.0
    for i in range(times):
        place = folder / f"killed-{i}"
        with begun(place) as (process, pipe):
            time.sleep(dice.uniform(0.1, long))
            signalled(process.pid, signal.SIGKILL)
            done = told(pipe)
        kept = Checkpoints(place).rounds()
        if not kept:  # it is begun anew
            shutil.rmtree(place, ignore_errors=True)
        else:
            again = max(again, min(done, ROUNDS) - kept[-1])
        went_on = time.monotonic()

        class Ready(_Quiet):
            seconds = 0.0

            def started(self, folder: Path, rounds: int, done: int) -> None:
                self.seconds = time.monotonic() - went_on  # noqa: B023

        watcher = Ready()
        good += _ends_as(wanted, lambda place=place, kept=kept, w=watcher: run(place, bool(kept), w))
        ready = max(ready, watcher.seconds)
        shutil.rmtree(place)
    figure = f"{good} of {times}; {again} reported rounds lost; ready in {ready:.1f} s"
    goal, met = "all; 0 reported rounds lost; ready in 5 s", good == times and not again and ready < 5
    return [Figure("killed (kill -9): resumed, equal bit for bit", figure, goal, met)]


@in_a_folder
def full_disk(folder: Path, sizes: int) -> list[Figure]:
    """Of so many sizes of a disk that are too small for the run, with how many its last checkpoint loads, no file is
    half there, and it ends, on a larger disk, as the uninterrupted run."""
    wanted = run(folder / "whole")
    whole = sum(path.stat().st_blocks * 512 for path in (folder / "whole").rglob("*"))
    good = 0
    for i in range(sizes):
        size = int(whole * (0.1 + 0.75 * i / sizes))
        with mounted(folder / "small", "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as disk:
            place = disk / "run"
            with begun(place) as (process, _):
                process.join()
            full = process.exitcode != 0
            kept = Checkpoints(place).rounds()
            visible = all(_is_whole(path) for path in place.rglob("*.state"))
            if kept:
                Checkpoints(place).read(kept[-1])
            subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
            if not kept:  # it is begun anew
                shutil.rmtree(place, ignore_errors=True)
            good += full and visible and _ends_as(wanted, lambda place=place, kept=kept: run(place, bool(kept)))
    what = "disk full in mid-run: the checkpoint loads, resumed"
    return [Figure(what, f"{good} of {sizes}", "all", good == sizes)]


def _is_whole(path: Path) -> bool:
    try:
        return bool(Parsed(path.read_bytes()))
    except fb.FrameError:
        return False
