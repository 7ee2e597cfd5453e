"""FedMA: its scores and matching against sums written out, layers that are permuted, and whole runs."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from cases import CASES, Chain, TinyNet, opened, tiny_data
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.state import state_of
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.methods.fedma import (
    Matched,
    added,
    by_classes,
    layer_of,
    layers_of,
    matched,
    permuted,
    renumbered,
    rows_of,
    scores,
)
from fewbytes.models.build import build_model
from fewbytes.models.chain import chain_of, resized

TERMS = {"gamma": 7.0, "variance": 1.0, "prior_variance": 1.0}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Matching -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "variance", "prior_variance"), [(7.0, 1.0, 1.0), (2.0, 0.5, 3.0)])
def test_scores_are_those_of_the_process_written_out(gamma, variance, prior_variance):
    w, members, clients = rows(3, 4), [rows(2, 4, seed=1), rows(1, 4, seed=2)], 5
    sums = torch.stack([members[0].sum(0), members[1].sum(0)])
    got = scores(w, sums, torch.tensor([2.0, 1.0]).double(), clients, gamma, variance, prior_variance)
    expected = np.zeros((3, 5))
    for i, neuron in enumerate(w.numpy()):
        for g, matched_to in enumerate(members):
            s, tau = matched_to.numpy().sum(0) / variance, 1 / prior_variance + len(matched_to) / variance
            expected[i, g] = sum((neuron[d] / variance + s[d]) ** 2 / (1 / variance + tau) for d in range(4))
            expected[i, g] -= sum(s[d] ** 2 / tau for d in range(4))
            expected[i, g] += 2 * math.log(len(matched_to) / (clients - len(matched_to)))
        for new in range(3):
            expected[i, 2 + new] = sum((x / variance) ** 2 for x in neuron) / (1 / variance + 1 / prior_variance)
            expected[i, 2 + new] += 2 * math.log(gamma / clients) - 2 * math.log(new + 1)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_permuted_neurons_are_found_again_and_averaged():
    neurons, rng = 5 * rows(6, 8), np.random.default_rng(0)
    orders = [torch.from_numpy(rng.permutation(6)) for _ in range(4)]
    noisy = [neurons[order] + 0.1 * rows(6, 8, seed=9 + j) for j, order in enumerate(orders)]
    means, places = matched(noisy, **TERMS, sweeps=5, rng=rng)
    assert len(means) == 6
    for order, place in zip(orders, places, strict=True):
        torch.testing.assert_close(means[place.long()], neurons[order] * 4 / 5, rtol=0, atol=0.3)
    sums = torch.zeros(6, 8, dtype=torch.float64)
    for own, place in zip(noisy, places, strict=True):
        sums[place.long()] += own
    torch.testing.assert_close(means, sums / (1 + 4))  # the posterior mean under the prior's variance 1


def test_a_neuron_that_only_one_client_has_is_a_global_one_of_its_own():
    common = 5 * rows(3, 8)
    alone = 9 * rows(1, 8, seed=5)
    means, places = matched(
        [common, torch.cat([alone, common.flip(0)]), common], **TERMS, sweeps=2, rng=np.random.default_rng(0)
    )
    assert len(means) == 4
    own = int(places[1][0])
    assert own not in places[0].tolist() + places[2].tolist()
    assert places[1].tolist()[1:] == places[0].flip(0).tolist()
    torch.testing.assert_close(means[own], alone[0] / 2)


@pytest.mark.parametrize("sweeps", [0, 3])
def test_every_client_has_places_of_its_own_and_every_place_a_client(sweeps):
    clients = [rows(n, 5, seed=n) for n in (3, 7, 5)]
    means, places = matched(clients, **TERMS, sweeps=sweeps, rng=np.random.default_rng(1))
    for own, place in zip(clients, places, strict=True):
        assert len(place.unique()) == len(own) == len(place)
    assert torch.cat(places).unique().tolist() == list(range(len(means)))


def test_a_client_alone_is_matched_to_itself():
    alone = rows(4, 3)
    means, (place,) = matched([alone], 7.0, 1.0, 1e12, 5, np.random.default_rng(0))
    assert place.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(means, alone)


def test_global_neurons_that_nobody_has_any_longer_go():
    places = renumbered({2: torch.tensor([5, 1]), 0: torch.tensor([1, 7])})
    assert {j: place.tolist() for j, place in places.items()} == {2: [1, 0], 0: [0, 2]}
    sums, counts = added([torch.eye(2), torch.zeros(0, 2), torch.ones(2, 2)], places)
    assert sums.tolist() == [[2, 1], [1, 1], [0, 1]]
    assert counts.tolist() == [2, 1, 1]
    assert renumbered({}) == {}


# Layers ---------------------------------------------------------------------------------------------------------------


def test_a_layer_and_its_rows_are_the_same_numbers():
    first, last = layers_of(Chain())
    assert rows_of(first).shape == (4, 10)
    assert torch.equal(rows_of(first)[2], torch.cat([first["0.weight"][2].flatten(), first["0.bias"][2:3]]).double())
    for layer in (first, last):
        back = layer_of(rows_of(layer), layer)
        assert all(torch.equal(value, layer[name]) and value.dtype == torch.float32 for name, value in back.items())


def test_neurons_at_other_places_make_the_same_function():
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 5), nn.ReLU(),
        nn.Linear(5, 3),
    )  # fmt: skip
    model, x = build(), torch.randn(6, 1, 4, 4)
    state, layers = {}, layers_of(model)
    for t, (own, width) in enumerate(zip([3, 2, 5], [5, 2, 6], strict=True)):
        places = torch.randperm(width)[:own].to(torch.int32)
        layer = layers[t]
        spread = {name: value.new_full((width, *value.shape[1:]), 0.7) for name, value in layer.items()}
        for name, value in layer.items():
            spread[name][places.long()] = value
        state |= spread
        layers[t + 1] = permuted(layers[t + 1], places, width)
    wide = resized(build(), state | layers[-1])
    assert wide[0].out_channels == wide[2].in_channels == 5
    torch.testing.assert_close(wide(x), model(x))


def test_classifiers_are_averaged_class_by_class():
    one, two = ({"w": rows(3, 2, seed=s).float(), "b": rows(3, seed=s + 5).float()} for s in (1, 2))
    mean = by_classes([one, two], torch.tensor([[6, 0, 0], [2, 4, 0]], dtype=torch.int32))
    for name in ("w", "b"):
        assert torch.allclose(mean[name][0], 0.75 * one[name][0] + 0.25 * two[name][0])
        assert torch.equal(mean[name][1], two[name][1])
        assert torch.allclose(mean[name][2], (one[name][2] + two[name][2]) / 2)


# Runs -----------------------------------------------------------------------------------------------------------------


def test_the_matched_model_may_be_wider_and_is_read_back(tmp_path):
    task = fb.Task.on(tiny_data(), Chain)
    result = fb.run(dataclasses.replace(CASES["fedma"], gamma=1e4), task, rounds=1, out=tmp_path / "run", workers=1)
    width = len(result.global_model[0].weight)
    assert 4 < width <= 16
    x = task.data.test.load()[0]
    read = fb.load_model(tmp_path / "run", build=Chain)
    assert torch.equal(read(x), result.global_model.eval()(x))
    assert read[4].in_features == 16 * width


def test_a_client_takes_the_matched_layer_as_it_is_and_trains_what_comes_after_it():
    method, task = CASES["fedma"].changed(lr=1e-5), fb.Task.on(tiny_data(), Chain)
    site = opened(task, 0, 1, "train")
    own = method.client(site)
    first = method.train(own, None, site)
    assert first.counts is None
    assert first.layer.state.keys() == {"0.weight", "0.bias"}
    last, layer = own.theta["4.weight"], {"0.weight": torch.randn(6, 1, 3, 3), "0.bias": torch.randn(6)}
    message = Matched(fb.Dense(layer), fb.Dense({"": torch.tensor([5, 0, 2, 3], dtype=torch.int32)}))
    site = opened(task, 0, 2, "train")
    sent = method.train(own, message, site)
    assert all(torch.equal(own.theta[name], value) for name, value in layer.items())
    before, after = last.view(3, 4, 16), sent.layer.state["4.weight"].view(3, 6, 16)
    assert 0 < (after[:, [5, 0, 2, 3]] - before).norm() < before.norm() / 100
    assert after[:, [1, 4]].abs().max() > 0  # of neurons it had none of, it learns the use
    assert torch.equal(sent.counts.state[""].long(), site.train.labels.bincount(minlength=3))


def test_a_client_that_missed_a_layer_has_no_part_in_the_later_ones():
    data = dataclasses.replace(tiny_data(), presence=((1, None), (1, None), (1, 1), (2, None)))
    result = fb.run(CASES["fedma"], fb.Task.on(data, Chain), workers=1)
    columns = result.ledger.columns()
    asked = list(zip(columns["round"].tolist(), columns["client"].tolist(), strict=True))
    assert asked == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert result.summary["status"] == "done"


def test_what_is_frozen_before_a_chain_stays_at_the_node():
    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).requires_grad_(False), *Chain())

    with torch.random.fork_rng():
        result = fb.run(CASES["fedma"], fb.Task.on(tiny_data(), build), workers=1)
        before = build().state_dict()
    assert result.global_model.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in result.global_model.state_dict().items() if k.startswith("0."))
    assert not any(name.startswith("0.") for name in state_of(result.global_model))


@pytest.mark.parametrize(
    ("method", "build", "says"),
    [
        ({}, TinyNet, "TinyNet .*BatchNorm2d: .*vgg9, cnn4, lenet or mlp"),
        ({"layers": 9, "epochs": 9}, Chain, "Chain has 2 layers.*layers=2"),
        ({}, lambda client: nn.Linear(16, 3), "FedMA .*one model"),
    ],
)
def test_what_cannot_be_matched_is_told_before_anything_is_written(method, build, says, tmp_path):
    with pytest.raises(fb.UserError, match=says) as told:
        fb.run(CASES["fedma"].changed(**method), fb.Task.on(tiny_data(), build), out=tmp_path / "run")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("layers", "shape"), [(2, (1, 8, 8)), (3, (5,)), (9, (3, 8, 8)), (9, (7,))])
def test_with_no_model_named_it_takes_one_with_its_layers(layers, shape):
    method = fb.FedMA(layers=layers)
    assert len(chain_of(build_model(method.model_for(shape), shape, 4))) == layers == method.planned_rounds(1)


def test_every_layer_needs_an_epoch():
    with pytest.raises(fb.UserError, match=r"epochs 8 .*9 layers.*epochs=9"):
        fb.FedMA(layers=9, epochs=8)


def test_on_digits_it_is_far_better_than_averaging_neurons_as_they_stand():
    accuracy = {}
    for method, more in (("fedma", {"layers": 2}), ("fedavg", {})):
        parameters = {"epochs": 12, "lr": 0.05, "batch": 16, "momentum": 0.9, **more}
        settings = {"dataset": "digits", "clients": 5, "alpha": 0.1, "model": "mlp:hidden=40"}
        experiment = make_experiment({"method": method, "parameters": parameters, **settings})
        accuracy[method] = fb.run(experiment.build_method(), find(experiment).task, rounds=1, workers=1).accuracy
    assert accuracy["fedma"] > accuracy["fedavg"] + 0.15
