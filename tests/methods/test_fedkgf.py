"""Fed-KGF: groups, assembly and training against vectors of reference code; what travels; what holds for any model."""

from __future__ import annotations

import json
import sys
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, TinyNet, tiny_task
from conftest import GOLDEN
from flower_grid import MemoryGrid
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fewbytes as fb
from fewbytes.base.state import EntryMeans
from fewbytes.cli.app import main
from fewbytes.core.task import Task
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.data.partition import main_category
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.methods.fedkgf import common_entries, grouped, modules_of, owned
from fewbytes.methods.fedpm import masked_names
from fewbytes.models import build_model
from fewbytes.models.build import ModelBuilder
from fewbytes.models.builders import SMALL_RESNET
from fewbytes.models.kgf import GeneratedConv2d, Kernels, not_generated, with_generated_kernels
from fewbytes.models.layers import layers_of
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings
from fewbytes.wire import Layout

QUICK = ["--clients", "3", "--rounds", "2", "--model", "resnet4:width=8", "--set", "batch=50"]


def vectors(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "fedkgf" / f"{name}.npz") as file:
        return {key: np.asarray(file[key]) for key in file.files}


def grouping() -> dict:
    return json.loads((GOLDEN / "fedkgf" / "grouping.json").read_text())


@pytest.mark.golden
def test_groups_of_modules():
    for case in grouping()["groupings"]:
        groups = grouped(range(case["modules"]), case["clients"])
        assert groups == case["groups"]
        assert [len(group) for group in groups] == case["sizes"]


@pytest.mark.golden
def test_assembly_copies_bit_for_bit():
    found = vectors("assembly")
    for a, case in enumerate(grouping()["assemblies"]):
        clients, groups = case["clients"], grouped(range(case["modules"]), case["clients"])
        order = [case["perm"].index(g) for g in range(clients)]
        assert order[: len(groups)] == case["owner_of_group"]
        expected = {k.removeprefix(f"a{a}_global__"): v for k, v in found.items() if k.startswith(f"a{a}_global__")}
        mean = EntryMeans()
        for client in range(clients):
            (group,) = owned(order.index(client), clients, owners=1)
            assert (group if group < len(groups) else None) == case["uploaded_group_of_client"][client]
            sent = [f"m{m}." for m in (groups[group] if group < len(groups) else [])]
            own = {k: found[f"a{a}_client{client}__{k}"] for k in expected if k.startswith(tuple(sent) or "-")}
            mean.add({name: torch.from_numpy(value) for name, value in own.items()})
        new = mean.over({name: torch.full(value.shape, torch.nan).double() for name, value in expected.items()})
        assert all(np.array_equal(new[name], value) for name, value in expected.items())


@pytest.mark.golden
def test_a_small_networks_loss_and_gradients():
    found = {name: torch.from_numpy(value) for name, value in vectors("kgf_tiny_net").items()}
    base, alpha = found["param__conv.base"], found["alpha"]
    like = nn.Conv2d(base.shape[1], len(base) + len(alpha), base.shape[-1], padding=1, bias=False)
    conv, bn = GeneratedConv2d(like, 0, Kernels(len(base))), nn.BatchNorm2d(like.out_channels)
    fc = nn.Linear(like.out_channels, len(found["param__fc.bias"]))
    net = nn.ModuleDict({"conv": conv, "bn": bn, "fc": fc}).double()
    conv.alpha, conv.beta = alpha, found["beta"]
    named = {name.replace("conv.weight", "conv.base"): p for name, p in net.named_parameters()}
    for name, p in named.items():
        p.data = found[f"param__{name}"]
    logits = fc(torch.relu(bn(conv(found["x"]))).mean((2, 3)))
    loss = F.cross_entropy(logits, found["y"])
    loss.backward()
    pairs = [(logits, found["logits"]), (loss, found["loss"])]
    for value, expected in pairs + [(p.grad, found[f"grad__{name}"]) for name, p in named.items()]:
        torch.testing.assert_close(value.detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.golden
def test_samples_with_one_main_category():
    for case in json.loads((GOLDEN / "fedkgf" / "noniid_counts.json").read_text()):
        labels = np.repeat(np.arange(case["n_classes"]), case["per_class"])
        parts = main_category(labels, case["n_clients"], case["main_frac"], np.random.RandomState(3))
        counts = [np.bincount(labels[part], minlength=case["n_classes"]).tolist() for part in parts]
        assert counts == case["counts"]
        assert len(set(chain(*parts))) == len(labels)


@pytest.mark.golden
def test_modules_of_a_resnet():
    for case in json.loads((GOLDEN / "fedkgf" / "counts.json").read_text())["resnet18"]:
        config = case["config"]
        if config["downsample"] != "kgf":  # shortcuts as this package's ResNets have them, generated too
            continue
        model = build_model(f"resnet18:stem={config['stem']}x{config['stem']}", (3, 32, 32), config["num_classes"])
        with_generated_kernels(model, Kernels(config["base"]))
        state, learnt = model.state_dict(), dict(model.named_parameters())
        assert sum(p.numel() for p in learnt.values()) == case["totals"]["kgf"]
        assert sum(v.numel() for v in state.values()) == case["totals"]["kgf"] + case["totals"]["buffers"]
        assert not [name for name in state if "alpha" in name or "beta" in name]
        modules = modules_of(model)
        assert sorted(chain(*modules)) == sorted(state)
        for names, expected in zip(modules, case["modules"], strict=True):
            assert sum(state[name].numel() for name in names if name in learnt) == expected["kgf"]
            assert sum(state[name].numel() for name in names if name not in learnt) == expected["buffers"]


@pytest.mark.golden
def test_modules_of_a_detector():
    pytest.importorskip("yolox")
    for found in json.loads((GOLDEN / "fedkgf" / "counts.json").read_text())["yolox_s"]:
        classes = next(m["out"] for m in found["modules"] if m["name"] == "head.cls_preds.0")
        model = with_generated_kernels(build_model("yolox-s", (3, 64, 64), classes), Kernels(found["base"]))
        state, learnt, modules = model.state_dict(), dict(model.named_parameters()), modules_of(model)
        assert sorted(chain(*modules)) == sorted(state)
        assert len(modules) == found["n_modules"]
        for names, expected in zip(modules, found["modules"], strict=True):
            assert names[0].removesuffix(".weight") in (expected["name"], f"{expected['name']}.conv")
            assert sum(state[name].numel() for name in names if name in learnt) == expected["kgf"]
            assert sum(state[name].numel() for name in names if name not in learnt) == expected["buffers"]
        common = common_entries(model)
        assert {name for name in common if "preds" in name} == {n for n in state if "preds" in n and "convs" not in n}
        assert not [name for name in common if name.endswith("conv.weight")]


def test_modules_of_other_models():
    names = ["torchvision:mobilenet_v2", "torchvision:vit_b_16", "vgg9:scale=0.1", "torchvision:resnet18"]
    for name in names:
        model = build_model(name, (3, 224 if "vit" in name else 32, 224 if "vit" in name else 32), 10)
        assert sorted(chain(*modules_of(model))) == sorted(model.state_dict())
    assert len(modules_of(model)) == 18  # torchvision's ResNet-18: the shortcuts are in their blocks' first modules
    assert modules_of(model)[5] == [
        f"layer2.0.{layer}.{entry}"
        for layer in ("conv1", "bn1", "downsample.0", "downsample.1")
        for entry in (["weight"] if layer[-2:] in ("v1", ".0") else
                      ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"])
    ]  # fmt: skip


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_groups_are_a_partition_and_every_owner_has_its_share(modules, clients, owners):
    groups = grouped(range(modules), clients)
    assert list(chain(*groups)) == list(range(modules))
    assert len(groups) == min(modules, clients)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    uploads = [g for slot in range(clients) for g in owned(slot, clients, owners)]
    assert sorted(uploads) == sorted(list(range(clients)) * min(owners or clients, clients))


@pytest.mark.parametrize("share", [0.3, 0.8, 1.0])
def test_main_categories_of_unequal_classes(share):
    labels = load_dataset("digits").train.labels.numpy()
    for clients in (1, 3, 4, 10, 13):
        parts = main_category(labels, clients, share, np.random.RandomState(0))
        assert sorted(chain(*parts)) == list(range(len(labels)))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    data = federate(load_dataset("digits"), Partition("main-category", 10, main_share=share))
    for i, own in enumerate(data.label_counts()["train"]):
        assert own[i] / sum(own) == pytest.approx(share, abs=0.02) or share == 1
        assert own.index(max(own)) == i


def test_a_round_uploads_one_model_in_all_whatever_the_permutation():
    method = fb.FedKGF(epochs=1, lr=0.1, batch=8, base=2)
    task = method.adapted(tiny_task(4))
    state = task.problem.first_state()
    assert [name for name in state if "alpha" in name or "beta" in name] == []
    whole = sum(value.nbytes for value in state.values())
    columns = fb.run(method, tiny_task(4), rounds=6).ledger.columns()
    assert set(columns["value_bytes_down"]) == {whole}
    by_round = [columns["value_bytes_up"][columns["round"] == t] for t in range(1, 7)]
    assert {int(up.sum()) for up in by_round} == {whole}
    assert len({tuple(up) for up in by_round}) > 1  # not always the same client
    assert len(modules_of(task.problem.first_model())) == 2
    assert all((up == 0).sum() == 2 for up in by_round)  # two modules, four clients: two have nothing to upload
    twice = fb.run(fb.FedKGF(epochs=1, lr=0.1, batch=8, base=2, owners=2), tiny_task(4), rounds=1).ledger.columns()
    assert twice["value_bytes_up"].sum() == 2 * whole


def test_groups_are_dealt_out_anew_where_they_are_random():
    """Five modules, three clients: the groups of a round are always the whole model, but not always the same."""
    data = federate(load_dataset("digits"), Partition("iid", 3, samples=(20, 5)))
    task = Task.on(data, ModelBuilder("resnet4:width=8,stem=3x3", (1, 8, 8), 10))
    uploads: dict[str, list[list[int]]] = {}
    for groups in ("fixed", "random"):
        method = fb.FedKGF(steps=1, lr_rounds=0, base=2, groups=groups)
        columns = fb.run(method, task, rounds=4, workers=1).ledger.columns()
        uploads[groups] = [sorted(columns["value_bytes_up"][columns["round"] == t].tolist()) for t in range(1, 5)]
    whole = sum(value.nbytes for value in method.adapted(task).problem.first_state().values())
    assert {sum(sent) for each in uploads.values() for sent in each} == {whole}
    assert len({tuple(sent) for sent in uploads["fixed"]}) == 1
    assert len({tuple(sent) for sent in uploads["random"]}) > 1


def test_all_owners_is_averaging():
    """Fed-KGF without module upload is FedAvg on a model of generated kernels."""
    rest = {"epochs": 2, "lr": 0.1, "batch": 8, "momentum": 0.5, "weight_decay": 1e-3, "lr_rounds": 3, "fraction": 0.5}

    def build() -> nn.Module:
        return with_generated_kernels(TinyNet(), Kernels(3, seed=0))

    one = fb.run(fb.FedKGF(base=3, owners=0, **rest), tiny_task(), rounds=3).global_model.state_dict()
    data = tiny_task().data
    other = fb.run(fb.FedAvg(**rest), Task.on(data, build), rounds=3).global_model.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_group_whose_upload_is_lost_keeps_its_values(tmp_path):
    method, task = fb.FedKGF(epochs=1, lr=0.1, batch=8, base=2), tiny_task(2)

    def fault(message, reply):
        client = message.metadata.dst_node_id - 1000
        lost = client == 1 and message.metadata.message_type.startswith("train.")
        return [] if lost else [reply]

    grid = MemoryGrid(client_app(method, task, tmp_path / "nodes"), 2, fault)
    policy = fb.Policy(min_replies=0.5, round_timeout=0.4, connect_timeout=0.4)
    result = serve_run(
        grid, Run.of(method, task, Settings(rounds=1, out=tmp_path / "run"), policy), exchange=Exchange(poll=0.001)
    )
    first, new = method.adapted(task).problem.first_state(), result.global_model.state_dict()
    changed = [any(not torch.equal(first[n], new[n]) for n in names) for names in modules_of(result.global_model)]
    assert sorted(changed) == [False, True]


def test_what_is_common_comes_from_all_clients():
    method = fb.FedKGF(epochs=1, lr=0.1, batch=8, base=2, common=True)
    state = method.adapted(tiny_task()).problem.first_state()
    common = sum(value.nbytes for name, value in state.items() if name.startswith(("norm.", "fc.")))
    columns = fb.run(method, tiny_task(4), rounds=1).ledger.columns()
    kernels = sum(value.nbytes for name, value in state.items() if name.startswith("conv."))
    assert sorted(columns["value_bytes_up"]) == [common, common, common, common + kernels]


def test_permuted_assembly_trains_on_clients_of_one_class_only_if_classifiers_are_averaged():
    """Why `common` is there: a classifier from one client knows that client's classes."""
    data = federate(load_dataset("digits"), Partition("main-category", 10, main_share=0.9))
    accuracy = {}
    for common in (False, True):
        method = fb.FedKGF(batch=20, lr=0.05, lr_rounds=0, base=8, common=common, last="kept")
        task = Task.on(data, ModelBuilder("resnet4:width=16,stem=3x3", (1, 8, 8), 10))
        accuracy[common] = fb.run(method, task, rounds=12).accuracy
    assert accuracy[True] > accuracy[False] + 0.1


def test_alpha_and_beta_come_from_the_seed_everywhere(tmp_path):
    method = CASES["fedkgf"]
    one, two, other = (method.adapted(tiny_task(seed=seed)).problem.model(0) for seed in (5, 5, 6))
    assert torch.equal(one.conv.beta, two.conv.beta)
    assert not torch.equal(one.conv.beta, other.conv.beta)
    assert Layout.of(one.state_dict()).hash == Layout.of(other.state_dict()).hash
    fb.run(method, tiny_task(), rounds=1, out=tmp_path)
    loaded = fb.load_model(tmp_path, build=TinyNet)
    assert torch.equal(loaded.conv.alpha, method.adapted(tiny_task()).problem.model(0).conv.alpha)


@pytest.fixture
def fewbytes(tmp_path, monkeypatch, capsys):
    """The command line, in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fewbytes", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_kgf_goes_with_other_methods(fewbytes, tmp_path):
    plain = build_model("resnet4:width=8", (1, 8, 8), 10)
    small = ModelBuilder("resnet4:width=8", (1, 8, 8), 10, Kernels(2))(0)
    assert sum(p.numel() for p in small.parameters()) < 0.5 * sum(p.numel() for p in plain.parameters())
    for method in ("fedavg", "fedpurin"):
        code, text, errors = fewbytes("run", method, *QUICK, "--kgf", "2", "--seed", "3", "--json", "--out", method)
        assert code == 0, errors
        result = json.loads(text)
        assert result["kgf"] == 2
        (folder,) = (tmp_path / method).iterdir()
        loaded = fb.load_model(folder, client=0 if method == "fedpurin" else None)
        expected = ModelBuilder("resnet4:width=8", (1, 8, 8), 10, Kernels(2, seed=3))(0)
        assert torch.equal(loaded.layers[0][0].conv1.alpha, expected.layers[0][0].conv1.alpha)
        sent = sum(v.numel() for v in loaded.state_dict().values())
        assert sent == sum(v.numel() for v in expected.state_dict().values())


def test_where_no_model_is_named_kgf_takes_one_with_convolutions(fewbytes):
    once = ["--clients", "2", "--samples", "20/5", "--rounds", "1", "--set", "epochs=1", "--json"]
    code, text, errors = fewbytes("run", "fedavg", *once, "--kgf", "16")
    assert code == 0, errors
    assert json.loads(text)["model"] == SMALL_RESNET
    code, text, _ = fewbytes("run", "fedavg", *once)
    assert json.loads(text)["model"] == "mlp"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "fedavg", "--kgf", "512"], "use fewer, or a model with wider convolutions"),
        (["run", "fedavg", *QUICK, "--kgf", "512"], "no convolution whose kernels 512 base kernels"),
        (["run", "fedkgf", *QUICK, "--set", "base=64"], "no convolution whose kernels 64 base kernels"),
        (["run", "fedkgf", *QUICK, "--model", "mlp"], "no convolution whose kernels"),
        (["run", "fedkgf", *QUICK, "--kgf", "4", "--set", "base=2"], "generated already"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(arguments, words, tmp_path, fewbytes):
    code, _, errors = fewbytes(*arguments)
    assert code == 2
    assert words in errors
    assert len(errors.splitlines()) == 1
    assert not list((tmp_path / "runs").glob("*/result.json"))


def test_layers_left_alone_are_named(fewbytes):
    options = ["--clients", "2", "--samples", "20/5", "--rounds", "1", "--model", "cases:Grouped"]
    code, _, errors = fewbytes("run", "fedkgf", *options, "--set", "base=8")
    assert code == 0
    assert "kernels are not generated in 2 (with groups)" in " ".join(errors.split())
    assert "kernels are not generated in 0 (no more than 8 kernels)" in " ".join(errors.split())


def test_constants_stay_where_models_are_cut(fewbytes):
    """FuseFL sends blocks, and folds normalisations into plain convolutions only."""
    options = ["--clients", "2", "--samples", "40/10", "--model", "resnet4:width=8,stem=3x3", "--set", "blocks=2"]
    code, text, errors = fewbytes("run", "fusefl", *options, "--set", "epochs=2", "--kgf", "4", "--json")
    assert code == 0, errors
    sent = json.loads(text)["uplink_nominal_bytes"]
    code, text, _ = fewbytes("run", "fusefl", *options, "--set", "epochs=2", "--json")
    assert sent < 0.7 * json.loads(text)["uplink_nominal_bytes"]


def test_layers_of_generated_kernels_are_layers():
    model = with_generated_kernels(build_model("resnet4:width=8", (1, 8, 8), 10), Kernels(2))
    assert layers_of(model).keys() == layers_of(build_model("resnet4:width=8", (1, 8, 8), 10)).keys()
    assert len(masked_names(model)) == len(layers_of(model))


def test_what_is_shared_stays_so_and_what_is_frozen_is_left_alone():
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    pretrained = net[2].weight
    with_generated_kernels(net, Kernels(2))
    assert net[1].weight is net[0].weight
    assert not torch.equal(net[1].alpha, net[0].alpha)
    assert net[2].weight is pretrained
    assert not_generated(net, 2) == {"2": "frozen"}
    with pytest.raises(fb.UserError, match=r"no convolution.*\(frozen\)"):
        with_generated_kernels(nn.Sequential(nn.Conv2d(4, 4, 3).requires_grad_(False), nn.Flatten()), Kernels(2))
