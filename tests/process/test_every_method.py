"""Every method runs from the command line with no options but few rounds, and says what it has picked."""

from __future__ import annotations

import json

import pytest
from commands import fewbytes

import fewbytes as fb

LEAST = {"dense": 0.5, "coboosting": 0.7, "feddafl": 0.5, "fedma": 0.5}
"""The accuracy that quick terms of servers that distil or match reach, far above guessing (0.1)."""


@pytest.mark.parametrize("name", fb.METHODS)
def test_it_runs(name, tmp_path):
    done = fewbytes("run", name, "--rounds", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "done"
    assert f"{name} takes model {result['model']}" in done.stderr
    assert LEAST.get(name, 0) < result["score"]["final"] <= 1
