"""Every method runs from the command line with no options but few rounds, and prints what it has picked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from commands import ended
from runs import PATIENCE

import fewbytes as fb

LEAST = {"dense": 0.5, "coboosting": 0.7, "feddafl": 0.5, "fedma": 0.5}
"""The accuracy that quick terms of servers that distil or match reach, far above guessing (0.1)."""


def holds(name: str, code: int, printed: str, errors: str) -> None:
    assert code == 0, errors
    result = json.loads(printed)
    assert result["status"] == "done"
    assert f"{name} uses model {result['model']}" in " ".join(errors.split())
    assert LEAST.get(name, 0) < result["score"]["final"] <= 1


@pytest.mark.parametrize("name", fb.METHODS)
def test_it_runs(name, tmp_path, monkeypatch, capsys):
    holds(name, *ended(capsys, monkeypatch, tmp_path, "run", name, "--rounds", "2", "--json"))


@pytest.mark.parametrize("method", ["fedavg", "fedpurin"])
def test_it_runs_in_a_process_of_its_own(method, tmp_path):
    command = [sys.executable, "-m", "fewbytes", "run", method, "--rounds", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    holds(method, done.returncode, done.stdout, done.stderr)
