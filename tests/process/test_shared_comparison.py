"""Several processes that work on one comparison: each run is done once, a killed process's runs are resumed, and the
results are those of one process, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fewbytes
from runs import PATIENCE, fingerprint, lines, until

ASKED = [
    "compare", "fedavg", "fedprox", "separate", "--dataset", "digits", "--part", "0.3", "--clients", "3",
    "--rounds", "4", "--model", "mlp:hidden=8", "--set", "epochs=1", "--set", "batch=10", "--workers", "1",
    "--seeds", "1,2", "--tune", "lr=0.01,0.2",
]  # fmt: skip


def prints(folder: Path) -> dict[str, dict]:
    """Everything that the runs of a comparison leave, by place."""
    return {
        path.parent.relative_to(folder).as_posix(): fingerprint(path.parent)
        for path in sorted(folder.rglob("result.json"))
    }


def begin(folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fewbytes", *ASKED, "--resume", str(folder), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    mine = [int(child) for child in children.read_text().split()] if children.exists() else []
    return [*mine, *(each for child in mine for each in descendants(child))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "it"
    done = fewbytes(*ASKED, "--resume", folder)
    assert done.returncode == 0, done.stderr
    return prints(folder)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_processes_share_a_folder_and_one_is_ended(whole, end, tmp_path):
    folder = tmp_path / "shared"
    first, second = begin(folder, "--jobs", "2"), begin(folder)
    assert until(lambda: lines(folder, "*/*/rounds.jsonl") > 1 and len(descendants(first.pid)) > 2, every=0.05)
    inside = descendants(first.pid)
    os.kill(first.pid, end)
    first.wait(PATIENCE)
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside), every=0.05), "processes outlived it"
    if end == signal.SIGINT:
        assert first.returncode == 130
        assert f"resume with: fewbytes compare --resume {folder}" in first.stderr.read()
    third = begin(folder, "--jobs", "2")
    for process in (second, third):
        errors = process.communicate(timeout=PATIENCE)[1]
        assert process.returncode == 0, errors
    assert prints(folder) == whole
    first.stderr.close()
    assert (folder / "report.html").exists()
    assert not (folder / "locks").exists()
