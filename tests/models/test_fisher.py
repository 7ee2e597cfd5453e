"""The Fisher diagonal: against vectors computed by reference code and against one gradient per sample; its manners."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.state import load_state, state_of
from fewbytes.models import build_model
from fewbytes.models.fisher import fisher_diagonal
from fewbytes.models.layers import layers_of


def close(value: Tensor, expected: np.ndarray | Tensor) -> None:
    torch.testing.assert_close(value, torch.as_tensor(expected), rtol=1e-9, atol=1e-9)


def group(g, name: str) -> dict[str, Tensor]:
    return {k.removeprefix(f"{name}__"): torch.from_numpy(g[k]) for k in g if k.startswith(f"{name}__")}


def one_by_one(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The definition: one sample, one gradient."""
    names = [name for own in layers_of(model).values() for name in own]
    total = {name: torch.zeros_like(model.get_parameter(name)) for name in names}
    for i in range(len(y)):
        loss = F.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(loss, [model.get_parameter(n) for n in names], allow_unused=True)
        for name, gradient in zip(names, gradients, strict=True):
            total[name] += 0 if gradient is None else gradient**2 / len(y)
    return total


# Golden vectors -------------------------------------------------------------------------------------------------------


@pytest.mark.golden
@pytest.mark.parametrize("kind", ["empirical", "model"])
def test_a_perceptron(golden, kind):
    g = golden("genefl/fisher_mlp")
    state = {name.replace("fc2", "fc"): value for name, value in group(g, "param").items()}
    hidden, features = state["fc1.weight"].shape
    model = build_model(f"mlp:hidden={hidden}", (features,), len(state["fc.bias"])).double()
    load_state(model, state)
    fisher = fisher_diagonal(model, torch.from_numpy(g["X"]), torch.from_numpy(g["y"]), kind=kind)
    expected = {name.replace("fc2", "fc"): value for name, value in group(g, f"fisher_{kind}").items()}
    assert fisher.keys() == expected.keys()
    for name, value in fisher.items():
        close(value, expected[name])
        wrong = torch.from_numpy(g[f"fisher_wrong_batch_gradient__{name.replace('fc.', 'fc2.')}"])
        assert not torch.allclose(value, wrong, rtol=0.1), "the square of the batch's gradient is another thing"


@pytest.mark.golden
def test_a_convolution_before_batch_normalisation(golden):
    g = golden("genefl/fisher_cnn_bn_eval")
    state = group(g, "param")
    (width, channels), classes = state["conv.weight"].shape[:2], len(state["fc.bias"])
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(channels, width, 3, padding=1, bias=False))
    model.add_module("bn", nn.BatchNorm2d(width))
    model.extend([nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    model.add_module("fc", nn.Linear(width, classes))
    model.double()
    load_state(model, state)
    fisher = fisher_diagonal(model, torch.from_numpy(g["X"]), torch.from_numpy(g["y"]))
    assert list(fisher) == ["conv.weight", "fc.weight", "fc.bias"]
    for name, value in fisher.items():
        close(value, g[f"fisher_empirical__{name}"])


# Any model ------------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Uses one layer twice, and another not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.unused, self.fc = nn.Linear(36, 36), nn.Linear(2, 2), nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(self.mix(self.mix(x).tanh()))


class PositionsFirst(nn.Module):
    """A layer that gets (positions, samples, features), as many positions as the test has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.fc = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mix(x.reshape(len(x), 6, 6).transpose(0, 1)).tanh().mean(0))


def head(*layers: nn.Module, features: int = 4) -> nn.Sequential:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 3))


def attention() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(2), nn.TransformerEncoderLayer(9, 3, 8, batch_first=True), nn.Flatten(), nn.Linear(36, 3)
    )


def tied() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36), nn.Linear(36, 3))
    model[3].weight = model[1].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "stride, bias": lambda: head(nn.Conv2d(4, 4, 3, stride=(2, 1), padding=(1, 0)), nn.Tanh()),
    "dilation": lambda: head(nn.Conv2d(4, 4, (2, 1), dilation=(2, 3)), nn.Tanh(), nn.Conv2d(4, 4, 1, stride=2)),
    "in place": lambda: head(nn.Conv2d(4, 4, 2), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 2), nn.ReLU(inplace=True)),
    "one position": lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Tanh(), nn.Linear(5, 3)),
    "same": lambda: head(nn.Conv2d(4, 4, 3, padding="same"), nn.Tanh()),
    "reflected": lambda: head(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Tanh()),
    "groups": lambda: head(nn.Conv2d(4, 8, 2, groups=2), nn.Tanh(), features=8),
    "Conv1d": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 2, 3), nn.Flatten(), nn.Linear(14, 3)),
    "Linear on positions": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Flatten(), nn.Linear(60, 3)),
    "positions first": PositionsFirst,
    "used twice": Twice,
    "tied": tied,
    "weight norm": lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(36, 3))),
    "pruned": lambda: nn.Sequential(nn.Flatten(), nn.utils.prune.l1_unstructured(nn.Linear(36, 3), "weight", 0.5)),
    "attention": attention,
}


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_gives_what_single_samples_give(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    x, y = torch.randn(6, 4, 3, 3).double(), torch.randint(3, (6,))
    expected = one_by_one(model, x, y)
    for batch in (4, 6):
        fisher = fisher_diagonal(model, x, y, batch=batch)
        assert fisher.keys() == expected.keys()
        for key, value in fisher.items():
            close(value, expected[key])
            assert value.is_contiguous()


@pytest.mark.parametrize("used", ["one_position", "groups"])
def test_the_expectation_over_labels_is_the_mean_weighted_by_their_probabilities(used):
    torch.manual_seed(0)
    model = MODELS[used.replace("_", " ")]().double()
    x = torch.randn(1, 4, 3, 3).double()
    each = [one_by_one(model, x, torch.tensor([label])) for label in range(3)]
    fisher = fisher_diagonal(model, x, torch.tensor([0]), kind="model")
    for name, value in fisher.items():
        close(value, sum(p * of[name] for p, of in zip(model(x).detach()[0].softmax(0), each, strict=True)))


@pytest.mark.parametrize("model", ["resnet8:width=4", "resnet18:width=2", "cnn4"])
def test_our_networks_in_float32_channels_last(model):
    torch.manual_seed(0)
    network = build_model(model, (3, 32, 32), 10).to(memory_format=torch.channels_last).eval()
    x, y = torch.randn(5, 3, 32, 32).contiguous(memory_format=torch.channels_last), torch.randint(10, (5,))
    expected = one_by_one(network, x, y)
    for name, value in fisher_diagonal(network, x, y, batch=3).items():
        torch.testing.assert_close(value, expected[name].contiguous(), rtol=1e-3, atol=1e-5 * float(value.max()))


@pytest.mark.parametrize("kind", ["fast", "one by one"])
def test_the_model_stays_as_it_was(kind):
    torch.manual_seed(0)
    groups = 1 if kind == "fast" else 2
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=groups),
        nn.BatchNorm2d(4),
        nn.Dropout(),
        nn.Conv2d(4, 4, 1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model.register_forward_hook(lambda *_: torch.rand(1) and None)  # draws from the generator in eval mode, too
    model[1].eval()
    model[3].weight.requires_grad_(False)
    model[5].bias.grad = torch.ones(3)
    x, y = torch.randn(4, 2, 3, 3), torch.randint(3, (4,))

    def everything() -> tuple[list[object], list[Tensor]]:
        modules, parameters = list(model.modules()), list(model.parameters())
        flags = [[m.training for m in modules], [len(m._forward_hooks) for m in modules]]
        needs = [[p.requires_grad for p in parameters], [p.grad is None for p in parameters]]
        return [*flags, *needs], [*state_of(model).values(), model[5].bias.grad.clone(), torch.get_rng_state()]

    facts, tensors = everything()
    with torch.no_grad():
        fisher = fisher_diagonal(model, x, y)
    assert "3.weight" not in fisher, "it is not trained"
    assert set(fisher) == {"0.weight", "0.bias", "3.bias", "5.weight", "5.bias"}
    after, others = everything()
    assert after == facts
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def test_an_error_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(RuntimeError):
        fisher_diagonal(model, torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))
    assert model.training
    assert not model[1]._forward_hooks
    with pytest.raises(UserError, match="one sample"):
        fisher_diagonal(model, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))


def test_layers_are_convolutions_and_linear_layers_without_normalisation():
    resnet = layers_of(build_model("resnet18", (3, 32, 32), 10))
    assert len(resnet) == 21
    assert next(iter(resnet)) == "pre_conv"
    assert list(resnet.values())[-1] == ["fc.weight", "fc.bias"]
    assert not [layer for layer in resnet if "bn" in layer]
    shared = tied()
    assert layers_of(shared) == {"1": ["1.weight", "1.bias"], "3": ["3.bias"], "4": ["4.weight", "4.bias"]}
    with pytest.raises(UserError, match="no Conv1d"):
        layers_of(nn.Sequential(nn.BatchNorm2d(3)))
