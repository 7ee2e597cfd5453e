"""Chains: which models are some, and their layers in other sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cases import Chain, Grouped, TinyNet
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.errors import MethodError
from fewbytes.base.state import mark_trained, state_of
from fewbytes.models.blocks import features_of
from fewbytes.models.build import build_model
from fewbytes.models.chain import chain_of, resized

VGG9 = [f"conv{i}" for i in range(1, 7)] + ["fc1", "fc2", "fc"]
SMALL = {
    "vgg9:scale=0.1": VGG9,
    "cnn4": ["conv1", "conv2", "fc1", "fc"],
    "lenet": ["conv1", "conv2", "conv3", "fc"],
    "mlp:layers=2,hidden=9": ["fc1", "fc2", "fc"],
}


@pytest.mark.parametrize("name", SMALL)
def test_the_plain_models_are_chains(name):
    model = build_model(name, (1, 16, 16), 5)
    assert list(chain_of(model)) == SMALL[name]
    assert list(chain_of(model).values()) == [getattr(model, layer) for layer in SMALL[name]]


@pytest.mark.parametrize("name", SMALL)
def test_a_wider_layer_whose_new_neurons_are_ignored_changes_nothing(name):
    model, x = build_model(name, (1, 16, 16), 5).eval(), torch.randn(3, 1, 16, 16)
    expected = model(x)
    state, layers = state_of(model), list(chain_of(model).items())
    for (one, layer), (other, after) in pairwise(layers):
        n = len(layer.weight)
        for kind in ("weight", "bias"):
            state[f"{one}.{kind}"] = torch.cat([state[f"{one}.{kind}"], torch.randn_like(state[f"{one}.{kind}"][:2])])
        weight = state[f"{other}.weight"]
        ignored = weight.new_zeros(len(weight), 2 * (after.weight[0].numel() // n))
        state[f"{other}.weight"] = torch.cat([weight.flatten(1), ignored], 1).reshape(
            len(weight), -1, *weight.shape[2:]
        )
    wide = resized(model, state)
    torch.testing.assert_close(wide(x), expected)
    torch.testing.assert_close(wide.classifier(features_of(wide)(x)), expected)
    assert {k: v.shape for k, v in state_of(wide).items()} == {k: v.shape for k, v in state.items()}
    with pytest.raises(MethodError, match="cannot load"):
        resized(wide, state | {"strange.weight": torch.zeros(1)})


class Residual(nn.Module):
    """A convolution beside what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class Backwards(nn.Sequential):
    """Layers that do not follow one another as they stand."""

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x)) + x


class Scaled(Chain):
    """A chain with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def frozen_in_between() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 3)
    )


def twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(16, 4), layer, nn.ReLU(), layer, nn.Linear(4, 3))


NO_CHAINS = {
    "BatchNorm2d": TinyNet,
    "Conv2d": Grouped,
    "Residual": lambda: nn.Sequential(Residual(), nn.Flatten(), nn.Linear(16, 3)),
    "Backwards": lambda: nn.Sequential(nn.Flatten(), Backwards(nn.Linear(16, 9), nn.Linear(9, 16)), nn.Linear(16, 3)),
    "Linear that is not trained": frozen_in_between,
    "trained parameters beside": lambda: Scaled(),
    "trained parameters beside its layers": twice,
    "a layer whose inputs do not match": lambda: nn.Sequential(
        nn.Linear(16, 4), nn.AdaptiveAvgPool1d(6), nn.Linear(6, 3)
    ),
}


@pytest.mark.parametrize("has", NO_CHAINS)
def test_what_is_no_chain_is_told_in_one_line(has):
    model = NO_CHAINS[has]()
    mark_trained(model)
    with pytest.raises(fb.UserError, match=f"not a chain .*{has}.*vgg9") as told:
        chain_of(model)
    assert "\n" not in str(told.value)


def test_what_is_not_trained_may_stand_before_a_chain():
    frozen = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1)).requires_grad_(False)
    model = nn.Sequential(frozen, *Chain())
    mark_trained(model)
    assert list(chain_of(model)) == ["1", "5"]
