"""A node with max-drift takes honest runs of the methods that it can judge, and says of the others that it cannot."""

from __future__ import annotations

import pytest
from cases import CASES, task_of

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from flower_grid import CLIENTS, MemoryGrid, run

from fewbytes.core.method import handlers_of
from fewbytes.core.trust import check_drift
from fewbytes.flower.apps import client_app

MOST = 0.9
NOT_JUDGED = {
    "fedcac", "feddistill", "fedgen", "fedgh", "fedkd", "fedkgf", "fedktl", "fedlps", "fedma", "fedpm", "fedproto",
    "fedpurin", "fml", "fusefl", "genefl", "lg_fedavg", "scaffold",
}  # fmt: skip
"""Methods that send numbers which are not a model for further training."""


def grid_of(name, folder, drift):
    grid = MemoryGrid(client_app(CASES[name], task_of(name), folder / "nodes"), CLIENTS)
    grid.config = {"max-drift": drift}
    return grid


@pytest.mark.parametrize("name", CASES)
def test_an_honest_run_ends_well_or_is_told_that_its_messages_cannot_be_judged(name, tmp_path):
    def go():
        return run(name, tmp_path / "run", grid=grid_of(name, tmp_path, MOST), rounds=3)[0]

    if name.partition("-")[0] in NOT_JUDGED:
        with pytest.raises(fb.FewbytesError, match=r"max-drift .*cannot judge"):
            go()
    else:
        assert go().summary["status"] == "done"


JUDGED = sorted(
    (name, handler.name)
    for name, method in CASES.items()
    for handler in handlers_of(type(method))
    if handler.message is not None and name.partition("-")[0] not in NOT_JUDGED
)


@pytest.mark.parametrize(("name", "handler"), JUDGED)
def test_a_first_layer_that_is_turned_is_refused_whichever_judged_method_sends_it(name, handler):
    kind = next(each.message for each in handlers_of(type(CASES[name])) if each.name == handler)
    problem = CASES[name].adapted(task_of(name)).problem
    first = problem.first_state(0)
    layer = next(key for key, value in first.items() if value.ndim >= 2)
    check_drift(problem, 0, kind(fb.Dense(first)), MOST)
    with pytest.raises(fb.MethodError, match=r"0\.9"):
        check_drift(problem, 0, kind(fb.Dense(first | {layer: -first[layer]})), MOST)


@pytest.mark.parametrize("drift", ["nan", float("nan"), -1, "-inf"])
def test_what_no_distance_can_be_turns_nothing_off(drift, tmp_path):
    with pytest.raises(fb.FewbytesError, match="are numbers"):
        run("fedavg", tmp_path / "run", grid=grid_of("fedavg", tmp_path, drift), rounds=1)


@pytest.mark.parametrize("runs", ["inf", float("inf"), "many"])
def test_what_no_number_of_runs_can_be_is_refused(runs, tmp_path):
    grid = MemoryGrid(client_app(CASES["fedavg"], task_of("fedavg"), tmp_path), 4)
    grid.config = {"max-runs": runs}
    with pytest.raises(fb.FewbytesError, match="are numbers"):
        run("fedavg", tmp_path / "run", grid=grid, rounds=1)
