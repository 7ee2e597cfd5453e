"""Whether a deployment on this machine survives kill -9 of any of its processes, a loss of power and a full disk.

As `durability.py`, with a SuperLink, the run's server, nodes and the command that started them all: the run ends, gone
on with where need be, as the local one does, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from durability import copied_disk, digest, in_a_folder, made_disk, mounted
from figures import Figure

from fewbytes.flower.children import family_of
from fewbytes.running.checkpoint import Checkpoints

ROUNDS = 16
PATIENCE = 300  # seconds for what must come
ROLES = {"superlink": "SuperLink", "flower.commands": "launcher", "flwr-serverapp": "server", "deploy": "command"}
"""What an argument of a command line is, or ends with, and which process it is; any other is of a node."""
METHOD = ["fedpurin", "--dataset", "digits", "--samples", "100/20", "--clients", "2", "--rounds", str(ROUNDS)]
METHOD += ["--evaluate-every", "1000", "--min-replies", "1", "--set", "epochs=20", "--set", "batch=20"]


def _wanted(folder: Path) -> str:
    """The digest of the local run."""
    command = [sys.executable, "-m", "fewbytes", "run", *METHOD, "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (run,) = folder.iterdir()
    return digest(run)


class Deployment:
    """`fewbytes deploy`, begun below a folder, or gone on with where there is a run."""

    def __init__(self, folder: Path) -> None:
        self.out = folder
        run = self.run()
        what = [*METHOD, "--out", str(folder)] if run is None else ["--resume", str(run)]
        command = [sys.executable, "-m", "fewbytes", "deploy", *what]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def run(self) -> Path | None:
        """Its run's folder, if there is one."""
        return next(iter(sorted(self.out.iterdir())), None)

    def rounds(self) -> int:
        """How many rounds it has written."""
        run = self.run()
        with contextlib.suppress(OSError):
            return len((run / "rounds.jsonl").read_text().splitlines()) if run else 0
        return 0

    def family(self) -> dict[int, str]:
        """The processes of it, each with its role."""
        roles = {}
        for pid, _ in family_of({self.process.pid}):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                ends = tuple(each for each in ROLES if any(part.endswith(each) for part in line))
                roles[pid] = ROLES[ends[0]] if ends else "node"
        return roles

    def kill(self, dice: random.Random) -> str:
        """Kill a drawn one of its processes; its role, or nothing if it has ended."""
        family = self.family()
        if self.process.poll() is not None or not family:
            return ""
        role = dice.choice(sorted(set(family.values())))
        os.kill(dice.choice(sorted(pid for pid, each in family.items() if each == role)), signal.SIGKILL)
        return role

    def advances(self, seconds: float = PATIENCE) -> bool:
        """Wait for one more round; whether it comes, or the command ends, in time."""
        there, until = self.rounds(), time.monotonic() + seconds
        while self.process.poll() is None and self.rounds() <= there:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def end(self, patience: float = PATIENCE) -> str:
        """Wait for its end; what it said last."""
        try:
            return self.process.communicate(timeout=patience)[1]
        except subprocess.TimeoutExpired:
            self.stop()
            return f"it does not end in {patience} s"

    def stop(self) -> None:
        """Kill all of it."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def _ends_as(wanted: str, folder: Path) -> bool:
    """Whether the deployment below a folder ends as wanted, once it is gone on with."""
    deployment = Deployment(folder)
    said, run = deployment.end(), deployment.run()
    good = deployment.process.returncode == 0 and run is not None and digest(run) == wanted
    if not good:
        print(deployment.process.returncode, said[-2000:], file=sys.stderr)
    return good


@in_a_folder
def killed(folder: Path, times: int) -> list[Figure]:
    """So many times a drawn process of a deployment is killed, at drawn moments from its beginning on: how many kills
    it bears, or is gone on with after, and ends as the local run."""
    wanted, dice, done, good = _wanted(folder / "here"), random.Random(0), Counter[str](), 0
    while done.total() < times:
        before, place = done.total(), folder / f"there-{done.total()}"
        place.mkdir()
        deployment = Deployment(place)
        held = deployment.advances()
        while held and done.total() < times and deployment.process.returncode != 0:
            if deployment.process.returncode is not None:
                deployment = Deployment(place)
            if dice.random() < 0.5:  # as it begins, or trains
                time.sleep(dice.uniform(0.0, 10.0))
            else:
                held = deployment.advances()
                time.sleep(dice.uniform(0.0, 1.0))
            if role := deployment.kill(dice):
                done[role] += 1
                held = deployment.advances()
        if not held:
            print(f"it stands still after {role} was killed", file=sys.stderr)
            deployment.stop()
        deployment.end()
        good += (done.total() - before) * (held and _ends_as(wanted, place))
    who = ", ".join(f"{n} of a {role}" for role, n in sorted(done.items()))
    what = f"processes of a deployment killed ({who}): resumed, equal bit for bit"
    return [Figure(what, f"{good} of {times}", "all", good == times)]


@contextlib.contextmanager
def _stopped(deployment: Deployment) -> Iterator[None]:
    """All its processes stand still meanwhile."""
    family = deployment.family()
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@in_a_folder
def power_loss(folder: Path, images: int) -> list[Figure]:
    """Of so many copies of the disk of a deployment in mid-run, how many can be gone on with and end as the local run;
    the disk holds the server's folder and the nodes'."""
    wanted, dice, copies = _wanted(folder / "here"), random.Random(0), list[Path]()
    while len(copies) < images:
        image = made_disk(folder / f"image-{len(copies)}")  # what is left of another may still be written
        with mounted(folder / "disk", "-o", "loop", str(image)) as disk:
            shutil.rmtree(disk / "lost+found")
            deployment = Deployment(disk)
            deployment.advances()
            for _ in range(5):
                time.sleep(dice.uniform(0.0, 1.0))
                if deployment.process.poll() is not None or len(copies) == images:
                    break
                with _stopped(deployment):
                    copies.append(folder / f"copy-{len(copies)}")
                    copied_disk(image, copies[-1])
            deployment.stop()
    good = 0
    for copy in copies:
        with mounted(folder / "disk", "-o", "loop", str(copy)) as disk:
            good += _ends_as(wanted, disk)
        copy.unlink()
    what = "power lost in mid-run of a deployment: resumed, equal bit for bit"
    return [Figure(what, f"{good} of {images}", "all", good == images)]


@in_a_folder
def full_disk(folder: Path, sizes: int) -> list[Figure]:
    """Of so many sizes of a disk that are too small for a deployment, with how many it says so, and ends, on a larger
    disk, as the local run."""
    wanted, good = _wanted(folder / "here"), 0
    (folder / "whole").mkdir()
    assert _ends_as(wanted, folder / "whole")
    whole = sum(path.stat().st_blocks * 512 for path in (folder / "whole").rglob("*"))
    for i in range(sizes):
        size = int(whole * (0.1 + 0.5 * i / sizes))
        with mounted(folder / "small", "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as disk:
            deployment = Deployment(disk)
            said = deployment.end()
            full = deployment.process.returncode not in (0, None) and "No space left" in said
            if not full:
                print(size, whole, deployment.process.returncode, said[-2000:], file=sys.stderr)
            run = deployment.run()
            if run is not None and (kept := Checkpoints(run).rounds()):
                Checkpoints(run).read(kept[-1])
            subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
            good += full and _ends_as(wanted, disk)
    what = "disk full in mid-run of a deployment: reported, the checkpoint loads, resumed"
    return [Figure(what, f"{good} of {sizes}", "all", good == sizes)]
