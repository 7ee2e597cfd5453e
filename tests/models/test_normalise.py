"""Normalisation inside the model: the same for the whole, its units and what a run keeps; nothing of it travels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.data.channels import channel_figures
from fewbytes.data.split import Split
from fewbytes.experiments.config_file import read_experiment
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower.node import in_common
from fewbytes.models import build_model
from fewbytes.models.blocks import cut, features_of, head_of
from fewbytes.models.build import ModelBuilder
from fewbytes.models.normalisation import Normalisation
from fewbytes.running.checkpoint import fingerprint
from fewbytes.running.settings import Watcher

HOW = Normalisation((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
SHAPE = (3, 16, 16)


def settings(**more: object) -> dict:
    how = {"model": "mlp:hidden=8", "rounds": 1, "parameters": {"batch": 20}}
    return {"method": "fedavg", "dataset": "digits", "clients": 2, "part": 0.1, **how, **more}


@pytest.mark.parametrize("name", ["resnet8:width=4,stem=3x3", "cnn4@32", "lenet", "torchvision:mobilenet_v2", "mlp@8"])
def test_a_model_takes_what_is_not_normalised(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = build_model(name, SHAPE, 5).eval()
        torch.manual_seed(0)
        model = ModelBuilder(name, SHAPE, 5, normalisation=HOW)(0).eval()
    x = torch.rand(4, *SHAPE)
    by_hand = (x - torch.tensor(HOW.mean).view(1, 3, 1, 1)) / torch.tensor(HOW.std).view(1, 3, 1, 1)
    assert model.state_dict().keys() == plain.state_dict().keys()  # so that nothing more travels
    assert torch.equal(model(x), plain(by_hand))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("name", ["resnet8:width=4,stem=3x3", "cnn4@32", "mlp:layers=3"])
def test_its_units_do_so_too(name):
    model = ModelBuilder(name, SHAPE, 5, normalisation=HOW)(0).eval()
    x = torch.rand(4, *SHAPE)
    torch.testing.assert_close(head_of(model)(features_of(model)(x)), model(x))
    blocks = cut(model, 2)
    torch.testing.assert_close(head_of(model)(blocks[1](blocks[0](x)).flatten(1)), model(x))
    assert {name for block in blocks for name in block.state()} < model.state_dict().keys()


def test_a_sequential_is_cut_likewise():
    from fewbytes.models.normalise import with_normalisation

    model = with_normalisation(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), HOW, 1)
    x = torch.rand(5, 3)
    assert torch.equal(head_of(model)(features_of(model)(x)), model(x))


def test_figures_of_the_data_are_what_numpy_says(monkeypatch):
    monkeypatch.setattr("fewbytes.data.channels.CHUNK", 7)
    images = torch.randint(0, 256, (20, 3, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pixels = images.numpy() / 255
    mean, std = channel_figures(Split(images, torch.zeros(20, dtype=torch.int64)))
    assert mean == pytest.approx(pixels.mean((0, 2, 3)), rel=1e-6)
    assert std == pytest.approx(pixels.std((0, 2, 3)), rel=1e-6)
    table = torch.tensor([[1e6, 2.0], [1e6 + 1, 2.0]])
    assert channel_figures(Split(table, torch.zeros(2, dtype=torch.int64)))[1] == pytest.approx([0.5, 0])
    assert Normalisation.of([1.0], [0.0]).std == (1.0,)


@pytest.mark.parametrize("method", ["fedavg", "ensemble"])
def test_a_run_keeps_the_figures_with_its_model(method, tmp_path):
    experiment = make_experiment(settings(method=method, normalise="data", parameters={"epochs": 1, "batch": 20}))
    found = find(experiment)
    task, result = found.task, run_with(found.run(tmp_path / "run", False, Watcher()))
    kept = read_experiment(tmp_path / "run" / "config.toml")["normalise"]
    assert kept == result.summary["normalise"]
    again = find(make_experiment(settings(method=method, normalise=kept))).task
    x = task.data.test.load()[0]
    for model in (fb.load_model(tmp_path / "run"), result.global_model):
        assert torch.equal(model.eval()(x), result.global_model(x))
    assert task.problem.agreed == again.problem.agreed


def test_other_figures_are_another_run():
    tasks = [find(make_experiment(settings(normalise=how))).task for how in ("0.5/0.5", "0.5/0.25")]
    assert fingerprint(fb.FedAvg(), tasks[0], "") != fingerprint(fb.FedAvg(), tasks[1], "")
    assert in_common(fb.FedAvg(), tasks[0], 0) != in_common(fb.FedAvg(), tasks[1], 0)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("imagnet", "imagenet, data, or MEAN/STD"),
        ("0.5", "imagenet, data, or MEAN/STD"),
        ("imagenet", "3 channels, .*1"),
        ("0.5/0", "above 0"),
        ("nan/1", "finite"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(how, words):
    with pytest.raises(UserError, match=words):
        find(make_experiment(settings(normalise=how)))


def test_nobody_pools_samples_of_clients_own(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="normalise data"):
        find(
            make_experiment(
                settings(partition="local", client_data=str(tmp_path), normalise="data", part=1.0, clients=1)
            )
        )
