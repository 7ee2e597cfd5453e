"""The updating line of a run without a watcher."""

from __future__ import annotations

import io
import itertools
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import tiny_task

import fewbytes as fb
from fewbytes.running.line import Line, in_notebook, line_for
from fewbytes.running.watcher import Watcher

SCRIPT = """
import fewbytes as fb, torch
if __name__ == "__main__":
    x, y = torch.eye(4), torch.arange(4)
    task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))], test=(x, y))
    fb.run(fb.FedAvg(), task, rounds=3, workers=1)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_neither_a_terminal_nor_a_notebook_is_quiet(capsys):
    fb.run(fb.FedAvg(), tiny_task(seed=1), rounds=1, workers=1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_one_line(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    mine, its = pty.openpty()
    done = subprocess.Popen([sys.executable, tmp_path / "script.py"], stderr=its)
    os.close(its)
    text = b""
    try:
        while part := os.read(mine, 4096):
            text += part
    except OSError:  # a closed terminal ends so
        pass
    os.close(mine)
    assert done.wait() == 0
    assert text.count(b"\n") == 1
    assert text.endswith(b"\r\n")
    assert b"fedavg: round 3/3  global" in text


@pytest.mark.parametrize("width", [12, 40, 200])
def test_the_line_fits_and_leaves_nothing_of_an_earlier_one(monkeypatch, width):
    monkeypatch.setattr(sys, "stderr", written := Terminal())
    fb.run(fb.FedAvg(), tiny_task(seed=1), rounds=3, workers=1, watcher=Line("fedavg", "global", width))
    lines = written.getvalue().rstrip("\n").split("\r")[1:]
    assert max(map(len, lines)) <= width
    assert all(len(line) >= len(before.rstrip()) for before, line in itertools.pairwise(lines))
    assert lines[-1].startswith("fedavg: round 3/3"[:width])


def test_a_notebook_is_told_by_its_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))
    assert in_notebook()
    assert isinstance(line_for("fedavg", "global"), Line)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()
    assert type(line_for("fedavg", "global")) is Watcher
