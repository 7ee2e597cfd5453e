"""GENE-FL: its equations against vectors computed by reference code, its properties, its bytes, its bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import TinyNet, late_task, opened, tiny_data, tiny_task
from conftest import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.state import EntryMeans
from fewbytes.codec.first import First
from fewbytes.core.objectives import Classification
from fewbytes.core.training import fit
from fewbytes.data import ClientData, Partition, Split, federate, load_dataset
from fewbytes.methods.fedbn import FedBN, without_batch_norm
from fewbytes.methods.fedfina import FedFina, last_convolutions
from fewbytes.methods.fedlp import FedLP
from fewbytes.methods.fedlps import FedLPS, channels_read, encoder_names, prune_mask
from fewbytes.methods.genefl import (
    GeneFL,
    Genes,
    layer_scores,
    learngene,
    mixed,
    next_gamma,
    normalised,
    plain_step,
    pulls,
    top_layers,
)
from fewbytes.methods.learngene import Learngene, Moving
from fewbytes.methods.partialfed import PartialFed, last_square
from fewbytes.methods.parts.averaging import Model, Own
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.methods.parts.clusters import (
    embedding,
    hierarchical,
    k_means,
    likeness,
    subspace,
    subspace_distance,
)
from fewbytes.models import build_model
from fewbytes.models.build import ModelBuilder
from fewbytes.models.layers import layers_of
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import unpack

golden = pytest.mark.golden
TENSORS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / "genefl" / f"{name}.npz") as file:
        return {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}


def group(found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {tensor: found[f"{name}__{tensor}"] for tensor in TENSORS}


def endings(found: dict[str, Tensor], name: str) -> list[str]:
    """What follows `name` in the vectors' names: the cases they hold."""
    ends = list(dict.fromkeys(key.removeprefix(name).split("__")[0] for key in found if key.startswith(name)))
    assert ends
    return ends


def close(value: Tensor | float, expected: Tensor) -> None:
    torch.testing.assert_close(
        torch.as_tensor(value, dtype=torch.float64).detach(), expected.double(), rtol=1e-9, atol=1e-9
    )


def close_all(value: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        close(value[name], tensor)


def same_groups(labels: list[int]) -> Tensor:
    return torch.tensor([[a == b for b in labels] for a in labels])


@golden
def test_normalised_fisher_information_and_the_mixture():
    found = vectors("elastic")
    fisher = group(found, "fisher")
    close_all(normalised(fisher), group(found, "Fhat_global"))
    close_all(normalised(fisher, per_tensor=True), group(found, "Fhat_per_tensor"))
    for threshold in endings(found, "mask_eps"):
        keep = {name: value <= float(threshold) for name, value in normalised(fisher).items()}
        close_all(keep, group(found, f"mask_eps{threshold}"))
        close_all(mixed(group(found, "local"), group(found, "cluster"), keep), group(found, f"mix_eps{threshold}"))
    edge = normalised({"": found["edge_F"]})[""]
    close(edge, found["edge_Fhat"])
    for threshold in endings(found, "edge_mask_eps"):
        close((edge <= float(threshold)).double(), found[f"edge_mask_eps{threshold}"])
    close(normalised({"": found["const_F"]})[""], found["const_Fhat"])


def perceptron(state: dict[str, Tensor]) -> nn.Sequential:
    hidden, features = state["fc1.weight"].shape
    model = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, len(state["fc2.bias"]))).double()
    with torch.no_grad():
        for p, value in zip(model.parameters(), state.values(), strict=True):
            p.copy_(value)
    return model


def terms(model: nn.Module, found: dict[str, Tensor], norm: str, target: bool = False):
    cluster, keep = group(found, "Theta"), group(found, "mask")
    anchors = mixed(group(found, "prev"), cluster, keep) if target else None
    return pulls(dict(zip(TENSORS, model.parameters(), strict=True)), cluster, keep, norm, anchors)


@golden
@pytest.mark.parametrize("norm", ["global", "per_tensor_sum", "squared"])
def test_the_objective_and_its_gradient(norm):
    found = vectors("objective")
    lambda_1, lambda_2 = float(found["lam1"]), float(found["lam2"])
    for kind in ("", "at_cluster__"):
        model = perceptron(group(found, "theta"))
        classes = F.cross_entropy(model(found["X"]), found["y"])
        at = found | {f"Theta__{name}": value for name, value in group(found, "theta").items()} if kind else found
        gen, elastic = (term() for term in terms(model, at, norm))
        total = classes + lambda_1 * gen + lambda_2 * elastic
        total.backward()
        close(total, found[f"{norm}__{kind}L_total"])
        gradient = dict(zip(TENSORS, (p.grad for p in model.parameters()), strict=True))
        close_all(gradient, group(found, f"{norm}__{kind}grad"))
        if not kind:
            for value, name in ((classes, "cls"), (gen, "gen"), (elastic, "elg")):
                close(value, found[f"{norm}__L_{name}"])
    model = perceptron(group(found, "theta"))
    elastic = terms(model, found, norm, target=True)[1]()
    close(elastic, found[f"{norm}__L_elg_target"])
    gradient = torch.autograd.grad(elastic, list(model.parameters()))
    close_all(dict(zip(TENSORS, gradient, strict=True)), group(found, f"{norm}__grad_elg_target"))


@golden
@pytest.mark.parametrize("norm", ["global", "per_tensor_sum", "squared"])
def test_training_steps(norm):
    found = vectors("objective")
    lambda_1, lambda_2, lr = (float(found[name]) for name in ("lam1", "lam2", "lr"))
    count = sum(key.startswith("batch") and key.endswith("_y") for key in found)
    x, y = (torch.cat([found[f"batch{i}_{name}"] for i in range(count)]) for name in ("X", "y"))
    size = len(found["batch0_y"])

    def trained(samples: int, steps: str) -> dict[str, Tensor]:
        model = perceptron(group(found, "theta"))
        gen, elg = terms(model, found, norm)
        split = steps == "split"
        local = fb.Local(lr=lr, batch=size, order="stored", momentum=0.0 if split else float(found["momentum"]))
        fit(
            model,
            x[:samples],
            y[:samples],
            local,
            extra=lambda _: lambda_1 * gen() + (0 if split else lambda_2 * elg()),
            after_step=(lambda: plain_step(list(model.parameters()), elg(), lr * lambda_2)) if split else None,
        )
        return dict(zip(TENSORS, (p.detach() for p in model.parameters()), strict=True))

    for ending in endings(found, f"{norm}__after"):
        batches, steps = ending.split("_")
        close_all(trained(int(batches) * size, steps), group(found, f"{norm}__after{ending}"))


@golden
def test_layer_scores_and_masks():
    found = vectors("layer_scores")
    count = len(found["dims"])
    current, before = ({str(i): found[f"{kind}_{i}"] for i in range(count)} for kind in ("cur", "prev"))
    scores = layer_scores(current, before, {str(i): [str(i)] for i in range(count)})
    close(scores, found["xi"])
    for gamma in range(count + 1):
        close(torch.tensor(top_layers(scores, gamma)).double(), found["mask_descending"][gamma])
        close(torch.tensor(top_layers(scores, gamma, lowest=True)).double(), found["mask_ascending"][gamma])
    for gamma in endings(found, "tie_mask_gamma"):
        close(torch.tensor(top_layers(found["tie_xi"], int(gamma))).double(), found[f"tie_mask_gamma{gamma}"])


@golden
def test_aggregation_and_the_inherited_learngene():
    found = vectors("aggregation")
    masks = found["masks"]
    old = {str(j): found[f"cluster_prev_{j}"] for j in range(masks.shape[1])}
    mean = EntryMeans()
    for i, mask in enumerate(masks):
        mean.add({str(j): found[f"client{i}_layer{j}"] for j in range(len(mask)) if mask[j]})
    new = mean.over(old)
    for j in range(masks.shape[1]):
        close(new[str(j)], found[f"cluster_new_{j}"])
        assert mean.weights.get(str(j), 0) == found["counts"][j]
    gene = learngene(found["counts"].tolist(), found["mean_xi"].tolist(), int(found["gamma"]))
    assert gene == sorted(found["learngene_layers"].tolist())
    for j in range(masks.shape[1]):
        close(new[str(j)] if j in gene else found[f"theta0_{j}"], found[f"inherited_{j}"])


@golden
def test_the_schedule_of_gamma():
    for case in json.loads((GOLDEN / "genefl" / "gamma_schedule.json").read_text()):
        gammas, best = [case["L"]], 0.0
        for accuracy in case["accs"]:
            gammas.append(next_gamma(gammas[-1], accuracy, best, case["gamma_min"], case["step"], case["tol"]))
            best = max(best, accuracy)
        assert gammas == case["gamma"]


@golden
def test_subspaces_clusters_and_the_nearest_of_them():
    found = vectors("subspace")
    count, d = int(found["n_clients"]), int(found["d"])
    subspaces = [subspace(found[f"X_{i}"].T, d) for i in range(count)]
    for i, own in enumerate(subspaces):
        torch.testing.assert_close(own, found[f"U_{i}"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(own.T.flatten(), found[f"u_{i}"], rtol=1e-6, atol=1e-9)
    together = found["comembership"].bool()
    literal = torch.stack([own.T.flatten() for own in subspaces])
    assert (same_groups(k_means(embedding(subspaces), len(found["cluster_sizes"]), 0)) == together).all()
    assert (same_groups(k_means(literal, len(found["cluster_sizes"]), 0)) == together).all()
    close(
        torch.cdist(embedding(subspaces), embedding(subspaces)).square(), found["projection_distance_matrix"].square()
    )
    angles = torch.linalg.svdvals(subspaces[0].T @ subspaces[1]).clamp(max=1).square().sum()
    close(likeness(subspaces[:1], subspaces[1:2])[0, 0], angles)

    newcomer = subspace(found["newcomer_X"].T, d)
    members: dict[int, list[Tensor]] = {}
    for i, k in enumerate(found["group"].tolist()):
        members.setdefault(k, []).append(subspaces[i])
    means = {k: torch.stack([own.T.flatten() for own in group]).mean(0) for k, group in members.items()}
    order = [min(means, key=lambda k: float((means[k] - mean).norm())) for mean in found["cluster_means_vec"]]
    away = torch.tensor([subspace_distance(newcomer, members[k], "vectors") for k in order], dtype=torch.float64)
    close(away, found["newcomer_dist_vec"])
    away = torch.tensor([subspace_distance(newcomer, members[k]) for k in order], dtype=torch.float64)
    close(away, found["newcomer_dist_projection"])
    near = int(away.argmin())
    assert near == int(found["newcomer_nearest"])
    members[order[near]].append(newcomer)
    close(subspace_distance(newcomer, members[order[near]]), found["newcomer_dist_projection_after_join"])
    joined = torch.stack([own.T.flatten() for own in members[order[near]]])
    torch.testing.assert_close(joined.mean(0), found["updated_mean_vec"], rtol=1e-6, atol=1e-9)
    assert len(joined) == int(found["updated_size"])


@golden
def test_what_the_paper_counts():
    for case in json.loads((GOLDEN / "genefl" / "comm.json").read_text()):
        model = build_model(f"resnet18:stem={case['stem']}x{case['stem']}", (3, 32, 32), case["num_classes"])
        entries = {name: value.numel() for name, value in model.state_dict().items()}
        sizes = [sum(entries[name] for name in names) for names in layers_of(model).values()]
        assert sizes == [layer["dim"] for layer in case["layers"]]
        assert sum(entries.values()) == case["FedAvg"]["elements"]
        assert sum(sizes) == case["FedBN_all_bn"]["elements"]
        kept = entries.keys() - set(without_batch_norm(model))
        counted = sum(entries[name] for name in entries if name not in kept or "shortcut" in name)
        assert counted == case["FedBN_name_filter"]["elements"]
        shared = {
            "FEDFINA": last_convolutions(model, 4),
            "PARFED": last_square(model),
            "FEDLG": Learngene().shared(model),
        }
        for name, names in shared.items():
            assert sum(entries[entry] for entry in names) == case[name]["elements"]
        assert sum(entries[name] for name in without_batch_norm(model)) == case["FedBN_all_bn"]["elements"]
        for row in case["gamma_cumulative"]:
            sent = GeneFL(gamma=row["gamma"]).observed(model)
            assert sum(entries[name] for name in sent) == row["elements"]


# Clustering -----------------------------------------------------------------------------------------------------------

DIGITS = load_dataset("digits").train


def planted(groups: list[list[int]], sizes: list[tuple[int, int]], rng: np.random.Generator) -> list[Tensor]:
    """Subspaces of clients (group, samples), each with samples of its group's classes only."""
    x, y = DIGITS.load()
    return [subspace(x[rng.choice(np.flatnonzero(np.isin(y, groups[g])), m, replace=False)], 5) for g, m in sizes]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(4, 12))
def test_planted_groups_are_found_whatever_the_sample_counts(seed, count, clients):
    rng = np.random.default_rng(seed)
    classes = rng.permutation(10)
    groups = [list(classes[2 * g : 2 * g + 2]) for g in range(count)]
    sizes = [(i % count, int(rng.integers(20, 250))) for i in range(max(clients, 2 * count))]
    points = embedding(planted(groups, sizes, rng))
    for found in (k_means(points, count, seed), hierarchical(points, count)):
        assert (same_groups(found) == same_groups([g for g, _ in sizes])).all()


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_clusters_and_distances_do_not_depend_on_signs_or_rotations_of_singular_vectors(seed):
    rng = np.random.default_rng(seed)
    own = planted([[0, 1], [2, 3], [7, 8]], [(i % 3, 40 + 9 * i) for i in range(9)], rng)
    turned = [u * torch.from_numpy(rng.choice([-1.0, 1.0], 5)).float() for u in own]
    turned[::2] = [u @ torch.linalg.qr(torch.from_numpy(rng.normal(size=(5, 5))).float())[0] for u in turned[::2]]
    assert k_means(embedding(own), 3, 0) == k_means(embedding(turned), 3, 0)
    torch.testing.assert_close(
        subspace_distance(own[0], own[1:]), subspace_distance(turned[0], turned[1:]), rtol=1e-4, atol=1e-4
    )


def test_a_hierarchy_has_as_many_clusters_as_asked_for_by_mean_distances():
    points = torch.tensor([[0.0], [1.0], [2.2], [3.4], [10.0]])
    assert hierarchical(points, 5) == [0, 1, 2, 3, 4]
    assert hierarchical(points, 3) == [0, 0, 1, 1, 2]  # by nearest neighbours 2.2 would be in the first
    assert hierarchical(points, 2) == [0, 0, 0, 0, 1]
    assert len(set(hierarchical(torch.zeros(4, 3), 3))) == 3  # of equal ones, too


def test_a_subspace_does_not_depend_on_the_order_of_samples_and_leaves_out_what_the_data_lack():
    x = DIGITS.load()[0][:40]
    torch.testing.assert_close(subspace(x, 5), subspace(x.flip(0), 5))
    assert (subspace(x, 5).norm(dim=0) - 1).abs().max() < 1e-5
    few = subspace(x[:3], 5)
    assert (few[:, 3:] == 0).all()
    assert (few[:, :3].norm(dim=0) - 1).abs().max() < 1e-5
    constant = subspace(torch.ones(9, 4), 3)
    torch.testing.assert_close(constant, torch.tensor([[0.5, 0, 0]] * 4))
    assert (subspace(torch.zeros(9, 4), 3) == 0).all()


# Training -------------------------------------------------------------------------------------------------------------

QUICK = {"epochs": 1, "lr": 0.1, "batch": 8, "momentum": 0.9, "fraction": 1.0}


def states(method: fb.Method, task: fb.Task, out: Path, rounds: int = 3) -> dict[str, Tensor]:
    fb.run(method, task, rounds=rounds, out=out)
    return {p.stem: value for p in sorted((out / "models").glob("client*")) for value in [load_file(p)]}


def test_without_both_pulls_training_is_plain_and_the_models_are_those_of_separate_training(tmp_path):
    """Who goes on from its own model, and is not pulled, hears nothing of the server."""
    task = tiny_task()
    how = {**QUICK, "clusters": 2, "vectors": 2, "lambda_gen": 0, "lambda_elastic": 0}
    plain = states(GeneFL(**how, start_from="own"), task, tmp_path / "plain", 1)
    other = states(Clustered(FedBN(**QUICK), clusters=2, vectors=2), task, tmp_path / "other", 1)
    for client, state in plain.items():
        assert all(torch.equal(value, other[client][name]) for name, value in state.items())
    alone = [
        states(GeneFL(**how, start_from=start, gamma=gamma, gamma_step=0), task, tmp_path / f"{start}{gamma}")
        for start, gamma in (("own", 1), ("own", 2), ("learngene", 2))
    ]
    for client, state in alone[0].items():
        assert all(torch.equal(value, alone[1][client][name]) for name, value in state.items())
        assert not torch.equal(state["conv.weight"], alone[2][client]["conv.weight"])


def test_one_cluster_of_all_clients_is_fedavg(tmp_path):
    task = tiny_task()
    runs = {"one": Clustered(fb.FedAvg(**QUICK), clusters=1), "all": fb.FedAvg(**QUICK)}
    results = [fb.run(method, task, rounds=3, out=tmp_path / name) for name, method in runs.items()]
    one, whole = (load_file(tmp_path / name / "models" / "global.safetensors") for name in runs)
    for name, value in whole.items():
        assert torch.equal(one[name], value)
    assert results[0].summary["score"]["all"]["global"] == results[1].summary["score"]["all"]["global"]


BASELINES = [FedBN, PartialFed, FedFina, FedLP, FedLPS, Learngene]


@pytest.mark.parametrize("cls", BASELINES)
def test_by_default_everybody_trains_together_and_nothing_but_models_is_sent(cls, tmp_path):
    """Three clients of four features, fewer than the singular vectors that clusters would take; one comes late."""
    data = late_task().data

    def few(split: Split) -> tuple[Tensor, Tensor]:
        x, y = split.load()
        return x[..., :2, :2], y

    clients = [(few(client.train), few(client.test)) for client in data.clients]
    build = ModelBuilder("mlp:layers=3,hidden=8", (1, 2, 2), 3)
    task = fb.Task.of(build, clients, few(data.test), presence=data.presence)
    result = fb.run(cls(batch=8), task, rounds=3, out=tmp_path / "run")
    columns = result.ledger.columns()
    names = [result.ledger.handlers[handler] for handler in columns["handler"]]
    sent = list(zip(columns["round"].tolist(), names, columns["client"].tolist(), strict=True))
    assert sent == [
        *((1, "train", i) for i in (0, 1)), *((t, "train", i) for t in (2, 3) for i in (0, 1, 2)),
    ]  # fmt: skip
    first = cls().server(task.problem)
    assert set(columns["value_bytes_down"]) == {4 * sum(value.numel() for value in first.theta.values())}
    assert result.summary["score"]["kind"] == ("global" if cls is FedLP else "personalised")


def test_fedlps_picks_channels_once_for_all_that_make_or_read_them():
    model = build_model("resnet8:width=8,stem=3x3", (3, 8, 8), 5)
    encoder = encoder_names(model)
    assert encoder >= {"pre_conv.weight", "layers.0.0.conv2.weight"}
    mask = prune_mask(model, 0.8, encoder)
    state = model.state_dict()
    kept: dict[int, list[Tensor]] = {}
    for name, of in mask.items():
        assert of.shape == state[name].shape
        if name != "fc.weight":  # the classifier keeps its outputs, the encoder what it has
            kept.setdefault(len(of), []).append(of.flatten(1).any(1) if of.dim() > 1 else of)
        if of.dim() > 1:
            kept.setdefault(of.shape[1], []).append(of.transpose(0, 1).flatten(1).any(1))
    assert {width: int(channels[0].sum()) for width, channels in kept.items()} == {8: 2, 16: 4, 32: 7}
    assert all(torch.equal(one, channels[0]) for channels in kept.values() for one in channels)
    assert [len(kept[width]) for width in (8, 16, 32)] == [2, 3 + 6 + 3, 3 + 6 + 2]  # layers, their norms, readers
    sums = state["layers.2.0.conv1.weight"].abs().transpose(0, 1).flatten(1).sum(1)  # of 16 channels, as they are read
    sums += state["layers.2.0.shortcut.0.weight"].abs().transpose(0, 1).flatten(1).sum(1)
    sums += state["layers.1.0.conv2.weight"].abs().transpose(0, 1).flatten(1).sum(1)
    sums += sum(
        state[f"layers.1.0.{layer}.weight"].abs().flatten(1).sum(1) for layer in ("conv1", "conv2", "shortcut.0")
    )
    assert kept[16][0].nonzero().flatten().tolist() == sorted(sums.topk(4).indices.tolist())


def test_fedlps_what_is_pruned_has_no_say():
    """Whatever a pruned channel's statistics, and whatever read it: its values are zeros."""
    model = build_model("resnet8:width=8,stem=3x3", (3, 16, 16), 5).eval()
    mask = prune_mask(model, 0.7, encoder_names(model))
    with torch.no_grad():
        for entry, of in mask.items():
            model.get_parameter(entry).mul_(of)
        x = torch.randn(4, 3, 16, 16)
        before = model(x)
        assert before.std() > 0
        for entry, of in mask.items():
            if of.dim() == 1 and entry.endswith("weight"):
                norm = model.get_submodule(entry.rpartition(".")[0])
                norm.running_mean[~of], norm.running_var[~of] = 5.0, 1e-6
        for reader in ("fc.weight", "layers.2.0.conv2.weight"):  # not of the encoder, which is whole
            model.get_parameter(reader).add_(9.0 * ~mask[reader])
        torch.testing.assert_close(model(x), before)


def test_fedlps_channels_that_a_layer_reads():
    assert channels_read(16, [8, 16, 32]) == 16
    assert channels_read(400, [6, 16]) == 16  # flattened: 25 inputs each
    assert channels_read(7, [6, 16]) == 7  # nobody's
    model = build_model("lenet", (1, 28, 28), 10)
    columns = prune_mask(model, 0.5, encoder_names(model))["fc.weight"][0]
    assert all(len(set(channel.tolist())) == 1 for channel in columns.view(12, -1))  # all positions of a channel


def test_fedbn_scores_each_client_s_own_model(tmp_path):
    task = tiny_task()
    result = fb.run(FedBN(lr=0.1), task, rounds=3, out=tmp_path / "run")
    own = [load_file(tmp_path / "run" / "models" / f"client-{i}.safetensors") for i in task.problem.clients]
    for name in ("norm.weight", "norm.running_mean", "norm.running_var"):  # stay, what is learnt and what is counted
        assert not any(torch.equal(own[0][name], other[name]) for other in own[1:])
    right = []
    for state, client in zip(own, task.data.clients, strict=True):
        scores, _ = Classification().evaluate(task.problem.first_model(state), *client.test.load())
        right.append(scores["accuracy"][0] / len(client.test))
    assert result.accuracy == pytest.approx(np.mean(right))
    assert result.rounds[-1]["scores"]["accuracy"]["cohort"] == result.accuracy  # as everybody took part


def test_without_batch_normalisation_fedbn_is_fedavg_newcomers_and_all(tmp_path):
    task = fb.Task.on(late_task().data, ModelBuilder("mlp:layers=2,hidden=8", (1, 4, 4), 3))
    how = {"epochs": 2, "lr": 0.1, "batch": 8}
    ours, theirs = (fb.run(cls(**how), task, rounds=4, out=tmp_path / cls.__name__) for cls in (FedBN, fb.FedAvg))
    one, other = (load_file(tmp_path / name / "models" / "global.safetensors") for name in ("FedBN", "FedAvg"))
    assert all(torch.equal(one[name], value) for name, value in other.items())
    rounds = [[row for row in result.rounds if row["phase"] == "round"] for result in (ours, theirs)]
    for mine, row in zip(*rounds, strict=True):
        scores = row["scores"].get("accuracy", {})
        assert {kind: mine["scores"]["accuracy"][kind] for kind in scores} == scores
        assert [mine[way] for way in ("uplink_bytes", "downlink_bytes")] == [row["uplink_bytes"], row["downlink_bytes"]]


def test_a_cluster_s_accuracy_is_of_the_clients_with_test_samples_and_gamma_falls_without(tmp_path):
    """Labels are random, so that accuracies on training samples would be others."""
    g = torch.Generator().manual_seed(3)

    def split(samples: int) -> Split:
        return Split(torch.randn(samples, 1, 4, 4, generator=g), torch.randint(3, (samples,), generator=g))

    many, none = split(60), split(0)
    for tests in ([many, none, none, none, none], [none] * 5):
        clients = tuple(ClientData(split(12), test) for test in tests)
        data = replace(tiny_data(5), clients=clients, presence=((1, None),) * 4 + ((4, None),))
        task = fb.Task.on(data, ModelBuilder("mlp:layers=6,hidden=32", (1, 4, 4), 3))
        out = tmp_path / str(len(tests[0]))
        method = GeneFL(epochs=3, lr=0.1, batch=4, fraction=1.0, clusters=1, gamma=1, tolerance=100)
        result = fb.run(method, task, rounds=4, out=out)
        server = unpack(Genes, read_checkpoint(out).server, layout=task.problem.layout(0))
        assert server.schedules[0].gamma == 6 - 3  # after the rounds in which its clients were alone
        kinds = {kind for row in result.rounds for kind in row["scores"].get("accuracy", {})} - {"global"}
        if tests[0] is none:
            assert not kinds
            assert server.schedules[0].best == 0
        else:
            assert kinds == {"cohort", "personalised", "micro"}  # and not the newcomer's "inherited"
            cohort = [row["scores"]["accuracy"]["cohort"] for row in result.rounds if row["phase"] == "round"]
            assert cohort == [
                row["scores"]["accuracy"]["personalised"] for row in result.rounds if row["phase"] == "round"
            ]
            assert server.schedules[0].best == pytest.approx(100 * max(cohort))


def test_the_pull_keeps_a_client_near_its_cluster(tmp_path):
    task = tiny_task()
    apart = []
    for weight in (0.0, 5.0):
        method = GeneFL(**QUICK, clusters=1, vectors=2, lambda_gen=weight)
        models = list(states(method, task, tmp_path / str(weight), rounds=4).values())
        first = task.problem.first_state()
        apart.append(sum(float((m["fc.weight"] - first["fc.weight"]).norm()) for m in models))
    assert apart[1] < apart[0]


def test_layers_nobody_sent_stay_and_are_not_on_the_wire(tmp_path):
    task = tiny_task()
    method = GeneFL(**QUICK, clusters=2, vectors=2, gamma=1, gamma_step=0)
    result = fb.run(method, task, rounds=2, out=tmp_path / "run")
    server = unpack(Genes, read_checkpoint(tmp_path / "run").server, layout=task.problem.layout(0))
    first, small = task.problem.first_state(), 4 * 36
    for model in server.models[:2]:
        assert torch.equal(model["fc.weight"], first["fc.weight"])  # larger, so never among the one best
        assert not torch.equal(model["conv.weight"], first["conv.weight"])
    columns = result.ledger.columns()
    trained = columns["handler"] == result.ledger.handlers.index("train")
    assert set(columns["value_bytes_up"][trained]) == {small}
    assert set(columns["value_bytes_up"][~trained]) == {4 * 16 * 2}  # U_i, once for each client
    assert (~trained).sum() == 4


def test_a_newcomer_like_a_member_joins_that_members_cluster_and_inherits_its_learngene(tmp_path):
    data = tiny_data(5)
    twin = replace(data, clients=(*data.clients[:4], data.clients[1]), presence=((1, None),) * 4 + ((3, None),))
    task = fb.Task.on(twin, TinyNet)
    method = GeneFL(**QUICK, clusters=2, vectors=2, gamma=1)
    result = fb.run(method, task, rounds=4, out=tmp_path / "run", keep_frames=True)
    server = unpack(Genes, read_checkpoint(tmp_path / "run").server, layout=task.problem.layout(0))
    assert server.cluster_of[4] == 2 + server.cluster_of[1]
    joined = next(row for row in result.rounds if row["phase"] == "join")
    assert (joined["round"], joined["client"]) == (3, 4)
    sent = unpack(
        Model,
        (tmp_path / "run" / "frames" / "3-begin-4-down.frame").read_bytes(),
        layout=task.problem.layout(4),
        base=First(task.problem.first_state(4)).exact,
    )
    rest = task.problem.first_state(draw="newcomers")
    assert set(sent.theta.dense()) < set(task.problem.first_state())
    own = server.models[server.cluster_of[4]]
    assert any(torch.equal(own[name], rest[name]) for name in own.keys() - sent.theta.dense().keys())


@pytest.mark.parametrize("cls", [fb.FedAvg, FedBN, PartialFed, FedFina, FedLP, FedLPS, Learngene, GeneFL])
def test_it_learns_real_digits_and_sends_what_it_says(cls):
    data = federate(load_dataset("digits"), Partition("shards", 6, shards_per_client=3, newcomers=3, arrival=9), seed=1)
    task = fb.Task.on(data, ModelBuilder("mlp:layers=3,hidden=64", (1, 8, 8), 10))
    how = {"epochs": 5, "lr": 0.1, "batch": 16, "momentum": 0.9, "fraction": 1.0}
    method = cls(clusters=2, **how) if cls is GeneFL else Clustered(cls(**how), clusters=2)
    result = fb.run(method, task, rounds=12)
    reached = {
        row["round"]: row["scores"]["accuracy"]["personalised" if cls is fb.FedAvg else "cohort"]
        for row in result.rounds
        if row["phase"] == "round"
    }
    assert max(reached[t] for t in range(5, 9)) > 0.75  # guessing the most frequent class: 0.48
    assert max(reached[t] for t in range(10, 13)) > 0.75  # of newcomers; 0.46
    columns = result.ledger.columns()
    trained = columns["handler"] == result.ledger.handlers.index("train")
    whole = 4 * sum(value.numel() for value in task.problem.first_state().values())
    up = columns["value_bytes_up"][trained & (columns["round"] == 12)]
    assert (up == whole).all() if cls in (fb.FedAvg, FedBN) else (up < whole).all()


def test_learngene_picks_the_layers_that_moved_least(tmp_path):
    task = fb.Task.on(tiny_data(), ModelBuilder("mlp:layers=6,hidden=8", (1, 4, 4), 3))
    method = Learngene(**QUICK, select="updates", select_rounds=2)
    fb.run(method, task, rounds=3, out=tmp_path / "run")
    state = unpack(Moving, read_checkpoint(tmp_path / "run").server, layout=task.problem.layout(0))
    least = sorted(state.moved, key=lambda layer: state.moved[layer])[:4]
    assert {name.rpartition(".")[0] for name in state.theta} == set(least)


def test_a_classifier_of_one_s_own_is_neither_sent_nor_pulled(tmp_path):
    task = tiny_task()
    method = GeneFL(**QUICK, clusters=2, vectors=2, classifier="own")
    fb.run(method, task, rounds=2, out=tmp_path / "run")
    server = unpack(Genes, read_checkpoint(tmp_path / "run").server, layout=task.problem.layout(0))
    assert all(set(model) <= {"conv.weight"} for model in server.models)
    with pytest.raises(fb.UserError, match="left to share"):
        fb.run(method, fb.Task.on(tiny_data(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))), rounds=1)


@pytest.mark.parametrize(("start", "batch_norm"), [("own", "own"), ("learngene", "own"), ("learngene", "layer")])
def test_what_of_a_client_s_model_the_learngene_replaces(start, batch_norm):
    task = tiny_task()
    method = GeneFL(
        epochs=1, lr=1e-30, batch=8, clusters=1, gamma=1, gamma_step=0, start_from=start, batch_norm=batch_norm
    )
    server = method.server(task.problem)
    last = {name: torch.full_like(value, 3) for name, value in task.problem.first_state().items()}
    state = Own(dict(last))
    message = method.download(server, 0)
    reply = method.train(state, message, opened(task, 0, 2, "train"))
    norm = ["norm.weight", "norm.bias"] if batch_norm == "layer" else []
    for name in ("conv.weight", "norm.weight", "norm.bias", "fc.weight", "fc.bias"):
        replaced = start == "learngene" and name in ["conv.weight", *norm]
        assert torch.allclose(state.theta[name], (message.theta.dense() if replaced else last)[name])
    statistics = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"] if norm else []
    assert list(reply.theta.dense()) == ["conv.weight", *norm, *statistics]
    assert len(reply.scores) == 2  # batch normalisation is not scored
    assert set(method.observed(task.problem.first_model())) == {"conv.weight", *norm}


def test_what_a_newcomer_inherits_has_the_batch_normalisation_that_travels(tmp_path):
    data = replace(tiny_data(5), presence=((1, None),) * 4 + ((3, None),))
    method = GeneFL(**QUICK, clusters=1, gamma=1, gamma_step=0, batch_norm="layer")
    fb.run(method, fb.Task.on(data, TinyNet), rounds=3, out=tmp_path / "run", keep_frames=True)
    frame = (tmp_path / "run" / "frames" / "3-begin-4-down.frame").read_bytes()
    problem = fb.Task.on(data, TinyNet).problem
    first = First(problem.first_state(4)).exact
    inherited = unpack(Model, frame, layout=problem.layout(4), base=first).theta.dense()
    assert inherited.keys() == {name for name in TinyNet().state_dict() if name.startswith(("conv", "norm"))}
    assert inherited["norm.running_var"].std() > 0  # of clients that have trained
    assert inherited["norm.num_batches_tracked"] > 0


@pytest.mark.parametrize(("step", "gammas"), [(0.0, [5, 5, 5]), (0.2, [7, 6, 5]), (0.5, [7, 6, 5]), (1.0, [7, 5, 5])])
def test_gamma_comes_down_by_a_part_of_its_way_a_round(step, gammas, tmp_path):
    task = fb.Task.on(tiny_data(), ModelBuilder("mlp:layers=6,hidden=8", (1, 4, 4), 3))
    method = GeneFL(**QUICK, clusters=1, gamma=5, gamma_step=step, tolerance=100)
    result = fb.run(method, task, rounds=3, out=tmp_path / "run")
    sizes = sorted(
        sum(task.problem.first_state()[name].numel() for name in names)
        for names in layers_of(task.problem.first_model()).values()
    )
    columns = result.ledger.columns()
    for t, gamma in zip((1, 2, 3), gammas, strict=True):
        assert set(columns["value_bytes_up"][columns["round"] == t]) == {4 * sum(sizes[:gamma])}


def test_parameters_that_do_not_train_stay(tmp_path):
    class Half(TinyNet):
        def __init__(self) -> None:
            super().__init__()
            self.conv.requires_grad_(False)

    task = fb.Task.on(tiny_data(), Half)
    for step in ("joint", "split"):
        models = states(GeneFL(**QUICK, clusters=2, vectors=2, elastic_step=step), task, tmp_path / step, rounds=2)
        for model in models.values():
            assert torch.equal(model["conv.weight"], task.problem.first_model().state_dict()["conv.weight"])


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (GeneFL(clusters=5), "clusters is 5, .*4 "),
        (GeneFL(clusters=2, gamma=3), "gamma is 3, .*2 layers"),
        (Clustered(FedLP(), clusters=9), "clusters is 9"),
    ],
)
def test_a_task_that_does_not_fit(method, words, tmp_path):
    with pytest.raises(fb.UserError, match=words):
        fb.run(method, tiny_task(), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_newcomer_of_another_shape_is_refused_and_the_run_goes_on(tmp_path):
    data = tiny_data(5)
    odd = Split(torch.rand(12, 1, 5, 5), torch.arange(12) % 3)
    clients = (*data.clients[:4], ClientData(odd, odd))
    task = fb.Task.on(replace(data, clients=clients, presence=((1, None),) * 4 + ((2, None),)), TinyNet)
    result = fb.run(GeneFL(**QUICK, clusters=2, vectors=2), task, rounds=3, out=tmp_path / "run")
    assert result.summary["status"] == "done"
    (row,) = [row for row in result.rounds if row["phase"] == "join"]
    assert "its samples have shape (1, 5, 5), the known clients' (1, 4, 4)" in row["left_out"][0]["why"]
    assert 4 not in read_checkpoint(tmp_path / "run").known


def test_a_client_of_another_shape_from_the_start_is_told_and_left_out(tmp_path):
    data = tiny_data(4)
    odd = Split(torch.rand(12, 1, 2, 8), torch.arange(12) % 3)
    task = fb.Task.on(replace(data, clients=(*data.clients[:3], ClientData(odd, odd))), TinyNet)
    with pytest.warns(RuntimeWarning, match=r"client 3.* client 3's .*shape"):
        result = fb.run(GeneFL(**QUICK, clusters=2, vectors=2), task, rounds=1, out=tmp_path / "run")
    (left,) = result.rounds[0]["left_out"]
    assert (left["client"], left["outcome"]) == (3, "rejected")
    assert "samples have shape (1, 2, 8), the others' (1, 4, 4): all must be equal" in left["why"]


def test_samples_that_are_no_numbers_are_told():
    data = tiny_data(4)
    x, y = data.clients[1].train.load()
    broken = Split(torch.where(x == x[3], torch.nan, x), y)
    task = fb.Task.on(replace(data, clients=(data.clients[0], ClientData(broken, broken), *data.clients[2:])), TinyNet)
    with pytest.raises(fb.UserError, match=r"client 1 .*not finite"):
        fb.run(GeneFL(**QUICK, clusters=2, vectors=2), task, rounds=1)


@pytest.mark.parametrize("cls", [FedBN, FedLPS, GeneFL])
def test_a_model_with_nothing_to_share_leaves_nothing_behind(cls, tmp_path):
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :3]

    with pytest.raises(fb.UserError, match="no parameter"):
        fb.run(cls(**QUICK), fb.Task.on(tiny_data(), Empty), rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_when_all_first_clients_leave_accuracies_are_the_newcomers_and_the_others_are_kept_apart():
    data = tiny_data(6)
    for last, stay in ((None, True), (2, False)):
        task = fb.Task.on(replace(data, presence=((1, last),) * 4 + ((3, None),) * 2), TinyNet)
        summary = fb.run(GeneFL(**QUICK, clusters=2, vectors=2), task, rounds=4).summary
        assert ("newcomers" in summary["score"]["all"]) == stay
        assert summary.get("turnover") == (None if stay else 3)
        assert (summary["score"]["best_round"] >= 3) or stay
        assert ("score_before" in summary) != stay
