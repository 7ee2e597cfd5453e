"""One and three malicious clients of ten send 30 times what they learnt, or -30 times: under the mean the systems fall,
by a rule that fits each they stay what they are."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cases import tiny_task
from safetensors.torch import load_file

import fewbytes as fb
from fewbytes.core.aggregation import vote
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.methods.fedkgf import Model, Modules
from fewbytes.methods.fedpurin import Critical, Personal
from fewbytes.methods.fusefl import Fused, FuseFL, Trained
from fewbytes.methods.fusefl import Own as Parts
from fewbytes.methods.genefl import Cluster, LearnGene
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.ccvr import ClassStatistics
from fewbytes.methods.parts.heterogeneous import elected
from fewbytes.models.build import ModelBuilder

pytestmark = pytest.mark.filterwarnings("ignore:round .*:RuntimeWarning")
MALICIOUS = {0: (), 1: (3,), 3: (3, 5, 7)}
TERMS = {"epochs": 2, "lr": 0.1, "batch": 20, "last": "kept"}


def times(value: fb.Dense, factor: float, start: dict[str, torch.Tensor] | None = None) -> fb.Dense:
    """A multiple of what a client adds to `start`; counters stay."""
    lie = {}
    for name, v in value.dense().items():
        at = (start or {}).get(name, torch.zeros(()))
        lie[name] = at + factor * (v - at) if v.is_floating_point() else v
    return fb.Dense(lie)


@dataclass(frozen=True)
class LyingPURIN(fb.FedPURIN):
    malicious: tuple[int, ...] = ()
    factor: float = 30.0

    def train(self, state: Personal, message: None, site: fb.Site) -> Critical:
        reply = super().train(state, message, site)
        factor = self.factor if site.me in self.malicious else 1.0
        lie = {name: factor * value for name, value in reply.theta.dense().items()}
        return Critical(fb.Masked.of(lie, reply.theta.mask), reply.samples)


@dataclass(frozen=True)
class LyingGene(fb.GeneFL):
    malicious: tuple[int, ...] = ()
    factor: float = 30.0

    def train(self, state: averaging.Own, message: Cluster, site: fb.Site) -> LearnGene:
        reply = super().train(state, message, site)
        if site.me not in self.malicious:
            return reply
        return dataclasses.replace(reply, theta=times(reply.theta, self.factor, message.theta.dense()))


@dataclass(frozen=True)
class LyingKGF(fb.FedKGF):
    malicious: tuple[int, ...] = ()
    factor: float = 30.0

    def train(self, state: None, message: Model, site: fb.Site) -> Modules:
        reply = super().train(state, message, site)
        if site.me not in self.malicious:
            return reply
        return dataclasses.replace(reply, theta=times(reply.theta, self.factor, message.theta.dense()))


@dataclass(frozen=True)
class LyingFuse(FuseFL):
    malicious: tuple[int, ...] = ()
    factor: float = 30.0

    def train(self, state: Parts, message: Fused | None, site: fb.Site) -> Trained:
        reply = super().train(state, message, site)
        if site.me not in self.malicious:
            return reply
        block, last = times(reply.branch.block, self.factor), reply.classifier
        branch = dataclasses.replace(reply.branch, block=block)
        return dataclasses.replace(reply, branch=branch, classifier=last and times(last, self.factor))

    def statistics(self, state: Parts, message: Fused | None, site: fb.Site) -> ClassStatistics:
        reply = super().statistics(state, message, site)
        return dataclasses.replace(reply, means=times(reply.means, self.factor if site.me in self.malicious else 1.0))


PURIN = LyingPURIN(**TERMS, beta=6)
GENE = LyingGene(**{**TERMS, "lr": 0.02}, momentum=0.9, clusters=1, fraction=1.0, factor=-30.0)
FUSE = LyingFuse(**{**TERMS, "lr": 0.02, "epochs": 40}, blocks=2, ccvr_samples=100)
SYSTEMS = {
    "fedpurin": (PURIN, "mlp:hidden=32", 6, "median"),
    "genefl": (GENE, "mlp:hidden=32", 6, "median"),
    "fusefl": (FUSE, "mlp:layers=2,hidden=32", 2, "median"),
}


@functools.cache
def task(model: str) -> fb.Task:
    data = load_dataset("digits")
    dealt = federate(data, Partition("dirichlet", clients=10, alpha=1.0), seed=1)
    return fb.Task.on(dealt, ModelBuilder(model, data.train.shape, len(data.classes)), seed=1)


@functools.cache
def accuracy(name: str, malicious: int, rule: str) -> float:
    """Of the last scores that say how well honest clients do; 0 for a run that ends before."""
    method, model, rounds, _ = SYSTEMS[name]
    how = {"rounds": rounds, "evaluate_every": rounds, "workers": 1, "save_models": False, "aggregate": rule}
    try:
        result = fb.run(dataclasses.replace(method, malicious=MALICIOUS[malicious]), task(model), **how)
    except fb.FewbytesError:
        return 0.0
    scores = [row["scores"]["accuracy"] for row in result.rounds if row.get("scores", {}).get("accuracy")][-1]
    return next(scores[kind] for kind in ("combined", "global", "cohort") if kind in scores)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("malicious", [1, 3])
def test_by_its_rule_a_system_stays_what_it_is_and_by_the_mean_it_falls(name, malicious):
    rule = SYSTEMS[name][3]
    assert accuracy(name, malicious, "mean") < accuracy(name, 0, "mean") - 0.2  # the control
    assert accuracy(name, malicious, rule) > accuracy(name, 0, rule) - 0.05


@pytest.mark.parametrize("rule", ["norm-clip", "median", "trimmed-mean"])
def test_in_fed_kgf_who_alone_sends_a_part_moves_it_no_further_than_others_move_theirs(rule, tmp_path):
    method = LyingKGF(**TERMS, lr_rounds=0, base=4)
    first = method.adapted(task("resnet4:width=8,stem=3x3")).problem.first_state()

    def moved(malicious: tuple[int, ...], rule: str) -> float:
        """How far a value of the model's goes in a round."""
        out = tmp_path / f"{len(malicious)} {rule}"
        how = {"rounds": 1, "workers": 1, "aggregate": rule}
        fb.run(dataclasses.replace(method, malicious=malicious), task("resnet4:width=8,stem=3x3"), out=out, **how)
        after = load_file(out / "models" / "global.safetensors")
        return max(float((after[n] - v).square().mean().sqrt()) for n, v in first.items() if v.is_floating_point())

    everybody = tuple(range(9))  # who of them has a part is drawn
    honest = moved((), "mean")
    assert moved(everybody[:5], "mean") > 10 * honest  # the control
    assert moved(everybody[:3], rule) < 2 * honest


@pytest.mark.parametrize("part", [None, 0.3])
def test_prototypes_of_three_of_ten_move_a_class_no_further_than_honest_ones_lie_apart(part):
    """What FedKTL's server learns from; by the mean, from every prototype as it was sent."""
    honest = F.normalize(torch.randn(10, 4, 6, generator=torch.Generator().manual_seed(0)), dim=2)
    labels = torch.arange(4).repeat(10)
    for factor in (30.0, -30.0):
        lied = honest.clone()
        lied[list(MALICIOUS[3])] *= factor
        assert (lied.mean(0) - honest.mean(0)).norm(dim=1).min() > 2  # the control
        rows = elected(lied.reshape(40, 6), labels, functools.partial(vote, part=part)).view(10, 4, 6)
        others = honest[[i for i in range(10) if i not in MALICIOUS[3]]]
        assert (others.amin(0) - 1e-6 <= rows).all()
        assert (rows <= others.amax(0) + 1e-6).all()


def test_of_a_class_that_fewer_than_three_sent_there_is_no_vote_but_nothing_is_longer_than_most():
    rows, labels = torch.tensor([[1.0, 0], [0, 30.0], [0, 1.0], [1.0, 0]]), torch.tensor([0, 0, 1, 2])
    got = elected(rows, labels, vote)
    assert got.tolist() == [[1, 0], [0, 1], [0, 1], [1, 0]]


@dataclasses.dataclass(frozen=True)
class Boastful(fb.FedAvg):
    """FedAvg whose client 2 says that it has other samples than it has."""

    more: int = 0

    def train(self, state: None, message: averaging.Model, site: fb.Site) -> averaging.Trained:
        reply = super().train(state, message, site)
        return dataclasses.replace(reply, samples=reply.samples + (self.more if site.me == 2 else 0))


@pytest.mark.parametrize("more", [1, 10**6, -1])
def test_a_client_weighs_no_more_than_its_samples_do(more):
    """A reply with another number of samples than the client has is left out; the others are averaged without it."""
    result = fb.run(Boastful(epochs=1, lr=0.1, batch=8, more=more), tiny_task(), rounds=1, workers=1)
    (left,) = result.rounds[0]["left_out"]
    assert (left["client"], left["outcome"]) == (2, "rejected")
    assert f"{19 + more}, but the client has 19" in left["why"]
