"""What does not require gradients never travels: a frozen backbone under an adapter, in every method."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import CASES, TinyNet, opened, tiny_data
from safetensors.torch import load_file
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.state import in_training, state_of, trained_entries
from fewbytes.flower.node import in_common
from fewbytes.methods.parts.distillation import frozen
from fewbytes.methods.pfedsd import Taught
from fewbytes.running.checkpoint import fingerprint


class FrozenStem(TinyNet):
    """A TinyNet whose convolution and batch normalisation are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.requires_grad_(False)
        self.norm.requires_grad_(False)


def test_buffers_go_with_the_parameters_they_are_beside():
    frozen = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).requires_grad_(False)
    without = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, affine=False))  # its statistics are the block's
    whole = fb.Task.on(
        tiny_data(), lambda: nn.Sequential(frozen, without, nn.Flatten(), nn.Linear(2, 2))
    ).problem.model(0)
    statistics = [f"1.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(trained_entries(whole)) == ["1.0.weight", "1.0.bias", *statistics, "3.weight", "3.bias"]


def test_training_leaves_frozen_statistics_alone():
    task = fb.Task.on(tiny_data(), FrozenStem)
    site = opened(task, 0, 1, "train")
    model = site.model()
    before = copy.deepcopy(model.state_dict())
    site.fit(model, fb.Local(epochs=2, lr=0.1, batch=5))
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(state_of(model)) == {"fc.weight", "fc.bias"}
    assert model.drop.training  # only statistics stand still
    assert not model.norm.training


def test_a_frozen_part_is_like_features_computed_beforehand():
    """FedAvg of a head behind a frozen part, and of the head alone on that part's outputs."""
    generator = torch.Generator().manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).requires_grad_(False)
    first = nn.Linear(5, 3).state_dict()

    def head() -> nn.Linear:
        layer = nn.Linear(5, 3)
        layer.load_state_dict(first)
        return layer

    def samples(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)

    clients, test = [(samples(20 + i), samples(7)) for i in range(3)], samples(9)

    def through(split: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat([backbone(x[None]) for x in split[0]]), split[1]

    whole = fb.Task.of(lambda: nn.Sequential(copy.deepcopy(backbone), head()), clients, test)
    features = [(through(train), through(own)) for train, own in clients]
    alone = fb.Task.of(lambda: nn.Sequential(nn.Identity(), head()), features, through(test))
    method = fb.FedAvg(epochs=2, lr=0.1, batch=1000)
    results = [fb.run(method, task, rounds=3, workers=1) for task in (whole, alone)]
    assert results[0].ledger.totals()["uplink_value_bytes"] == results[1].ledger.totals()["uplink_value_bytes"]
    theta = [state_of(result.global_model) for result in results]
    assert theta[0].keys() == theta[1].keys() == {"1.weight", "1.bias"}
    for name, value in theta[1].items():
        torch.testing.assert_close(theta[0][name], value)


class Backbone(nn.Module):
    """A frozen part of 98,000 values, batch normalisation among them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.back = nn.Linear(16, 3000), nn.BatchNorm1d(3000), nn.Linear(3000, 16)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.norm(self.wide(x.flatten(1))).tanh()).view_as(x)


class WithBackbone(TinyNet):
    """A TinyNet behind a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.backbone(x))

    def units(self) -> dict[str, nn.Module]:
        return {"backbone": self.backbone, **super().units()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "fedma"])  # takes chains alone
def test_a_backbone_never_travels_and_never_changes(name, tmp_path):
    task = fb.Task.on(tiny_data(), WithBackbone)
    result = fb.run(CASES[name], task, rounds=2, out=tmp_path / "run", workers=1)
    columns = result.ledger.columns()
    assert max(columns["bytes_up"].max(), columns["bytes_down"].max()) < 250_000  # of the 392,000 it would take
    first = task.problem.first_model().state_dict()
    saved = [load_file(path) for path in (tmp_path / "run" / "models").glob("*.safetensors")]
    frozen = {name: value for name, value in first.items() if name.startswith("backbone.")}
    whole = [state for state in saved if state.keys() >= frozen.keys()]
    assert all(torch.equal(state[name], value) for state in whole for name, value in frozen.items())
    assert whole or not saved or name.startswith(("fusefl", "ensemble", "fedktl", "fedproto"))  # put together of parts


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(fb.UserError, match="no parameter"):
        fb.run(fb.FedAvg(), fb.Task.on(tiny_data(), Backbone), rounds=1)


def test_another_frozen_part_is_noticed():
    """Nodes that hold other frozen weights, or a resumed run with others, would train on other features."""
    tasks = []
    for seed in (0, 0, 1):
        weights = WithBackbone().backbone.state_dict()
        g = torch.Generator().manual_seed(seed)
        weights["wide.weight"] = torch.randn(3000, 16, generator=g)

        def build(weights: dict[str, Tensor] = weights) -> nn.Module:
            model = WithBackbone()
            model.backbone.load_state_dict({k: v for k, v in weights.items() if k == "wide.weight"}, strict=False)
            return model

        tasks.append(fb.Task.on(tiny_data(), lambda build=build: build()))
    agreed = [in_common(fb.FedAvg(), task, 0) for task in tasks]
    assert agreed[0] == agreed[1] != agreed[2]
    prints = [fingerprint(fb.FedAvg(), task, "") for task in tasks]
    assert prints[0] == prints[1] != prints[2]


class Still(TinyNet):
    """A TinyNet behind frozen batch normalisation whose statistics are not those of any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm2d(1)
        self.before.running_mean.fill_(0.5)
        self.before.running_var.fill_(4.0)
        self.before.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.before.training
        return super().forward(self.before(x))


@pytest.mark.parametrize("teacher", ["train", "eval"])
def test_no_training_loop_moves_frozen_statistics(teacher):
    task = fb.Task.on(tiny_data(), Still)
    site = opened(task, 0, 1, "train")
    student, taught = site.model(), site.model()
    x, _ = site.tensors(site.train)
    for model in (student, taught, Taught(student, taught, teacher)):
        in_training(model)(x)
    with frozen(student):
        student(x)
    student(x)
    for model in (student, taught):
        assert not model.seen
        assert torch.equal(model.before.running_mean, torch.tensor([0.5]))


class FrozenHead(TinyNet):
    """A TinyNet with a classifier that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.fc.requires_grad_(False)


class OnlyBiases(TinyNet):
    """A TinyNet of which only biases and batch normalisation are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.requires_grad_(False)
        self.fc.weight.requires_grad_(False)


@pytest.mark.parametrize("build", [FrozenHead, OnlyBiases])
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_learnt_with_a_part_frozen_is_told_before_anything_is_written(name, build, tmp_path):
    task = fb.Task.on(tiny_data(), build)
    try:
        fb.run(CASES[name], task, rounds=2, out=tmp_path / "run", workers=1)
    except fb.UserError:
        assert not (tmp_path / "run").exists()
