"""The same results whatever runs a method: any number of worker processes, none, or Flower."""

from __future__ import annotations

import sys

import pytest
from cases import CASES, task_of
from runs import ROUNDS, fingerprint

import fewbytes as fb


@pytest.mark.parametrize("name", CASES)
def test_without_worker_processes_it_is_the_same(name, uninterrupted, tmp_path, monkeypatch):
    import sklearn.cluster  # noqa: F401 (what it imports asks for the platform)

    monkeypatch.setattr(sys, "platform", "elsewhere")  # where processes cannot be forked, handlers run right here
    fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=tmp_path / "run")
    assert fingerprint(tmp_path / "run") == uninterrupted(name)
