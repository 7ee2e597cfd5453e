"""Every method learns its case: its score is far above what guessing one of three classes gets."""

from __future__ import annotations

import pytest
from cases import LEARNING, task_of
from runs import ROUNDS

import fewbytes as fb


@pytest.mark.parametrize("name", LEARNING)
def test_every_method_learns_its_case(name, reference):
    method, task = LEARNING[name], task_of(name)
    result = fb.run(method, task, rounds=ROUNDS, workers=1) if method else reference(name).result
    assert result.summary["score"]["final"] >= 0.75
