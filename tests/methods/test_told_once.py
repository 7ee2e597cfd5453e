"""Lies that have ended runs or ruined models: told once, each is refused by name, and the run ends as without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import CASES
from hostile import LIAR, Lie, outcome, task_of
from torch import Tensor

import fewbytes as fb
from fewbytes.methods import fedcac, fedgen, fedkgf, fedlp, fedma, fedpurin, fusefl, genefl
from fewbytes.methods.fedlps import Pruned
from fewbytes.methods.parts.averaging import Trained
from fewbytes.methods.parts.ccvr import ClassStatistics
from fewbytes.methods.parts.heterogeneous import ClassVectors
from fewbytes.methods.smartidx import Packed, packages
from fewbytes.wire import Masked

WHOLE = task_of("fedavg").problem.first_state()


def every(state: dict[str, Tensor], but: int = 0) -> Masked:
    """All values, but for the first so many of each entry."""
    return Masked.of(state, {n: (torch.arange(v.numel()) >= but).view(v.shape) for n, v in state.items()})


def filled(value: fb.Dense, number: float) -> fb.Dense:
    return fb.Dense({name: torch.full_like(tensor, number) for name, tensor in value.state.items()})


def part(reply: fusefl.Trained, **fields: Any) -> fusefl.Trained:
    return replace(reply, branch=replace(reply.branch, **fields))


def zero(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}


def statistics(block: fb.Dense) -> list[dict[int, fb.Dense]]:
    return [{0: fb.Dense(zero(block.state))}]


ALL = fb.Dense(WHOLE)
OF_ALL_GROUPS = fb.Dense(CASES["fedkgf"].adapted(task_of("fedkgf")).problem.first_state())
REST = {name: value.float() for name, value in WHOLE.items()}
LIES: dict[str, tuple[str, int, type, Callable[[Any], Any], str]] = {
    "no scores": ("genefl", 0, genefl.LearnGene, lambda r: replace(r, scores=[]), "0 scores of 2 layers"),
    "all layers": ("genefl", 1, genefl.LearnGene, lambda r: replace(r, theta=ALL), "unexpected|other entries"),
    "scores of any sum": ("genefl", 0, genefl.LearnGene, lambda r: replace(r, scores=[9.0, 9.0]), "sum of its scores"),
    "a group of all": ("fedkgf", 0, fedkgf.Modules, lambda r: replace(r, theta=OF_ALL_GROUPS), "of its group"),
    "what it did not draw": ("fedlp", 0, fedlp.Kept, lambda r: replace(r, theta=ALL), "other entries"),
    "a mask of all": (
        "fedpurin", 0, fedpurin.Critical, lambda r: replace(r, theta=every(r.theta.dense(), 1)), "fraction tau"
    ),
    "nothing pruned": ("fedlps", 1, Pruned, lambda r: replace(r, theta=every(REST)), "pruning"),
    "more than its density": (
        "smartidx", 0, Packed, lambda r: replace(r, change=packages(r.change.dense(), 1.0, 0)), "important"
    ),
    "counts without end": (
        "fedgen", 0, fedgen.Counts, lambda r: fedgen.Counts(filled(r.counts, (1 << 31) - 1)), "the client has 13"
    ),
    "counts of a classifier": (
        "fedma", 1, fedma.Sent,
        lambda r: replace(r, counts=r.counts and filled(r.counts, (1 << 31) - 1)),
        "the client has 13",
    ),
    "counts of features": (
        "fusefl", 0, ClassStatistics, lambda r: replace(r, counts=filled(r.counts, 1 << 40)), "the client has 13"
    ),
    "means of other sizes": (
        "fusefl", 0, ClassStatistics,
        lambda r: replace(r, means=fb.Dense({"mean": r.means.state["mean"][:, 1:].contiguous()})), "its 'mean' is",
    ),
    "an adaptor with more": (
        "fusefl", 1, fusefl.Trained,
        lambda r: part(r, adaptor=fb.Dense(r.branch.adaptor.state | {"more": torch.ones(1)})), "unexpected",
    ),
    "an adaptor times -30": (
        "fusefl", 1, fusefl.Trained,
        lambda r: part(r, adaptor=fb.Dense({n: -30 * v for n, v in r.branch.adaptor.state.items()})),
        "adaptor is of norm",
    ),
    "statistics nobody asked for": (
        "fusefl", 1, fusefl.Trained, lambda r: replace(r, statistics=statistics(r.branch.block)), "other statistics"
    ),
    "other entries as statistics": (
        "fusefl-moving", 1, fusefl.Trained,
        lambda r: replace(r, statistics=[
            {i: fb.Dense(s.state | {"conv.weight": torch.zeros(4, 1, 3, 3)}) for i, s in of.items()}
            for of in r.statistics
        ]),
        "other statistics",
    ),
    "a class it has not": (
        "fedproto", 0, ClassVectors, lambda r: ClassVectors.of(torch.ones(3, 64), [0, 1, 2]), "class 2"
    ),
    "prototypes without end": (
        "fedktl", 0, ClassVectors, lambda r: ClassVectors.of(-1e5 * r.rows, r.classes), "of norm"
    ),
    "a model far away": (
        "fedavg", 0, Trained,
        lambda r: replace(r, theta=fb.Dense(r.theta.state | {"conv.weight": torch.full((4, 1, 3, 3), -1e5)})),
        "1000 times the",
    ),
    "a variance below zero": (
        "fedavg", 0, Trained,
        lambda r: replace(r, theta=fb.Dense(r.theta.state | {"norm.running_var": -torch.ones(4)})), "variance below 0",
    ),
}  # fmt: skip
"""By name: the case, which of the liar's replies of a class it is, that class, what becomes of the reply, and words
that say why it is refused."""


@pytest.mark.parametrize("lie", LIES)
def test_it_is_refused_and_nothing_of_it_is_left(lie):
    name, turn, kind, change, why = LIES[lie]
    told = Lie(kind, lie, change, turn, True)
    found = outcome(name, told)
    assert not found.raised
    left = [each for row in found.rows for each in row.get("left_out", [])]
    assert {(each["client"], each["outcome"]) for each in left} == {(LIAR, "rejected")}
    assert any(word in each["why"] for each in left for word in why.split("|"))
    assert found.state == outcome(name, told, refused=True).state


def test_a_client_that_said_another_mask_than_it_has_keeps_its_model_and_goes_on():
    """After FedCAC's last round of collaboration it is sent the values outside of the mask that it said."""
    ones = {"norm.bias": torch.ones(4, dtype=torch.bool)}
    told = Lie(fedcac.Marked, "a mask of ones", lambda r: replace(r, mask=fb.Bits(r.mask.bits | ones)), 2, True)
    assert not outcome("fedcac", told).raised
