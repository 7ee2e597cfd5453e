"""Local models' accuracy: of what each learnt from, and of the server's test set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fewbytes as fb
from fewbytes.analysis.local import local_accuracies
from fewbytes.base.errors import UserError
from fewbytes.base.streams import seeded
from fewbytes.data import Split
from fewbytes.data.transforms import stamp_shapes
from fewbytes.experiments.settings import make_experiment, make_method
from fewbytes.experiments.tasks import find
from fewbytes.report import read_runs


def made(folder: Path, method: str) -> tuple[Path, fb.Task]:
    """A run on enlarged digits, whose first client is backdoored."""
    settings = {"method": method, "model": "mlp", "clients": 2, "image_size": 16, "backdoor": 1, "seed": 3}
    few = {"partition": "iid", "samples": "150/20", "parameters": {"epochs": 15, "lr": 0.05, "batch": 20}}
    found = find(make_experiment(settings | few))
    experiment, task = found.experiment, found.task
    fb.run(
        make_method(method, experiment.parameters), task, rounds=1, out=folder, workers=1,
        config=experiment.toml(), about=found.about(),
    )  # fmt: skip
    return folder, task


def test_a_client_is_judged_by_what_it_learnt_from_with_its_shapes_and_by_clean_test_images(tmp_path):
    run, task = made(tmp_path / "run", "ensemble")
    found = local_accuracies(run)
    assert json.loads((run / "local.json").read_text()) == found == local_accuracies(run)
    assert [row["client"] for row in found] == [0, 1]

    def accuracy(client: int, split: Split, stamped: bool = False) -> float:
        x, y = split.load()
        if stamped:
            with seeded(3, "local accuracy", client):
                x = stamp_shapes(x, y)
        with torch.no_grad():
            return float((fb.load_model(run, client)(x).argmax(1) == y).double().mean())

    backdoored, normal = (client.train for client in task.data.clients)
    assert found[0]["own"] == accuracy(0, backdoored, stamped=True) != accuracy(0, backdoored)
    assert found[1]["own"] == accuracy(1, normal)
    assert [row["test"] for row in found] == [accuracy(i, task.data.test) for i in (0, 1)]
    assert read_runs([run])[0].local == found


def test_what_has_no_local_models_is_refused(tmp_path):
    run, _ = made(tmp_path / "run", "fedavg")
    with pytest.raises(UserError, match="clients keep none"):
        local_accuracies(run)
    assert not (run / "local.json").exists()
