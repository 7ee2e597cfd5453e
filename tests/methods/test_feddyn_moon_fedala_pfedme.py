"""FedDyn, MOON, FedALA, pFedMe: against a second implementation, and what holds in general.

The second one is of float64, written from the papers' equations, as in test_baselines: a client's batch is all it has.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import LOCAL, late_task, tiny_data, tiny_task
from hypothesis import given
from hypothesis import strategies as st
from test_baselines import (
    FULL,
    HEAD,
    LR,
    ROUNDS,
    Finished,
    equal,
    first,
    gradient,
    left,
    mean,
    numbers,
    plus,
    same,
    samples,
    steps,
    two_layer_task,
)
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.methods.fedala import has_settled, learnt, mixed
from fewbytes.methods.feddyn import corrected, moved_against
from fewbytes.methods.moon import contrast
from fewbytes.methods.pfedme import envelope_gradient, regularised

NUMBERS = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4).map(torch.tensor)
PLAIN = {"weight_decay": 0.0, "clip": 0.0}


# ---------------------------------------------------------------------------------------------------- FedDyn


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_feddyn(fraction, tmp_path):
    alpha = 0.3
    method = fb.FedDyn(**FULL, **PLAIN, epochs=4, alpha=alpha, fraction=fraction)
    run, x = Finished(method, two_layer_task(), tmp_path), first()
    h = {name: np.zeros_like(value) for name, value in x.items()}
    own = [h] * 4
    for cohort in run.cohorts:
        assert len(cohort) == 4 * fraction
        solutions = []
        for i in cohort:
            y = steps(x, 4, lambda y, i=i, x=x: plus(plus(gradient(y, i), own[i], -1), plus(y, x, -1), alpha))
            own[i] = plus(own[i], plus(y, x, -1), -alpha)
            solutions.append(y)
        for y in solutions:
            h = plus(h, plus(y, x, -1), -alpha / 4)
        x = plus(mean(solutions), h, -1 / alpha)
    same(run.model, x)
    same(run.server.h, h)
    for i in {i for cohort in run.cohorts for i in cohort}:
        same(run.state(i).g, own[i])
    same(run.server.h, mean(own))  # what h stands for


class Slope(nn.Module):
    """One weight, by which a sample is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def test_feddyn_s_fixed_point_is_the_federation_s_optimum_and_fedavg_s_is_not():
    """w^2 at one client, (2 w - 10)^2 at the other: their sum is least at 4, and their own optima are 0 and 5."""
    splits = [(torch.full((8, 1), size), torch.full((8, 1), target)) for size, target in ((1.0, 0.0), (2.0, 10.0))]
    task = fb.Task.of(Slope, [(split, split) for split in splits])
    local = {"lr": 0.05, "batch": 8, "epochs": 15}
    dyn = fb.run(fb.FedDyn(**local, **PLAIN, alpha=4.0), task, rounds=10, workers=1).global_model.w.item()
    avg = fb.run(fb.FedAvg(**local), task, rounds=10, workers=1).global_model.w.item()
    assert dyn == pytest.approx(4, abs=0.02)
    assert avg == pytest.approx(2.5, abs=0.4)


def test_a_newcomer_s_gradient_is_0(tmp_path):
    """h is the mean over all clients, also of those that come later and have not trained."""
    run = Finished(fb.FedDyn(**LOCAL, fraction=0.5), late_task(), tmp_path, rounds=2)
    own = [numbers(run.state(i).g) if run.versions.get(i) else {} for i in range(3)]
    trained = [g for g in own if g]
    assert trained
    same(run.server.h, {name: sum(g[name] for g in trained) / 3 for name in trained[0]})


@given(st.lists(st.lists(NUMBERS | st.none(), min_size=3, max_size=3), min_size=1, max_size=4), st.floats(0.01, 1))
def test_h_is_the_mean_of_clients_gradients_whoever_takes_part(rounds, alpha):
    """And if all gradients are 0, nothing is corrected."""
    h, own = {"w": torch.zeros(4)}, [{"w": torch.zeros(4)}] * 3
    assert torch.equal(corrected({"w": torch.ones(4)}, h, alpha)["w"], torch.ones(4))
    for changes in rounds:
        here = {i: change for i, change in enumerate(changes) if change is not None}
        for i, change in here.items():
            own[i] = moved_against(own[i], {"w": change}, alpha)
        if here:
            average = torch.stack(list(here.values())).mean(0)
            h = moved_against(h, {"w": average}, alpha * len(here) / 3)
    torch.testing.assert_close(h["w"], torch.stack([g["w"] for g in own]).mean(0), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- MOON


def contrasted(w, client, received, last, mu, tau):
    """The gradient of the paper's loss, as it is printed, by torch in float64."""
    data = two_layer_task().data.clients[client].train
    x, y = data.x[:].double().flatten(1), data.y
    v = {name: torch.from_numpy(value).requires_grad_() for name, value in w.items()}

    def features(of):
        weight, bias = (torch.as_tensor(of[f"1.{name}"]) for name in ("weight", "bias"))
        return x @ weight.T + bias

    def sim(a, b):
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    z = features(v)
    p = (z @ v["2.weight"].T + v["2.bias"]).softmax(1)
    near, far = (torch.exp(sim(z, features(other)) / tau) for other in (received, last))
    loss = -p[torch.arange(len(y)), y].log() - mu * torch.log(near / (near + far))
    loss.mean().backward()
    return {name: value.grad.numpy() for name, value in v.items()}


def test_moon(tmp_path):
    method = fb.MOON(**FULL, momentum=0.0, weight_decay=0.0, epochs=3, mu=2.0, temperature=0.4)
    run, w = Finished(method, two_layer_task(), tmp_path), first()
    own = [w] * 4
    for _ in range(ROUNDS):
        for i, last in enumerate(own):
            own[i] = steps(w, 3, lambda v, w=w, i=i, last=last: contrasted(v, i, w, last, 2.0, 0.4))
        w = mean(own, samples())
    same(run.model, w)
    for i, v in enumerate(own):
        same(run.state(i).theta, v)


def test_moon_without_a_contrast_is_fedavg_bit_for_bit():
    terms = LOCAL | {"epochs": 2, "momentum": 0.9, "fraction": 0.75}
    fedavg = left(fb.FedAvg(**terms))
    assert equal(left(fb.MOON(**terms, weight_decay=0.0, mu=0.0)), fedavg)
    assert not equal(left(fb.MOON(**terms, weight_decay=0.0, mu=1.0)), fedavg)


def test_moon_takes_models_without_units_and_none_without_a_linear_layer():
    class Own(nn.Module):
        def __init__(self, last: nn.Module) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 8, 4), last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x))).flatten(1)

    takes = fb.Task.on(tiny_data(), lambda: Own(nn.Sequential(nn.Flatten(), nn.Linear(8, 3))))
    assert fb.run(fb.MOON(**LOCAL), takes, rounds=5, workers=1).summary["score"]["final"] > 0.75
    with pytest.raises(fb.UserError, match="Own has no Linear, whose input MOON contrasts: use another model"):
        fb.run(fb.MOON(**LOCAL), fb.Task.on(tiny_data(), lambda: Own(nn.Conv2d(8, 3, 1))), rounds=1)


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0.1, 2))
def test_the_contrast_is_the_loss_of_telling_two_models_apart(z, near, far, tau):
    """One of two, by how like they are: the probabilities of both sum to 1, and lengths do not count."""
    z, near, far = z[None], near[None], far[None]
    one, other = contrast(z, near, far, tau), contrast(z, far, near, tau)
    assert float((-one).exp() + (-other).exp()) == pytest.approx(1, abs=1e-5)
    assert float(contrast(z, near, near, tau)) == pytest.approx(math.log(2), abs=1e-6)
    if min(float(v.norm()) for v in (z, near, far)) > 0.01:
        assert float(contrast(2 * z, 0.5 * near, 3 * far, tau)) == pytest.approx(float(one), abs=1e-4)


# ---------------------------------------------------------------------------------------------------- FedALA


def loss_of(w, client) -> float:
    data = two_layer_task().data.clients[client].train
    x, y = data.x[:].double().numpy().reshape(len(data), -1), data.y.numpy()
    o = (x @ w["1.weight"].T + w["1.bias"]) @ w["2.weight"].T + w["2.bias"]
    return float(np.mean(np.log(np.exp(o).sum(1)) - o[np.arange(len(y)), y]))


@pytest.mark.parametrize("settled", [1e-9, 0.02])
def test_fedala(settled, tmp_path):
    """The weights of the last layer, until the loss has settled or for twenty passes, and once in later rounds."""
    method = fb.FedALA(**FULL, epochs=2, settled=settled, weight_lr=0.7, first_passes=20)
    run, theta = Finished(method, two_layer_task(), tmp_path), first()
    own, weights, passes = [None] * 4, [None] * 4, []
    for _ in range(ROUNDS):
        for i in range(4):
            start = dict(theta)
            if own[i] is not None:
                fresh = weights[i] is None
                w = {name: np.ones_like(theta[name]) for name in HEAD} if fresh else weights[i]
                losses = []
                while True:
                    start |= {name: own[i][name] + (theta[name] - own[i][name]) * w[name] for name in HEAD}
                    losses.append(loss_of(start, i))
                    g = gradient(start, i)
                    w = {k: np.clip(v - 0.7 * (theta[k] - own[i][k]) * g[k], 0, 1) for k, v in w.items()}
                    if not fresh or len(losses) == 20 or (len(losses) > 10 and np.std(losses[-10:]) < settled):
                        break
                start |= {name: own[i][name] + (theta[name] - own[i][name]) * w[name] for name in HEAD}
                weights[i] = w
                passes.append(len(losses))
            own[i] = steps(start, 2, lambda v, i=i: gradient(v, i))
        theta = mean(own, samples())
    assert set(passes) == ({20, 1} if settled < 1e-3 else {11, 1})
    same(run.model, theta)
    for i in range(4):
        same(run.state(i).theta, own[i])
        same(run.state(i).weights, weights[i])
        assert any((w < 1).any() for w in weights[i].values())


def test_fedala_s_first_round_is_fedavg_s():
    assert equal(left(fb.FedALA(**LOCAL), 1), left(fb.FedAvg(**LOCAL), 1))
    with pytest.raises(fb.UserError, match="layers=3: the model has only 2 layers to aggregate"):
        fb.run(fb.FedALA(layers=3), tiny_task(), rounds=1)


@given(NUMBERS, NUMBERS, NUMBERS.map(lambda v: (v + 3) / 6), NUMBERS, st.floats(0.1, 5))
def test_weights_keep_each_value_between_the_client_s_and_the_server_s(own, theta, weight, gradient, eta):
    new = learnt(weight, gradient, theta - own, eta)
    assert bool(((new >= 0) & (new <= 1)).all())
    value = mixed(own, theta - own, new)
    low, high = torch.minimum(own, theta), torch.maximum(own, theta)
    assert bool(((value >= low - 1e-5) & (value <= high + 1e-5)).all())
    assert torch.equal(mixed(own, theta - own, torch.zeros(4)), own)
    inner = weight.clone().requires_grad_()  # the gradient of the weights is the chain rule's
    (mixed(own, theta - own, inner) * gradient).sum().backward()
    torch.testing.assert_close(new, (weight - eta * inner.grad).clamp(0, 1), rtol=1e-4, atol=1e-5)


def test_a_loss_settles_after_more_than_ten_passes():
    assert not has_settled([1.0] * 10, 0.1)
    assert has_settled([5.0, *[1.0] * 10], 0.1)
    assert not has_settled([*[1.0] * 10, 5.0], 0.1)
    assert not has_settled([math.nan] * 20, 0.1)


# ---------------------------------------------------------------------------------------------------- pFedMe


@pytest.mark.parametrize("beta", [1.0, 0.6])
def test_pfedme(beta, tmp_path):
    near, lr = 3.0, 0.2
    method = fb.PFedMe(**FULL, steps=4, lambda_near=near, personal_steps=3, personal_lr=lr, beta=beta)
    run, w = Finished(method, two_layer_task(), tmp_path), first()
    personal = [w] * 4
    for _ in range(ROUNDS):
        moved = []
        for i in range(4):
            here, theta = w, w
            for _ in range(4):
                for _ in range(3):
                    theta = plus(theta, plus(gradient(theta, i), plus(theta, here, -1), near), -lr)
                here = plus(here, plus(here, theta, -1), -LR * near)
            personal[i] = theta
            moved.append(here)
        w = plus({name: (1 - beta) * value for name, value in w.items()}, mean(moved), beta)
    same(run.model, w)
    for i, theta in enumerate(personal):
        same(run.state(i).theta, theta)


@given(st.floats(0.5, 4), NUMBERS, NUMBERS, st.floats(0.5, 8))
def test_where_the_personal_model_is_solved_the_shared_one_goes_down_the_envelope(curvature, b, w, near):
    """Of f = a / 2 (theta - b)^2 the envelope is a lambda / (a + lambda) / 2 (w - b)^2."""
    theta = w
    for _ in range(60):
        theta = theta - regularised(curvature * (theta - b), theta, w, near) / (curvature + near)
    expected = curvature * near / (curvature + near) * (w - b)
    torch.testing.assert_close(envelope_gradient(w, theta, near), expected, rtol=1e-3, atol=1e-4)


def test_pfedme_s_statistics_are_the_personal_models_mean():
    """Whatever the server's step; the model's own values move by beta."""
    whole, half = (left(fb.PFedMe(**LOCAL, steps=2, beta=beta), 1) for beta in (1.0, 0.5))
    start = tiny_task().problem.first_state()
    assert torch.equal(whole["norm.running_mean"], half["norm.running_mean"])
    assert whole["norm.num_batches_tracked"] == half["norm.num_batches_tracked"] == 2 * 5
    moved = half["fc.weight"] - start["fc.weight"]
    torch.testing.assert_close(moved, (whole["fc.weight"] - start["fc.weight"]) / 2, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- on real data


@pytest.mark.parametrize("method", [fb.FedDyn(), fb.MOON(), fb.FedALA(), fb.PFedMe()], ids=lambda m: m.method_name)
def test_it_learns_the_digits(method):
    """By its paper's terms, but for the length and step of local training."""
    data = federate(load_dataset("digits"), Partition(clients=4, alpha=1.0), seed=0)
    local = {"epochs": 2, "lr": 0.1, "batch": 20, "steps": 0}
    task = fb.Task.on(data, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))
    result = fb.run(method.changed(**local), task, rounds=6, workers=1)
    assert result.summary["score"]["final"] > 0.8
