"""A first layer made for it reads images off, more in clear than in a sum; a node refuses it by its distance."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from imprints import hidden
from runs import configured

import fewbytes as fb
from fewbytes.analysis.imprint import imprint, imprint_table, imprinted_model
from fewbytes.analysis.settings import Imprinting, attack_of
from fewbytes.base.state import state_of
from fewbytes.core.trust import check_drift, drift
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.methods.parts.averaging import Model
from fewbytes.running.run import Run

SETTINGS = {
    "dataset": "digits", "part": 0.1, "clients": 4, "partition": "iid", "rounds": 3, "model": "mlp",
    "parameters": {"epochs": 1, "batch": 16, "lr": 0.05},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return configured(tmp_path_factory.mktemp("imprint") / "run", "fedavg", **SETTINGS)


def test_images_come_back_in_clear_fewer_from_a_sum_and_the_control_succeeds(run):
    result = imprint(run)
    assert json.loads((run / "imprint.json").read_text()) == result
    assert result["control"] >= 0.3 * result["control_images"]
    assert result["in_clear"] >= 0.2 * result["images"]
    assert 0 < result["in_a_sum"] < result["in_clear"]
    assert "the sum of all" in [str(cell) for cell in imprint_table(result).columns[0].cells]


def test_trained_honestly_a_first_layer_stays_near_and_one_made_for_it_does_not(run):
    experiment = experiment_of(run)
    task = find(experiment).task
    trained = fb.run(experiment.build_method(), task, rounds=15, evaluate_every=15, workers=1, save_models=False)
    first, _ = imprinted_model(task)
    near, far = drift(task.problem, 0, state_of(trained.global_model)), drift(task.problem, 0, first)
    assert near < 0.9 < far
    check_drift(task.problem, 0, Model(fb.Dense(state_of(trained.global_model))), 0.9)
    check_drift(task.problem, 0, None, 0.9)
    assert drift(task.problem, 0, hidden(task, first)) > 0.9
    for state in (
        first,
        hidden(task, first),
        {n: v * torch.nan for n, v in first.items()},
        {n: v[:1] for n, v in first.items()},
    ):
        with pytest.raises(fb.MethodError, match=r"0\.9 .*max-drift"):
            check_drift(task.problem, 0, Model(fb.Dense(state)), 0.9)


def test_a_node_refuses_a_model_whose_first_layer_is_made_for_it(run, tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import CLIENTS, Exchange, MemoryGrid

    from fewbytes.flower.apps import client_app, serve_run
    from fewbytes.running.settings import Settings

    experiment = experiment_of(run)
    method, task = experiment.build_method(), find(experiment).task
    grid = MemoryGrid(client_app(method, task, tmp_path / "nodes"), CLIENTS)
    grid.config = {"max-drift": "0.9"}
    policy = fb.Policy(round_timeout=2, connect_timeout=2, retries=0)
    how = Settings(rounds=1, out=tmp_path / "honest")
    assert serve_run(grid, Run.of(method, task, how, policy), exchange=Exchange(poll=0.001)).summary["status"] == "done"
    hostile = Settings(rounds=1, out=tmp_path / "hostile")

    class Hostile(type(method)):
        """Sends a model whose first layer reads images off, and says that it is what its nodes run."""

        def start(self, state, net):
            state.theta = imprinted_model(task)[0]

        def __repr__(self):
            return repr(method)

    hostile_method = Hostile(**{f.name: getattr(method, f.name) for f in dataclasses.fields(method)})
    with pytest.raises(fb.FewbytesError, match="max-drift"):
        serve_run(grid, Run.of(hostile_method, task, hostile, policy), exchange=Exchange(poll=0.001))
    grid.config = {"max-drift": "much"}
    with pytest.raises(fb.FewbytesError, match="are numbers"):
        serve_run(
            grid, Run.of(method, task, Settings(rounds=1, out=tmp_path / "x"), policy), exchange=Exchange(poll=0.001)
        )


def test_what_it_is_not_for_is_said(run, tmp_path):
    other = configured(tmp_path / "run", "fedavg", **SETTINGS | {"model": "resnet8:width=4", "rounds": 1})
    with pytest.raises(fb.UserError, match="two Linear layers"):
        imprint(other)
    assert isinstance(attack_of({"imprint": True, "clients": 3}), Imprinting)
    with pytest.raises(fb.UserError, match="one attack"):
        attack_of({"imprint": True, "poison": "scale"})
    with pytest.raises(fb.UserError, match="not a setting of imprinted first layer"):
        attack_of({"imprint": True, "noise": 0.1})
