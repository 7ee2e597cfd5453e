"""FedCOM and FedPM: their equations against vectors of reference code, their bytes, and models of any make."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import LOCAL, TinyNet, opened, tiny_data, tiny_task
from torch import nn

import fewbytes as fb
from fewbytes.base.state import Mean, load_state, state_of
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.experiments.settings import make_method
from fewbytes.methods.fedcom import Tracking
from fewbytes.methods.fedpm import Stochastic, Theta, drawn, frozen_weights, masked_names, scores
from fewbytes.methods.parts.averaging import Model
from fewbytes.models.build import ModelBuilder
from fewbytes.wire import Layout


def equal_task(clients: int = 3) -> fb.Task:
    """Clients with as many samples each, so that plain and weighted means are the same."""
    data = tiny_data(clients)
    members = tuple(dataclasses.replace(m, train=m.train.take(torch.arange(16))) for m in data.clients)
    return fb.Task.on(dataclasses.replace(data, clients=members), TinyNet)


# FedCOM ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "near"), [(8, 2e-3), (16, 1e-5)])
def test_fedcom_is_fedavg_but_for_rounding(bits, near):
    expected = fb.run(fb.FedAvg(**LOCAL), equal_task(), rounds=3).global_model.state_dict()
    model = fb.run(fb.FedCOM(**LOCAL, bits=bits), equal_task(), rounds=3).global_model.state_dict()
    gap = max(float((model[name].float() - value.float()).abs().max()) for name, value in expected.items())
    assert 0 < gap < near


def test_gamma_is_the_servers_step():
    task = tiny_task()
    first = task.problem.first_state()["fc.weight"]
    once, half = (
        fb.run(fb.FedCOM(**LOCAL, gamma=g), task, rounds=1).global_model.state_dict()["fc.weight"] - first
        for g in (1.0, 0.5)
    )
    torch.testing.assert_close(half, once / 2)
    with pytest.raises(fb.UserError, match=r"gamma .*above 0"):
        fb.FedCOM(gamma=0)


class Line(nn.Module):
    """y = w, whatever x: a client's gradient is its own constant."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.w.expand(len(x), 3)


def line_task() -> fb.Task:
    """Two clients, each of one class of three."""
    x = torch.zeros(8, 1)
    sets = [(x, torch.full((8,), label)) for label in (0, 2)]
    return fb.Task.of(Line, [(s, s) for s in sets])


def test_gate_follows_its_equation():
    """delta_i + (mean D - D_i) / (lr tau), with D as it was sent; the clients' delta_i add up to nothing."""
    task, method = line_task(), fb.FedCOM(epochs=2, lr=0.1, batch=4, gate=True)
    states = [method.client(opened(task, i, 1, "train")) for i in (0, 1)]
    theta, expected = {"w": torch.zeros(3)}, [torch.zeros(3), torch.zeros(3)]
    for t in (1, 2, 3):
        for i in (0, 1):
            delta = states[i].settled(theta, t, 1.0)
            torch.testing.assert_close(delta.get("w", torch.zeros(3)), expected[i], rtol=1e-4, atol=1e-6)
        sent = [
            method.train(states[i], Model(fb.Dense(theta)), opened(task, i, t, "train")).change.dense()["w"]
            for i in (0, 1)
        ]
        mean = (sent[0] + sent[1]) / 2
        expected = [d + (mean - s) / (0.1 * 4) for d, s in zip(expected, sent, strict=True)]
        torch.testing.assert_close(expected[0], -expected[1], rtol=0, atol=1e-6)
        theta = {"w": theta["w"] + mean}


def test_gate_makes_clients_step_alike():
    """From the second round on both go where the mean gradient points, though their own gradients differ."""
    task, method = line_task(), fb.FedCOM(epochs=1, lr=0.001, batch=4, gate=True)
    states = [method.client(opened(task, i, 1, "train")) for i in (0, 1)]
    theta, apart = {"w": torch.zeros(3)}, []
    for t in (1, 2):
        a, b = (
            method.train(states[i], Model(fb.Dense(theta)), opened(task, i, t, "train")).change.dense()["w"]
            for i in (0, 1)
        )
        apart.append(float((a - b).norm()))
        theta = {"w": theta["w"] + (a + b) / 2}
    assert apart[1] < 0.01 * apart[0]


def test_a_client_that_was_away_takes_the_mean_change_a_round():
    one = Tracking({"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 2.0])}, 3, 0.5)
    assert one.settled({"w": torch.tensor([2.0, 0.0])}, 5, 0.5)["w"].tolist() == [2.0, -4.0]


def test_a_learning_rate_of_zero_tracks_nothing():
    method = fb.FedCOM(**LOCAL, gate=True, lr_rounds=1)
    assert fb.run(method, tiny_task(), rounds=3).summary["status"] == "done"


def test_bits_are_chosen_on_the_command_line():
    assert make_method("fedcom", {"bits": "8"}) == make_method("fedcom", {"bits": 8}) == fb.FedCOM(bits=8)
    with pytest.raises(fb.UserError, match=r"bits .*8, 16, not '7'"):
        make_method("fedcom", {"bits": "7"})


# FedPM ----------------------------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_the_servers_probabilities_and_the_clients_scores(golden):
    g = golden("fedkgf/baselines")
    mean = Mean()
    for mask in torch.from_numpy(g["pm_masks"]):
        mean.add({"x": fb.Bits({"x": mask.bool()}).dense()["x"].double()})
    torch.testing.assert_close(mean()["x"], torch.from_numpy(g["pm_theta"]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(scores(mean()["x"]), torch.from_numpy(g["pm_score"]), rtol=1e-9, atol=1e-9)


def test_probabilities_are_clipped():
    theta = torch.tensor([0.0, 0.005, 0.5, 1.0])
    torch.testing.assert_close(scores(theta).sigmoid(), torch.tensor([0.01, 0.01, 0.5, 0.99]))


class Odd(nn.Module):
    """Tied and frozen weights, a bias, a layer norm, an embedding of its own, a batch norm that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.again, self.stays = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.again.weight = self.hidden.weight
        self.stays.requires_grad_(False)
        self.layer, self.shift, self.fc = nn.LayerNorm(64), nn.Parameter(torch.ones(64)), nn.Linear(64, 3, bias=False)
        nn.init.zeros_(self.norm.weight)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x):
        x = self.norm(self.conv(x)).flatten(1)
        x = torch.relu(self.again(torch.relu(self.hidden(x)))) + self.shift
        return self.fc(self.layer(self.stays(x)))


def test_weights_stay_at_their_constants():
    """Only masks are learnt: every masked weight is 0, c or -c, and all else as first drawn."""
    task = fb.Task.on(tiny_data(), Odd)
    assert masked_names(Odd()) == ["conv.weight", "hidden.weight", "fc.weight"]
    first = task.problem.first_model().state_dict()
    for scored in ("threshold", "sampled"):
        model = fb.run(fb.FedPM(**LOCAL, scored=scored), task, rounds=2).global_model.state_dict()
        for name, value in model.items():
            if name in ("conv.weight", "hidden.weight", "again.weight", "fc.weight"):
                c = math.sqrt(2 / value[0].numel())
                signs = torch.where(first[name] < 0, -c, c)
                assert bool(((value == 0) | (value == signs)).all())
                assert 0.2 < float((value != 0).float().mean()) < 0.8
            elif name.startswith("norm."):
                continue
            else:
                assert torch.equal(value, first[name]), name
        assert bool((model["norm.weight"] == 1).all())
        assert not model["norm.bias"].any()
        assert model["norm.running_mean"].any()


def test_gradients_pass_the_draw_as_if_it_were_the_probability():
    task = tiny_task()
    model = task.problem.first_model()
    load_state(model, frozen_weights(model))
    weight = model.fc.weight.detach().clone()
    theta = {"fc.weight": torch.full((3, 64), 0.3)}
    network = Stochastic(model, theta).eval()
    g = torch.randn(5, 3)
    x = torch.randn(5, 1, 4, 4)
    torch.manual_seed(1)
    (network(x) * g).sum().backward()
    torch.manual_seed(1)
    kept = drawn(torch.full((3, 64), 0.3).logit().sigmoid())
    features = model.norm(model.conv(x)).relu().flatten(1)
    torch.testing.assert_close(network.scores[0].grad, g.T @ features * weight * 0.3 * 0.7)
    with torch.no_grad():
        torch.manual_seed(1)
        torch.testing.assert_close(network(x), features @ (weight * kept).T + model.fc.bias)
    assert all(p.grad is None for p in model.parameters())


def test_adams_first_step_is_the_learning_rate():
    site, model = opened(line_task(), 0, 1, "train"), Line()
    site.fit(model, fb.Local(epochs=1, lr=0.25, batch=8, optimiser="adam"))
    torch.testing.assert_close(model.w.detach(), torch.tensor([0.25, -0.25, -0.25]))


def test_masks_are_drawn_by_their_probabilities():
    torch.manual_seed(0)
    p = torch.tensor([0.0, 0.01, 0.5, 1.0]).expand(20_000, 4)
    torch.testing.assert_close(drawn(p).float().mean(0), p[0], rtol=0, atol=0.02)
    assert not drawn(torch.full((9,), math.nan)).any()


def test_a_model_without_layers_to_mask_is_told_of():
    with pytest.raises(fb.UserError, match="Linear and Conv2d"):
        fb.run(fb.FedPM(), line_task(), rounds=1)


# Bytes beside the information that is sent ----------------------------------------------------------------------------


class Wide(nn.Module):
    """Large enough that a frame's header does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Linear(1024, 200)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))


def entropy_bits(p: float) -> float:
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)


@pytest.mark.parametrize("name", ["fedcom", "fedcom8", "fedpm"])
def test_bytes_are_near_the_information_that_is_sent(name):
    method = {"fedcom": fb.FedCOM(**LOCAL), "fedcom8": fb.FedCOM(**LOCAL, bits=8), "fedpm": fb.FedPM(**LOCAL)}[name]
    task = fb.Task.on(tiny_data(), Wide)
    state = method.server(task.problem)
    message = Model(fb.Dense(state.theta | state.buffers))
    reply = method.train(None, message, opened(task, 0, 1, "train"))
    size = len(fb.pack(reply, layout=Layout.of(task.problem.first_state()))) - sum(b.nbytes for b in Wide().buffers())
    if name == "fedpm":
        flat = torch.cat([b.reshape(-1) for b in reply.mask.bits.values()])
        bound = len(flat) * entropy_bits(float(flat.float().mean())) / 8
        assert 4 * len(flat) / size > 31
    else:
        bound = sum(level.nbytes + 8 for level in reply.change.levels.values())
    assert size <= 1.05 * bound + 200


def test_few_that_are_kept_take_their_entropy():
    """A client whose probabilities are near 0 or 1 draws a mask of little information."""
    task = fb.Task.on(tiny_data(), Wide)
    method = fb.FedPM(epochs=1, batch=20, lr=1e-6)
    state = method.server(task.problem)
    theta = {name: torch.full_like(p, 0.02) for name, p in state.theta.items()}
    reply = method.train(None, Theta(fb.Dense(theta | state.buffers)), opened(task, 0, 1, "train"))
    size = len(fb.pack(reply, layout=Layout.of(task.problem.first_state()))) - sum(b.nbytes for b in Wide().buffers())
    values = sum(p.numel() for p in theta.values())
    assert size <= 1.05 * values * entropy_bits(0.02) / 8 + 250


# Learning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "model", "least"),
    [
        (fb.FedCOM(epochs=2, lr=0.1, batch=20), "mlp", 0.85),
        (fb.FedCOM(epochs=2, lr=0.1, batch=20, bits=8, gate=True), "mlp", 0.85),
        (fb.FedPM(), "mlp", 0.8),
    ],
    ids=["fedcom", "gate", "fedpm"],
)
def test_it_learns_digits(method, model, least):
    data = federate(load_dataset("digits"), Partition("iid", 4), seed=1)
    task = fb.Task.on(data, ModelBuilder(model, data.test.shape, 10))
    result = fb.run(method, task, rounds=5, evaluate_every=5)
    assert result.accuracy > least
    assert set(state_of(result.global_model)) == set(task.problem.first_state())
