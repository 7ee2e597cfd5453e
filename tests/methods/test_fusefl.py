"""FuseFL's networks and equations against golden vectors."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from conftest import GOLDEN
from torch import nn

from fewbytes.core.training import Local, fit
from fewbytes.methods.parts.ccvr import class_statistics, merge, virtual_features, whole
from fewbytes.models.blocks import cut, shapes
from fewbytes.models.fused import Gather, Prefix, Stage, adaptor_of, fused_blocks, fused_network, make_adaptor
from fewbytes.models.resnet import DEPTHS, ResNet

pytestmark = pytest.mark.golden
KINDS = {"conv": "conv", "avg": "average"}


class Clients:
    """The clients of a golden archive: their models, adaptors and cuts."""

    def __init__(self, vectors):
        self.vectors = vectors
        meta = vectors["meta/M_width_inch_ncls_img"]
        self.count, self.width, self.channels, self.classes, self.size = (int(n) for n in meta)
        stages = {tuple(units): depth for depth, (_, units) in DEPTHS.items() if depth in (10, 18, 26)}
        rows = vectors["meta/units_per_stage"] if "meta/units_per_stage" in vectors else np.full((1, 4), 2)
        rows = np.broadcast_to(rows.reshape(-1, 4), (self.count, 4))
        self.depths = [stages[tuple(int(n) for n in row)] for row in rows]

    def model(self, client):
        return ResNet(self.depths[client], self.channels, self.classes, self.width).double()

    def names(self, client):
        """Our entry names by theirs."""
        row = list(self.model(client).units())
        return {f"layer{j}": unit for j, unit in enumerate(row)}

    def state(self, client):
        state = {}
        for layer, unit in self.names(client).items():
            for name, value in self.vectors.state(f"w/client{client}/{layer}").items():
                if unit == "stem":
                    name = name.replace("0.", "pre_conv.", 1) if name.startswith("0.") else "pre_bn." + name[2:]
                    state[name] = value
                else:
                    state[f"{unit}.{name}"] = value
        for name, value in self.vectors.state(f"w/client{client}/classifier").items():
            state[f"fc.{name}"] = value
        return {name: value.double() if value.is_floating_point() else value for name, value in state.items()}

    def loaded(self, client):
        model = self.model(client)
        missing, unexpected = model.load_state_dict(self.state(client), strict=False)
        assert not unexpected
        assert all(name.endswith("num_batches_tracked") for name in missing)
        return model

    def adaptor(self, blocks, client, block):
        path = f"a/K{blocks}/client{client}/block{block}"
        if f"{path}/weight" not in self.vectors:
            path = f"a/client{client}/block{block}"
        return {name: value.double() for name, value in self.vectors.state(path).items()}

    @functools.cache  # noqa: B019 (the archive is read once a test)
    def sent(self, blocks, kind):
        """What every client sends for every block."""
        rows = []
        for k in range(blocks):
            row = {}
            for client in range(self.count):
                part = cut(self.loaded(client), blocks)[k]
                adaptor = self.adaptor(blocks, client, k + 1) if k and kind == "conv" else {}
                row[client] = (adaptor, part.state(), self.takes(blocks, client)[k])
            rows.append(row)
        return rows

    def takes(self, blocks, client):
        sample = (self.channels, self.size, self.size)
        return [sample, *shapes(cut(self.model(client).float(), blocks), sample)]

    def stage(self, blocks, kind, client, k, moving=False):
        """F^{k,m}, its adaptor, and the client's own blocks (k counted from 0)."""
        model = self.loaded(client)
        own = cut(model, blocks)
        if k == 0:
            return nn.Sequential(*own, model.classifier), None, model
        fused = fused_blocks(self.sent(blocks, kind)[:k], self.model, blocks, (), kind)
        takes = self.takes(blocks, client)[k]
        adaptor = adaptor_of(self.adaptor(blocks, client, k + 1)) if kind == "conv" else None
        trained = nn.Sequential(*([adaptor] if adaptor else []), *own[k:], model.classifier)
        return Stage(Prefix(fused, Gather(kind, takes)), trained, moving).double(), adaptor, model


def close(ours, expected):
    expected = torch.from_numpy(expected)  # NaN where a class is held by nobody
    torch.testing.assert_close(ours.reshape(expected.shape), expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def cases(archive):
    vectors = np.load(GOLDEN / "fusefl" / f"{archive}.npz")
    names = {tuple(name.split("/")[1:3]) for name in vectors.files if name.startswith("o/")}
    return [(archive, kind, int(k[1:])) for kind, k in sorted(names)]


@pytest.mark.parametrize(("archive", "kind", "blocks"), [*cases("forward"), *cases("hetero_forward")])
def test_fused_forward(archive, kind, blocks, golden):
    vectors = golden(f"fusefl/{archive}")
    clients = Clients(vectors)
    x = torch.from_numpy(vectors["x"]).double()
    mean = vectors.state("cls_avg")
    for reduce, features, logits in (("sum", "features_sum", "logits_sum"), ("mean", None, "logits_mean")):
        net = (
            fused_network(clients.sent(blocks, KINDS[kind]), mean, clients.model, blocks, (), KINDS[kind], reduce)
            .double()
            .eval()
        )
        net.classifier.load_state_dict(mean)
        found = net.activations(x)
        for k, row in enumerate(found, 1):
            for client, out in enumerate(row):
                close(out, vectors[f"o/{kind}/K{blocks}/block{k}/client{client}"])
        if features:
            close(net.features(x), vectors[f"o/{kind}/K{blocks}/final/{features}"])
        close(net(x), vectors[f"o/{kind}/K{blocks}/final/{logits}"])
        for k in range(blocks):
            measured = torch.stack(found[k]).mean(0)
            if f"o/{kind}/K{blocks}/measure/block{k + 1}" in vectors:
                close(measured, vectors[f"o/{kind}/K{blocks}/measure/block{k + 1}"])


@pytest.mark.parametrize(("archive", "kind", "blocks"), [*cases("forward"), *cases("hetero_forward")])
def test_local_model_of_every_stage(archive, kind, blocks, golden):
    vectors = golden(f"fusefl/{archive}")
    clients = Clients(vectors)
    x = torch.from_numpy(vectors["x"]).double()
    for client in range(clients.count):
        for k in range(blocks):
            stage, _, _ = clients.stage(blocks, KINDS[kind], client, k)
            expected = vectors[f"o/{kind}/K{blocks}/stage{k + 1}/client{client}/logits"]
            close(stage.eval()(x), expected)
            if k:  # folded batch normalisation is the same network
                torch.testing.assert_close(
                    stage.trained(stage.prefix.folded()(x)), torch.from_numpy(expected), rtol=1e-6, atol=1e-8
                )


@pytest.mark.parametrize("mode", ["train_bn", "eval_bn"])
def test_training_steps_of_a_stage(mode, golden):
    """Two SGD steps of stage 2 of 2: what moves, what does not, and the statistics of the frozen block."""
    vectors = golden("fusefl/stage_step")
    clients = Clients(vectors)
    stage, adaptor, model = clients.stage(2, "conv", 0, 1, moving=mode == "train_bn")
    lr, momentum = (float(v) for v in vectors["meta/lr_momentum"])
    before = clients.sent(2, "conv")[0]
    losses = []

    def loss(logits, labels):
        losses.append(nn.functional.cross_entropy(logits, labels))
        return losses[-1]

    batches = [(vectors[f"x{i}"], vectors[f"y{i}"]) for i in range(2)]
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*batches, strict=True))
    size = len(batches[0][1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", torch.arange)  # the batches in the order they were made
        fit(stage, x.double(), y, Local(epochs=1, lr=lr, batch=size, momentum=momentum))
    outcome = f"o/{mode}"
    for i, value in enumerate(losses):
        close(value.detach(), np.asarray(vectors[f"{outcome}/loss{i}"]))
    for name, value in adaptor.state_dict().items():
        close(value, vectors[f"{outcome}/adapter/{name}"])
    for layer, unit in (clients.names(0) | {"classifier": "fc"}).items():
        for name, expected in vectors.state(f"{outcome}/{layer}").items():
            close(model.state_dict()[f"{unit}.{name}"], expected.numpy())
    for client, branch in zip(before, stage.prefix.blocks[0].branches, strict=True):
        state = branch.block.state()
        for layer, unit in clients.names(client).items():
            for name, expected in vectors.state(f"{outcome}/frozen/client{client}/{layer}").items():
                ours = f"pre_bn.{name[2:]}" if unit == "stem" else f"{unit}.{name}"
                close(state[ours], expected.numpy())
                assert torch.equal(state[ours], before[client][1][ours]) == (mode == "eval_bn")


def statistics(vectors):
    """Every client's `class_statistics` of the archive's raw features, and what `merge` takes."""
    classes = vectors["counts"].shape[1]
    rows = [
        class_statistics(
            torch.from_numpy(vectors[f"features/client{i}"]), torch.from_numpy(vectors[f"labels/client{i}"]), classes
        )
        for i in range(len(vectors["counts"]))
    ]
    return rows, [torch.stack(part) for part in zip(*map(whole, rows), strict=True)]


def test_class_statistics_are_those_of_the_features(golden):
    vectors = golden("fusefl/ccvr_merge")
    _, (counts, means, scatters) = statistics(vectors)
    assert torch.equal(counts, torch.from_numpy(vectors["counts"]))
    for ours, name in ((means, "client_means"), (scatters, "client_scatters")):  # they travel as float32
        torch.testing.assert_close(ours, torch.from_numpy(vectors[name]), rtol=1e-5, atol=1e-4)


def test_merged_statistics_equal_pooling_all_samples(golden):
    vectors = golden("fusefl/ccvr_merge")
    parts = [torch.from_numpy(vectors[name]) for name in ("counts", "client_means", "client_scatters")]
    totals, mean, covariance = merge(*parts)
    assert totals.tolist() == vectors["counts"].sum(0).tolist()
    close(mean, vectors["merged_mean"])
    close(covariance, vectors["merged_cov_unbiased"])
    released = merge(*parts, covariance="released")
    torch.testing.assert_close(released[1], torch.from_numpy(vectors["released_code_mean"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(released[2], torch.from_numpy(vectors["released_code_cov"]), rtol=1e-5, atol=1e-6)
    absent = torch.from_numpy(vectors["absent/counts"])
    held = (absent > 0).double()
    totals, mean, covariance = merge(absent, parts[1] * held[..., None], parts[2] * held[..., None, None])
    close(mean, vectors["absent/merged_mean"])
    close(covariance, vectors["absent/merged_cov_unbiased"])


def test_virtual_features_have_the_merged_moments_even_of_deficient_covariances():
    covariance = torch.zeros(2, 3, 3).double()
    covariance[0] = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])  # of rank 2
    mean = torch.tensor([[1.0, -1.0, 5.0], [0.0, 0.0, 0.0]]).double()
    x, y = virtual_features(torch.tensor([9, 0]), mean, covariance, 40_000, np.random.default_rng(0))
    assert set(y.tolist()) == {0}  # nobody holds the other class
    torch.testing.assert_close(x.mean(0), mean[0].float(), atol=0.03, rtol=0)
    torch.testing.assert_close(x.T.cov(), covariance[0].float(), atol=0.05, rtol=0)
    assert (x[:, 2] == 5).all()


def test_calibration_steps(golden):
    vectors = golden("fusefl/ccvr_calibrate")
    sizes = [int(name.removeprefix("W_batch")) for name in vectors if name.startswith("W_batch")]
    assert sizes
    x, y = (torch.from_numpy(vectors[name][vectors["order"]]) for name in ("virtual_features", "targets"))
    for batch in sizes:
        linear = nn.Linear(vectors["W0"].shape[1], vectors["W0"].shape[0]).double()
        linear.load_state_dict({"weight": torch.from_numpy(vectors["W0"]), "bias": torch.from_numpy(vectors["b0"])})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randperm", torch.arange)
            fit(linear, x, y, Local(epochs=1, lr=float(vectors["lr"]), batch=batch, last="kept"))
        close(linear.weight.detach(), vectors[f"W_batch{batch}"])
        close(linear.bias.detach(), vectors[f"b_batch{batch}"])


def counts(case):
    """Parameters and buffer entries of one client's blocks, adaptors and classifier, from the code."""
    with torch.device("meta"):
        model = ResNet(18, case["in_channels"], case["num_classes"], case["width"])
    parts = cut(model, case["K"])
    learnt = {name for name, _ in model.named_parameters()}
    blocks = [sum(v.numel() for n, v in part.names if n in learnt) for part in parts]
    kept = [sum(v.numel() for n, v in part.names if n not in learnt) for part in parts]
    takes, x = [], torch.zeros(1, case["in_channels"], 32, 32, device="meta")
    for part in parts:
        takes.append(tuple(x.shape[1:]))
        x = part.eval()(x)
    kind = KINDS[case["adapter"]]
    adaptors = [0] + [
        sum(p.numel() for p in adaptor.parameters()) if adaptor else 0
        for shape in takes[1:]
        if (adaptor := make_adaptor(kind, (case["M"] * shape[0], *shape[1:]), shape)) or kind == "average"
    ]
    return blocks, kept, adaptors, sum(p.numel() for p in model.classifier.parameters())


def test_parameter_counts():
    for case in json.loads((GOLDEN / "fusefl" / "param_counts.json").read_text())["cases"]:
        blocks, kept, adaptors, classifier = counts(case)
        assert blocks == case["block_params"]
        assert kept == case["block_buffers"]
        assert adaptors == case["adapter_params_before_block"]
        assert classifier == case["classifier_params"]
        sent = [b + a for b, a in zip(blocks, adaptors, strict=True)]
        assert sent == case["upload_params_per_client_at_stage"]
        assert [(case["M"] - 1) * n for n in sent] == case["download_params_per_client_after_stage"]
        trained = [sum(blocks[k:]) + adaptors[k] + classifier for k in range(case["K"])]
        assert trained == case["trainable_params_at_stage"]
        assert case["M"] * sum(sent) + classifier == case["fused_params"]
