"""FedPURIN's baselines, FedAvg's family and FedCAC: vectors of reference code, and what holds for any input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import Net3, TinyNet, opened, tiny_data, tiny_task
from torch import nn

import fewbytes as fb
from fewbytes.core.site import Site
from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.methods.fedbn import without_batch_norm
from fewbytes.methods.fedcac import FedCAC, Marked, Personal, sensitive
from fewbytes.methods.parts.averaging import Model, Own
from fewbytes.methods.parts.critical import collaborators, overlap
from fewbytes.methods.pfedsd import Taught
from fewbytes.models.layers import classifier
from fewbytes.wire import Bits, Counted, Dense, counted

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
TRAINED = {"rtol": 1e-3, "atol": 1e-5}
FAMILY = {"fedavg": fb.FedAvg(buffers="local").shared, "fedper": fb.FedPer().base, "fedbn": without_batch_norm}


@pytest.mark.golden
@pytest.mark.parametrize("name", FAMILY)
def test_what_is_averaged(golden, name):
    g = golden("fedpurin/purin_fedavg_family")
    names, mean = FAMILY[name](Net3(g.state("theta/0"))), fb.Mean()
    assert sorted(names) == sorted(map(str, g[f"{name}/keys"]))
    for i, samples in enumerate(g["samples"]):
        theta = g.state(f"theta/{i}")
        mean.add({k: theta[k] for k in names}, weight=float(samples))
    want = g.state(f"{name}/global")
    assert all(torch.allclose(mean()[k], want[k], **CLOSE) for k in names)


@pytest.mark.golden
@pytest.mark.parametrize("teacher", ["train", "eval"])
def test_a_step_of_self_distillation(golden, teacher):
    g = golden("fedpurin/purin_pfedsd_step")
    x, y, student = torch.from_numpy(g["x"]), torch.from_numpy(g["y"]), g.state("student")
    data = FederatedData((ClientData(Split(x, y), Split(x, y)),), Split(x, y), tuple(map(str, range(int(y.max()) + 1))))
    settings = {"lambda_kd": float(g["lambda"]), "temperature": float(g["temperature"]), "lr": float(g["lr"])}
    method = fb.PFedSD(epochs=1, batch=len(y), teacher=teacher, **settings)
    state, site = Own(g.state("teacher")), opened(fb.Task.on(data, lambda: Net3(student)), 0, 2, "train")
    reply = method.train(state, Model(Dense(student)), site)  # with its statistics: they are not the teacher's here
    after = g.state(f"teacher_{teacher}/after")
    assert reply.theta.state.keys() == after.keys()
    assert all(torch.allclose(reply.theta.state[k].double(), after[k].double(), **TRAINED) for k in after)
    assert site.records.losses["train"] == pytest.approx(float(g[f"teacher_{teacher}/loss"]), rel=1e-4)


@pytest.mark.golden
def test_fedcac_masks(golden):
    g = golden("fedpurin/purin_masks")
    keys = [key for key in g if key.startswith("mask/fedcac/tau")]
    assert keys
    for key in keys:
        tau, layer = key.removeprefix("mask/fedcac/tau").split("/")
        theta, before = torch.from_numpy(g[f"theta/{layer}"]), torch.from_numpy(g[f"theta_prev/{layer}"])
        assert np.array_equal(sensitive(theta, before, float(tau)).numpy(), g[key].astype(bool)), key


@pytest.mark.golden
def test_fedcac_rounds(golden):
    g = golden("fedpurin/purin_fedcac_round")
    clients, beta, tau = g.below("theta"), int(g["beta"]), float(g["tau"])
    cases = [f"{name}/{t}" for name in ("equal", "uneven") for t in g.below(name)]
    assert cases
    for case in cases:
        name, t = case.split("/t")
        replies = {}
        for i in clients:
            theta, gradient = g.state(f"theta/{i}"), g.state(f"{'grad' if name == 'equal' else 'grad_uneven'}/{i}")
            mask = {k: sensitive(theta[k], theta[k] - gradient[k], tau) for k in theta}
            for k in theta:
                assert np.array_equal(mask[k].numpy(), g[f"{case}/mask/{i}/{k}"].astype(bool)), (case, i, k)
            replies[int(i)] = Marked(Dense(theta), Bits(mask), 1)
        masks = [reply.mask.bits for reply in replies.values()]
        table = overlap(masks)
        assert np.allclose(table, g[f"{case}/overlap"], equal_nan=True, **CLOSE)
        assert np.array_equal(collaborators(table, int(t), beta), g[f"{case}/collab"])
        down = FedCAC(beta=beta, tau=tau).aggregate(replies, int(t))
        for i in clients:
            own, mask = g.state(f"theta/{i}"), masks[int(i)]
            size, ones = sum(m.numel() for m in mask.values()), sum(int(m.sum()) for m in mask.values())
            assert counted(replies[int(i)]) == Counted(4 * size, size)
            assert counted(down[int(i)]) == Counted(4 * (size - ones if int(t) > beta else size))
            # What the client makes of its download is the golden combined model, its statistics untouched.
            state, want = Personal(own | g.state(f"buffer/{i}"), mask), g.state(f"{case}/combined/{i}")
            FedCAC().receive(state, down[int(i)], some_site(own))
            begin = state.theta | state.received
            assert want.keys() == own.keys()
            assert all(torch.allclose(begin[k], want[k], **CLOSE) for k in want), (case, i)
            assert all(torch.equal(begin[k], v) for k, v in g.state(f"{case}/combined_buffer/{i}").items())
            if int(t) > beta:
                assert all(torch.equal(begin[k][mask[k]], own[k][mask[k]]) for k in own)


def some_site(like: dict[str, torch.Tensor]) -> Site:
    """A site that has the golden files' network and no test samples to score it on."""
    nothing = Split(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    data = FederatedData((ClientData(nothing, nothing),), nothing, ())
    return opened(fb.Task.on(data, lambda: Net3(like)), 0, 1, "receive")


def test_fedcac_s_cutoff_lets_more_values_be_critical():
    after = torch.tensor([1e-3, 1e-6, 1e-8, 0.0])  # scores 1e-6, 1e-12, 1e-16, 0
    assert sensitive(after, torch.zeros(4), 0.5).tolist() == [True, True, True, False]
    assert sensitive(torch.zeros(4), torch.zeros(4), 0.5).all()


def test_fedcac_where_all_is_critical_for_all_is_fedavg():
    g, mean = torch.Generator().manual_seed(0), fb.Mean()
    states = [{"a": torch.randn(3, 4, generator=g), "b": torch.randn(5, generator=g)} for _ in range(4)]
    ones = {k: sensitive(v, torch.zeros_like(v), 1.0) for k, v in states[0].items()}
    replies = {i: Marked(Dense(s), Bits(ones), 7) for i, s in enumerate(states)}
    for s in states:
        mean.add(s)
    for down in FedCAC(tau=1.0).aggregate(replies, 1).values():
        assert all(torch.allclose(down.theta.state[k], v, **CLOSE) for k, v in mean().items())
    late = FedCAC(tau=1.0, beta=1).aggregate(replies, 2)
    assert all(not counted(down).value_bytes for down in late.values())  # the clients have it all


def test_fedcac_counts_a_client_s_samples_outside_its_mask_only():
    states = [{"a": torch.tensor([1.0, 1.0])}, {"a": torch.tensor([4.0, 4.0])}]
    mask = {"a": torch.tensor([True, False])}
    replies = {i: Marked(Dense(s), Bits(mask), n) for (i, s), n in zip(enumerate(states), (1, 2), strict=True)}
    assert FedCAC().aggregate(replies, 1)[0].theta.state["a"].tolist() == [2.5, 3.0]


def test_fedper_s_classifiers_stay_with_their_clients(tmp_path):
    task, model = tiny_task(), TinyNet()
    own = [fb.FedPer().client(opened(task, i, 0, "client")).theta for i in (0, 1)]
    assert own[0].keys() == set(classifier(model)) == {"fc.weight", "fc.bias"}
    assert not torch.equal(own[0]["fc.weight"], own[1]["fc.weight"])  # each its own draw
    method = fb.FedPer(epochs=1, lr=0.1, batch=8)
    columns = fb.run(method, task, rounds=2, out=tmp_path / "run").ledger.columns()
    base = sum(p.nbytes for name, p in model.named_parameters() if name not in own[0])
    assert set(columns["value_bytes_up"]) == set(columns["value_bytes_down"]) == {base}
    trained = [fb.load_model(tmp_path / "run", client=i, build=TinyNet) for i in task.problem.clients]
    for i, theirs in enumerate(trained):
        assert (theirs.fc.weight - trained[i - 1].fc.weight).abs().max() > 0.01
        start = fb.FedPer().client(opened(task, i, 0, "client")).theta["fc.weight"]
        assert torch.corrcoef(torch.stack([start.flatten(), theirs.fc.weight.flatten()]))[0, 1] > 0.5


def test_fedper_needs_more_than_one_layer():
    with pytest.raises(fb.UserError, match="one layer"):
        fb.run(fb.FedPer(), fb.Task.on(tiny_data(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), rounds=1)


def batch_normed() -> nn.Module:
    """Without dropout, so that a teacher beside it draws no random number."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def after_rounds(method: fb.FedAvg, rounds: int) -> list[torch.Tensor]:
    """A client's model, statistics last, after so many rounds with a server that moves what it gets."""
    task = fb.Task.on(tiny_data(), batch_normed)
    state, theta = method.client(opened(task, 0, 0, "client")), method.server(task.problem).theta
    for t in range(1, rounds + 1):
        reply = method.train(state, Model(Dense(theta)), opened(task, 0, t, "train"))
        theta = {name: 0.9 * value for name, value in reply.theta.state.items()}
    learnt = reply.theta.state
    return [*learnt.values(), *(state.theta[name] for name in sorted(state.theta.keys() - learnt.keys()))]


def test_pfedsd_without_its_weight_is_fedavg_bit_for_bit():
    local = {"epochs": 2, "lr": 0.1, "batch": 8, "momentum": 0.9}

    def same(a: fb.Method, b: fb.Method, rounds: int) -> bool:
        pairs = zip(after_rounds(a, rounds), after_rounds(b, rounds), strict=True)
        return all(torch.equal(*pair) for pair in pairs)

    fedavg = fb.FedAvg(**local, buffers="local")
    for teacher in ("train", "eval"):
        assert same(fedavg, fb.PFedSD(**local, lambda_kd=0.0, teacher=teacher), 3)
        assert same(fedavg, fb.PFedSD(**local, teacher=teacher), 1)  # nobody to learn from yet
        assert not same(fedavg, fb.PFedSD(**local, teacher=teacher), 2)
    assert not same(fb.PFedSD(**local), fb.PFedSD(**local, teacher="eval"), 2)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_pfedsd_s_teacher_learns_nothing(mode):
    method, site = fb.PFedSD(epochs=2, batch=8), opened(fb.Task.on(tiny_data(), batch_normed), 0, 2, "train")
    student, teacher = site.model(), site.model(fresh=True)
    before = [[p.detach().clone() for p in model.parameters()] for model in (student, teacher)]
    site.fit(Taught(student, teacher, mode), method.local, loss=method.loss)
    assert not any(torch.equal(*pair) for pair in zip(student.parameters(), before[0], strict=True))
    assert all(torch.equal(*pair) for pair in zip(teacher.parameters(), before[1], strict=True))
