"""DGC, FedCAMS and SmartIdx: their equations against vectors of reference code, and what holds for any input."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from cases import LOCAL, TinyNet, opened, tiny_data, tiny_task
from torch import nn

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.methods.dgc import Memory, clipped, remember
from fewbytes.methods.fedcams import Moments
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.compressed import Residual, trained_change
from fewbytes.methods.smartidx import packages
from fewbytes.models.build import ModelBuilder
from fewbytes.wire import Layout, TopK, counted
from fewbytes.wire.topk import largest

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CLOSE32 = {"rtol": 2e-4, "atol": 1e-6}


def steps_of(g, name: str) -> list[int]:
    """0, 1, … as long as there is an array of that name."""
    return list(itertools.takewhile(lambda t: f"{name}{t}" in g, itertools.count()))


@pytest.mark.golden
def test_dgc_remembers_what_it_does_not_send(golden):
    g = golden("fedkgf/baselines")
    u = v = torch.zeros(g["dgc_g0"].shape, dtype=torch.float64)
    steps = steps_of(g, "dgc_g")
    for t in steps:
        places, sent, u, v = remember(u, v, torch.from_numpy(g[f"dgc_g{t}"]), float(g["dgc_momentum"]), int(g["dgc_k"]))
        dense = TopK.of({"x": sent}, {"x": places}).dense()["x"]
        for name, value in (("sent", dense), ("u", u), ("v", v)):
            torch.testing.assert_close(value, torch.from_numpy(g[f"dgc_{name}{t}"]), **CLOSE)
    assert len(steps) > 1


@pytest.mark.golden
def test_fedcams_rounds(golden):
    g = golden("fedkgf/baselines")
    steps = steps_of(g, "cams_delta")
    first = torch.from_numpy(g["cams_x0"])
    zeros = [{"x": torch.zeros_like(first)} for _ in range(3)]
    state = Moments({"x": first}, {}, *zeros)
    clients = [Residual({}) for _ in g["cams_delta0"]]
    method = fb.FedCAMS()
    for t in steps:
        mean = fb.Mean()
        for i, client in enumerate(clients):
            x = client.added({"x": torch.from_numpy(g[f"cams_delta{t}"][i])})
            sent = fb.Signs.of(x).dense()
            client.keep(x, sent)
            torch.testing.assert_close(sent["x"].double(), torch.from_numpy(g[f"cams_sent{t}"][i]), **CLOSE32)
            torch.testing.assert_close(client.error["x"], torch.from_numpy(g[f"cams_err{t}"][i]), **CLOSE32)
            mean.add({"x": sent["x"].double()})
        method.move(state, mean())
        for name, value in (("x", state.theta), ("m", state.m), ("v", state.v), ("vhat", state.highest)):
            torch.testing.assert_close(value["x"], torch.from_numpy(g[f"cams_{name}{t + 1}"]), **CLOSE32)
    assert len(steps) > 1


def equal_task(clients: int = 3) -> fb.Task:
    """Clients with as many samples each, so that plain and weighted means are the same."""
    data = tiny_data(clients)
    members = tuple(
        dataclasses.replace(member, train=member.train.take(torch.arange(16))) for member in data.clients
    )  # fmt: skip
    return fb.Task.on(dataclasses.replace(data, clients=members), TinyNet)


ALL_OF_IT = [fb.DGC(**LOCAL, density=1.0, momentum=0.0), fb.SmartIdx(**LOCAL, density=1.0, patterns=0)]


@pytest.mark.parametrize("method", ALL_OF_IT, ids=lambda m: type(m).__name__)
def test_all_values_are_fedavg(method):
    expected = fb.run(fb.FedAvg(**LOCAL), equal_task(), rounds=3).global_model.state_dict()
    model = fb.run(method, equal_task(), rounds=3).global_model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-6)


def test_dgc_sends_everything_in_the_end():
    """Without momentum, what was sent and what is left add up to all changes; vectors leave nothing."""
    task, method, state = tiny_task(), fb.DGC(**LOCAL, momentum=0.0, density=0.1), Memory({}, {})
    message = Model(fb.Dense(task.problem.first_state()))
    total: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    local = dataclasses.replace(method.local, momentum=0.0)
    for t in (1, 2, 3):
        change, _ = trained_change(message, opened(task, 0, t, "train"), local)
        sent = method.train(state, message, opened(task, 0, t, "train")).change
        for name, value in sent.dense().items():
            total[name] = total.get(name, 0) + value
            wanted[name] = wanted.get(name, 0) + change[name]
            assert len(sent.indices[name]) == (math.ceil(0.1 * value.numel()) if value.dim() > 1 else value.numel())
    assert set(state.v) == {name for name, value in wanted.items() if value.dim() > 1}
    for name, value in wanted.items():
        torch.testing.assert_close(total[name] + state.v.get(name, 0), value)


def test_dgc_warms_up_as_its_paper_says():
    """Densities of 25 %, 6.3 %, 1.6 %, 0.4 % and then 0.1 %."""
    task = fb.Task.on(tiny_data(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 400)))
    method, message = fb.DGC(**LOCAL, density=0.001, warmup=4), Model(fb.Dense(task.problem.first_state()))
    parts = []
    for t in range(1, 8):
        sent = method.train(Memory({}, {}), message, opened(task, 0, t, "train")).change
        parts.append(len(sent.indices["1.weight"]) / 6400)
    assert np.allclose(parts, [0.251, 0.063, 0.016, 0.004, 0.001, 0.001, 0.001], atol=3e-4)


def test_clipping_is_of_all_tensors_together():
    g = {"a": torch.full((3,), 4.0), "b": torch.full((4, 4), -1.0)}
    assert clipped(g, 8.0) == g
    less = clipped(g, 2.0)
    assert torch.cat([v.reshape(-1) for v in less.values()]).norm() == pytest.approx(2)
    assert (less["a"] / g["a"]).tolist() == pytest.approx([0.25] * 3)
    assert clipped({"a": torch.zeros(2)}, 0.0)["a"].tolist() == [0, 0]
    task = tiny_task()
    loose, tight = (fb.run(fb.DGC(**LOCAL, clip=c), task, rounds=1).global_model.state_dict() for c in (0.0, 1e-6))
    assert not torch.equal(loose["fc.weight"], task.problem.first_state()["fc.weight"])
    torch.testing.assert_close(tight["fc.weight"], task.problem.first_state()["fc.weight"], rtol=0, atol=1e-6)


def test_packages_of_a_change():
    """Of sixteen kernels of four values: three of one sign pattern, one of its own, a single value, nothing else."""
    x = {"w": torch.full((4, 4, 2, 2), 0.01), "b": torch.tensor([0.02, 5.0])}
    rows = x["w"].view(16, 4)
    for i, scale in ((1, 1.0), (6, 2.0), (11, 3.0)):
        rows[i] = scale * torch.tensor([1.0, -1.0, 0.5, -0.01])
    rows[9] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    rows[14, 2] = -0.9
    sent = packages(x, 14 / 66, 2)
    assert sent.single.indices["w"].tolist() == [14 * 4 + 2]
    assert sent.single.indices["b"].tolist() == [1]
    assert sent.whole.indices["w"].tolist() == [9]
    assert sent.magnitudes.indices["w"].tolist() == [1, 6, 11]
    assert sent.patterns.tolist() == [0b0101]
    dense = sent.dense()
    assert torch.equal(dense["w"].view(16, 4)[9], rows[9])
    m = (1 + 1 + 0.5 + 0.01) / 4
    expected = torch.tensor([[m, -m, m, -m]]) * torch.tensor([[1.0], [2.0], [3.0]])
    torch.testing.assert_close(dense["w"].view(16, 4)[[1, 6, 11]], expected)
    assert int((dense["w"] != 0).sum()) == 17
    assert len(packages(x, 14 / 66, 0).whole.indices["w"]) == 4


@pytest.mark.parametrize("density", [0.001, 1 / 32, 0.3, 1.0])
@pytest.mark.parametrize("patterns", [0, 1, 256])
def test_packages_hold_all_that_is_important(density, patterns):
    g = torch.Generator().manual_seed(0)
    shapes = {
        "a": (8, 3, 7, 7),
        "b": (6, 8, 3, 3),
        "c": (10, 6, 1, 1),
        "d": (5, 10),
        "e": (5,),
        "f": (3, 3, 9, 9),
        "g": (),
    }
    x = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    x["b"][:, :4] *= 5
    dense = packages(x, density, patterns).dense()
    flat = torch.cat([v.reshape(-1) for v in x.values()])
    important = largest(flat, math.ceil(density * len(flat)))
    got = torch.cat([v.reshape(-1) for v in dense.values()])
    assert (got[important] != 0).all()
    assert torch.equal(got[important].sign(), flat[important].sign())
    if not patterns:
        assert torch.equal(got[important], flat[important])
    assert packages({}, density, patterns).dense() == {}


def test_error_feedback_sends_everything_in_the_end():
    for name in ("fedcams", "smartidx"):
        method = {"fedcams": fb.FedCAMS(**LOCAL), "smartidx": fb.SmartIdx(**LOCAL, density=0.1)}[name]
        task, state = tiny_task(), Residual({})
        message = Model(fb.Dense(task.problem.first_state()))
        balance = {}
        local = dataclasses.replace(method.local, momentum=0.0)
        for t in (1, 2, 3):
            change, _ = trained_change(message, opened(task, 0, t, "train"), local)
            sent = method.train(state, message, opened(task, 0, t, "train")).change.dense()
            balance = {n: balance.get(n, 0) + value - sent[n] for n, value in change.items()}
        for n, value in balance.items():
            torch.testing.assert_close(state.error[n], value, rtol=1e-4, atol=1e-5)


def test_what_does_not_learn_is_not_sent():
    def build() -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
        model[1].requires_grad_(False)
        return model

    task = fb.Task.on(tiny_data(), build)
    for method in (fb.DGC(**LOCAL), fb.FedCAMS(**LOCAL), fb.SmartIdx(**LOCAL, density=0.5)):
        model = fb.run(method, task, rounds=2).global_model.state_dict()
        for name, value in task.problem.first_state().items():
            assert torch.equal(model[name], value) == name.startswith("1."), (name, method)


# ---------------------------------------------------------------------------------------------------- bytes


class Wide(nn.Module):
    """Large enough that a frame's header does not matter: 189,000 values, of which 45 % in kernels of 3 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 64, 3, padding=1), nn.Conv2d(64, 144, 3, padding=1)
        self.norm, self.hidden, self.last = nn.BatchNorm2d(144), nn.Linear(144 * 4, 180), nn.Linear(180, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.second(torch.relu(self.first(x)))))
        x = nn.functional.avg_pool2d(x, 2).flatten(1)
        return self.last(torch.relu(self.hidden(x)))


def choice_bits(d: int, k: int) -> float:
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


def chosen_bits(sent: TopK) -> float:
    places = [choice_bits(math.prod(s[: sent.depth]), len(sent.indices[n])) for n, s in sent.shapes.items()]
    return sum(places) + 32 * sum(v.numel() for v in sent.values.values())


BOUNDS = {
    "dgc": (fb.DGC(**LOCAL), chosen_bits),
    "fedcams": (fb.FedCAMS(**LOCAL), lambda sent: 32 + sum(s.numel() for s in sent.signs.values())),
    "smartidx": (
        fb.SmartIdx(**LOCAL, patterns=4),
        lambda sent: sum(map(chosen_bits, (sent.single, sent.whole, sent.magnitudes))) + 2 * len(sent.which),
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bytes_are_near_the_information_that_is_sent(name):
    """Frames of a real round; the bound counts 32 bits a value, which lossless coding undercuts."""
    method, bound_of = BOUNDS[name]
    task = fb.Task.on(tiny_data(), Wide)
    layout = Layout.of(task.problem.first_state())
    reply = method.train(
        method.client(opened(task, 0, 1, "train")),
        Model(fb.Dense(task.problem.first_state())),
        opened(task, 0, 1, "train"),
    )
    size = len(fb.pack(reply, layout=layout)) - sum(v.nbytes for v in reply.buffers.state.values())
    bound = bound_of(reply.change) / 8
    assert 0.5 * bound < size <= 1.05 * bound + 200
    values = sum(p.numel() for p in Wide().parameters())
    if name == "fedcams":
        assert 4 * values / size > 31.5  # more where values stay as they are, all of a kernel or none
    else:
        assert 4 * values / size > 25


def test_packages_count_as_papers_count_them():
    sent = packages({"w": torch.randn(20, 20, 3, 3)}, 0.5, 4)
    n = sum(len(part.indices["w"]) for part in (sent.single, sent.whole, sent.magnitudes))
    single, whole, magnitudes = (len(p.indices["w"]) for p in (sent.single, sent.whole, sent.magnitudes))
    assert counted(sent) == fb.wire.Counted(4 * (single + 9 * whole + magnitudes), 24 * n)


# ---------------------------------------------------------------------------------------------------- learning


LEARNERS = [
    fb.DGC(lr=0.1, batch=20),
    fb.FedCAMS(epochs=1, lr=0.1, batch=20),
    fb.SmartIdx(lr=0.1, batch=20, momentum=0.9),
]


@pytest.mark.parametrize("method", LEARNERS, ids=lambda method: type(method).__name__)
def test_it_learns_digits(method):
    data = federate(load_dataset("digits"), Partition("iid", 4), seed=1)
    task = fb.Task.on(data, ModelBuilder("mlp", data.test.shape, 10))
    assert fb.run(method, task, rounds=10, evaluate_every=10).accuracy > 0.85
