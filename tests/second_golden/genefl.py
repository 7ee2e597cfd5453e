"""GENE-FL: Fisher information, the objective, scores, aggregation, subspaces, the attack, communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

from second_golden.common import (
    TABLES,
    Arrays,
    archive,
    endings,
    live,
    put,
    slopes,
    under,
)
from second_golden.fedkgf import RESNET18, SHORTCUTS


def mlp(p: dict[str, Tensor], x: Tensor, act: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
    return act(x @ p["fc1.weight"].T + p["fc1.bias"]) @ p["fc2.weight"].T + p["fc2.bias"]


def mlp_state(r: Generator, features: int, hidden: int, classes: int, name: str, scale: float = 0.6) -> Arrays:
    shapes = {"fc1.weight": (hidden, features), "fc1.bias": (hidden,), "fc2.weight": (classes, hidden)}
    shapes["fc2.bias"] = (classes,)
    return {f"{name}__{k}": scale * r.standard_normal(s) for k, s in shapes.items()}


def fisher(forward: Callable[..., Tensor], params: dict[str, Tensor], x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The mean over samples of the squared gradients of log p(class), one class after another by its weight."""
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for i in range(len(x)):
        log_p = F.log_softmax(forward(params, x[i : i + 1]), 1)[0]
        for c, weight in enumerate(weights[i]):
            for k, g in slopes(log_p[c], params).items():
                total[k] += weight * g.detach() ** 2 / len(x)
    return total


def fisher_mlp_inputs(r: Generator) -> Arrays:
    return {"X": r.standard_normal((9, 4)), "y": r.integers(0, 5, 9), **mlp_state(r, 4, 7, 5, "param")}


@archive("genefl/fisher_mlp", fisher_mlp_inputs)
def fisher_mlp(v: Arrays) -> Arrays:
    params, x, y = live(under(v, "param__")), torch.from_numpy(v["X"]), torch.from_numpy(v["y"])
    logits = mlp(params, x)
    loss = F.cross_entropy(logits, y)
    one_hot = F.one_hot(y, logits.shape[1]).double()
    return {
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        **put("fisher_empirical__", fisher(mlp, params, x, one_hot)),
        **put("fisher_model__", fisher(mlp, params, x, logits.softmax(1).detach())),
        **put("fisher_wrong_batch_gradient__", {k: g**2 for k, g in slopes(loss, params).items()}),
    }


def fisher_cnn_inputs(r: Generator) -> Arrays:
    state = {"conv.weight": r.standard_normal((5, 3, 3, 3)) / 3, "bn.weight": r.uniform(0.5, 1.5, 5)}
    state |= {"bn.bias": 0.3 * r.standard_normal(5), "bn.running_mean": 0.3 * r.standard_normal(5)}
    state |= {"bn.running_var": r.uniform(0.5, 2, 5), "fc.weight": r.standard_normal((4, 5)) / 2}
    state["fc.bias"] = r.standard_normal(4) / 2
    return {
        "X": r.standard_normal((8, 3, 7, 6)),
        "y": r.integers(0, 4, 8),
        **{f"param__{k}": a for k, a in state.items()},
    }


@archive("genefl/fisher_cnn_bn_eval", fisher_cnn_inputs)
def fisher_cnn(v: Arrays) -> Arrays:
    state = under(v, "param__")
    params = live({k: p for k, p in state.items() if "running" not in k})

    def forward(p: dict[str, Tensor], x: Tensor) -> Tensor:
        x = F.conv2d(x, p["conv.weight"], padding=1).movedim(1, -1) - state["bn.running_mean"]
        x = x / (state["bn.running_var"] + 1e-5).sqrt() * p["bn.weight"] + p["bn.bias"]
        return x.relu().mean((1, 2)) @ p["fc.weight"].T + p["fc.bias"]

    one_hot = F.one_hot(torch.from_numpy(v["y"]), len(state["fc.bias"])).double()
    return put("fisher_empirical__", fisher(forward, params, torch.from_numpy(v["X"]), one_hot))


def elastic_inputs(r: Generator) -> Arrays:
    state = mlp_state(r, 3, 4, 6, "fisher")
    v = {k: a**4 for k, a in state.items()}
    for name in ("local", "cluster"):
        v |= mlp_state(r, 3, 4, 6, name)
    edge, const = np.array([5.0, 3.0, 4.0, 3.2, 3.8, 5.0]), np.full(7, 0.25)
    return {
        **v,
        "edge_F": edge,
        "const_F": const,
        "mask_eps0.2__": None,
        "mask_eps0.75__": None,
        "edge_mask_eps0.4": None,
    }


@archive("genefl/elastic", elastic_inputs)
def elastic(v: Arrays) -> Arrays:
    def spread(a: np.ndarray, low: float, high: float) -> np.ndarray:
        return (a - low) / (high - low) if high > low else np.zeros_like(a)

    f = {k.removeprefix("fisher__"): a for k, a in v.items() if k.startswith("fisher__")}
    low, high = min(a.min() for a in f.values()), max(a.max() for a in f.values())
    out: Arrays = {"edge_Fhat": spread(v["edge_F"], v["edge_F"].min(), v["edge_F"].max())}
    out["const_Fhat"] = spread(v["const_F"], v["const_F"].min(), v["const_F"].max())
    for end in endings(v, "edge_mask_eps"):
        out[f"edge_mask_eps{end}"] = (out["edge_Fhat"] <= float(end)).astype(float)
    for k, a in f.items():
        out[f"Fhat_global__{k}"] = spread(a, low, high)
        out[f"Fhat_per_tensor__{k}"] = spread(a, a.min(), a.max())
        for end in endings(v, "mask_eps"):
            keep = (out[f"Fhat_global__{k}"] <= float(end)).astype(float)
            out[f"mask_eps{end}__{k}"] = keep
            out[f"mask_per_tensor_eps{end}__{k}"] = (out[f"Fhat_per_tensor__{k}"] <= float(end)).astype(float)
            out[f"mix_eps{end}__{k}"] = keep * v[f"local__{k}"] + (1 - keep) * v[f"cluster__{k}"]
    return out


def objective_inputs(r: Generator) -> Arrays:
    v: Arrays = {"X": r.standard_normal((5, 8)), "y": r.integers(0, 4, 5), "lam1": np.array(0.2), "lam2": np.array(0.3)}
    v |= {"lr": np.array(0.03), "momentum": np.array(0.7)}
    for name in ("theta", "Theta", "prev"):
        v |= mlp_state(r, 8, 3, 4, name)
    v["Theta__fc2.bias"] = v["theta__fc2.bias"].copy()
    v |= {k: (a > 0).astype(float) for k, a in mlp_state(r, 8, 3, 4, "mask").items()}
    for i in range(3):
        v |= {f"batch{i}_X": r.standard_normal((6, 8)), f"batch{i}_y": r.integers(0, 4, 6)}
    return v


@archive("genefl/objective", objective_inputs)
def objective(v: Arrays) -> Arrays:
    cluster, mask, prev = (under(v, f"{name}__") for name in ("Theta", "mask", "prev"))
    lam1, lam2, lr, momentum = (float(v[name]) for name in ("lam1", "lam2", "lr", "momentum"))
    out: Arrays = {}
    for kind in ("global", "per_tensor_sum", "squared"):

        def size(parts: Sequence[Tensor], kind: str = kind) -> Tensor:
            if kind == "squared":
                return torch.stack([d.square().sum() for d in parts]).sum()
            whole = [torch.cat([d.flatten() for d in parts])] if kind == "global" else parts
            return torch.stack([torch.linalg.vector_norm(d) for d in whole]).sum()

        def parts(p: dict[str, Tensor], x: str, to: dict[str, Tensor], size: Any = size) -> tuple[Tensor, ...]:
            near = "" if x == "X" else x.removesuffix("X")
            ce = F.cross_entropy(mlp(p, torch.from_numpy(v[x])), torch.from_numpy(v[f"{near}y"]))
            return ce, size([p[k] - to[k] for k in p]), size([mask[k] * (p[k] - to[k]) for k in p])

        p = live(under(v, "theta__"))
        cls, gen, elg = parts(p, "X", cluster)
        total = cls + lam1 * gen + lam2 * elg
        for name, value in (("cls", cls), ("gen", gen), ("elg", elg), ("total", total)):
            out[f"{kind}__L_{name}"] = value.detach().numpy()
        out |= put(f"{kind}__grad__", slopes(total, p))
        out[f"{kind}__at_cluster__L_total"] = cls.detach().numpy()
        out |= put(f"{kind}__at_cluster__grad__", slopes(cls, p))
        target = size([p[k] - (mask[k] * prev[k] + (1 - mask[k]) * cluster[k]) for k in p])
        out[f"{kind}__L_elg_target"] = target.detach().numpy()
        out |= put(f"{kind}__grad_elg_target__", slopes(target, p))
        for count, split in ((1, False), (3, False), (3, True)):
            p, speed = live(under(v, "theta__")), {k: torch.zeros_like(t) for k, t in cluster.items()}
            for i in range(count):
                cls, gen, elg = parts(p, f"batch{i}_X", cluster)
                grad = slopes(cls + lam1 * gen + (0 if split else lam2 * elg), p)
                speed = {k: (0 if split else momentum) * speed[k] + grad[k] for k in p}
                p = live({k: p[k] - lr * speed[k] for k in p})
                if split:
                    grad = slopes(lam2 * parts(p, f"batch{i}_X", cluster)[2], p)
                    p = live({k: p[k] - lr * grad[k] for k in p})
            out |= put(f"{kind}__after{count}_{'split' if split else 'joint'}__", p)
    return out


def layer_scores_inputs(r: Generator) -> Arrays:
    dims = [4, 30, 9, 9, 50, 7]
    v: Arrays = {"dims": np.array(dims), "tie_xi": np.array([0.1, 0.2, 0.1, 0.2, 0.3, 0.1])}
    for i, n in enumerate(dims):
        v[f"cur_{i}"] = r.standard_normal(n)
        v[f"prev_{i}"] = (v[f"cur_{i}"] + 0.5 * r.standard_normal(n)) * (i + 1 < len(dims))
    return {**v, "tie_mask_gamma3": None, "tie_mask_gamma1": None, "tie_mask_gamma5": None}


@archive("genefl/layer_scores", layer_scores_inputs)
def layer_scores(v: Arrays) -> Arrays:
    def top(scores: Sequence[float], gamma: int) -> np.ndarray:
        chosen = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:gamma]
        return np.array([int(i in chosen) for i in range(len(scores))])

    cos = []
    for i in range(len(v["dims"])):
        a, b = v[f"cur_{i}"], v[f"prev_{i}"]
        sizes = np.sqrt((a @ a) * (b @ b))
        cos.append(a @ b / sizes if sizes else 0.0)
    raw = np.array(cos) / v["dims"]
    xi = raw / raw.sum()
    gammas = range(len(xi) + 1)
    return {
        "cos": np.array(cos),
        "xi": xi,
        "mask_descending": np.stack([top(xi, g) for g in gammas]),
        "mask_ascending": np.stack([top(-xi, g) for g in gammas]),
        **{f"tie_mask_gamma{g}": top(v["tie_xi"], int(g)) for g in endings(v, "tie_mask_gamma")},
    }


def aggregation_inputs(r: Generator) -> Arrays:
    masks = np.array([[1, 0, 1, 0, 1, 0, 1], [1, 0, 0, 1, 1, 0, 1], [1, 0, 1, 0, 1, 1, 0]])
    v: Arrays = {"masks": masks, "mean_xi": r.random(7), "gamma": np.array(4)}
    for j, n in enumerate([5, 2, 8, 3, 1, 4, 6]):
        for name in ("cluster_prev_", "theta0_", *(f"client{i}_layer" for i in range(3))):
            v[f"{name}{j}"] = r.standard_normal(n)
    return v


@archive("genefl/aggregation", aggregation_inputs)
def aggregation(v: Arrays) -> Arrays:
    masks, counts = v["masks"], v["masks"].sum(0)
    rank = sorted(range(len(counts)), key=lambda j: (-counts[j], -v["mean_xi"][j], j))
    out: Arrays = {"counts": counts, "learngene_layers": np.array(rank[: int(v["gamma"])])}
    for j, count in enumerate(counts):
        sent = [v[f"client{i}_layer{j}"] for i in range(len(masks)) if masks[i, j]]
        out[f"cluster_new_{j}"] = np.mean(sent, 0) if count else v[f"cluster_prev_{j}"]
        out[f"inherited_{j}"] = out[f"cluster_new_{j}"] if j in out["learngene_layers"] else v[f"theta0_{j}"]
    return out


def subspace_inputs(r: Generator) -> Arrays:
    features, d, sizes = 16, 2, [3, 5, 2, 4]
    v: Arrays = {"d": np.array(d), "n_clients": np.array(sum(sizes)), "cluster_order": np.array([2, 0, 3, 1])}
    v["group"] = r.permutation(np.repeat(np.arange(len(sizes)), sizes))
    bases = [np.linalg.qr(r.standard_normal((features, d)))[0] for _ in sizes]

    def client(group: int) -> np.ndarray:
        m = int(r.integers(30, 70))
        right = np.linalg.qr(r.standard_normal((m, d)))[0].T
        return bases[group] @ (np.array([[40.0], [22.0]]) * right) + 0.02 * r.standard_normal((features, m))

    v |= {f"X_{i}": client(g) for i, g in enumerate(v["group"])}
    return {**v, "newcomer_X": client(3)}


@archive("genefl/subspace", subspace_inputs)
def subspace(v: Arrays) -> Arrays:
    d, count, group = int(v["d"]), int(v["n_clients"]), v["group"]

    def vectors(x: np.ndarray) -> np.ndarray:
        u = np.linalg.svd(x, full_matrices=False)[0][:, :d]
        return u * np.sign(u[np.abs(u).argmax(0), np.arange(d)])

    us, new = [vectors(v[f"X_{i}"]) for i in range(count)], vectors(v["newcomer_X"])
    flat, planes = [u.T.ravel() for u in us], [u @ u.T for u in us]
    order = v.get("cluster_order", np.arange(group.max() + 1))
    members = [[i for i in range(count) if group[i] == g] for g in order]
    means = np.stack([np.mean([flat[i] for i in own], 0) for own in members])
    away = [np.linalg.norm(new @ new.T - np.mean([planes[i] for i in own], 0)) for own in members]
    near = int(np.argmin(away))
    joined = [*(planes[i] for i in members[near]), new @ new.T]
    return {
        **{f"U_{i}": u for i, u in enumerate(us)},
        **{f"u_{i}": u for i, u in enumerate(flat)},
        "comembership": (group[:, None] == group).astype(int),
        "cluster_means_vec": means,
        "cluster_sizes": np.array([len(own) for own in members]),
        "newcomer_U": new,
        "newcomer_u": new.T.ravel(),
        "newcomer_dist_vec": np.linalg.norm(new.T.ravel() - means, axis=1),
        "newcomer_nearest": np.array(near),
        "updated_mean_vec": np.mean([*(flat[i] for i in members[near]), new.T.ravel()], 0),
        "updated_size": np.array(len(joined)),
        "newcomer_dist_projection": np.array(away),
        "newcomer_dist_projection_after_join": np.linalg.norm(new @ new.T - np.mean(joined, 0)),
        "projection_distance_matrix": np.array([[np.linalg.norm(p - q) for q in planes] for p in planes]),
    }


def privacy_inputs(r: Generator) -> Arrays:
    a = r.random((1, 6, 5))
    v = {"x_true": r.random(8), "x_guess": r.random(8), "label": np.array(1), "image_a": a}
    v["image_b"] = np.clip(a + 0.1 * r.standard_normal(a.shape), 0, 1)
    return {**v, **mlp_state(r, 8, 6, 4, "victim"), **mlp_state(r, 8, 6, 4, "attacker_random")}


@archive("genefl/privacy", privacy_inputs)
def privacy(v: Arrays) -> Arrays:
    victim, label = live(under(v, "victim__")), torch.from_numpy(np.array([v["label"]]))

    def gradient(p: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return slopes(F.cross_entropy(mlp(p, x[None], torch.sigmoid), label), p)

    seen = {k: g.detach() for k, g in gradient(victim, torch.from_numpy(v["x_true"])).items()}
    out: Arrays = put("victim_grad__", seen)
    out["recovered_label"] = seen["fc2.bias"].argmin().numpy()
    for name, begin in (("all", "fc"), ("fc1", "fc1"), ("fc2", "fc2")):
        shared = [k for k in victim if k.startswith(begin)]
        p = live(under(v, "attacker_random__") | {k: victim[k] for k in shared})
        x = torch.from_numpy(v["x_guess"]).clone().requires_grad_()
        mine = gradient(p, x)
        loss = torch.stack([(mine[k] - seen[k]).square().sum() for k in shared]).sum()
        out[f"{name}__loss"] = loss.detach().numpy()
        out[f"{name}__grad_x"] = torch.autograd.grad(loss, x)[0].numpy()
    out["psnr_ab"] = np.array(10 * np.log10(1 / np.mean((v["image_a"] - v["image_b"]) ** 2)))
    return out


def comm_case(classes: int, stem: int) -> Any:
    convolutions = [(n, o * (i or 3) * (k if i else stem) ** 2, o) for n, o, i, k in RESNET18]
    for name, out, channels in SHORTCUTS:  # behind their block's second convolution
        at = [n for n, _, _ in convolutions].index(name.replace("downsample.0", "conv2")) + 1
        convolutions.insert(at, (name, out * channels, out))
    layers = [{"name": n, "dim": dim} for n, dim, _ in convolutions] + [{"name": "fc", "dim": 513 * classes}]
    weights, kernels = sum(layer["dim"] for layer in layers), sum(out for _, _, out in convolutions)
    widths = [out for _, out, _ in SHORTCUTS]
    dims = {layer["name"]: layer["dim"] for layer in layers}
    square = [f"layer{s}.1.conv2" for s in (1, 2, 3, 4)]
    genes = ["layer4.1.conv1", "layer4.1.conv2", "layer1.1.conv1", "layer1.1.conv2"]
    rising = sorted(dims.values())
    return {
        "num_classes": classes,
        "stem": stem,
        "layers": layers,
        "FedAvg": {"elements": weights + 4 * kernels + len(convolutions)},
        "FedBN_name_filter": {"elements": weights + 4 * sum(widths) + len(widths)},
        "FedBN_all_bn": {"elements": weights},
        "FEDFINA": {"elements": sum(d for n, d in dims.items() if n.startswith("layer4") and "conv" in n)},
        "PARFED": {"elements": sum(dims[n] for n in square)},
        "FEDLG": {"elements": sum(dims[n] for n in genes)},
        "gamma_cumulative": [{"gamma": g, "elements": sum(rising[:g])} for g in range(1, len(rising) + 1)],
    }


def schedule(case: Any) -> list[int]:
    gamma, best = [case["L"]], 0.0
    for accuracy in case["accs"]:
        fewer = max(case["gamma_min"], gamma[-1] - case["step"])
        gamma.append(fewer if accuracy >= best - case["tol"] else gamma[-1])
        best = max(best, accuracy)
    return gamma


def gamma_schedule(found: Any) -> Any:
    return [case | {"gamma": schedule(case)} for case in found]


TABLES["genefl/comm"] = (
    [{"num_classes": 13, "stem": 3}, {"num_classes": 2, "stem": 7}],
    lambda found: [comm_case(case["num_classes"], case["stem"]) for case in found],
)
TABLES["genefl/gamma_schedule"] = (
    [
        {"accs": [3, 60, 59, 58.9, 61, 10], "L": 9, "gamma_min": 6, "step": 2, "tol": 1.0},
        {"accs": [5, 4, 5, 6, 5.75], "L": 5, "gamma_min": 1, "step": 1, "tol": 0.25},
    ],
    gamma_schedule,
)
