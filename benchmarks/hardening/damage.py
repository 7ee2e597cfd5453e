"""Whether a run goes on rightly, or says what is damaged, after one byte of any file of its folder has changed."""

from __future__ import annotations

import logging
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from durability import digest, in_a_folder
from figures import Figure

import fewbytes as fb
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.run_folders import resumed
from fewbytes.flower.allowance import Allows
from fewbytes.flower.node import Node
from fewbytes.report import read_runs, write_report

SETTINGS: dict[str, Any] = {
    "method": "fedpurin", "dataset": "digits", "samples": "40/20", "clients": 3, "rounds": 4, "evaluate_every": 1,
    "workers": 1, "parameters": {"epochs": 1, "batch": 20},
}  # fmt: skip
logging.disable(logging.WARNING)


class Interrupt(fb.Watcher):
    """Ends a run after a round, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def scored(self, row: dict[str, Any]) -> None:
        if row["round"] == self.after:
            raise KeyboardInterrupt


@in_a_folder
def flipped(folder: Path, times: int) -> list[Figure]:
    """So many times one bit of a file of an interrupted run's folder is flipped, of each file in its turn: how many end
    as the uninterrupted run or are refused in words, and of how many folders the report is written or refused so."""
    wanted = _gone_on(_begun(folder / "whole", 2))
    half = _begun(folder / "half", 2)
    dice, wrong, unread, names = random.Random(0), [], [], _files(half)
    refused = 0
    for i in range(times):
        place = Path(shutil.copytree(half, folder / "flipped"))
        name = names[i % len(names)]
        _flip(place / name, dice)
        try:
            write_report(read_runs([place]), place / "report.html")
        except fb.UserError:
            pass
        except Exception as error:
            unread.append((name, repr(error)))
        try:
            if _gone_on(place) != wanted:
                wrong.append((name, "another result"))
        except fb.FewbytesError:
            refused += 1
        except Exception as error:
            wrong.append((name, repr(error)))
        shutil.rmtree(place)
    for each in (*wrong, *unread):
        print(*each, file=sys.stderr)
    what = f"one bit of one of {len(names)} files flipped: resumed, equal bit for bit, or refused with a message"
    good = f"{times - len(wrong)} of {times} ({refused} refused)"
    return [
        Figure(what, good, "all", not wrong),
        Figure(
            "its report is written, or the damage is reported", f"{times - len(unread)} of {times}", "all", not unread
        ),
    ]


@in_a_folder
def diary(folder: Path, times: int) -> list[Figure]:
    """So many times one bit of a node's diary of privacy is flipped: how many of them are refused in words."""
    method = fb.FedAvg(epochs=1, batch=8)
    sites = [((torch.randn(40, 6), torch.zeros(40).long()), (torch.randn(5, 6), torch.zeros(5).long()))] * 2
    task = method.adapted(fb.Task.of(lambda: torch.nn.Linear(6, 3), sites))
    made = method.promising(task, "of=samples,epsilon=1,delta=1e-5,clip=1.0", 1)
    allowance = Node(method, made, folder, "run", allows=Allows(holds=0))._allowance
    assert allowance is not None
    allowance.trained(0, bytes(32), made.problem.privacy.spent(40, 1))
    [path] = (folder / ".privacy").glob("*.spent")
    whole, dice, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(times):
        path.write_bytes(whole)
        _flip(path, dice)
        try:
            allowance.spending(40)
        except fb.UserError:
            refused += 1
    figure = f"{refused} of {times}"
    return [
        Figure("one bit of a node's diary of privacy flipped: refused with a message", figure, "all", refused == times)
    ]


def _begun(folder: Path, after: int) -> Path:
    """A run that is interrupted after a round."""
    try:
        PreparedRun(SETTINGS).execute(folder, False, watchers=[Interrupt(after)])
    except KeyboardInterrupt:
        return folder
    raise AssertionError("the run was not interrupted")


def _gone_on(folder: Path) -> str:
    settings = resumed(folder, {})
    PreparedRun(settings).execute(folder, True)
    return digest(folder)


def _files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(str(path.relative_to(folder)) for path in paths)


def _flip(path: Path, dice: random.Random) -> None:
    held = bytearray(path.read_bytes())
    held[dice.randrange(len(held))] ^= 1 << dice.randrange(8)
    path.write_bytes(held)
