"""What does not require gradients never travels: a frozen backbone under an adapter, in every method."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import CASES, TinyNet, opened, tiny_data
from safetensors.torch import load_file
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.state import state_of, trained_entries


class FrozenStem(TinyNet):
    """A TinyNet whose convolution and batch normalisation are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.requires_grad_(False)
        self.norm.requires_grad_(False)


def test_buffers_go_with_the_parameters_they_are_beside():
    frozen = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).requires_grad_(False)
    without = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, affine=False))  # its statistics are the block's
    whole = fb.Task(lambda: nn.Sequential(frozen, without, nn.Flatten(), nn.Linear(2, 2)), tiny_data()).model(0)
    statistics = [f"1.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(trained_entries(whole)) == ["1.0.weight", "1.0.bias", *statistics, "3.weight", "3.bias"]


def test_training_leaves_frozen_statistics_alone():
    task = fb.Task(FrozenStem, tiny_data())
    site = opened(task, 0, 1, "train")
    model = site.model()
    before = copy.deepcopy(model.state_dict())
    site.fit(model, epochs=2, lr=0.1, batch=5)
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


@pytest.mark.parametrize("name", CASES)
def test_a_backbone_never_travels_and_never_changes(name, tmp_path):
    task = fb.Task(WithBackbone, tiny_data())
    result = fb.run(CASES[name], task, rounds=2, out=tmp_path / "run", workers=1)
    columns = result.ledger.columns()
    assert max(columns["bytes_up"].max(), columns["bytes_down"].max()) < 250_000  # of the 392,000 it would take
    first = task.first_model().state_dict()
    saved = [load_file(path) for path in (tmp_path / "run" / "models").glob("*.safetensors")]
    frozen = {name: value for name, value in first.items() if name.startswith("backbone.")}
    whole = [state for state in saved if state.keys() >= frozen.keys()]
    assert all(torch.equal(state[name], value) for state in whole for name, value in frozen.items())
    assert whole or not saved or name.startswith(("fusefl", "ensemble", "fedktl", "fedproto"))  # put together of parts


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(fb.UserError, match="no parameter to train"):
        fb.run(fb.FedAvg(), fb.Task(Backbone, tiny_data()), rounds=1)
