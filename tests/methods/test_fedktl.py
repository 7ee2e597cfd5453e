"""FedKTL: its equations against vectors computed by reference code, its properties, its bytes, its bad input."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import LOCAL, OwnNet, TinyNet, opened, tiny_data
from cases.fedktl import KTL
from conftest import GOLDEN
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.state import load_state, state_of
from fewbytes.core.admission import Expected, admit, finite_norm
from fewbytes.core.training import fit, outputs
from fewbytes.data import ClientData, Partition, Split, federate, load_dataset
from fewbytes.experiments.display import Display
from fewbytes.generators import load_generator
from fewbytes.methods.fedktl import (
    Joint,
    KnowledgeTransfer,
    Own,
    Pairs,
    arcface_logits,
    make_transformer,
    mmd,
)
from fewbytes.methods.parts.heterogeneous import ClassVectors, class_means, gathered, one_each
from fewbytes.methods.parts.latents import (
    client_images,
    shortened,
    usable_classes,
    use_statistics_of,
    with_class_means,
)
from fewbytes.models.build import ModelBuilder
from fewbytes.models.etf import Embedding, EtfNetwork, simplex_frame
from fewbytes.report import read_runs, write_report
from fewbytes.report.table import summary_table
from fewbytes.running.checkpoint import Checkpoints, read_checkpoint
from fewbytes.wire import FrameError, Images, Layout, unpack
from fewbytes.wire.schema import leaves_of


def close(value: Tensor, expected: np.ndarray | Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(value.detach(), torch.as_tensor(expected).to(value.dtype), rtol=rtol, atol=atol)


def network(state: dict[str, Tensor], frame: Tensor) -> EtfNetwork:
    """The golden vectors' small network with the given values."""
    convolution, width = state["base.0.weight"], state["head.weight"].shape[1]
    base = nn.Sequential(
        nn.Conv2d(convolution.shape[1], convolution.shape[0], 3, padding=1),
        nn.BatchNorm2d(convolution.shape[0]),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.AdaptiveAvgPool1d(width),
    )
    head = nn.Linear(width, state["head.weight"].shape[0])
    load_state(base, {k.removeprefix("base."): v for k, v in state.items() if k.startswith("base.")})
    load_state(head, {k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")})
    return EtfNetwork(Embedding(base, head), frame)


def named(network: EtfNetwork) -> dict[str, Tensor]:
    parts = {"base": network.embedding.features, "head": network.embedding.head}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in state_of(module).items()}


# Golden vectors -------------------------------------------------------------------------------------------------------


@pytest.mark.golden
def test_the_frame(golden):
    g = golden("fedktl/ktl_etf")
    for case in g.below():
        frame = simplex_frame(torch.from_numpy(g[f"{case}/P"]))
        close(frame, g[f"{case}/etf"])
        close(frame.T @ frame, g[f"{case}/gram"], atol=2e-6)
        close(F.normalize(frame, dim=0).T, g[f"{case}/etf_rows_normalized"])


@pytest.mark.golden
def test_the_discrepancy_and_its_gradient(golden):
    g = golden("fedktl/ktl_mmd")
    for case in g.below():
        x = torch.from_numpy(g[f"{case}/x"]).requires_grad_()
        y = torch.from_numpy(g[f"{case}/y"]) if f"{case}/y" in g else x.detach()
        value = mmd(x, y)
        close(value, g[f"{case}/mmd"], rtol=1e-3, atol=1e-5)
        if f"{case}/grad_x" in g:
            value.backward()
            close(x.grad, g[f"{case}/grad_x"], rtol=1e-3, atol=1e-5)


def cases(archive: str, holding: str) -> list[str]:
    """The cases of an archive: what holds an array of that name."""
    with np.load(GOLDEN / "fedktl" / f"{archive}.npz") as file:
        return [name.removesuffix(f"/{holding}") for name in file.files if name.endswith(f"/{holding}")]


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("ktl_local", "mu_s_m"))
def test_two_local_steps(golden, case):
    g = golden("fedktl/ktl_local")
    mu, scale, margin = (float(v) for v in g[f"{case}/mu_s_m"])
    method = fb.FedKTL(mu=mu, scale=scale, margin=margin, lr=float(g["lr"]), batch=g["x"].shape[1])
    net = network(g.state("init/model"), torch.from_numpy(g["etf"]))
    local, pairs = Joint(net), None
    if len(g[f"{case}/mse"]):
        weight = g.state("init/proj")["weight"]
        local.mapping = nn.Linear(weight.shape[1], weight.shape[0])
        load_state(local.mapping, g.state("init/proj"))
        pairs = torch.from_numpy(g["x_gen"]), torch.from_numpy(g["latent_gen"])
    logits, losses, norms = [], [], []
    arcface = method.loss

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        logits.append(arcface_logits(scores, labels, scale, margin).detach())
        losses.append(float(arcface(scores, labels).detach()))
        return arcface(scores, labels)

    def before_step(again) -> None:
        norms.append([float(nn.utils.get_total_norm(p.grad for p in m.parameters())) for m in local.children()])

    x, y = torch.from_numpy(g["x"]).flatten(0, 1), torch.from_numpy(g["y"]).flatten()
    extra = None if pairs is None else method.transfer_loss(local, net.embedding.features, *pairs)
    fit(local, x, y, method.local, loss=loss, extra=extra, before_step=before_step)
    close(torch.stack(logits)[0], g[f"{case}/logits"][0], rtol=1e-5, atol=1e-4)
    close(torch.stack(logits), g[f"{case}/logits"], rtol=2e-3, atol=1e-2)
    close(torch.tensor(losses), g[f"{case}/ce"], rtol=1e-3, atol=1e-3)
    norms = torch.tensor(norms)
    close(norms, g[f"{case}/grad_norm_model_proj"][:, : norms.shape[1]], rtol=2e-3, atol=1e-3)
    for name, value in named(net).items():
        close(value.float(), g[f"{case}/after/model/{name}"], rtol=1e-3, atol=1e-5)
    if pairs is not None:
        for name, value in state_of(local.mapping).items():
            close(value, g[f"{case}/after/proj/{name}"], rtol=1e-3, atol=1e-5)


@pytest.mark.golden
def test_prototypes_and_predictions(golden):
    g = golden("fedktl/ktl_protos")
    net = network(g.state("model"), torch.from_numpy(g["etf"]))
    x, y = torch.from_numpy(g["x"]).flatten(0, 1), torch.from_numpy(g["y"]).flatten()
    means = class_means(outputs(net.embedding, x), y)
    assert means.classes == g["proto_labels"].tolist()
    close(F.normalize(means.rows, dim=1), g["protos"])
    assert means.rows.numel() == g["upload_elements"]
    cosines = outputs(net, x)
    close(cosines, g["test_cosine"])
    assert cosines.argmax(1).tolist() == g["test_pred"].tolist()


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("ktl_align", "latents"))
def test_alignment(golden, case):
    g = golden("fedktl/ktl_align")
    prototypes, labels = torch.from_numpy(g["protos"]), torch.from_numpy(g["labels"])
    latents = list(torch.from_numpy(g[f"{case}/latents"]))
    start = torch.from_numpy(g["init/centroids"])
    f = make_transformer(prototypes.shape[1], start.shape[1])
    load_state(f, {k.removeprefix("mlp."): v for k, v in g.state("init/F").items()})
    if f"{case}/class_means_before" in g:
        close(with_class_means(start, f, prototypes, labels), g[f"{case}/class_means_before"])
    if f"{case}/init_centroids" in g:  # the table starts at the class means
        start = with_class_means(start, f, prototypes, labels)
        close(start, g[f"{case}/init_centroids"])
    rate, weight = float(g["lr"]), float(g["lambda"])
    method = fb.FedKTL(server_epochs=len(latents), server_batch=len(labels), server_lr=rate, lambda_mse=weight)
    made = method.align(f, start, prototypes, labels, lambda n: latents.pop(0))
    after = {k.removeprefix("mlp."): v for k, v in g.state(f"{case}/after/F").items()}
    for name, value in state_of(f).items():
        if name not in ("0.bias", "1.running_mean"):  # rounding noise made large by Adam
            close(value.float(), after[name], rtol=1e-3, atol=2e-4)
    close(made, g[f"{case}/after/centroids_embedding"], rtol=1e-3, atol=2e-4)
    load_state(f, {name: after[name] for name in ("0.bias", "1.running_mean")})
    close(with_class_means(start, f, prototypes, labels), g[f"{case}/class_means_after"], rtol=2e-3, atol=1e-3)


@pytest.mark.golden
def test_images_for_clients(golden):
    g = golden("fedktl/ktl_images")
    synthesised = (torch.from_numpy(g["synthesis_output"]) * 127.5 + 128).clamp(0, 255) / 255  # StyleGAN3's
    images = client_images(synthesised, g["images"].shape[1:])
    close((images - 0.5) / 0.5, g["images"])
    assert np.array_equal(g["vectors"], g["latent_centroids"])  # the pair's vector is the centroid itself


# Properties -----------------------------------------------------------------------------------------------------------


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64, generator=g))[0]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 30), st.integers(0, 20), st.integers(0, 1000))
def test_a_frame_is_spread_equally_whatever_its_rotation(classes, more, seed):
    frame = simplex_frame(orthonormal(classes + more, classes, seed))
    gram = torch.full((classes, classes), -1 / (classes - 1)) + torch.eye(classes) * classes / (classes - 1)
    close(frame.T @ frame, gram, atol=1e-5)
    assert torch.linalg.matrix_rank(frame.double(), atol=1e-4) == classes - 1


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 1000), st.sampled_from(["fixed", "median"]))
@example(1, 9, 276, "median")  # a pair: its own distance is the median
def test_the_discrepancy_is_one(n, size, seed, bandwidth):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, n, size, generator=g)
    value = mmd(x, y, bandwidth)
    close(mmd(x, x, bandwidth), torch.zeros(()), atol=1e-5)
    assert value > -1e-5
    close(mmd(y, x, bandwidth), value, atol=1e-5)
    close(mmd(x[torch.randperm(n, generator=g)], y[torch.randperm(n, generator=g)], bandwidth), value, atol=1e-5)


def test_the_median_bandwidth_has_a_gradient_where_the_fixed_one_underflows():
    x, y = torch.randn(2, 6, 16384, generator=torch.Generator().manual_seed(0))
    for bandwidth, moves in (("fixed", False), ("median", True)):
        free = x.clone().requires_grad_()
        mmd(free, y, bandwidth).backward()
        assert bool(free.grad.abs().max() > 0) is moves


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000))
def test_nothing_is_aligned_in_no_epochs(seed):
    g = torch.Generator().manual_seed(seed)
    prototypes, labels = torch.randn(7, 4, generator=g), torch.tensor([0, 0, 2, 2, 2, 3, 3])
    f, start = make_transformer(4, 6), torch.randn(5, 6, generator=g)
    before = state_of(f)
    made = fb.FedKTL().align(f, start, prototypes[:1], labels[:1], lambda n: torch.randn(n, 6))  # one, and no batch
    assert all(torch.equal(value, before[name]) for name, value in state_of(f).items())
    assert torch.equal(made, start)
    means = with_class_means(start, f, prototypes, labels)
    close(means[2], f.eval()(prototypes)[2:5].mean(0))
    assert torch.equal(means[[1, 4]], start[[1, 4]])  # classes nobody sent


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 12), st.integers(0, 1000), st.sampled_from([1e-5, 1e-2, 1.0]))
def test_the_transformer_takes_the_statistics_of_the_prototypes_that_are_there(n, seed, spread):
    g = torch.Generator().manual_seed(seed)
    f = make_transformer(4, 6)
    f.train()(5 + torch.randn(9, 4, generator=g))  # the last round's were elsewhere
    prototypes = torch.ones(4) + spread * torch.randn(n, 4, generator=g)
    use_statistics_of(f, prototypes)
    close(f.eval()(prototypes), f.train()(prototypes), rtol=1e-3, atol=1e-3)
    before = state_of(f)
    use_statistics_of(f, prototypes[:1])  # one alone has no variance
    assert all(torch.equal(value, before[name]) for name, value in state_of(f).items())


def test_only_vectors_that_are_too_long_are_shortened():
    made = shortened(torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]]), 6.0)
    close(made, torch.tensor([[3.0, 4.0], [3.6, 4.8], [0.0, 0.0]]))


def test_alignment_brings_the_prototypes_to_the_latents_and_keeps_classes_together():
    torch.manual_seed(0)
    labels = torch.arange(5).repeat(8)
    prototypes = F.normalize(torch.eye(5)[labels] + 0.1 * torch.randn(40, 5), dim=1)
    f = make_transformer(5, 16)

    def latents(n: int) -> Tensor:
        return 3 + torch.randn(n, 16)

    far = mmd(f.eval()(prototypes), latents(40))
    method = fb.FedKTL(server_epochs=200, server_batch=20, server_lr=0.01)
    centroids = method.align(f, torch.randn(5, 16), prototypes, labels, latents)
    q = f.eval()(prototypes).detach()
    assert mmd(q, latents(40)) < 0.5 * far
    assert (torch.cdist(q, centroids).argmin(1) == labels).float().mean() > 0.7


def test_the_margin_widens_the_true_angle_only():
    cosines, labels = torch.tensor([[0.9, -0.2, 1.0], [1.0, 0.0, -1.0]]), torch.tensor([2, 0])
    logits = arcface_logits(cosines, labels, 10.0, 0.5)
    others = torch.tensor([[True, True, False], [False, True, True]])
    assert torch.equal(logits[others], 10 * cosines[others])
    close(logits[~others], torch.full((2,), 10 * math.cos(0.5)), atol=1e-2)
    steep = torch.ones(2, 3, requires_grad=True)
    arcface_logits(steep, labels, 10.0, 0.5).sum().backward()
    assert steep.grad.isfinite().all()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9))
def test_images_cover_the_clients_shape(height, width, channels, h, w):
    images = torch.rand(2, 3, height, width)
    made = client_images(images, (channels, h, w))
    assert made.shape == (2, channels, h, w)
    assert made.min() >= images.min() - 1e-6
    assert made.max() <= images.max() + 1e-6


# Runs -----------------------------------------------------------------------------------------------------------------


class PlainNet(TinyNet):
    """Without dropout, so that nothing is drawn while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


class WideNet(PlainNet):
    """Other features than TinyNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Linear(32, 3)


def server_state(folder: Path) -> KnowledgeTransfer:
    return unpack(KnowledgeTransfer, read_checkpoint(folder).server)


def client_state(folder: Path, client: int) -> Own:
    version = read_checkpoint(folder).named()[client]
    return unpack(Own, (folder / "checkpoint" / "clients" / f"{client}-{version}.state").read_bytes())


def method(**others: object) -> fb.FedKTL:
    return fb.FedKTL(**({**LOCAL, **KTL} | others))


def test_without_a_weight_pairs_change_only_what_batch_normalisation_has_seen(tmp_path):
    task = fb.Task.on(tiny_data(), PlainNet)
    for name, parameters in (("weightless", {"mu": 0.0}), ("without", {"transfer": "none"})):
        fb.run(method(**parameters), task, rounds=2, out=tmp_path / name, workers=1)
    with_pairs, without = (client_state(tmp_path / name, 1) for name in ("weightless", "without"))
    differ = {name for name, value in with_pairs.theta.items() if not torch.equal(value, without.theta[name])}
    assert differ == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert all(torch.equal(value, without.head[name]) for name, value in with_pairs.head.items())


def test_a_class_that_nobody_has_gets_no_picture(tmp_path):
    data = tiny_data()
    clients = tuple(ClientData(c.train.take((c.train.labels != 1).nonzero().flatten()), c.test) for c in data.clients)
    fb.run(method(), fb.Task.on(replace(data, clients=clients), TinyNet), rounds=2, out=tmp_path / "run", workers=1)
    state = server_state(tmp_path / "run")
    assert state.known == [0, 2]
    assert state.pairs.vectors.classes == [0, 2]
    assert state.pairs.images.pixels.shape == (2, 1, 4, 4)
    assert torch.equal(state.pairs.vectors.rows, state.centroids[[0, 2]])


def test_clients_with_one_class_or_one_sample_take_part(tmp_path):
    data = tiny_data()
    labels = data.clients[0].train.labels
    one_class = ClientData(data.clients[0].train.take((labels == 2).nonzero().flatten()), data.clients[0].test)
    one_sample = ClientData(data.clients[1].train.take([0]), data.clients[1].test)
    task = fb.Task.on(replace(data, clients=(one_class, one_sample, *data.clients[2:])), TinyNet)
    result = fb.run(method(), task, rounds=2, out=tmp_path / "run", workers=1)
    columns = result.ledger.columns()
    up = {int(i): int(n) for i, n in zip(columns["client"], columns["value_bytes_up"], strict=True)}
    assert up == {0: 4 * 3, 1: 4 * 3, 2: 4 * 9, 3: 4 * 9}
    state = client_state(tmp_path / "run", 1)  # nothing to train on, but it has a prototype
    assert state.theta["norm.num_batches_tracked"] == 0


@pytest.mark.filterwarnings("ignore:batch normalisation .* sees a single value")
@pytest.mark.parametrize("transfer", ["pairs", "images"])
def test_a_single_pair_is_left_out_as_it_cannot_be_normalised(transfer, tmp_path):
    def narrow() -> nn.Module:  # batch normalisation sees one number a sample and channel
        return nn.Sequential(nn.Conv2d(1, 4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))

    data = tiny_data()
    clients = tuple(ClientData(c.train.take((c.train.labels == 2).nonzero().flatten()), c.test) for c in data.clients)
    task = fb.Task.on(replace(data, clients=clients), narrow)
    fb.run(method(transfer=transfer), task, rounds=3, out=tmp_path / "run", workers=1)
    assert server_state(tmp_path / "run").pairs.vectors.classes == [2]


def test_every_client_may_have_another_model(tmp_path):
    task = fb.Task.on(tiny_data(), lambda client: [TinyNet, WideNet][client % 2]())
    fb.run(method(), task, rounds=2, out=tmp_path / "run", workers=1)
    models = [fb.load_model(tmp_path / "run", client=i, build=task.problem.build) for i in (0, 1)]
    assert [m.embedding.head.in_features for m in models] == [64, 32]
    kept = client_state(tmp_path / "run", 1)
    close(models[1].embedding.head.weight, kept.head["weight"])


def test_it_learns_digits_with_different_models(tmp_path):
    data = federate(load_dataset("digits"), Partition("dirichlet", 4, alpha=0.3), seed=1)
    task = fb.Task.on(data, ModelBuilder("mlp@32+mlp:layers=2", (1, 8, 8), 10), seed=1)
    result = fb.run(fb.FedKTL(lr=0.05, epochs=2, server_epochs=10), task, rounds=3, out=tmp_path / "run", workers=1)
    assert result.accuracy > 0.8
    assert result.accuracy > result.summary["majority_class_accuracy"]["personalised"] + 0.1
    assert (
        result.summary["uplink_nominal_bytes"] < 4 * 4 * 4 * 10 * 10
    )  # rounds, clients, floats of ten classes at most


@pytest.mark.parametrize(
    ("task", "parameters", "words"),
    [
        (lambda: fb.Task.on(tiny_data(), TinyNet), {"dimension": 2}, "dimension is 2"),
        (lambda: fb.Task.on(tiny_data(), TinyNet), {"generator": "nobody"}, "no generator 'nobody'"),
        (lambda: fb.Task.on(tiny_data(), TinyNet), {"generator": "cases:TinyNet"}, "made a TinyNet"),
        (lambda: fb.Task.on(tiny_data(), TinyNet), {"transfer": "conditional"}, "does not have 3 classes of its own"),
        (lambda: fb.Task.on(tiny_data(), TinyNet), {"generator": "cases:Nothing"}, "cannot be made"),
        (lambda: fb.Task.on(tiny_data(), lambda: nn.GRU(4, 4)), {}, "a GRU has no features"),
        (lambda: fb.Task.of(lambda: nn.Linear(4, 2), [flat()], flat()[1]), {}, "shape \\(4,\\)"),
        (
            lambda: fb.Task.on(tiny_data(), lambda i: [TinyNet, WideNet][i % 2]()),
            {"classifier": "linear"},
            "features of one size",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(task, parameters, words, tmp_path):
    with pytest.raises(fb.UserError, match=words):
        fb.run(method(**parameters), task(), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def flat() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    half = torch.rand(6, 4), torch.tensor([0, 1] * 3)
    return half, half


def test_centroids_far_from_all_valid_latents_are_not_used():
    valid = torch.eye(3)
    centroids = torch.tensor([[1.9, 0, 0], [0, 50.0, 0], [0, 0, 0.1], [float("nan"), 0, 0]])
    assert usable_classes(centroids, [0, 1, 2, 3], valid) == [0, 2]
    assert usable_classes(centroids, [1], valid) == []


class Norms(fb.Watcher):
    """Remembers the centroids' norms and the classes with pairs, as the server's state has them after every round."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.norms, self.pairs = folder, [], []

    def scored(self, row: dict[str, object]) -> None:
        state = server_state(self.folder)
        self.norms.append(state.centroids[state.known].norm(dim=1))
        self.pairs.append((state.known, None if state.pairs is None else state.pairs.vectors.classes))


def edge_client(shots: int) -> fb.Task:
    """One client with a few digits of every class, and a network without batch normalisation."""
    data = load_dataset("digits")
    rows = torch.cat([(data.train.labels == c).nonzero().flatten()[:shots] for c in range(10)])
    splits = data.train.take(rows), data.test.take(range(100))
    train, test = ((F.interpolate(split.load()[0], scale_factor=2), split.labels) for split in splits)
    return fb.Task.of(ModelBuilder("cnn4@64", (1, 16, 16), 10), [(train, test)], test)


def test_centroids_stay_among_valid_latents_and_every_class_has_its_pair(tmp_path):
    heard = Norms(tmp_path / "run")
    fb.run(fb.FedKTL(), edge_client(9), rounds=60, out=tmp_path / "run", workers=1, watcher=heard, evaluate_every=60)
    valid = load_generator("compact").sample_latents(200).norm(dim=1)
    assert torch.stack(heard.norms).max() < 2 * valid.max()
    assert all(norms.median() > 0.3 * valid.median() for norms in heard.norms)
    assert all(known == classes == list(range(10)) for known, classes in heard.pairs)


def test_pairs_that_cannot_be_used_are_told(tmp_path, capsys):
    task = fb.Task.on(tiny_data(), TinyNet)
    far = method(server_lr=1e3)  # throws the centroids out
    with Display("fedktl", tmp_path / "run") as display:
        result = fb.run(far, task, rounds=2, out=tmp_path / "run", workers=1, watcher=display)
    words = "centroids far from all valid latents made no pairs"
    assert [row["notes"] for row in result.rounds] == [{words: "3 of 3 classes"}] * 2
    assert capsys.readouterr().err.replace("\n", " ").count(words) == 1
    runs = read_runs([tmp_path / "run"])
    assert f"in 2 of 2 rounds {words} (the last time 3 of 3 classes)" in str(summary_table(runs).caption)
    assert words in write_report(runs, tmp_path / "report.html").read_text()


@pytest.mark.parametrize("samples", [3, 13, 19])
def test_every_generated_image_is_trained_on(samples):
    seen: list[int] = []

    @dataclass(frozen=True)
    class Listening(fb.FedKTL):
        def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
            seen.extend(labels.tolist())
            return super().loss(scores, labels)

    own = ClientData(Split(torch.rand(samples, 1, 4, 4), torch.zeros(samples, dtype=torch.int64)), tiny_data().test)
    site = opened(fb.Task.on(replace(tiny_data(1), clients=(own,)), TinyNet), 0, 1, "train")
    learner = Listening(**LOCAL | KTL | {"transfer": "images", "epochs": 1, "batch": 10})
    message = Pairs(Images.of(torch.rand(2, 1, 4, 4)), ClassVectors.of(torch.zeros(2, 4), [1, 2]))
    learner.train(learner.client(site), message, site)
    assert sorted(seen) == [0] * samples + [1, 2]


def test_without_transfer_nothing_is_generated_and_nothing_sent_down(tmp_path):
    halves = [flat() for _ in range(2)]
    task = fb.Task.of(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), halves, halves[0][1])
    result = fb.run(method(transfer="none", generator="nobody"), task, rounds=2, out=tmp_path / "run", workers=1)
    assert result.ledger.totals()["downlink_bytes"] == 0
    assert result.ledger.totals()["uplink_bytes"] > 0


def test_conditional_pairs_are_of_the_generators_own_classes_and_nothing_is_uploaded(tmp_path):
    task = fb.Task.on(tiny_data(), PlainNet)
    given = method(transfer="conditional", generator="cases:TinyConditional")
    result = fb.run(given, task, rounds=2, out=tmp_path / "run", workers=1)
    columns = result.ledger.columns()
    assert (columns["value_bytes_up"] == 0).all()
    assert (columns["value_bytes_down"] == 4 * 3 * (4 + 16)).all()  # from the first round on
    states = [server_state(tmp_path / "run")]
    fb.run(given, task, rounds=1, out=tmp_path / "shorter", workers=1)
    states.append(server_state(tmp_path / "shorter"))
    drawn, before = (state.centroids[:, 0].tolist() for state in states)
    assert drawn == before  # classes are drawn once,
    assert len({*range(5)} & {*drawn}) == 3
    assert not torch.equal(states[0].centroids, states[1].centroids)  # the rest of a vector every round
    assert states[0].pairs.vectors.classes == [0, 1, 2]
    fb.run(method(transfer="none"), task, rounds=1, out=tmp_path / "alone", workers=1)
    learnt, alone = (client_state(tmp_path / name, 1).theta for name in ("shorter", "alone"))
    assert not torch.equal(learnt["conv.weight"], alone["conv.weight"])


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from cases import LOCAL, OwnNet, tiny_data
import fewbytes as fb
class Stop(fb.Watcher):
    def scored(self, row):
        if row["round"] == 2:
            raise KeyboardInterrupt
task = fb.Task.on(tiny_data(2), lambda client: OwnNet(2 + client))
try:
    fb.run(fb.FedKTL(**LOCAL, server_epochs=2), task, rounds=4, out=sys.argv[2], workers=1, resume=len(sys.argv) > 3,
           watcher=fb.Watcher() if len(sys.argv) > 3 else Stop())
except KeyboardInterrupt:
    pass
"""


def test_a_run_resumed_by_a_new_process_ends_the_same(tmp_path):
    for more in ((), ("resume",)):  # the generator is loaded anew, at another point of the run
        arguments = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent.parent), str(tmp_path / "stopped"), *more]
        subprocess.run(arguments, check=True)
    task = fb.Task.on(tiny_data(2), lambda client: OwnNet(2 + client))
    whole = fb.run(fb.FedKTL(**LOCAL, server_epochs=2), task, rounds=4, out=tmp_path / "whole", workers=1)
    assert read_checkpoint(tmp_path / "stopped").server == read_checkpoint(tmp_path / "whole").server
    kept, stopped = Checkpoints(tmp_path / "stopped"), read_checkpoint(tmp_path / "stopped")
    assert kept.ledger.read(stopped.ledger) == whole.ledger.tobytes()


@pytest.mark.parametrize(
    ("vectors", "classes"),
    [
        (torch.zeros(2, 3), [0]),
        (torch.zeros(2, 3), [0, 0]),
        (torch.zeros(2, 3), [0, 3]),
        (torch.zeros(1, 3), [-1]),
        (torch.zeros(2), [0, 1]),
        (torch.zeros(1, 4), [0]),
        (torch.full((1, 3), 2.0), [0]),
    ],
)
def test_vectors_that_do_not_fit_are_refused(vectors, classes):
    good, known = (
        ClassVectors.of(torch.zeros(2, 3), [0, 2]),
        Expected(Layout(()), frozenset(), None, {}, 20, None, 1, 1e9),
    )

    def taken(reply):
        leaves = leaves_of(reply)
        admit(leaves, finite_norm(leaves, ""), known)
        one_each(3, 3, longest=2)(7, reply)
        return reply

    with pytest.raises((FrameError, fb.MethodError)):
        taken(ClassVectors.of(vectors, classes))
    rows, labels = gathered([(1, taken(good)), (2, taken(ClassVectors.of(torch.empty(0, 0), []))), (3, good)])
    assert rows.shape == (4, 3)
    assert labels.tolist() == [0, 2, 0, 2]
