"""GENE-FL: its equations against vectors computed by reference code, its properties, its bytes, its bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN
from torch import Tensor, nn

from fewbytes.methods.clustered import EntryMeans, embedding, k_means, likeness, subspace, subspace_distance
from fewbytes.methods.fedbn import FedBN, without_batch_norm
from fewbytes.methods.fedfina import FedFina
from fewbytes.methods.genefl import (
    GeneFL,
    layer_scores,
    learngene,
    mixed,
    next_gamma,
    normalised,
    plain_step,
    pulls,
    top_layers,
)
from fewbytes.methods.learngene import Learngene
from fewbytes.methods.partialfed import PartialFed
from fewbytes.models import build_model
from fewbytes.models.layers import layers_of
from fewbytes.training import fit

golden = pytest.mark.golden
TENSORS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def vectors(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / "genefl" / f"{name}.npz") as file:
        return {key: torch.from_numpy(np.asarray(file[key])) for key in file.files}


def group(found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {tensor: found[f"{name}__{tensor}"] for tensor in TENSORS}


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
    for threshold in (0.1, 0.5, 0.9):
        keep = {name: value <= threshold for name, value in normalised(fisher).items()}
        close_all(keep, group(found, f"mask_eps{threshold}"))
        close_all(mixed(group(found, "local"), group(found, "cluster"), keep), group(found, f"mix_eps{threshold}"))
    edge = normalised({"": found["edge_F"]})[""]
    close(edge, found["edge_Fhat"])
    close((edge <= 0.5).double(), found["edge_mask_eps0.5"])
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
    return pulls(list(model.parameters()), cluster, keep, norm, anchors)


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
    x, y = (torch.cat([found[f"batch{i}_{name}"] for i in range(3)]) for name in ("X", "y"))
    size = len(found["batch0_y"])

    def trained(samples: int, steps: str) -> dict[str, Tensor]:
        model = perceptron(group(found, "theta"))
        gen, elg = terms(model, found, norm)
        split = steps == "split"
        fit(
            model, x[:samples], y[:samples], epochs=1, lr=lr, batch=size, order="stored",
            momentum=0.0 if split else float(found["momentum"]),
            extra=lambda _: lambda_1 * gen() + (0 if split else lambda_2 * elg()),
            after_step=(lambda: plain_step(list(model.parameters()), elg(), lr * lambda_2)) if split else None,
        )  # fmt: skip
        return dict(zip(TENSORS, (p.detach() for p in model.parameters()), strict=True))

    close_all(trained(size, "joint"), group(found, f"{norm}__after1_joint"))
    close_all(trained(3 * size, "joint"), group(found, f"{norm}__after3_joint"))
    close_all(trained(3 * size, "split"), group(found, f"{norm}__after3_split"))


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
    for gamma in (2, 4):
        close(torch.tensor(top_layers(found["tie_xi"], gamma)).double(), found[f"tie_mask_gamma{gamma}"])


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
        for method, name in ((FedFina(), "FEDFINA"), (PartialFed(), "PARFED"), (Learngene(), "FEDLG")):
            assert sum(entries[entry] for entry in method.shared(model)) == case[name]["elements"]
        assert sum(entries[name] for name in FedBN().shared(model)) == case["FedBN_all_bn"]["elements"]
        for row in case["gamma_cumulative"]:
            sent = GeneFL(gamma=row["gamma"]).observed(model)
            assert sum(entries[name] for name in sent) == row["elements"]
