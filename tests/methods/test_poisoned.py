"""Two of ten clients lie about what they learnt: the mean is theirs, the rules that bear them are not."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

import fewbytes as fb
from fewbytes.core.rules import EVERY_RULE
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.methods.fedpurin import Critical, Personal
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.models import build_model
from fewbytes.models.build import ModelBuilder

pytestmark = pytest.mark.filterwarnings("ignore:round .* client . (sends updates|pulls):RuntimeWarning")  # who lies
LIARS = {3, 7}
TERMS = {"epochs": 2, "lr": 0.2, "batch": 20, "last": "kept"}


@dataclass(frozen=True)
class Poisoned(fb.FedAvg):
    """FedAvg with two clients that send their update times a factor."""

    factor: float = 1.0

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        reply = super().train(state, message, site)
        if site.me not in LIARS:
            return reply
        start, theta = message.theta.dense(), reply.theta.dense()
        lie = {name: start[name] + self.factor * (value - start[name]) for name, value in theta.items()}
        return Trained(fb.Dense(lie), reply.samples)


@dataclass(frozen=True)
class Stretched(fb.FedAvg):
    """FedAvg with two clients that send 30 times what their weights learnt, beside honest running statistics."""

    lying: bool = True

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        reply = super().train(state, message, site)
        if site.me not in LIARS or not self.lying:
            return reply
        start, theta = message.theta.dense(), reply.theta.dense()
        lie = {name: start[name] + 30 * (v - start[name]) for name, v in theta.items() if "running_" not in name}
        return Trained(fb.Dense(theta | lie), reply.samples)


@dataclass(frozen=True)
class PoisonedPURIN(fb.FedPURIN):
    """FedPURIN with two clients that send their critical values times a factor."""

    factor: float = 1.0

    def train(self, state: Personal, message: None, site: fb.Site) -> Critical:
        reply = super().train(state, message, site)
        if site.me not in LIARS:
            return reply
        lie = {name: self.factor * value for name, value in reply.theta.dense().items()}
        return Critical(fb.Masked.of(lie, reply.theta.mask), reply.samples)


@functools.cache
def digits() -> fb.Task:
    data = load_dataset("digits")
    dealt = federate(data, Partition("iid", clients=10), seed=0)
    return fb.Task.on(dealt, lambda: build_model("mlp", data.train.shape, len(data.classes)), seed=0)


@functools.cache
def accuracy(factor: float, rule: str, rounds: int = 20) -> float:
    how = {"rounds": rounds, "evaluate_every": rounds, "workers": 1, "save_models": False}
    return fb.run(Poisoned(**TERMS, factor=factor), digits(), **how, aggregate=rule).accuracy


@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_the_mean_is_the_liars(factor):
    assert accuracy(1.0, "mean", rounds=4) > 0.85
    assert accuracy(factor, "mean", rounds=4) < 0.5  # in a few more it is not a number


@pytest.mark.parametrize("rule", sorted(EVERY_RULE))
@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_by_a_rule_that_bears_them_they_cost_three_points_at_most(factor, rule):
    rule = f"{rule}={len(LIARS)}" if "krum" in rule else rule
    assert accuracy(factor, rule) > accuracy(1.0, "mean") - 0.03


def test_clipped_before_its_means_fedpurin_bears_them_too():
    taken = fb.Policy(max_norm=1e30, strikes=1000)  # else liars are found out by their models' norms, in some rounds
    how = {"rounds": 15, "evaluate_every": 15, "workers": 1, "save_models": False, "policy": taken}

    def combined(factor: float, rule: str) -> float:
        method = PoisonedPURIN(**TERMS | {"lr": 0.1}, beta=15, factor=factor)
        return fb.run(method, digits(), **how, aggregate=rule).rounds[-1]["scores"]["accuracy"]["combined"]

    clean = combined(1.0, "mean")
    assert combined(100.0, "mean") < clean - 0.2
    assert combined(100.0, "norm-clip") > clean - 0.03


def test_running_statistics_hide_no_liar_from_clipping(tmp_path):
    data = load_dataset("digits")
    dealt = federate(data, Partition("iid", clients=10), seed=0)
    build = ModelBuilder("resnet4:width=8,stem=3x3", data.train.shape, len(data.classes))

    def learnt(lying: bool, rule: str) -> torch.Tensor:
        out = tmp_path / f"{lying} {rule}"
        method, task = Stretched(epochs=1, lr=0.05, batch=40, lying=lying), fb.Task.on(dealt, build, seed=0)
        fb.run(method, task, rounds=1, workers=1, out=out, aggregate=rule)
        model = load_file(out / "models" / "global.safetensors")
        return torch.cat([v.flatten() for name, v in model.items() if v.is_floating_point() and "running_" not in name])

    honest = learnt(False, "mean")
    far = {rule: float((learnt(True, rule) - honest).norm()) for rule in ("mean", "norm-clip")}
    assert far["norm-clip"] < far["mean"] / 10


@dataclass(frozen=True)
class Diverged(fb.FedAvg):
    """FedAvg with two clients that send what is not a number."""

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        reply = super().train(state, message, site)
        if site.me not in LIARS:
            return reply
        return Trained(fb.Dense({name: torch.full_like(v, torch.nan) for name, v in reply.theta.dense().items()}), 1)


@pytest.mark.parametrize("rule", ["krum=3", "multi-krum=3"])
def test_malicious_that_are_refused_are_fewer_for_krum_to_bear(rule):
    with pytest.warns(RuntimeWarning, match="not finite"):
        result = fb.run(Diverged(**TERMS), digits(), rounds=4, workers=1, save_models=False, aggregate=rule)
    assert result.accuracy > 0.8  # of 10 clients 8 are left, and with 3 liars among them 9 would be needed
