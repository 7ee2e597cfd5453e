"""A client that lies once, of any method: the run goes on, is resumed, and ends as without that reply. All lies with
FEWBYTES_LONG=1."""

from __future__ import annotations

import os
import random

import pytest
from cases import CASES
from hostile import lies_of, outcome

EACH = None if os.environ.get("FEWBYTES_LONG") else 1
"""How many lies of a case are told."""


@pytest.mark.parametrize("name", CASES)
def test_no_reply_ends_a_run(name):
    for lie in lies_of(name, random.Random(name), EACH):
        told = outcome(name, lie)
        assert not told.raised, lie
        if told.refused:
            assert told.state == outcome(name, lie, refused=True).state, lie
        else:
            assert not lie.shape or told.state == outcome(name).state, lie
