"""A second set of golden vectors: the first one's layout with other seeds, shapes and configurations.

    python tests/second_golden.py FOLDER

The expected values are computed here, from the papers' equations as the READMEs of the first set give them, with NumPy
and torch alone: nothing of this package. Every file is a pair of functions: one draws the inputs, one makes the expected
values of any inputs, which `test_second_golden.py` first holds to the first set's own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator, RandomState
from PIL import Image, ImageDraw
from torch import Tensor

Arrays = dict[str, Any]
FIRST = Path(__file__).parent / "golden"
ARCHIVES: dict[str, tuple[Callable[..., Arrays], Callable[..., Arrays]]] = {}
"""Per file: (its inputs of a random generator, its expected values of the inputs)."""


def archive(name: str, inputs: Callable[[Generator], Arrays]) -> Callable[[Callable[..., Arrays]], Any]:
    """Registers the function below it as what makes the expected values of a file."""

    def registered(answers: Callable[..., Arrays]) -> Callable[..., Arrays]:
        ARCHIVES[name] = inputs, answers
        return answers

    return registered


def under(v: Arrays, prefix: str) -> dict[str, Tensor]:
    """Copies of all tensors below a prefix, float64."""
    found = {k.removeprefix(prefix): torch.from_numpy(np.array(a)) for k, a in v.items() if k.startswith(prefix)}
    return {k: t.double() if t.is_floating_point() else t for k, t in found.items()}


def put(prefix: str, values: dict[str, Tensor]) -> Arrays:
    return {f"{prefix}{k}": t.detach().numpy().copy() for k, t in values.items()}


def endings(v: Arrays, prefix: str, split: str = "__") -> list[str]:
    """What follows a prefix in names: the cases of the first set; the inputs of the second name theirs alike."""
    return list(dict.fromkeys(k.removeprefix(prefix).split(split)[0] for k in v if k.startswith(prefix)))


def slopes(loss: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    got = torch.autograd.grad(loss, list(params.values()), retain_graph=True, create_graph=True, allow_unused=True)
    return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(params.items(), got, strict=True)}


def live(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: p.detach().clone().requires_grad_() for k, p in params.items()}


# GENE-FL --------------------------------------------------------------------------------------------------------------


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
    return {"X": r.standard_normal((8, 3, 7, 6)), "y": r.integers(0, 4, 8), **{f"param__{k}": a for k, a in state.items()}}


@archive("genefl/fisher_cnn_bn_eval", fisher_cnn_inputs)
def fisher_cnn(v: Arrays) -> Arrays:
    state = under(v, "param__")
    params = live({k: p for k, p in state.items() if "running" not in k})

    def forward(p: dict[str, Tensor], x: Tensor) -> Tensor:
        x = (F.conv2d(x, p["conv.weight"], padding=1).movedim(1, -1) - state["bn.running_mean"])
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
    return {**v, "edge_F": edge, "const_F": const, "mask_eps0.2__": None, "mask_eps0.75__": None, "edge_mask_eps0.4": None}


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


# Fed-KGF --------------------------------------------------------------------------------------------------------------


def bank(w: Tensor, alpha: Tensor, beta: Tensor, through: bool = True) -> Tensor:
    copy = w[torch.arange(len(alpha)) % len(w)] if len(alpha) else w[:0]
    made = copy.sign() * (copy.abs() ** beta + alpha)
    return torch.cat([w, made if through else made.detach()])


def constants(r: Generator, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    return r.uniform(1e-5, 0.1, shape), r.uniform(2, 10, shape)


def kgf_case(r: Generator, i: int, base: int, out: int, rest: tuple[int, ...]) -> Arrays:
    alpha, beta = constants(r, (out - base, *rest))
    return {f"c{i}_w": r.uniform(-1.2, 1.2, (base, *rest)), f"c{i}_alpha": alpha, f"c{i}_beta": beta}


def kgf_values_inputs(r: Generator) -> Arrays:
    v: Arrays = {"cases": np.array(3)}
    for i, (base, out, rest) in enumerate([(3, 11, (2, 5, 5)), (8, 8, (1, 3, 3)), (2, 9, (6, 1, 1))]):
        v |= kgf_case(r, i, base, out, rest) | {f"c{i}_out": np.array(out), f"c{i}_G": r.standard_normal((out, *rest))}
    return v


@archive("fedkgf/kgf_values", kgf_values_inputs)
def kgf_values(v: Arrays) -> Arrays:
    out: Arrays = {}
    for i in range(int(v["cases"])):
        alpha, beta, g = (torch.from_numpy(v[f"c{i}_{name}"]) for name in ("alpha", "beta", "G"))
        for name, through in (("grad_w", True), ("grad_direct_only", False)):
            w = torch.from_numpy(v[f"c{i}_w"]).clone().requires_grad_()
            made = bank(w, alpha, beta, through)
            out |= {f"c{i}_bank": made.detach().numpy(), f"c{i}_{name}": torch.autograd.grad(made, w, g)[0].numpy()}
    return out


def kgf_special_inputs(r: Generator) -> Arrays:
    w = np.repeat([0.0, -0.0, 1.0, -1.0, 2.5, -1.7, 1e-8, 0.3], 5)
    alpha, beta = constants(r, w.shape)
    alpha[::7] = 0
    return {"w": w, "alpha": alpha, "beta": beta}


@archive("fedkgf/kgf_special", kgf_special_inputs)
def kgf_special(v: Arrays) -> Arrays:
    w, size = v["w"], np.abs(v["w"])
    value = np.sign(w) * (size ** v["beta"] + v["alpha"])
    slope = np.where(w == 0, 0, v["beta"] * size ** (v["beta"] - 1))
    return {"kgf": value, "dkgf_dw": slope, "kgf_f32": value.astype(np.float32)}


def kgf_conv_inputs(r: Generator) -> Arrays:
    shapes = [(2, 5, (2, 5, 5), 2, 2, (3, 2, 9, 8)), (3, 7, (1, 3, 3), 1, 0, (1, 1, 6, 6)), (4, 4, (2, 1, 1), 1, 0, (2, 2, 4, 3))]
    v: Arrays = {"cases": np.array(len(shapes))}
    for i, (base, out, rest, stride, pad, x) in enumerate(shapes):
        height, width = ((n + 2 * pad - rest[1]) // stride + 1 for n in x[2:])
        v |= kgf_case(r, i, base, out, rest) | {f"c{i}_x": r.standard_normal(x)}
        v |= {f"c{i}_stride": np.array(stride), f"c{i}_pad": np.array(pad)}
        v[f"c{i}_R"] = r.standard_normal((x[0], out, height, width))
    return v


@archive("fedkgf/kgf_conv", kgf_conv_inputs)
def kgf_conv(v: Arrays) -> Arrays:
    out: Arrays = {}
    for i in range(int(v["cases"])):
        x, alpha, beta, r = (torch.from_numpy(v[f"c{i}_{name}"]) for name in ("x", "alpha", "beta", "R"))
        for name, through in (("grad_w", True), ("grad_direct_only", False)):
            w = torch.from_numpy(v[f"c{i}_w"]).clone().requires_grad_()
            y = F.conv2d(x, bank(w, alpha, beta, through), None, int(v[f"c{i}_stride"]), int(v[f"c{i}_pad"]))
            out |= {f"c{i}_y": y.detach().numpy(), f"c{i}_{name}": torch.autograd.grad((r * y).sum(), w)[0].numpy()}
    return out


def kgf_net_inputs(r: Generator) -> Arrays:
    alpha, beta = constants(r, (4, 1, 3, 3))
    state = {"conv.base": r.uniform(-1, 1, (2, 1, 3, 3)), "bn.weight": r.uniform(0.5, 1.5, 6)}
    state |= {"bn.bias": r.standard_normal(6) / 3, "fc.weight": r.standard_normal((3, 6)), "fc.bias": r.standard_normal(3)}
    v = {"alpha": alpha, "beta": beta, "x": r.standard_normal((7, 1, 6, 4)), "y": r.integers(0, 3, 7)}
    return {**v, **{f"param__{k}": a for k, a in state.items()}}


@archive("fedkgf/kgf_tiny_net", kgf_net_inputs)
def kgf_net(v: Arrays) -> Arrays:
    p, x = live(under(v, "param__")), torch.from_numpy(v["x"])
    kernels = bank(p["conv.base"], torch.from_numpy(v["alpha"]), torch.from_numpy(v["beta"]))
    x = F.batch_norm(F.conv2d(x, kernels, padding=1), None, None, p["bn.weight"], p["bn.bias"], True)
    logits = x.relu().mean((2, 3)) @ p["fc.weight"].T + p["fc.bias"]
    loss = F.cross_entropy(logits, torch.from_numpy(v["y"]))
    return {"logits": logits.detach().numpy(), "loss": loss.detach().numpy(), **put("grad__", slopes(loss, p))}


def kgf_draws_inputs(r: Generator) -> Arrays:
    v: Arrays = {"cases": np.array(3)}
    for i, (seed, layer, shape) in enumerate([(2**40 + 3, 2, (5, 4, 3, 3)), (0, 11, (9, 2, 1, 1)), (7, 0, (3, 1, 5, 5))]):
        v |= {f"c{i}_seed": np.array(seed), f"c{i}_layer": np.array(layer), f"c{i}_shape": np.array(shape)}
    return v


@archive("fedkgf/kgf_draws", kgf_draws_inputs)
def kgf_draws(v: Arrays) -> Arrays:
    out: Arrays = {}
    for i in range(int(v["cases"])):
        bits = np.random.PCG64(np.random.SeedSequence([int(v[f"c{i}_seed"]), int(v[f"c{i}_layer"])]))
        made = constants(Generator(bits), v[f"c{i}_shape"])
        out |= {f"c{i}_{name}_f32": a.astype(np.float32) for name, a in zip(("alpha", "beta"), made, strict=True)}
    return out


def assembly_cases() -> list[tuple[int, int, list[int]]]:
    """Modules, clients, and the group of each client."""
    return [(7, 3, [1, 2, 0]), (2, 5, [4, 1, 0, 3, 2]), (4, 4, [3, 2, 0, 1])]


def groups_of(modules: int, clients: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(modules), min(modules, clients))]


def assembly_inputs(r: Generator) -> Arrays:
    v: Arrays = {}
    for a, (modules, clients, _) in enumerate(assembly_cases()):
        for c, m in itertools.product(range(clients), range(modules)):
            v[f"a{a}_client{c}__m{m}.weight"], v[f"a{a}_client{c}__m{m}.bn"] = r.random((3, 1 + m % 2)), r.random(2)
    return v


@archive("fedkgf/assembly", assembly_inputs)
def assembly(v: Arrays, cases: list[tuple[int, int, list[int]]] | None = None) -> Arrays:
    out: Arrays = {}
    for a, (modules, clients, group_of) in enumerate(cases or assembly_cases()):
        for g, own in enumerate(groups_of(modules, clients)):
            for m, part in itertools.product(own, ("weight", "bn")):
                out[f"a{a}_global__m{m}.{part}"] = v[f"a{a}_client{group_of.index(g)}__m{m}.{part}"]
    return out


def grouping() -> Any:
    shapes = [(23, 6), (6, 23), (8, 8), (83, 7), (2, 1)]
    groupings = [{"modules": m, "clients": c, "groups": groups_of(m, c)} for m, c in shapes]
    assemblies = []
    for modules, clients, group_of in assembly_cases():
        groups = groups_of(modules, clients)
        case = {"modules": modules, "clients": clients, "perm": group_of, "groups": groups}
        case["owner_of_group"] = [group_of.index(g) for g in range(len(groups))]
        case["uploaded_group_of_client"] = [g if g < len(groups) else None for g in group_of]
        assemblies.append(case)
    return {"groupings": [g | {"sizes": [len(own) for own in g["groups"]]} for g in groupings], "assemblies": assemblies}


def baselines_inputs(r: Generator) -> Arrays:
    v: Arrays = {f"dgc_g{t}": r.standard_normal(20) for t in range(3)}
    v |= {"dgc_momentum": np.array(0.6), "dgc_k": np.array(4), "cams_x0": r.standard_normal(9)}
    v |= {f"cams_delta{t}": 0.1 * r.standard_normal((5, 9)) for t in range(2)}
    return {**v, "com_x": 3 * r.standard_normal((6, 7)) + 1, "pm_masks": r.integers(0, 2, (4, 15))}


@archive("fedkgf/baselines", baselines_inputs)
def baselines(v: Arrays) -> Arrays:
    out: Arrays = {}
    u = w = np.zeros_like(v["dgc_g0"])
    for t in map(int, endings(v, "dgc_g")):
        u = float(v["dgc_momentum"]) * u + v[f"dgc_g{t}"]
        w = w + u
        chosen = np.zeros(len(w), bool)
        chosen[np.argsort(-np.abs(w))[: int(v["dgc_k"])]] = True
        out[f"dgc_sent{t}"] = w * chosen
        u, w = u * ~chosen, w * ~chosen
        out |= {f"dgc_u{t}": u, f"dgc_v{t}": w}
    x, error = v["cams_x0"], np.zeros_like(v["cams_delta0"])
    m = s = high = np.zeros_like(x)
    for t in map(int, endings(v, "cams_delta")):
        whole = v[f"cams_delta{t}"] + error
        sent = np.abs(whole).mean(1, keepdims=True) * np.sign(whole)
        error, mean = whole - sent, sent.mean(0)
        m, s = 0.9 * m + 0.1 * mean, 0.99 * s + 0.01 * mean**2
        high = np.maximum(np.maximum(high, s), 1e-3)
        x = x + m / np.sqrt(high)
        out |= {f"cams_sent{t}": sent, f"cams_err{t}": error, f"cams_x{t + 1}": x}
        out |= {f"cams_m{t + 1}": m, f"cams_v{t + 1}": s, f"cams_vhat{t + 1}": high}
    for bits in (8, 16):
        low, scale = v["com_x"].min(), (v["com_x"].max() - v["com_x"].min()) / (2**bits - 1)
        q = np.rint((v["com_x"] - low) / scale)
        out |= {f"com{bits}_q": q.astype(int), f"com{bits}_lo": low, f"com{bits}_scale": scale}
        out[f"com{bits}_deq"] = low + scale * q
    theta = v["pm_masks"].mean(0)
    clipped = np.clip(theta, 0.01, 0.99)
    return {**out, "pm_theta": theta, "pm_score": np.log(clipped / (1 - clipped))}


RESNET18 = [("conv1", 64, 0, 1)] + [
    (f"layer{s}.{b}.conv{c}", 32 << s, (32 << s) >> (s > 1 and b == 0 and c == 1), 3)
    for s in (1, 2, 3, 4) for b in (0, 1) for c in (1, 2)
]  # fmt: skip
"""ResNet-18's convolutions on the main path: name, kernels, input channels (of the first: the image's), kernel size."""
SHORTCUTS = [(f"layer{s}.0.downsample.0", 32 << s, 16 << s) for s in (2, 3, 4)]


def resnet18_counts(classes: int, stem: int, downsample: str, base: int) -> Any:
    def weights(out: int, channels: int, k: int, generated: bool = True) -> np.ndarray:
        return np.array([out * channels * k * k, (min(out, base) if generated else out) * channels * k * k])

    modules = []
    for name, out, channels, k in RESNET18:
        own = weights(out, channels or 3, k if channels else stem) + 2 * out
        buffers = 2 * out + 1
        for short, wide, narrow in SHORTCUTS:
            if downsample != "none" and short.replace("downsample.0", "conv1") == name:
                own, buffers = own + weights(wide, narrow, 1, downsample == "kgf") + 2 * wide, buffers + 2 * wide + 1
        modules.append({"name": name, "full": int(own[0]), "kgf": int(own[1]), "buffers": buffers})
    modules.append({"name": "fc", "full": 513 * classes, "kgf": 513 * classes, "buffers": 0})
    totals = {kind: sum(m[kind] for m in modules) for kind in ("full", "kgf", "buffers")}
    config = {"num_classes": classes, "stem": stem, "downsample": downsample, "base": base}
    return {"config": config, "totals": {"modules": len(modules)} | totals, "modules": modules}


def yolox_counts(classes: int, base: int) -> Any:
    """Of YOLOX-S, whose convolutions the first set lists."""
    listed, modules = json.loads((FIRST / "fedkgf" / "counts.json").read_text())["yolox_s"][0]["modules"], []
    for m in listed:
        predicts = "preds" in m["name"]
        out = classes if "cls_preds" in m["name"] else m["out"]
        full, kgf = (n * m["cin"] * m["k"] ** 2 + (1 if predicts else 2) * out for n in (out, min(out, base)))
        modules.append(m | {"out": out, "full": full, "kgf": kgf, "buffers": 0 if predicts else 2 * out + 1})
    totals = {kind: sum(m[kind] for m in modules) for kind in ("full", "kgf", "buffers")}
    return {"base": base, "n_modules": len(modules), **totals, "modules": modules}


def counts() -> Any:
    configs = [(7, 3, "kgf", 4), (7, 7, "full", 4), (12, 3, "none", 32), (12, 7, "kgf", 100)]
    return {"resnet18": [resnet18_counts(*config) for config in configs], "yolox_s": [yolox_counts(20, 8)]}


def main_categories(classes: int, per_class: int, clients: int, share: float) -> Any:
    """What a class has left after its owner's share goes to the others alike, what does not divide to the next."""
    table, block = np.zeros((clients, classes), int), classes // clients
    for c in range(classes):
        main = round(share * per_class)
        table[c // block, c] = main
        each, over = divmod(per_class - main, clients - 1)
        for k in range(1, clients):
            table[(c // block + k) % clients, c] = each + ((k - 1 - c % block) % (clients - 1) < over)
    case = {"n_classes": classes, "per_class": per_class, "n_clients": clients, "main_frac": share}
    return case | {"counts": table.tolist()}


def noniid() -> Any:
    return [main_categories(6, 70, 6, 0.7), main_categories(12, 100, 4, 0.7)]


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


def gamma_schedule() -> Any:
    cases = [
        {"accs": [3, 60, 59, 58.9, 61, 10], "L": 9, "gamma_min": 6, "step": 2, "tol": 1.0},
        {"accs": [5, 4, 5, 6, 5.75], "L": 5, "gamma_min": 1, "step": 1, "tol": 0.25},
    ]
    return [case | {"gamma": schedule(case)} for case in cases]


def schedule(case: Any) -> list[int]:
    gamma, best = [case["L"]], 0.0
    for accuracy in case["accs"]:
        fewer = max(case["gamma_min"], gamma[-1] - case["step"])
        gamma.append(fewer if accuracy >= best - case["tol"] else gamma[-1])
        best = max(best, accuracy)
    return gamma


# FuseFL ---------------------------------------------------------------------------------------------------------------

CUTS = {2: [4, 9], 3: [0, 4, 9], 4: [0, 4, 6, 9], 8: [0, 1, 2, 3, 5, 7, 8, 9]}
"""ResNet-18's last layer of each block."""


def last_layers(units: Sequence[int], blocks: int) -> list[int]:
    """CUTS, of other depths at the same ends of stages (4 blocks)."""
    first, last = int(sum(units[:2])), int(sum(units)) + 1
    return CUTS[blocks] if list(units) == [2, 2, 2, 2] else [0, first, first + int(units[2]), last]


def norm(p: dict[str, Tensor], x: Tensor, train: bool) -> Tensor:
    return F.batch_norm(x, p["running_mean"], p["running_var"], p["weight"], p["bias"], train, 0.1, 1e-5)


def layer(p: dict[str, Tensor], x: Tensor, train: bool = False) -> Tensor:
    """A ResNet's layer by its tensors: the stem, a unit (of stride 2 where it has a shortcut), or the pool."""

    def of(name: str) -> dict[str, Tensor]:
        return {k.removeprefix(f"{name}."): t for k, t in p.items() if k.startswith(f"{name}.")}

    if not p:
        return x.mean((2, 3), keepdim=True)
    if "0.weight" in p:
        return norm(of("1"), F.conv2d(x, p["0.weight"], padding=1), train).relu()
    stride = 2 if "shortcut.0.weight" in p else 1
    y = norm(of("bn1"), F.conv2d(x, p["conv1.weight"], stride=stride, padding=1), train).relu()
    y = norm(of("bn2"), F.conv2d(y, p["conv2.weight"], padding=1), train)
    if stride == 2:
        x = norm(of("shortcut.1"), F.conv2d(x, p["shortcut.0.weight"], stride=2), train)
    return (y + x).relu()


def through(layers: Sequence[dict[str, Tensor]], x: Tensor, train: bool = False) -> Tensor:
    for p in layers:
        x = layer(p, x, train)
    return x


def client_layers(v: Arrays, client: int, units: Sequence[int]) -> list[dict[str, Tensor]]:
    return [under(v, f"w/client{client}/layer{j}/") for j in range(int(sum(units)) + 2)]


def adapted(outs: list[Tensor], p: dict[str, Tensor], kind: str) -> Tensor:
    return F.conv2d(torch.cat(outs, 1), p["weight"], p["bias"]) if kind == "conv" else torch.stack(outs).mean(0)


def resnet_state(r: Generator, units: Sequence[int], channels: int, width: int, classes: int) -> Arrays:
    def bn(n: int, name: str) -> Arrays:
        own = {"weight": r.uniform(0.6, 1.4, n), "bias": r.standard_normal(n) / 10}
        own |= {"running_mean": r.standard_normal(n) / 5, "running_var": r.uniform(0.6, 1.4, n)}
        return {f"{name}.{k}": a for k, a in own.items()}

    def conv(out: int, into: int, k: int) -> np.ndarray:
        return r.standard_normal((out, into, k, k)) * math.sqrt(2 / (into * k * k))

    v, j, into = {f"layer0/{k}": a for k, a in ({"0.weight": conv(width, channels, 3)} | bn(width, "1")).items()}, 1, width
    for stage, count in enumerate(units):
        for unit in range(int(count)):
            out = width << stage
            own = {"conv1.weight": conv(out, into, 3), "conv2.weight": conv(out, out, 3), **bn(out, "bn1"), **bn(out, "bn2")}
            if stage and not unit:
                own |= {"shortcut.0.weight": conv(out, into, 1), **bn(out, "shortcut.1")}
            v |= {f"layer{j}/{k}": a for k, a in own.items()}
            j, into = j + 1, out
    v |= {"classifier/weight": r.standard_normal((classes, into)) / 3, "classifier/bias": r.standard_normal(classes) / 10}
    return {k: a.astype(np.float32) for k, a in v.items()}


def adaptor_state(r: Generator, into: int, out: int) -> Arrays:
    v = {"weight": r.standard_normal((out, into, 1, 1)) / math.sqrt(into), "bias": r.standard_normal(out) / 10}
    return {k: a.astype(np.float32) for k, a in v.items()}


def fused_inputs(r: Generator, units: list[list[int]], width: int, channels: int, classes: int, size: int, ks: list[int]) -> Arrays:
    m = len(units)
    v: Arrays = {"x": r.random((3, channels, size, size)).astype(np.float32)}
    for c, row in enumerate(units):
        v |= {f"w/client{c}/{k}": a for k, a in resnet_state(r, row, channels, width, classes).items()}
    for k in ks:
        for c, row in enumerate(units):
            cuts = last_layers(row, k)
            v[f"meta/last_layer_of_block/K{k}/client{c}"] = np.array(cuts)
            for b, cut in enumerate(cuts[:-1]):
                stage = sum(cut > int(sum(row[: s + 1])) for s in range(4)) if cut else 0
                n = width << min(stage, 3)
                v |= {f"a/K{k}/client{c}/block{b + 2}/{name}": a for name, a in adaptor_state(r, m * n, n).items()}
    v["meta/M_width_inch_ncls_img"] = np.array([m, width, channels, classes, size])
    return {**v, "meta/units_per_stage": np.array(units)}


def fused(v: Arrays) -> Arrays:
    units, x = v["meta/units_per_stage"], torch.from_numpy(v["x"]).double()
    count = len(units)
    models = [client_layers(v, c, row) for c, row in enumerate(units)]
    heads = [under(v, f"w/client{c}/classifier/") for c in range(count)]
    head = {k: torch.stack([h[k] for h in heads]).mean(0) for k in heads[0]}
    out: Arrays = put("cls_avg/", head)
    ks = {int(k.split("/")[2][1:]) for k in v if k.startswith("meta/last_layer_of_block/")}
    for kind, k in itertools.product(("conv", "avg"), sorted(ks)):
        at, before = f"o/{kind}/K{k}", []
        cuts = [[0, *(n + 1 for n in last_layers(row, k))] for row in units]
        for b in range(k):
            given = [
                adapted(before, under(v, f"a/K{k}/client{c}/block{b + 1}/"), kind) if b else x for c in range(count)
            ]
            for c in range(count):
                end = through(models[c][cuts[c][b] :], given[c]).flatten(1)
                logits = end @ heads[c]["weight"].T + heads[c]["bias"]
                out[f"{at}/stage{b + 1}/client{c}/logits"] = logits.numpy()
            before = [through(models[c][cuts[c][b] : cuts[c][b + 1]], given[c]) for c in range(count)]
            out |= {f"{at}/block{b + 1}/client{c}": u.numpy() for c, u in enumerate(before)}
            out[f"{at}/measure/block{b + 1}"] = torch.stack(before).mean(0).numpy()
        total = torch.stack(before).sum(0).flatten(1)
        out[f"{at}/final/features_sum"] = total.numpy()
        for name, features in (("sum", total), ("mean", total / count)):
            out[f"{at}/final/logits_{name}"] = (features @ head["weight"].T + head["bias"]).numpy()
    return out


R10, R18, R26 = [1] * 4, [2] * 4, [3] * 4
archive("fusefl/forward", lambda r: fused_inputs(r, [R18] * 2, 3, 1, 4, 12, [3, 8]))(fused)
archive("fusefl/hetero_forward", lambda r: fused_inputs(r, [R26, R10, R18, R10], 2, 2, 3, 12, [4]))(fused)


def stage_inputs(r: Generator) -> Arrays:
    m, width, channels, classes, size = 3, 3, 1, 4, 12
    v: Arrays = {"meta/M_width_inch_ncls_img": np.array([m, width, channels, classes, size])}
    for c in range(m):
        v |= {f"w/client{c}/{k}": a for k, a in resnet_state(r, R18, channels, width, classes).items()}
        v |= {f"a/client{c}/block2/{k}": a for k, a in adaptor_state(r, m * 2 * width, 2 * width).items()}
    for i in range(2):
        v[f"x{i}"], v[f"y{i}"] = r.random((5, channels, size, size)).astype(np.float32), r.integers(0, classes, 5)
    return {**v, "meta/lr_momentum": np.array([0.02, 0.6])}


@archive("fusefl/stage_step", stage_inputs)
def stage(v: Arrays) -> Arrays:
    count, (lr, momentum), out = int(v["meta/M_width_inch_ncls_img"][0]), v["meta/lr_momentum"], {}
    for mode in ("train_bn", "eval_bn"):
        frozen = [client_layers(v, c, R18)[:5] for c in range(count)]
        parts = {f"layer{j}/": p for j, p in enumerate(client_layers(v, 0, R18)) if j >= 5}
        parts |= {"adapter/": under(v, "a/client0/block2/"), "classifier/": under(v, "w/client0/classifier/")}
        every = {f"{at}{k}": t for at, p in parts.items() for k, t in p.items()}
        speed = {k: torch.zeros_like(t) for k, t in every.items() if "running" not in k}
        for i in range(2):
            p = live({k: every[k] for k in speed})
            whole = every | p

            def part(at: str, whole: dict[str, Tensor] = whole) -> dict[str, Tensor]:
                return {k.removeprefix(at): t for k, t in whole.items() if k.startswith(at)}

            x = torch.from_numpy(v[f"x{i}"]).double()
            x = adapted([through(own, x, mode == "train_bn") for own in frozen], part("adapter/"), "conv")
            x = through([part(f"layer{j}/") for j in range(5, 10)], x, True).flatten(1)
            head = part("classifier/")
            loss = F.cross_entropy(x @ head["weight"].T + head["bias"], torch.from_numpy(v[f"y{i}"]))
            out[f"o/{mode}/loss{i}"] = loss.detach().numpy()
            grads = slopes(loss, p)
            speed = {k: momentum * speed[k] + grads[k].detach() for k in p}
            every |= {k: p[k].detach() - lr * speed[k] for k in p}
        out |= put(f"o/{mode}/", every)
        for c, own in enumerate(frozen):
            for j, p in enumerate(own):
                out |= put(f"o/{mode}/frozen/client{c}/layer{j}/", {k: t for k, t in p.items() if "running" in k})
    return out


def param_case(m: int, width: int, blocks: int, adapter: str, classes: int, channels: int) -> Any:
    b, sizes, kept = width, [9 * channels * width + 2 * width], [2 * width + 1]
    wide = [b] + [b << s for s in (0, 0, 1, 1, 2, 2, 3, 3, 3)]
    for into, out in itertools.pairwise(wide[:9]):
        short = into != out
        sizes.append(9 * out * (into + out) + 4 * out + short * (into * out + 2 * out))
        kept.append((2 + short) * (2 * out + 1))
    sizes, kept, ends = [*sizes, 0], [*kept, 0], CUTS[blocks]
    starts = [0, *(n + 1 for n in ends[:-1])]
    own, own_kept = ([sum(n[i : j + 1]) for i, j in zip(starts, ends, strict=True)] for n in (sizes, kept))
    adaptors = [0] + [(m * wide[n] ** 2 + wide[n]) * (adapter == "conv") for n in ends[:-1]]
    head, sent = (8 * b + 1) * classes, [p + a for p, a in zip(own, adaptors, strict=True)]
    return {
        "M": m, "width": width, "K": blocks, "adapter": adapter, "num_classes": classes, "in_channels": channels,
        "last_layer_of_block": ends, "block_params": own, "block_buffers": own_kept, "classifier_params": head,
        "adapter_params_before_block": adaptors, "upload_params_per_client_at_stage": sent,
        "download_params_per_client_after_stage": [(m - 1) * n for n in sent],
        "trainable_params_at_stage": [sum(own[k:]) + adaptors[k] + head for k in range(blocks)],
        "fused_params": m * sum(sent) + head,
    }  # fmt: skip


def param_counts() -> Any:
    cases = [(3, 12, 3, "conv", 7, 1), (7, 5, 8, "conv", 4, 3), (2, 16, 4, "avg", 20, 3), (4, 6, 2, "conv", 2, 2)]
    return {"cases": [param_case(*case) for case in cases]}


def ccvr_inputs(r: Generator) -> Arrays:
    counts = np.array([[0, 1, 30, 12], [2, 9, 0, 15], [17, 25, 1, 0]])
    v: Arrays = {"absent/counts": counts * (np.arange(4) != 1)}
    centres = 3 * r.standard_normal((4, 5))
    for m, row in enumerate(counts):
        labels = r.permutation(np.repeat(np.arange(4), row))
        v[f"labels/client{m}"] = labels
        v[f"features/client{m}"] = centres[labels] + r.standard_normal((len(labels), 5)) * r.uniform(0.5, 2, 5)
    return v


@archive("fusefl/ccvr_merge", ccvr_inputs)
def ccvr(v: Arrays) -> Arrays:
    clients, classes = len(endings(v, "features/client")), v["absent/counts"].shape[1]
    x, y = ([v[f"{name}/client{m}"] for m in range(clients)] for name in ("features", "labels"))
    d = x[0].shape[1]
    n = np.array([[int((y[m] == c).sum()) for c in range(classes)] for m in range(clients)])
    means, scatters = np.zeros((clients, classes, d)), np.zeros((clients, classes, d, d))
    for m, c in zip(*np.nonzero(n), strict=True):
        means[m, c] = x[m][y[m] == c].mean(0)
        off = x[m][y[m] == c] - means[m, c]
        scatters[m, c] = off.T @ off
    biased = scatters / np.maximum(n, 1)[..., None, None]
    unbiased = np.where((n > 1)[..., None, None], scatters / np.maximum(n - 1, 1)[..., None, None], np.nan)
    total = n.sum(0)
    mean = np.einsum("mc,mcd->cd", n, means) / total[:, None]
    outer, own = np.einsum("mc,mcd,mce->cde", n, means, means), np.einsum("mc,mcde->cde", n - 1, biased)
    released = (own + outer) / (total - 1)[:, None, None]
    pooled = [np.concatenate([x[m][y[m] == c] for m in range(clients)]) for c in range(classes)]
    exact = np.stack([np.cov(p, rowvar=False) for p in pooled])
    gone = (v["absent/counts"].sum(0) == 0)[:, None]
    return {
        "counts": n, "client_means": means, "client_scatters": scatters, "client_covs_biased": biased,
        "client_covs_unbiased": unbiased, "merged_mean": mean, "merged_cov_unbiased": exact,
        "merged_cov_formula_on_biased_locals":
            released - total[:, None, None] / (total - 1)[:, None, None] * mean[:, :, None] * mean[:, None],
        "released_code_mean": mean, "released_code_cov": released,
        "absent/merged_mean": np.where(gone, np.nan, mean),
        "absent/merged_cov_unbiased": np.where(gone[..., None], np.nan, exact),
    }  # fmt: skip


def calibrate_inputs(r: Generator) -> Arrays:
    v = {"virtual_features": r.standard_normal((70, 4)), "targets": r.integers(0, 3, 70), "order": r.permutation(70)}
    v |= {"lr": np.array(0.3), "W0": r.standard_normal((3, 4)), "b0": r.standard_normal(3)}
    return {**v, "W_batch32": None, "W_batch9": None}


@archive("fusefl/ccvr_calibrate", calibrate_inputs)
def calibrate(v: Arrays) -> Arrays:
    out: Arrays = {}
    for size in endings(v, "W_batch"):
        w, b = v["W0"], v["b0"]
        for rows in (v["order"][i : i + int(size)] for i in range(0, len(v["order"]), int(size))):
            x, y = v["virtual_features"][rows], v["targets"][rows]
            off = (np.exp(x @ w.T + b) / np.exp(x @ w.T + b).sum(1, keepdims=True) - np.eye(len(b))[y]) / len(rows)
            w, b = w - float(v["lr"]) * off.T @ x, b - float(v["lr"]) * off.sum(0)
        out |= {f"W_batch{size}": w, f"b_batch{size}": b}
    return out


def partition_case(seed: int, m: int, alpha: float, classes: int, train: int, test: int, layout: str) -> Any:
    r = RandomState(seed)
    labels = {n: np.tile(np.arange(classes), size) for n, size in (("train", train), ("test", test))}
    if layout == "sorted":
        labels = {n: np.sort(y) for n, y in labels.items()}
    parts: list[list[int]] = []
    while not parts or min(map(len, parts)) < 10:
        parts = [[] for _ in range(m)]
        for c in range(classes):
            rows = np.flatnonzero(labels["train"] == c)
            r.shuffle(rows)
            p = r.dirichlet(np.repeat(alpha, m)) * [len(own) < classes * train / m for own in parts]
            places = (np.cumsum(p / p.sum()) * len(rows)).astype(int)[:-1]
            for own, piece in zip(parts, np.split(rows, places), strict=True):
                own += piece.tolist()
    for own in parts:
        r.shuffle(own)
    held = [[int((labels["train"][own] == c).sum()) for c in range(classes)] for own in parts]
    tests: list[list[int]] = [[] for _ in range(m)]
    for c in range(classes):
        rows = np.flatnonzero(labels["test"] == c)
        r.shuffle(rows)
        share = np.array([row[c] for row in held]) / train
        for own, piece in zip(tests, np.split(rows, (np.cumsum(share) * len(rows)).astype(int)[:-1]), strict=True):
            own += piece.tolist()
    for own in tests:
        r.shuffle(own)
    case: Any = {"np_random_seed": seed, "M": m, "alpha": alpha, "classes": classes, "label_layout": layout}
    case |= {"train_per_class": train, "test_per_class": test}
    for name, found in (("train", parts), ("test", tests)):
        case[f"{name}_counts"] = [[int((labels[name][own] == c).sum()) for c in range(classes)] for own in found]
        case[f"{name}_first10"] = [own[:10] for own in found]
        case[f"{name}_sorted_sha256_16"] = [
            hashlib.sha256(np.sort(own).astype(np.int64).tobytes()).hexdigest()[:16] for own in found
        ]
    return case


def partition() -> Any:
    cases = [(5, 3, 0.4, 7, 90, 31, "sorted"), (12, 6, 0.2, 4, 200, 50, "interleaved"), (0, 2, 5.0, 11, 40, 10, "sorted")]
    return {"cases": [partition_case(*case) for case in cases]}


def backdoor_inputs(r: Generator) -> Arrays:
    names = ["circle", "triangle", "square", "ellipse", "star", "diamond", "heart", "cross", "pentagon", "hexagon"]
    colours = ["red", "blue", "green", "yellow", "purple", "orange", "pink", "brown", "black", "grey"]
    cases = [
        {"location": [3, 9], "color": "orange", "size": 14, "image": [40, 28]},
        {"location": [20, 0], "color": "grey", "size": 8, "image": [32, 32]},
        {"location": [0, 30], "color": "pink", "size": 21, "image": [56, 64]},
    ]
    meta = {"meta_json": np.array(json.dumps({"cases": cases}))}
    return {"label_to_shape": np.array(names), "colors": np.array(colours), **meta}


@archive("fusefl/backdoor_shapes", backdoor_inputs)
def backdoor(v: Arrays) -> Arrays:
    out: Arrays = {}
    for number, case in enumerate(json.loads(str(v["meta_json"]))["cases"]):
        (x, y), s = case["location"], case["size"]
        height, width = case.get("image", [32, 32])
        h, q, low, high = s // 2, s // 4, s * 7 // 20, s * 13 // 20

        def round_(n: int, turn: float, x: int = x, y: int = y, s: int = s) -> list[tuple[int, int]]:
            angles = [2 * math.pi * i / n + turn for i in range(n)]
            ends = [(x + s / 2 + s / 2 * math.cos(a), y + s / 2 + s / 2 * math.sin(a)) for a in angles]
            return [(int(round(a, 9)), int(round(b, 9))) for a, b in ends]

        star = [(h, 0), (high, low), (s, low), (s * 7 // 10, s * 11 // 20), (s * 4 // 5, s), (h, s * 3 // 4)]
        star += [(s // 5, s), (s * 3 // 10, s * 11 // 20), (0, low), (low, low)]
        drawn: list[list[tuple[str, list[Any]]]] = [
            [("ellipse", [(0, 0), (s, s)])],
            [("polygon", [(h, 0), (s, s), (0, s)])],
            [("rectangle", [(0, 0), (s, s)])],
            [("ellipse", [(0, 0), (2 * s, s)])],
            [("polygon", star)],
            [("polygon", [(h, 0), (s, h), (h, s), (0, h)])],
            [("ellipse", [(0, 0), (h, h)]), ("ellipse", [(h, 0), (s, h)]), ("polygon", [(0, s // 3), (s, s // 3), (h, s)])],
            [("rectangle", [(q, 0), (s - q, s)]), ("rectangle", [(0, q), (s, s - q)])],
            [("polygon", [(a - x, b - y) for a, b in round_(5, math.pi / 2)])],
            [("polygon", [(a - x, b - y) for a, b in round_(6, math.pi / 6)])],
        ]
        images, masks = [], []
        for parts in drawn:
            image, mask = Image.new("RGB", (width, height)), Image.new("1", (width, height))
            for kind, points in parts:
                moved = [(a + x, b + y) for a, b in points]
                getattr(ImageDraw.Draw(image), kind)(moved, fill=case["color"])
                getattr(ImageDraw.Draw(mask), kind)(moved, fill=1)
            images.append(np.array(image))
            masks.append(np.array(mask))
        out |= {f"case{number}/images_u8": np.stack(images), f"case{number}/mask": np.stack(masks)}
    return out


def probe_inputs(r: Generator) -> Arrays:
    v: Arrays = {"h": r.standard_normal((5, 6, 3, 4)), "image": r.random((5, 1, 9, 7)), "label": r.integers(0, 4, 5)}
    v |= {"decoder/decoder.0.weight": r.standard_normal((12, 6, 3, 3)) / 7, "decoder/decoder.0.bias": r.standard_normal(12)}
    v |= {"decoder/decoder.1.weight": r.uniform(0.5, 1.5, 12), "decoder/decoder.1.bias": r.standard_normal(12) / 5}
    v |= {"decoder/decoder.1.running_mean": r.standard_normal(12) / 5}
    v |= {"decoder/decoder.1.running_var": r.uniform(0.5, 1.5, 12), "decoder/decoder.3.bias": r.standard_normal(1)}
    v |= {"decoder/decoder.3.weight": r.standard_normal((1, 12, 3, 3)) / 10}
    v = {k: a.astype(np.float32) if a.dtype == np.float64 else a for k, a in v.items()}
    return {**v, "probe/weight": r.standard_normal((4, 72)) / 4, "probe/bias": r.standard_normal(4)}


@archive("fusefl/mi_probe", probe_inputs)
def probe(v: Arrays) -> Arrays:
    h, image = (torch.from_numpy(v[name]).double() for name in ("h", "image"))
    p = under(v, "decoder/decoder.")
    large = F.interpolate(h, image.shape[2:], mode="bilinear", align_corners=True)
    out: Arrays = {"h_upsampled": large.numpy()}
    for mode in ("eval", "train"):
        y = F.conv2d(large, p["0.weight"], p["0.bias"], padding=1)
        bn = {k.removeprefix("1."): t.clone() for k, t in p.items() if k.startswith("1.")}
        y = torch.sigmoid(F.conv2d(norm(bn, y, mode == "train").relu(), p["3.weight"], p["3.bias"], padding=1))
        out[f"bce_{mode}_bn"] = -(image * y.log() + (1 - image) * (1 - y).log()).mean().numpy()
    logits = h.flatten(1) @ torch.from_numpy(v["probe/weight"]).double().T + torch.from_numpy(v["probe/bias"]).double()
    ce = F.cross_entropy(logits, torch.from_numpy(v["label"]))
    return {**out, "probe/logits": logits.numpy(), "probe/ce": ce.numpy()}


def losses_inputs(r: Generator) -> Arrays:
    v: Arrays = {"teacher_logits": 2 * r.standard_normal((3, 9, 6)), "labels": r.integers(0, 6, 9)}
    v["student_logits"] = v["teacher_logits"].mean(0) + r.standard_normal((9, 6))
    v |= {"teacher_features": r.standard_normal((9, 4)), "bn_input": r.standard_normal((9, 3, 2, 5))}
    v |= {"bn_running_mean": r.standard_normal(3), "bn_running_var": r.uniform(0.5, 2, 3), "images": r.random((9, 1, 6, 5))}
    named = ["kd/kl_batchmean_times_T2_T2", "kd/kl_batchmean_times_T2_T7", "feddf/avg_losses_T2"]
    return {**v, **dict.fromkeys([*named, "gen/adv_masked_T2", "gen/adv_masked_T5", "adi/js_T3"])}


@archive("fusefl/baseline_losses", losses_inputs)
def losses(v: Arrays) -> Arrays:
    def soft(z: np.ndarray, t: float = 1) -> np.ndarray:
        e = np.exp(z / t - (z / t).max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    def apart(a: np.ndarray, b: np.ndarray, t: float) -> np.ndarray:
        p, q = soft(a, t), soft(b, t)
        return (p * (np.log(p) - np.log(q))).sum(1)

    each, student, x = v["teacher_logits"], v["student_logits"], v["images"]
    teacher = each.mean(0)
    p = soft(teacher)
    out: Arrays = {"ensemble_logits": teacher}
    for t in endings(v, "kd/kl_batchmean_times_T2_T"):
        mean = apart(teacher, student, int(t)).mean()
        out |= {f"kd/kl_batchmean_times_T2_T{t}": int(t) ** 2 * mean, f"kd/kl_batchmean_no_T2_T{t}": mean}
    for t in endings(v, "feddf/avg_losses_T"):
        mean = np.mean([apart(own, student, int(t)).mean() for own in each])
        out[f"feddf/avg_losses_T{t}"] = int(t) ** 2 * mean
    for t in endings(v, "gen/adv_masked_T"):
        kl, differ = apart(teacher, student, int(t)), teacher.argmax(1) != student.argmax(1)
        out |= {f"gen/adv_masked_T{t}": -(int(t) ** 2) * (kl * differ).mean(), f"gen/adv_unmasked_T{t}": -(int(t) ** 2) * kl.mean()}
    rows, b = np.arange(len(p)), v["bn_input"]
    out |= {"gen/ce": -np.log(p[rows, v["labels"]]).mean(), "dafl/one_hot": -np.log(p.max(1)).mean()}
    out["gen/bn_one_layer"] = np.linalg.norm(b.var((0, 2, 3)) - v["bn_running_var"]) + np.linalg.norm(
        b.mean((0, 2, 3)) - v["bn_running_mean"]
    )
    out["dafl/activation"] = -np.abs(v["teacher_features"]).mean()
    out["dafl/info_entropy_log10"] = (p.mean(0) * np.log10(p.mean(0))).sum()
    steps = [x[..., 1:] - x[..., :-1], x[..., 1:, :] - x[..., :-1, :]]
    steps += [x[..., 1:, 1:] - x[..., :-1, :-1], x[..., 1:, :-1] - x[..., :-1, 1:]]
    out |= {"adi/tv_l2": sum(np.sqrt((s**2).sum()) for s in steps), "adi/l2": np.sqrt((x**2).sum())}
    a, c = soft(teacher, 3), soft(student, 3)
    a, c, m = np.clip(a, 0.01, 0.99), np.clip(c, 0.01, 0.99), np.clip((a + c) / 2, 0.01, 0.99)
    js = ((m * (np.log(m) - np.log(a))).sum(1).mean() + (m * (np.log(m) - np.log(c))).sum(1).mean()) / 2
    return {**out, "adi/js_T3": js, "adi/competition": 1 - min(max(js, 0), 1)}


# FedPURIN -------------------------------------------------------------------------------------------------------------


def net3(p: dict[str, Tensor], x: Tensor, train: bool) -> Tensor:
    for conv, bn in (("pre_conv", "pre_bn"), ("conv1", "bn1")):
        own = {k.removeprefix(f"{bn}."): t for k, t in p.items() if k.startswith(f"{bn}.")}
        x = norm(own, F.conv2d(x, p[f"{conv}.weight"], padding=1), train).relu()
    return x.mean((2, 3)) @ p["fc.weight"].T + p["fc.bias"]


def net3_state(r: Generator, channels: int, a: int, b: int, classes: int, fresh: bool = False) -> Arrays:
    v: Arrays = {"pre_conv.weight": r.standard_normal((a, channels, 3, 3)) / 4}
    for name, n in (("pre_bn", a), ("bn1", b)):
        v |= {f"{name}.weight": np.ones(n) if fresh else r.standard_normal(n)}
        v |= {f"{name}.bias": np.zeros(n) if fresh else r.standard_normal(n)}
        v |= {f"{name}.running_mean": np.zeros(n) if fresh else r.random(n), f"{name}.num_batches_tracked": np.array(0)}
        v |= {f"{name}.running_var": np.ones(n) if fresh else r.random(n)}
    v |= {"conv1.weight": r.standard_normal((b, a, 3, 3)) / 6, "fc.weight": r.standard_normal((classes, b)) / 2}
    return v | {"fc.bias": r.standard_normal(classes) / 2}


def short(v: Arrays) -> Arrays:
    """Arrays of floats as float32, as those files hold them; single numbers stay."""
    return {k: a.astype(np.float32) if getattr(a, "ndim", 0) and a.dtype == np.float64 else a for k, a in v.items()}


def tracked(name: str) -> bool:
    return "running_" in name or "num_batches" in name


def critical(c: np.ndarray, tau: float, at_least: float = 1e-10) -> np.ndarray:
    """1 where a score is among the tau highest of its tensor; `at_least` is the least that counts if 1e-10 does not."""
    k = math.floor(tau * c.size)
    if not k:
        return np.zeros(c.shape, np.uint8)
    limit = np.sort(c, axis=None)[-k]
    if limit <= 1e-10 and (c > at_least).any():
        limit = c[c > at_least].min()
    return (c >= limit).astype(np.uint8)


def masks_inputs(r: Generator) -> Arrays:
    layers = {"generic_5x2x3": r.standard_normal((5, 2, 3)), "odd_11": r.standard_normal(11), "one": r.standard_normal(1)}
    layers |= {"ties_8": np.array([1.0, 2, 2, 2, 1, 2, 3, 0]), "matrix_3x9": r.standard_normal((3, 9))}
    layers |= {"partly_10": r.standard_normal(10), "all_below_6": r.standard_normal(6), "no_gradient_7": r.standard_normal(7)}
    v: Arrays = {"taus": np.array([0.3, 0.7])}
    for name, theta in layers.items():
        grad = {"ties_8": np.ones(8), "no_gradient_7": np.zeros(7)}.get(name, r.standard_normal(theta.shape))
        grad = grad * 10.0 ** (-13 if name == "all_below_6" else np.where(np.arange(10) < 6, -12, 0) if name[:6] == "partly" else 0)
        v |= {f"theta/{name}": theta, f"grad/{name}": grad, f"theta_prev/{name}": (theta - grad)}
        for tau, hessian in itertools.product(v["taus"], (0, 1)):
            v |= {f"mask/{kind}/H{hessian}/tau{tau}/{name}": None for kind in ("exact", "delta")}
        v |= {f"mask/exact_fp16grad/H0/tau0.3/{name}": None, f"mask/fedcac/tau0.7/{name}": None}
    return short(v)


@archive("fedpurin/purin_masks", masks_inputs)
def masks(v: Arrays) -> Arrays:
    out = {}
    for key in (k for k in v if k.startswith("mask/")):
        _, kind, *_, tau, name = key.split("/")
        theta, grad = v[f"theta/{name}"], v[f"grad/{name}"]
        if kind in ("delta", "fedcac"):
            grad = theta - v[f"theta_prev/{name}"]
        elif kind == "exact_fp16grad":
            grad = grad.astype(np.float16).astype(np.float32)
        p = grad * theta
        score = np.abs(p * p / 2 - p) if "/H1/" in key else np.abs(p)
        out[key] = critical(score, float(tau.removeprefix("tau")), 1e-20 if kind == "fedcac" else 1e-10)
    return out


def round_inputs(r: Generator, cases: Sequence[str]) -> Arrays:
    clients = 5
    v: Arrays = {"beta": np.array(4), "tau": np.array(0.4), "samples_unequal": np.array([50, 10, 70, 20, 40])}
    common = net3_state(r, 3, 5, 4, 7)
    for i in range(clients):
        for k, a in net3_state(r, 3, 5, 4, 7).items():
            if tracked(k):
                v[f"buffer/{i}/{k}"] = a
                continue
            v[f"theta/{i}/{k}"] = a + 2 * common[k] * (i < 2)
            v[f"grad/{i}/{k}"] = r.standard_normal(a.shape)
            v[f"grad_uneven/{i}/{k}"] = v[f"grad/{i}/{k}"] * (r.random(a.shape) < [1, 0.2, 0.6, 0.1, 1][i])
        v[f"grad_uneven/4/fc.bias"] = np.zeros(7)
    return short(v) | {f"{case}/overlap": None for case in cases}


def purin_round(v: Arrays, fedcac: bool = False) -> Arrays:
    out: Arrays = {}
    beta, clients = int(v["beta"]), len(endings(v, "theta/", "/"))
    for case in (k.removesuffix("/overlap") for k in v if k.endswith("/overlap")):
        name, t = case.split("/t")
        grads = "grad_uneven" if name == "uneven" else "grad"
        tau = float(name.removeprefix("tau")) if name.startswith("tau") else float(v["tau"])
        weights = v["samples_unequal"] if name == "weighted" else np.ones(clients)
        every = endings(v, "theta/0/", "/")
        chosen = [k for k in every if fedcac or name == "bn_selected" or "bn" not in k]
        theta = [{k: v[f"theta/{i}/{k}"] for k in every} for i in range(clients)]
        masks: list[Arrays] = []
        for i, own in enumerate(theta):
            grad = {k: v[f"{grads}/{i}/{k}"] for k in chosen}
            if fedcac:
                grad = {k: own[k] - (own[k] - g) for k, g in grad.items()}
            masks.append({k: critical(np.abs(g * own[k]), tau, 1e-20 if fedcac else 1e-10) for k, g in grad.items()})
        flat = np.stack([np.concatenate([m[k].ravel() for k in chosen]) for m in masks]).astype(int)
        n = flat.sum(1)
        table = 1 - np.abs(flat[:, None] - flat[None]).sum(2) / (2 * n[:, None])
        np.fill_diagonal(table, np.nan)
        low, high = np.nanmean(table), np.nanmax(table)
        limit = high if int(t) == beta else low + int(t) / beta * (high - low)
        group = np.eye(clients, dtype=bool) | (np.nan_to_num(table, nan=-9) >= (limit if int(t) <= beta else np.inf))
        out |= {f"{case}/overlap": table, f"{case}/O_avg": low, f"{case}/O_max": high, f"{case}/threshold": limit}
        out |= {f"{case}/collab": group, f"{case}/upload_count": n}
        sent = [{k: own[k].astype(float) * (1 if fedcac else m[k]) for k in chosen} for own, m in zip(theta, masks, strict=True)]
        mean = {k: sum(w * u[k] for w, u in zip(weights, sent, strict=True)) / weights.sum() for k in chosen}
        out |= {f"{case}/global/{k}": a for k, a in mean.items()}
        down = []
        for i in range(clients):
            delta = {k: np.mean([sent[j][k] for j in np.flatnonzero(group[i])], 0) for k in chosen}
            both = {k: np.where(masks[i][k], delta[k], mean[k]) if k in chosen else theta[i][k] for k in every}
            down.append(sum(int((np.abs(both[k]) > (1e-10 if fedcac else 0)).sum()) for k in chosen))
            for part, own in (("mask", masks[i]), ("uploaded", sent[i]), ("delta", delta), ("combined", both)):
                out |= {f"{case}/{part}/{i}/{k}": a for k, a in own.items()}
            out |= {f"{case}/combined_buffer/{i}/{k}": v[f"buffer/{i}/{k}"] for k in endings(v, f"buffer/{i}/", "/")}
        out[f"{case}/download_count"] = np.array(down)
    return short(out)


ROUNDS = [f"{name}/t{t}" for name in ("equal", "uneven") for t in (1, 3, 4, 6)]
OPTIONS = ["weighted/t2", "bn_selected/t3", "tau0.25/t2", "tau0.7/t1"]
archive("fedpurin/purin_round", lambda r: round_inputs(r, ROUNDS + OPTIONS))(purin_round)
archive("fedpurin/purin_fedcac_round", lambda r: round_inputs(r, ROUNDS))(lambda v: purin_round(v, fedcac=True))


def step(
    state: dict[str, Tensor], loss: Callable[[dict[str, Tensor]], Tensor], lr: float, speed: dict[str, Tensor] | None = None,
    momentum: float = 0.0, clip: float = math.inf,
) -> tuple[dict[str, Tensor], float, dict[str, Tensor], dict[str, Tensor]]:
    """One step of SGD: (the state, the loss before, the gradients, the velocities); statistics move in place."""
    p = live({k: t for k, t in state.items() if not tracked(k)})
    value = loss(state | p)
    grads = {k: g.detach() for k, g in slopes(value, p).items()}
    size = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
    cut = {k: g * min(1.0, clip / size) if size else g for k, g in grads.items()}
    speed = {k: momentum * speed[k] + g if speed else g for k, g in cut.items()}
    after = state | {k: p[k].detach() - lr * speed[k] for k in p}
    return after, float(value.detach()), grads, speed


def counted(state: dict[str, Tensor], passes: int = 1) -> dict[str, Tensor]:
    return {k: t + passes if "num_batches" in k else t for k, t in state.items()}


def local_inputs(r: Generator) -> Arrays:
    v: Arrays = {f"init/{k}": a for k, a in net3_state(r, 1, 6, 5, 3, fresh=True).items()}
    v |= {"x": r.standard_normal((9, 1, 6, 4)), "y": r.integers(0, 3, 9)}
    return {**short(v), "after_train/pre_bn.num_batches_tracked": np.array(3)}


@archive("fedpurin/purin_local", local_inputs)
def local(v: Arrays) -> Arrays:
    x, y = torch.from_numpy(v["x"]).double(), torch.from_numpy(v["y"])
    state, speed, values = under(v, "init/"), None, []
    for _ in range(int(v["after_train/pre_bn.num_batches_tracked"])):
        state, value, grads, speed = step(state, lambda p: F.cross_entropy(net3(p, x, True), y), 0.1, speed, 0.9)
        values, state = [*values, value], counted(state)
    half = {k: g.numpy().astype(np.float16) for k, g in grads.items()}
    chosen = [k for k in half if "bn" not in k]
    mask = {k: critical(np.abs(half[k].astype(float) * state[k].numpy()), 0.5) for k in chosen}
    sparse = state | {k: state[k] * torch.from_numpy(mask[k]) for k in chosen}
    accuracy = (net3(sparse, x, False).argmax(1) == y).double().mean()
    out = {**put("after_train/", state), **put("after_sparsify/", sparse), **{f"mask/{k}": m for k, m in mask.items()}}
    out |= {"train_loss_mean": np.mean(values), "test_acc_sparsified": accuracy.numpy()}
    return short(out) | {f"grad_fp16/{k}": g for k, g in half.items()}


def family_inputs(r: Generator) -> Arrays:
    v: Arrays = {"samples": np.array([30, 5, 90, 45])}
    for i in range(4):
        v |= {f"theta/{i}/{k}": a for k, a in net3_state(r, 1, 3, 8, 6).items()}
    return short(v)


@archive("fedpurin/purin_fedavg_family", family_inputs)
def family(v: Arrays) -> Arrays:
    out: Arrays = {}
    for name, local_part in (("fedavg", ()), ("fedper", ("fc",)), ("fedbn", ("pre_bn", "bn1"))):
        keys = [k for k in endings(v, "theta/0/", "/") if not tracked(k) and k.split(".")[0] not in local_part]
        out[f"{name}/keys"] = np.array(sorted(keys))
        for k in keys:
            rows = np.stack([v[f"theta/{i}/{k}"].astype(float) for i in range(len(v["samples"]))])
            out[f"{name}/global/{k}"] = np.average(rows, 0, v["samples"])
    return short(out)


def pfedsd_inputs(r: Generator) -> Arrays:
    v: Arrays = {f"{n}/{k}": a for n in ("student", "teacher") for k, a in net3_state(r, 2, 3, 5, 4, fresh=True).items()}
    v |= {"x": r.standard_normal((11, 2, 4, 7)), "y": r.integers(0, 4, 11), "lambda": np.array(0.8)}
    return short(v | {"temperature": np.array(2.0), "lr": np.array(0.04)})


@archive("fedpurin/purin_pfedsd_step", pfedsd_inputs)
def pfedsd(v: Arrays) -> Arrays:
    x, y, t = torch.from_numpy(v["x"]).double(), torch.from_numpy(v["y"]), float(v["temperature"])
    out: Arrays = {}
    for mode in ("train", "eval"):
        taught = (net3(under(v, "teacher/"), x, mode == "train") / t).softmax(1)

        def loss(p: dict[str, Tensor], taught: Tensor = taught) -> Tensor:
            logits = net3(p, x, True)
            kl = (taught * (taught.log() - (logits / t).log_softmax(1))).sum(1).mean()
            return F.cross_entropy(logits, y) + float(v["lambda"]) * t**2 * kl

        state, value, *_ = step(under(v, "student/"), loss, float(v["lr"]))
        out |= {f"teacher_{mode}/loss": np.array(value), **put(f"teacher_{mode}/after/", counted(state))}
    return short(out)


def dirichlet_inputs(r: Generator) -> Arrays:
    v: Arrays = {"labels": r.integers(0, 7, 1500), "seed": np.array(11), "clients": np.array(4)}
    sizes = {"train": np.zeros((4, 55), int), "test": np.zeros((4, 17), int)}
    return v | {f"alpha{alpha}/{name}/indices": a for alpha in (0.05, 2.5) for name, a in sizes.items()}


@archive("fedpurin/purin_dirichlet", dirichlet_inputs)
def dirichlet(v: Arrays) -> Arrays:
    out, labels = {}, v["labels"]
    for key in (k for k in v if k.startswith("alpha")):
        r, (clients, size), classes = RandomState(int(v["seed"])), v[key].shape, int(labels.max()) + 1
        parts = []
        for q in r.dirichlet([float(key.split("/")[0].removeprefix("alpha"))] * classes, clients):
            part: list[int] = []
            for c in range(classes):
                pool, left = np.flatnonzero(labels == c), size - len(part)
                n = left if c == classes - 1 else min(left, math.floor(size * q[c] + 0.5))
                part += r.choice(pool, n, replace=n > len(pool)).tolist()
            parts.append(part)
        out[key] = np.array(parts)
    return out


# FedKTL ---------------------------------------------------------------------------------------------------------------


def features(p: dict[str, Tensor], x: Tensor, train: bool) -> Tensor:
    own = {k.removeprefix("base.1."): t for k, t in p.items() if k.startswith("base.1.")}
    x = norm(own, F.conv2d(x, p["base.0.weight"], p["base.0.bias"], padding=1), train).relu()
    return F.adaptive_avg_pool1d(F.adaptive_avg_pool2d(x, 2).flatten(1), p["head.weight"].shape[1])


def head(p: dict[str, Tensor], r: Tensor) -> Tensor:
    return r @ p["head.weight"].T + p["head.bias"]


def ktl_state(r: Generator, name: str, channels: int, width: int, hidden: int, out: int, fresh: bool = True) -> Arrays:
    v: Arrays = {"base.0.weight": r.standard_normal((width, channels, 3, 3)) / 4, "base.0.bias": r.standard_normal(width) / 9}
    v |= {"base.1.weight": np.ones(width), "base.1.bias": np.zeros(width), "base.1.num_batches_tracked": np.array(0)}
    v["base.1.running_mean"] = np.zeros(width) if fresh else r.standard_normal(width) / 9
    v["base.1.running_var"] = np.ones(width) if fresh else r.uniform(0.7, 1.6, width)
    v |= {"head.weight": r.standard_normal((out, hidden)) / 2, "head.bias": r.standard_normal(out) / 5}
    return {f"{name}{k}": a for k, a in v.items()}


def frame(rows: int, classes: int, r: Generator) -> tuple[np.ndarray, np.ndarray]:
    p = np.linalg.qr(r.standard_normal((rows, classes)))[0]
    return p, math.sqrt(classes / (classes - 1)) * p @ (np.eye(classes) - 1 / classes)


def etf_inputs(r: Generator) -> Arrays:
    return short({f"K{k}_C{c}/P": frame(k, c, r)[0] for k, c in ((3, 3), (8, 6), (40, 2), (60, 60))})


@archive("fedktl/ktl_etf", etf_inputs)
def etf(v: Arrays) -> Arrays:
    out: Arrays = {}
    for case in (k.removesuffix("/P") for k in v if k.endswith("/P")):
        p = v[f"{case}/P"].astype(float)
        c = p.shape[1]
        made = math.sqrt(c / (c - 1)) * p @ (np.eye(c) - 1 / c)
        out |= {f"{case}/etf": made, f"{case}/gram": made.T @ made, f"{case}/expected_offdiag": np.array(-1 / (c - 1))}
        out[f"{case}/etf_rows_normalized"] = (made / np.linalg.norm(made, axis=0)).T
    return short(out)


def discrepancy(x: Tensor, y: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        d = (a[:, None] - b).square().sum(2)
        return torch.stack([(-d / (2 * sigma)).exp() for sigma in (10, 15, 20, 50)]).sum(0).mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def mmd_inputs(r: Generator) -> Arrays:
    v = {"same/x": r.standard_normal((7, 3))}
    for i, shape in enumerate([(3, 5), (12, 40), (5, 130)]):
        v |= {f"{i}/x": r.standard_normal(shape), f"{i}/y": r.standard_normal(shape) * 1.5 + 0.3}
    return short(v)


@archive("fedktl/ktl_mmd", mmd_inputs)
def mmd(v: Arrays) -> Arrays:
    out: Arrays = {"same/mmd": np.array(0.0)}
    for case in (k.removesuffix("/y") for k in v if k.endswith("/y")):
        x = torch.from_numpy(v[f"{case}/x"]).double().requires_grad_()
        value = discrepancy(x, torch.from_numpy(v[f"{case}/y"]).double())
        out |= {f"{case}/mmd": value.detach().numpy(), f"{case}/grad_x": torch.autograd.grad(value, x)[0].numpy()}
    return short(out)


def ktl_local_inputs(r: Generator) -> Arrays:
    v: Arrays = ktl_state(r, "init/model/", 2, 4, 9, 6) | {"etf": frame(6, 4, r)[1], "lr": np.array(0.02)}
    v |= {"init/proj/weight": r.standard_normal((7, 9)) / 3, "init/proj/bias": r.standard_normal(7) / 9}
    v |= {"x": r.standard_normal((3, 8, 2, 6, 6)), "y": r.integers(0, 4, (3, 8))}
    v |= {"x_gen": r.standard_normal((4, 2, 6, 6)), "latent_gen": r.standard_normal((4, 7))}
    cases = {"default": (50, 64, 0.5), "first_round_no_pairs": (50, 64, 0.5), "plain_s1_m0": (20, 1, 0), "clip": (3000, 32, 0.3)}
    return short(v) | {f"{case}/mu_s_m": np.array(numbers, float) for case, numbers in cases.items()}


@archive("fedktl/ktl_local", ktl_local_inputs)
def ktl_local(v: Arrays) -> Arrays:
    out: Arrays = {}
    ends, made, latent = (torch.from_numpy(v[name]).double() for name in ("etf", "x_gen", "latent_gen"))
    for case in (k.removesuffix("/mu_s_m") for k in v if k.endswith("/mu_s_m")):
        mu, scale, margin = v[f"{case}/mu_s_m"]
        model, proj, told = under(v, "init/model/"), under(v, "init/proj/"), []
        pairs = case != "first_round_no_pairs"
        for x, y in zip(torch.from_numpy(v["x"]).double(), torch.from_numpy(v["y"]), strict=True):
            p, w = live({k: t for k, t in model.items() if not tracked(k)}), live(proj)
            cos = F.normalize(head(p, features(model | p, x, True)), dim=1) @ ends
            true = F.one_hot(y, ends.shape[1]).bool()
            logits = scale * torch.where(true, (cos.clamp(-1 + 1e-7, 1 - 1e-7).arccos() + margin).cos(), cos)
            ce, mse = F.cross_entropy(logits, y), torch.zeros(()).double()
            if pairs:
                mse = (features(model | p, made, True) @ w["weight"].T + w["bias"] - latent).square().mean()
            total = ce + mu * mse
            grads = [{k: g.detach() for k, g in slopes(total, own).items()} for own in (p, w)]
            sizes = [float(torch.cat([t.flatten() for t in g.values()]).norm()) for g in grads]
            told.append([t.detach().numpy() for t in (logits, ce, mse, total)] + [np.array(sizes)])
            model, proj = (
                old | {k: old[k] - float(v["lr"]) * g[k] * min(1, 100 / size if size else 1) for k in g}
                for old, g, size in zip((model, proj), grads, sizes, strict=True)
            )
            model = counted(model, 1 + pairs)
        names = ("logits", "ce", "mse", "total_loss", "grad_norm_model_proj")
        made_up = {name: np.stack([row[i] for row in told]) for i, name in enumerate(names)}
        out |= {f"{case}/{name}": a for name, a in made_up.items()} | put(f"{case}/after/model/", model)
        out |= put(f"{case}/after/proj/", proj) if pairs else {f"{case}/mse": np.zeros(0)}
    return short(out)


def protos_inputs(r: Generator) -> Arrays:
    v: Arrays = ktl_state(r, "model/", 1, 5, 10, 6, fresh=False) | {"etf": frame(6, 6, r)[1]}
    return short(v | {"x": r.standard_normal((3, 7, 1, 9, 5)), "y": np.array([[0, 5, 1, 1, 5, 0, 0]] * 2 + [[3, 5, 1, 0, 0, 1, 5]])})


@archive("fedktl/ktl_protos", protos_inputs)
def protos(v: Arrays) -> Arrays:
    p, x, y = under(v, "model/"), torch.from_numpy(v["x"]).double().flatten(0, 1), torch.from_numpy(v["y"]).flatten()
    u = F.normalize(head(p, features(p, x, False)), dim=1)
    labels = sorted(set(y.tolist()))
    rows = F.normalize(torch.stack([u[y == c].mean(0) for c in labels]), dim=1)
    cos = u @ torch.from_numpy(v["etf"]).double()
    out = {"proto_labels": np.array(labels), "protos": rows.numpy(), "upload_elements": np.array(rows.numel())}
    return short({**out, "test_cosine": cos.numpy(), "test_pred": cos.argmax(1).numpy()})


def align_inputs(r: Generator) -> Arrays:
    k, h, n, classes = 4, 10, 11, 3
    v: Arrays = {"init/F/mlp.0.weight": r.standard_normal((k, k)) / 2, "init/F/mlp.0.bias": r.standard_normal(k) / 3}
    v |= {"init/F/mlp.1.weight": np.ones(k), "init/F/mlp.1.bias": np.zeros(k), "init/F/mlp.1.num_batches_tracked": np.array(0)}
    v |= {"init/F/mlp.1.running_mean": r.standard_normal(k) / 9, "init/F/mlp.1.running_var": r.uniform(0.1, 0.4, k)}
    v |= {"init/F/mlp.3.weight": r.standard_normal((h, k)) / 2, "init/F/mlp.3.bias": r.standard_normal(h) / 3}
    points = r.standard_normal((n, k))
    v |= {"init/centroids": r.standard_normal((classes, h)), "protos": points / np.linalg.norm(points, axis=1, keepdims=True)}
    v |= {"labels": np.arange(n) % classes, "lr": np.array(0.004), "lambda": np.array(0.3)}
    v |= {f"{case}/latents": r.standard_normal((steps, n, h)) for case, steps in (("one_step", 1), ("two_steps", 2))}
    return short(v | {"one_step_reset/latents": r.standard_normal((1, n, h)), "one_step_reset/init_centroids": None})


@archive("fedktl/ktl_align", align_inputs)
def align(v: Arrays) -> Arrays:
    out: Arrays = {}
    points, labels = torch.from_numpy(v["protos"]).double(), torch.from_numpy(v["labels"])

    def transformed(f: dict[str, Tensor], train: bool) -> Tensor:
        own = {k.removeprefix("1."): t for k, t in f.items() if k.startswith("1.")}
        return norm(own, points @ f["0.weight"].T + f["0.bias"], train).relu() @ f["3.weight"].T + f["3.bias"]

    def class_means(f: dict[str, Tensor], start: Tensor) -> Tensor:
        q = transformed(f, False).detach()
        return torch.stack([q[labels == c].mean(0) if (labels == c).any() else start[c] for c in range(len(start))])

    for case in (k.removesuffix("/latents") for k in v if k.endswith("/latents")):
        f, table = under(v, "init/F/mlp."), torch.from_numpy(v["init/centroids"]).double()
        out[f"{case}/class_means_before"] = class_means(f, table).numpy()
        if f"{case}/init_centroids" in v:
            table = class_means(f, table)
            out[f"{case}/init_centroids"] = table.numpy()
        p, table = live({k: t for k, t in f.items() if not tracked(k)}), table.clone().requires_grad_()
        adams = [torch.optim.Adam(own, lr=float(v["lr"])) for own in (p.values(), [table])]
        values = []
        for i, latents in enumerate(torch.from_numpy(v[f"{case}/latents"]).double()):
            q = transformed(f | p, True)
            apart = discrepancy(q, latents)
            (apart + float(v["lambda"]) * (q - table[labels]).square().mean()).backward()
            values.append(float(apart.detach()))
            if not i:
                out |= {f"{case}/grad/F/mlp.{k}": t.grad.numpy().copy() for k, t in p.items()}
                out[f"{case}/grad/centroids"] = table.grad.numpy().copy()
            for adam in adams:
                adam.step()
                adam.zero_grad()
            f = counted(f)
        f = {k: t.detach() for k, t in (f | p).items()}
        out |= {f"{case}/mmd_per_step": np.array(values), **put(f"{case}/after/F/mlp.", f)}
        out[f"{case}/after/centroids_embedding"] = table.detach().numpy()
        out[f"{case}/class_means_after"] = class_means(f, table.detach()).numpy()
    return short(out)


def images_inputs(r: Generator) -> Arrays:
    means = r.standard_normal((4, 9)).astype(np.float32)
    v = {"synthesis_output": r.standard_normal((4, 3, 16, 12)) * 0.8, "images": np.zeros((4, 3, 6, 6))}
    return short(v) | {"latent_centroids": means, "vectors": means}


@archive("fedktl/ktl_images", images_inputs)
def images(v: Arrays) -> Arrays:
    x = (torch.from_numpy(v["synthesis_output"]).double() * 127.5 + 128).clamp(0, 255) / 255
    size = v["images"].shape[2]
    height, width = (n * size // min(x.shape[2:]) for n in x.shape[2:])
    x = F.interpolate(x, (height, width), mode="bilinear", antialias=True)
    top, left = (height - size) // 2, (width - size) // 2
    return short({"images": ((x[:, :, top : top + size, left : left + size] - 0.5) / 0.5).numpy()})


def htfl_inputs(r: Generator) -> Arrays:
    v: Arrays = {"x": r.standard_normal((12, 2, 7, 7)), "y": np.arange(12) % 4, "lr": np.array(0.03)}
    v |= ktl_state(r, "init/model/", 2, 5, 8, 6) | ktl_state(r, "init/aux/", 2, 5, 8, 6)
    v |= {"fedkd/init/W/weight": r.standard_normal((8, 8)) / 3, "fedproto/lambda": np.array(4.0)}
    v |= {"feddistill/lambda": np.array(0.6), "fedproto/global_protos_0_1": r.standard_normal((2, 8))}
    v |= {"feddistill/global_logits_0_1": r.standard_normal((2, 6)), "svd/0/A": r.standard_normal((4, 13))}
    v |= {"svd/1/A": r.standard_normal((15, 7)), "svd/2/A": r.standard_normal((5, 5))}
    return short(v) | {f"svd/{i}/e{energy}/rank": None for i in range(3) for energy in (0.7, 0.9)}


@archive("fedktl/ktl_htfl_baselines", htfl_inputs)
def htfl(v: Arrays) -> Arrays:
    x, y, lr = torch.from_numpy(v["x"]).double(), torch.from_numpy(v["y"]), float(v["lr"])
    out: Arrays = {"class_mean/out": np.array([[2.0, 1.0], [5.0, 5.0], [2.0, 3.0]])}

    def kl(p: Tensor, q: Tensor) -> Tensor:  # over samples and classes
        return (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).mean()

    for name in ("fml", "fedkd"):
        states = {"model": under(v, "init/model/"), "aux": under(v, "init/aux/")}
        states |= {"W": under(v, "fedkd/init/W/")} if name == "fedkd" else {}
        p = {part: live({k: t for k, t in own.items() if not tracked(k)}) for part, own in states.items()}
        ra, rb = (features(states[part] | p[part], x, True) for part in ("model", "aux"))
        a, b = head(p["model"], ra), head(p["aux"], rb)
        ce_a, ce_b = F.cross_entropy(a, y), F.cross_entropy(b, y)
        if name == "fml":
            loss = (ce_a + kl(b, a) + ce_b + kl(a, b)) / 2
        else:
            far = (ra - rb @ p["W"]["weight"].T).square().mean()
            loss = ce_a + ce_b + (kl(b, a) + kl(a, b) + 2 * far) / (ce_a + ce_b)
        for part, own in p.items():
            grads = slopes(loss, own)
            cut = min(1.0, 10 / float(torch.cat([g.flatten() for g in grads.values()]).norm()))
            after = states[part] | {k: own[k] - lr * cut * grads[k] for k in own}
            out |= put(f"{name}/after/{part}/", counted(after))
    for name, known in (("fedproto", "global_protos"), ("feddistill", "global_logits")):
        (key,) = (k for k in v if k.startswith(f"{name}/{known}_"))
        rows, seen = torch.from_numpy(v[key]).double(), {}

        def loss_of(p: dict[str, Tensor], name: str = name, rows: Tensor = rows, seen: Any = seen) -> Tensor:
            r = features(p, x, True)
            logits = head(p, r)
            seen["own"] = (r if name == "fedproto" else logits).detach()
            told = torch.stack([rows[c] if c < len(rows) else own for own, c in zip(seen["own"], y, strict=True)])
            live_own = r if name == "fedproto" else logits
            return F.cross_entropy(logits, y) + float(v[f"{name}/lambda"]) * (live_own - told).square().mean()

        state, *_ = step(under(v, "init/model/"), loss_of, lr)
        out |= put(f"{name}/after/model/", counted(state))
        classes = sorted(set(y.tolist()))
        out[f"{name}/local_labels"] = np.array(classes)
        out[f"{name}/local_{known.split('_')[1]}"] = torch.stack([seen["own"][y == c].mean(0) for c in classes]).numpy()
    for key in [k.removesuffix("/rank") for k in v if k.endswith("/rank")]:
        at, energy = key.rsplit("/e", 1)
        u, s, w = np.linalg.svd(v[f"{at}/A"].astype(float), full_matrices=False)
        rank = int((np.cumsum(s**2) <= float(energy) * (s**2).sum()).sum()) + 1
        out |= {f"{key}/rank": np.array(rank), f"{key}/elements": np.array(rank * (sum(v[f"{at}/A"].shape) + 1))}
        out[f"{key}/recovered"] = (u[:, :rank] * s[:rank]) @ w[:rank]
    return short(out)


# Files ----------------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], Any]] = {
    "fedkgf/counts": counts,
    "fedkgf/grouping": grouping,
    "fedkgf/noniid_counts": noniid,
    "fusefl/param_counts": param_counts,
    "fusefl/partition": partition,
    "genefl/comm": lambda: [comm_case(*case) for case in ((13, 3), (2, 7))],
    "genefl/gamma_schedule": gamma_schedule,
}


def write(folder: Path, seed: int = 7) -> None:
    """The whole set, into folders that may be there already."""
    for name, (inputs, answers) in ARCHIVES.items():
        v = inputs(np.random.default_rng([seed, *name.encode()]))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{name}.npz", **{k: a for k, a in (v | answers(v)).items() if a is not None})
    for name, table in TABLES.items():
        (folder / f"{name}.json").write_text(json.dumps(table(), indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
