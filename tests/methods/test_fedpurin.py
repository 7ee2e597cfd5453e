"""FedPURIN's equations against vectors computed by reference code, and the properties that hold for any input."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cases import CASES, Net3, opened, tiny_task
from runs import fingerprint
from torch import nn

import fewbytes as fb
from fewbytes.core import table
from fewbytes.core.task import Task
from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.methods.fedpurin import Critical, FedPURIN, Personal, taking_part
from fewbytes.methods.parts import critical as parts
from fewbytes.methods.parts.activations import watched
from fewbytes.methods.parts.critical import (
    collaborators,
    combine,
    critical,
    critical_means,
    overlap,
    scores,
    sparse_mean,
    threshold,
)  # fmt: skip
from fewbytes.wire import Masked

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.golden
def test_masks(golden):
    g = golden("fedpurin/purin_masks")
    cases = 0
    for key in g:
        match = re.fullmatch(r"mask/(exact|delta|exact_fp16grad)/H([01])/tau([\d.]+)/(.+)", key)
        if match is None:
            continue
        kind, hessian, tau, layer = match[1], match[2] == "1", float(match[3]), match[4]
        theta, gradient = torch.from_numpy(g[f"theta/{layer}"]), torch.from_numpy(g[f"grad/{layer}"])
        if kind == "delta":
            gradient = theta - torch.from_numpy(g[f"theta_prev/{layer}"])
        if kind == "exact_fp16grad":
            gradient = gradient.half().float()
        mask = critical(scores(theta, gradient, hessian), tau)
        assert np.array_equal(mask.numpy(), g[key].astype(bool)), key
        cases += 1
    assert cases


def round_cases(g) -> list[str]:
    return sorted({"/".join(k.split("/")[:2]) for k in g if re.match(r"[\w.]+/t\d+/", k)})


@pytest.mark.golden
def test_rounds(golden):
    g = golden("fedpurin/purin_round")
    clients = g.below("theta")
    like = g.state("theta/0")
    cases = [c for c in round_cases(g) if f"{c}/overlap" in g]
    assert cases
    for case in cases:
        name, t = case.split("/")[0], int(case.split("/t")[1])
        tau = float(name.removeprefix("tau")) if name.startswith("tau") else float(g["tau"])
        samples = g["samples_unequal"] if name == "weighted" else np.ones(len(clients))
        chosen = taking_part(Net3(like), "selected" if name == "bn_selected" else "local")
        gradients = "grad_uneven" if name == "uneven" else "grad"
        replies = {}
        for i in clients:
            theta, gradient = g.state(f"theta/{i}"), g.state(f"{gradients}/{i}")
            mask = {k: critical(scores(theta[k], gradient[k]), tau) for k in chosen}
            for k in chosen:
                assert np.array_equal(mask[k].numpy(), g[f"{case}/mask/{i}/{k}"].astype(bool)), (case, i, k)
            replies[int(i)] = Critical(Masked.of({k: theta[k] for k in chosen}, mask), int(samples[int(i)]))
        masks, uploads = [r.theta.mask for r in replies.values()], [r.theta.dense() for r in replies.values()]
        table, beta = overlap(masks), int(g["beta"])
        assert np.allclose(table, g[f"{case}/overlap"], equal_nan=True, **CLOSE)
        if t <= beta:
            assert np.isclose(threshold(table, t, beta), g[f"{case}/threshold"], **CLOSE)
        group = collaborators(table, t, beta)
        assert np.array_equal(group, g[f"{case}/collab"])
        assert [len(r.theta.values) for r in replies.values()] == g[f"{case}/upload_count"].tolist()
        delta, mean = critical_means(uploads, group), sparse_mean(uploads, list(samples / samples.sum()))
        method = FedPURIN(beta=beta, tau=tau, weighted=name == "weighted")
        down, _ = method.aggregate(replies.items(), t)
        for i in clients:
            for k in chosen:
                assert torch.allclose(uploads[int(i)][k], torch.from_numpy(g[f"{case}/uploaded/{i}/{k}"]), **CLOSE)
                if f"{case}/delta/{i}/{k}" in g:
                    assert torch.allclose(delta[int(i)][k], torch.from_numpy(g[f"{case}/delta/{i}/{k}"]), **CLOSE)
                assert torch.allclose(mean[k], torch.from_numpy(g[f"{case}/global/{k}"]), **CLOSE)
            # What the client makes of its download is the golden combined model, its other tensors untouched.
            theta = g.state(f"theta/{i}") | g.state(f"buffer/{i}")
            state = Personal(dict(theta), masks[int(i)])
            method.receive(state, down[int(i)], FakeSite(Net3(like)))
            begin = state.theta | state.received
            want = g.state(f"{case}/combined/{i}")
            assert all(torch.allclose(begin[k], want[k], **CLOSE) for k in want), (case, i)
            assert all(torch.equal(begin[k], theta[k]) for k in theta if k not in chosen)
            sent = sum(int((begin[k] != 0).sum()) for k in chosen)
            assert sent == g[f"{case}/download_count"][int(i)]
            if t > beta:  # critical values come back unchanged, and are not sent
                assert all(torch.equal(begin[k][masks[int(i)][k]], theta[k][masks[int(i)][k]]) for k in chosen)
                assert not any((down[int(i)].theta.mask[k] & masks[int(i)][k]).any() for k in chosen)


class FakeSite:
    """Stands in for the site of `receive`, which only scores there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def model(self, state):
        return self._model

    def score(self, name, model):
        pass


@pytest.mark.golden
def test_local_training(golden):
    g = golden("fedpurin/purin_local")
    x, y, init = torch.from_numpy(g["x"]), torch.from_numpy(g["y"]), g.state("init")
    data = FederatedData((ClientData(Split(x, y), Split(x, y)),), Split(x, y), tuple(map(str, range(int(y.max()) + 1))))
    task = Task.on(data, lambda: Net3(init))
    after = g.state("after_train")
    epochs = int(after["pre_bn.num_batches_tracked"] - init["pre_bn.num_batches_tracked"])  # of one batch each
    method = FedPURIN(epochs=epochs, lr=0.1, momentum=0.9, batch=len(y), gradient_storage="float16")
    site, state = opened(task, 0, 1, "train"), Personal(init, {})
    reply = method.train(state, None, site)
    assert all(torch.allclose(state.theta[k].double(), after[k].double(), rtol=1e-3, atol=1e-5) for k in after)
    masks = g.state("mask")
    assert reply.theta.mask.keys() == masks.keys()
    assert all(torch.equal(reply.theta.mask[k], masks[k].bool()) for k in masks)
    sparse, want = reply.theta.dense(), g.state("after_sparsify")
    assert all(torch.allclose(sparse[k], want[k], rtol=1e-3, atol=1e-5) for k in masks)
    correct, tested = site.records.scores["sparse"]["accuracy"]
    assert correct / tested == pytest.approx(float(g["test_acc_sparsified"]))


def some_states(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [{"a": torch.randn(3, 4, generator=g), "b": torch.randn(5, generator=g)} for _ in range(count)]


def test_dense_mask_and_everybody_is_fedavg():
    states = some_states(4)
    masks = [{k: critical(v.abs() + 1, 1.0) for k, v in s.items()} for s in states]
    assert all(m.all() for mask in masks for m in mask.values())
    group = collaborators(overlap(masks), 1, 100)
    assert group.all()  # identical masks: everybody collaborates
    mean = fb.Mean()
    for s in states:
        mean.add(s)
    for delta in critical_means(states, group):
        theta = combine(delta, sparse_mean(states, [1.0] * 4), masks[0])
        assert all(torch.allclose(theta[k], mean()[k], **CLOSE) for k in theta)


def test_ties_cutoff_and_all_zero():
    assert critical(torch.tensor([1.0, 2, 2, 2]), 0.5).tolist() == [False, True, True, True]
    assert critical(torch.tensor([1e-11, 1e-12, 5.0, 0]), 0.75).tolist() == [False, False, True, False]
    assert critical(torch.zeros(4), 0.5).all()  # no score above the cut-off: it is not applied
    assert not critical(torch.ones(1), 0.5).any()
    assert not torch.isnan(scores(torch.zeros(2), torch.tensor([float("inf"), float("nan")]))).any()


def test_a_client_without_critical_values_takes_part_in_no_mean():
    states = some_states(3)
    ones = {k: torch.ones_like(v, dtype=torch.bool) for k, v in states[0].items()}
    none = {k: ~v for k, v in ones.items()}
    replies = {i: Critical(Masked.of(s, none if i == 2 else ones), 1) for i, s in enumerate(states)}
    down, _ = FedPURIN().aggregate(replies.items(), 1)
    assert torch.allclose(down[2].theta.dense()["b"], (states[0]["b"] + states[1]["b"]) / 2)
    assert FedPURIN().aggregate([(0, replies[0])], 1) == ({}, {})  # alone: nothing is aggregated


@pytest.mark.parametrize("t", [1, 100, 101])
def test_the_server_gives_the_same_bits_however_much_is_in_memory(t, monkeypatch):
    g = torch.Generator().manual_seed(1)
    shapes = {"a": (40, 70), "b": (33,), "c": (7, 3, 3, 3)}
    replies = []
    for i in range(23):
        state = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
        replies.append((i, Critical(Masked.of(state, {k: v.abs() > 0.2 + 0.02 * i for k, v in state.items()}), i + 1)))
    whole, mean = FedPURIN(weighted=True).aggregate(replies, t)
    monkeypatch.setattr(table, "IN_MEMORY", 1)
    monkeypatch.setattr(table, "BLOCK", 1)
    parts, parts_mean = FedPURIN(weighted=True).aggregate(replies, t)
    assert all(torch.equal(mean[name], parts_mean[name]) for name in mean)
    for i in whole:
        assert torch.equal(whole[i].theta.values, parts[i].theta.values)
        assert all(torch.equal(m, parts[i].theta.mask[name]) for name, m in whole[i].theta.mask.items())


@dataclass(frozen=True)
class Kept(FedPURIN):
    """FedPURIN that keeps the masks of every round, as they came."""

    def aggregate(self, replies, t, *rule):
        replies = list(replies)
        SEEN.append({i: reply.theta.dense() for i, reply in replies})
        return super().aggregate(replies, t, *rule)


SEEN: list[dict[int, dict[str, torch.Tensor]]] = []


def test_activations_are_the_shares_of_rounds_and_change_nothing(tmp_path):
    about = CASES["fedpurin-sampled"].parameters
    SEEN.clear()
    fb.run(Kept(**about), tiny_task(), rounds=5, out=tmp_path / "on", workers=1)
    told = json.loads((tmp_path / "on" / "gallery" / "6-activations.shares.json").read_text())
    names = ["conv.weight", "fc.weight"]
    ones = [{i: {k: u[k] != 0 for k in names} for i, u in found.items()} for found in SEEN]  # no upload is exactly 0
    rows = {f"client {i}": [found[i] for found in ones if i in found] for i in range(4)}
    rows["server"] = [{k: torch.stack([m[k] for m in found.values()]).any(0) for k in names} for found in ones]
    assert list(told) == [row for row, found in rows.items() if found]
    assert len({len(found) for found in rows.values()}) > 2  # shares of different numbers of rounds
    for row, layers in told.items():
        conv, fc = (sum(m[k].double() for m in rows[row]) / len(rows[row]) for k in names)
        assert list(layers) == ["conv.weight[0]", "fc.weight"]
        assert layers["conv.weight[0]"] == pytest.approx(conv[0].flatten().tolist(), abs=1e-4)
        assert layers["fc.weight"] == pytest.approx(fc.flatten().tolist(), abs=1e-4)
        assert 0 < np.mean(layers["fc.weight"]) < 1
    fb.run(FedPURIN(**about | {"activations": False}), tiny_task(), rounds=5, out=tmp_path / "off", workers=1)
    on, off = fingerprint(tmp_path / "on"), fingerprint(tmp_path / "off")
    assert (len(on.pop("gallery")), off.pop("gallery")) == (1, {})
    assert on.pop("server") != off.pop("server")  # holds the counts
    assert (on["result"].pop("method"), off["result"].pop("method")) == ("kept", "fedpurin")
    assert on["result"]["parameters"].pop("activations") is not off["result"]["parameters"].pop("activations")
    assert on == off


def test_what_is_watched_is_bounded():
    state = {"a": torch.zeros(8, 3, 5, 5), "b": torch.zeros(4, 4), "c": torch.zeros(9), "d": torch.zeros(1000, 2048)}
    assert {name: tuple(value.shape) for name, value in watched(state).items()} == {"a[0]": (75,), "d": (1 << 16,)}


@pytest.mark.parametrize("at_once", [1, 7, 1 << 17])
def test_overlaps_are_those_of_each_pair_however_many_words_are_compared_at_once(at_once, monkeypatch):
    monkeypatch.setattr(parts, "WORDS_AT_ONCE", at_once)
    drawn = torch.rand(4, 333, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.0], [0.2], [0.5], [1.0]])
    table = overlap([{"a": row[:100].view(10, 10), "b": row[100:]} for row in drawn])
    for i, mine in enumerate(drawn):
        for j, other in enumerate(drawn):
            if i != j:
                differ = (mine != other).sum().item()
                assert table[i, j] == (1 - differ / (2 * mine.sum().item()) if mine.any() else 0.0)
    assert np.isnan(table.diagonal()).all()
