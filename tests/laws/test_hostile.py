"""A client that lies, of any method: the run goes on as without its reply. All lies with FEWBYTES_LONG=1."""

from __future__ import annotations

import os
import random
import typing

import pytest
from cases import CASES
from hostile import LIAR, lies_of, outcome

import fewbytes as fb
from fewbytes.base.ranges import PART

EACH = None if os.environ.get("FEWBYTES_LONG") else 1
"""How many lies of a case are told."""
HONEST = {"mask", "counts", "scores", "classes", "indices", "values", "levels", "signs", "patterns", "which", "vectors"}
"""Fields whose numbers may be anything their type holds: a lie there is one that nobody can tell from the truth."""


@pytest.mark.parametrize("name", CASES)
def test_no_reply_ends_a_run(name):
    lies = lies_of(name)
    if not lies:
        return  # it replies nothing
    without = outcome(name, None, policy=fb.Policy(exclude=str(LIAR)))
    assert not without.raised
    for lie in random.Random(name).sample(lies, min(EACH or len(lies), len(lies))):
        told = outcome(name, lie)
        assert not told.raised, lie
        left_out = [left for row in told.rows for left in row.get("left_out", []) if left["client"] == LIAR]
        refused = [left for left in left_out if left["outcome"] != "surplus"]  # at work when the last round ended
        assert all(left["outcome"] in ("rejected", "excluded") for left in refused)
        if not refused and told.state not in (without.state, outcome(name, None).state):
            assert set(lie.what.split()) & HONEST or leaves_out(lie), lie


def leaves_out(lie):
    """Whether the lie is to say nothing of entries that its type lets a client leave out."""
    kind = typing.get_type_hints(lie.kind, include_extras=True)[lie.what.split()[0]]
    return lie.what.endswith(("an entry missing", "no entry")) and PART in getattr(kind, "__metadata__", ())


def test_lies_of_models_leave_the_model_as_without_the_liar():
    """Whatever FedAvg's client says in place of its model or its number of samples."""
    without = outcome("fedavg", None, policy=fb.Policy(exclude=str(LIAR))).state
    for lie in lies_of("fedavg"):
        told = outcome("fedavg", lie)
        assert told.state == without, lie
        assert {left["client"] for row in told.rows for left in row["left_out"]} == {LIAR}
