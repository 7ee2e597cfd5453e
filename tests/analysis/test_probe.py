"""Probes: against golden vectors, and over runs as the command line makes them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import fewbytes
from torch import nn

import fewbytes as fb
from fewbytes.analysis.probe import (
    Probes,
    descend,
    enlarged,
    features,
    make_decoder,
    points_of,
    pooled,
    probe,
    probe_table,
    probed,
    reconstruction_loss,
    rest_of,
)
from fewbytes.analysis.settings import Probing
from fewbytes.base.named import only_allowed
from fewbytes.base.state import load_state
from fewbytes.data import Split
from fewbytes.experiments.settings import make_experiment, make_method
from fewbytes.experiments.tasks import find
from fewbytes.models.blocks import cut
from fewbytes.models.files import save_model
from fewbytes.models.fused import fused_network, make_adaptor
from fewbytes.models.resnet import ResNet
from fewbytes.models.small import Mlp
from fewbytes.models.vgg import Vgg9
from fewbytes.report import read_runs, write_report

pytestmark = pytest.mark.filterwarnings(
    "ignore:batch normalisation .* sees a single value"
)  # deep networks, small images
HOW = Probing(epochs=1, linear_epochs=2, samples=400, batch=20)
QUICK = ["--epochs", "1", "--linear-epochs", "2", "--samples", "400", "--batch", "20"]
RESNET = [f"layers.{unit}" for unit in ("0.0", "0.1", "1.0", "2.0", "3.0", "3.1")]


def made(folder: Path, method: str, model: str, rounds: int, **parameters: Any) -> Path:
    """A run on the digits as the command line makes them."""
    settings = {"method": method, "model": model, "rounds": rounds, "clients": 2}
    few = {"partition": "iid", "samples": "300/50", "parameters": {"batch": 20, **parameters}}
    found = find(make_experiment(settings | few))
    experiment, task = found.experiment, found.task
    fb.run(
        make_method(method, experiment.parameters), task, rounds=rounds, out=folder, workers=1,
        config=experiment.toml(), about=found.about(),
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def resnet(tmp_path_factory) -> Path:
    """A run of FedAvg that learns something."""
    return made(tmp_path_factory.mktemp("resnet"), "fedavg", "resnet18:width=4", 2, epochs=3, lr=0.05, momentum=0.9)


@pytest.fixture(scope="module")
def separate(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("separate"), "separate", "mlp:hidden=30,layers=2", 1)


# ---- the networks ----


@pytest.mark.golden
def test_the_decoder_and_its_loss(golden):
    vectors = golden("fusefl/mi_probe")
    h, image = (torch.from_numpy(vectors[name]).double() for name in ("h", "image"))
    decoder = make_decoder(h.shape[1], image.shape[1]).double()
    state = {name.removeprefix("decoder."): value for name, value in vectors.state("decoder").items()}
    assert state.keys() == {name for name in decoder.state_dict() if not name.endswith("num_batches_tracked")}
    load_state(decoder, state)
    large = enlarged(h, image.shape[2:])
    torch.testing.assert_close(large, torch.from_numpy(vectors["h_upsampled"]), rtol=1e-9, atol=1e-12)
    for mode in ("eval", "train"):
        loss = reconstruction_loss(decoder.train(mode == "train")(large), image).item()
        assert loss == pytest.approx(float(vectors[f"bce_{mode}_bn"]), rel=1e-9)


@pytest.mark.golden
def test_the_linear_probe(golden):
    vectors = golden("fusefl/mi_probe")
    h, image = (torch.from_numpy(vectors[name]).double() for name in ("h", "image"))
    classes = len(vectors["probe/bias"])
    probes = Probes(tuple(h.shape[1:]), tuple(image.shape[1:]), nn.Identity(), classes).double()
    load_state(probes.linear, {name: torch.from_numpy(vectors[f"probe/{name}"]) for name in ("weight", "bias")})
    logits = probes.separated(h).detach()
    torch.testing.assert_close(logits, torch.from_numpy(vectors["probe/logits"]), rtol=1e-9, atol=1e-12)
    loss = float(F.cross_entropy(logits, torch.from_numpy(vectors["label"])))
    assert loss == pytest.approx(float(vectors["probe/ce"]), rel=1e-9)


def test_steps_are_those_of_sgd_with_nesterov_momentum():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    momenta = [torch.zeros_like(p) for p in ours.parameters()]
    for _ in range(4):
        x = torch.randn(5, 3)
        for model in (ours, theirs):
            model(x).square().sum().backward()
        descend(list(ours.parameters()), momenta, 0.1)
        optimiser.step()
        optimiser.zero_grad()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_the_auxiliary_network_sees_enlarged_features_where_it_can():
    resnet = ResNet(10, 3, 5, width=2)
    probes = Probes((2, 8, 8), (3, 16, 16), rest_of(resnet, 1), 5)
    assert probes.enlarges
    image, label = probes(torch.rand(2, 2, 8, 8))
    assert (image.shape, label.shape) == ((2, 3, 16, 16), (2, 5))
    vgg = Vgg9((3, 16, 16), 5, scale=0.1)  # its linear layers take one size
    probes = Probes((6, 8, 8), (3, 16, 16), rest_of(vgg, 2), 5)
    assert not probes.enlarges
    assert probes(torch.rand(2, 6, 8, 8))[1].shape == (2, 5)
    flat = Probes((7,), (3, 16, 16), nn.Linear(7, 5), 5)
    assert flat(torch.rand(2, 7))[0] is None


# ---- the points ----


def names(model: nn.Module, sample: tuple[int, ...], *wanted: str) -> list[str]:
    points, skipped = points_of(model, model, sample, wanted)
    assert not skipped
    return [point.name for point in points]


def test_points_are_the_paper_s_or_the_ends_of_units():
    assert names(ResNet(18, 1, 10, width=2), (1, 8, 8)) == ["stem", *RESNET]
    assert names(ResNet(10, 1, 10, width=2), (1, 8, 8)) == ["stem", *(f"layers.{i}.0" for i in range(4))]
    assert names(ResNet(18, 1, 10, width=2), (1, 8, 8), "pool", "layers.1") == ["layers.1.1", "pool"]
    assert names(Mlp((6,), 3, layers=2), (6,)) == ["fc1", "fc2"]
    assert names(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (6,)) == ["0", "1"]
    assert names(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)), (1, 8, 8)) == ["0"]
    assert names(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), (1, 8, 8)) == ["0"]
    with pytest.raises(fb.UserError, match="did you mean 'fc1'"):
        names(Mlp((6,), 3), (6,), "fc")


def two_branches(last: tuple[int, int]):
    """A fused network of two clients, cut after the first unit, whose second units have so many features."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, width), nn.Linear(width, 3)) for width in last]
    parts = [cut(model, 2) for model in models]
    adaptors = [make_adaptor("conv", (12,), (6,)).state_dict() for _ in models]
    sent = [
        {i: ({}, parts[i][0].state(), (4,)) for i in range(2)},
        {i: (adaptors[i], parts[i][1].state(), (6,)) for i in range(2)},
    ]
    classifier = nn.Linear(sum(last), 3).state_dict()
    return fused_network(sent, classifier, lambda i: models[i], 2, (), "conv", "concatenate"), models


def test_features_of_a_fused_network_are_the_mean_over_branches():
    network, models = two_branches((5, 5))
    points, skipped = points_of(network, models[0], (4,))
    assert [(point.name, point.units, point.shape) for point in points] == [("0", 1, (6,)), ("1", 2, (5,))]
    assert not skipped
    x = torch.rand(3, 4)
    first, second = features(network, points, x)
    torch.testing.assert_close(first, (models[0][0](x) + models[1][0](x)).detach() / 2)
    torch.testing.assert_close(second, torch.stack(network.activations(x)[1]).mean(0).detach())
    assert not second.requires_grad


def test_where_branches_differ_there_is_no_point():
    network, models = two_branches((5, 7))
    points, skipped = points_of(network, models[0], (4,))
    assert ([point.name for point in points], skipped) == (["0"], ["1"])
    with pytest.raises(fb.UserError, match="after 1"):
        points_of(network, models[0], (4,), ["1"])


# ---- the training ----


def data(samples: int, seed: int):
    """Samples (n, 6) whose first three values say the class, noisily."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, samples)
    x = rng.normal(size=(samples, 6)) + 3 * np.eye(6)[y]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def test_probes_find_what_is_there_and_nothing_that_is_not():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
        model[2].weight.zero_()  # forgets everything
    before = {name: value.clone() for name, value in model.state_dict().items()}
    points, _ = points_of(model, model, (6,))
    how = Probing(epochs=8, linear_epochs=8, batch=20, lr=0.05)
    fresh = lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.Linear(4, 3))  # noqa: E731
    rows = probed(model, points, fresh, data(600, 1), data(400, 2), 3, how)
    knows, forgot = rows[1], rows[2]
    assert knows["linear_accuracy"] > 0.9
    assert 0.7 < knows["information_y"] < math.log(3)
    assert forgot["linear_accuracy"] < 0.45
    assert abs(forgot["information_y"]) < 0.05
    assert all(row["information_x"] is None for row in rows)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_that_work_in_place_change_no_feature():
    rows = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=in_place), nn.Linear(4, 3))
        points, _ = points_of(model, model, (6,))
        fresh = lambda flag=in_place: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=flag), nn.Linear(4, 3))  # noqa: E731
        rows.append(probed(model, points, fresh, data(60, 1), data(40, 2), 3, Probing(epochs=2, batch=20)))
    assert rows[0] == rows[1]


def test_samples_of_all_clients_or_some_drawn_by_the_seed():
    splits = [Split(torch.arange(k, k + 5.0)[:, None], torch.arange(k, k + 5)) for k in (0, 5, 10)]
    x, y = pooled(splits, Probing(), "cpu")
    assert y.tolist() == x.flatten().tolist() == list(range(15))
    few = [pooled(splits, Probing(samples=6, seed=seed), "cpu")[1].tolist() for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]
    assert few[0] == sorted(set(few[0]))
    assert len(few[0]) == 6


# ---- runs ----


def test_a_run_probed_by_the_command_line(resnet):
    done = fewbytes("probe", resnet, *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((resnet / "probe.json").read_text())
    assert (result["model"], result["train_samples"], result["test_samples"]) == ("global", 400, 359)
    assert [row["point"] for row in result["points"]] == ["stem", *RESNET]
    for row in result["points"]:
        assert -1 < row["information_x"] < 0
        assert row["information_y"] < math.log(10)
        assert 0 < row["linear_accuracy"] <= 1
    image = [row["information_x"] for row in result["points"]]
    assert image[0] > image[-1], "the stem knows more of the image than the end"
    page = (resnet / "report.html").read_text()
    assert "Linear separability" in page
    assert all(f'id="probe-{name}"' in page for name in ("information_x", "information_y", "linear_accuracy"))


def test_the_same_seed_gives_the_same_file_and_a_point_is_its_own(resnet):
    rows = probe(resnet, None, ["layers.3", "stem"], HOW)["points"]
    first = (resnet / "probe.json").read_bytes()
    assert [row["point"] for row in rows] == ["stem", "layers.3.1"]
    assert probe(resnet, None, ["layers.3", "stem"], HOW)["points"] == rows
    assert (resnet / "probe.json").read_bytes() == first
    assert probe(resnet, None, ["layers.3"], HOW)["points"] == rows[1:]
    other = Probing(HOW.epochs, HOW.linear_epochs, HOW.samples, HOW.batch, seed=1)
    assert probe(resnet, None, ["layers.3"], other)["points"] != rows[1:]


def test_training_makes_the_end_separable(resnet):
    trained = fb.load_model(resnet)
    torch.manual_seed(0)
    untrained = ResNet(18, 1, 10, width=4)
    data = find(make_experiment({"method": "fedavg"})).task.data
    train, test = pooled([one.train for one in data.clients], Probing(), "cpu"), data.test.load()
    how = Probing(epochs=1, linear_epochs=4, batch=20)
    accuracy = []
    for model in (trained, untrained):
        points, _ = points_of(model, model, (1, 8, 8), ["layers.3.1"])
        rows = probed(model, points, lambda: ResNet(18, 1, 10, width=4), train, test, 10, how)
        accuracy.append(rows[0]["linear_accuracy"])
    assert accuracy[0] > accuracy[1] + 0.1


def test_a_fused_network_is_probed_where_its_blocks_end(tmp_path):
    run = made(tmp_path, "fusefl", "resnet10:width=2,stem=3x3", 1, epochs=4, ccvr_samples=20)
    result = probe(run, how=HOW)
    rows = result["points"]
    assert [row["point"] for row in rows] == ["stem", "layers.1.0", "layers.2.0", "pool"]
    assert [row["information_x"] is None for row in rows] == [False, False, False, True]
    assert rows[-1]["shape"] == [16]
    assert [list(column.cells)[-1] for column in probe_table(result).columns][1:3] == ["16", "—"]


def test_a_client_s_own_model_and_its_report(separate):
    result = probe(separate, 1, ["fc2"], HOW)
    assert (result["model"], [row["point"] for row in result["points"]]) == ("client 1", ["fc2"])
    page = write_report(read_runs([separate]), separate / "report.html").read_text()
    assert "client 1 model" in page
    assert 'id="probe-linear_accuracy"' in page
    assert 'id="probe-information_x"' not in page, "no feature of a perceptron is an image"
    hostile = {**result, "model": "<i>evil", "points": [{**row, "point": "<i>evil"} for row in result["points"]]}
    (separate / "probe.json").write_text(json.dumps(hostile))
    assert "<i>evil" not in write_report(read_runs([separate]), separate / "report.html").read_text()
    (separate / "probe.json").write_text('{"model": "global"}')
    with pytest.raises(fb.UserError, match=r"probe\.json is damaged"):
        read_runs([separate])
    (separate / "probe.json").unlink()


def test_stopped_early_nothing_is_written(separate):
    def stop(done: int, steps: int, text: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    before = sorted(separate.iterdir())
    with pytest.raises(KeyboardInterrupt):
        probe(separate, 0, how=HOW, progress=stop)
    assert sorted(separate.iterdir()) == before


def test_mistakes_are_told(separate, tmp_path):
    mine, whole = tmp_path / "mine", tmp_path / "whole"
    mine.mkdir()
    (mine / "config.toml").write_text('method = "fedavg"\nrounds = 1\nseed = 0\n[parameters]\n')
    shutil.copytree(separate, whole)
    about = {"model": "torch.nn:Identity", "sample_shape": [1, 8, 8], "classes": 10}
    save_model(nn.Identity(), whole / "models" / "global.safetensors", about)
    mistakes = {
        "is not a run folder": (tmp_path,),
        "was made from Python": (mine,),
        "Identity cannot be cut": (whole,),
        "no model client-7": (separate, 7),
        "no unit 'fc3' .did you mean": (separate, 0, ["fc1", "fc3"]),
    }
    for told, arguments in mistakes.items():
        with pytest.raises(fb.UserError, match=told), only_allowed("torch.nn"):
            probe(*arguments)
    for told, wrong in {
        "at least 1": {"epochs": 0}, "at least 2": {"samples": 1}, "finite": {"lr": math.nan},
    }.items():  # fmt: skip
        with pytest.raises(fb.UserError, match=told):
            Probing(**wrong)


def test_a_mistake_gets_one_line_and_code_2(separate):
    done = fewbytes("probe", separate)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = (line for line in done.stderr.splitlines() if line.strip())
    assert "has no model global.safetensors; it has client-0.safetensors" in line


def test_an_ensemble_is_probed_one_member_at_a_time(tmp_path):
    run = made(tmp_path / "run", "ensemble", "mlp:hidden=30,layers=2", 1, epochs=3, lr=0.05)
    with pytest.raises(fb.UserError, match="--client I"):
        probe(run, how=HOW)
    first, second = (probe(run, client, how=HOW) for client in (0, 1))
    assert (first["model"], second["model"]) == ("client 0", "client 1")
    assert first["points"] != second["points"]
