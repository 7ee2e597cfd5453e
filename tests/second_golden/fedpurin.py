"""FedPURIN, FedCAC, pFedSD and the averaging baselines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator, RandomState
from torch import Tensor

from second_golden.common import (
    Arrays,
    archive,
    counted,
    endings,
    norm,
    put,
    short,
    step,
    tracked,
    under,
)


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
    layers = {
        "generic_5x2x3": r.standard_normal((5, 2, 3)),
        "odd_11": r.standard_normal(11),
        "one": r.standard_normal(1),
    }
    layers |= {"ties_8": np.array([1.0, 2, 2, 2, 1, 2, 3, 0]), "matrix_3x9": r.standard_normal((3, 9))}
    layers |= {
        "partly_10": r.standard_normal(10),
        "all_below_6": r.standard_normal(6),
        "no_gradient_7": r.standard_normal(7),
    }
    v: Arrays = {"taus": np.array([0.3, 0.7])}
    for name, theta in layers.items():
        grad = {"ties_8": np.ones(8), "no_gradient_7": np.zeros(7)}.get(name, r.standard_normal(theta.shape))
        grad = grad * 10.0 ** (
            -13 if name == "all_below_6" else np.where(np.arange(10) < 6, -12, 0) if name[:6] == "partly" else 0
        )
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
        v["grad_uneven/4/fc.bias"] = np.zeros(7)
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
        sent = [
            {k: own[k].astype(float) * (1 if fedcac else m[k]) for k in chosen}
            for own, m in zip(theta, masks, strict=True)
        ]
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
    v: Arrays = {
        f"{n}/{k}": a for n in ("student", "teacher") for k, a in net3_state(r, 2, 3, 5, 4, fresh=True).items()
    }
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
