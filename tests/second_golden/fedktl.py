"""FedKTL and its baselines."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

from second_golden.common import (
    Arrays,
    archive,
    counted,
    live,
    norm,
    put,
    short,
    slopes,
    step,
    tracked,
    under,
)


def features(p: dict[str, Tensor], x: Tensor, train: bool) -> Tensor:
    own = {k.removeprefix("base.1."): t for k, t in p.items() if k.startswith("base.1.")}
    x = norm(own, F.conv2d(x, p["base.0.weight"], p["base.0.bias"], padding=1), train).relu()
    return F.adaptive_avg_pool1d(F.adaptive_avg_pool2d(x, 2).flatten(1), p["head.weight"].shape[1])


def head(p: dict[str, Tensor], r: Tensor) -> Tensor:
    return r @ p["head.weight"].T + p["head.bias"]


def ktl_state(r: Generator, name: str, channels: int, width: int, hidden: int, out: int, fresh: bool = True) -> Arrays:
    v: Arrays = {
        "base.0.weight": r.standard_normal((width, channels, 3, 3)) / 4,
        "base.0.bias": r.standard_normal(width) / 9,
    }
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
    cases = {
        "default": (50, 64, 0.5),
        "first_round_no_pairs": (50, 64, 0.5),
        "plain_s1_m0": (20, 1, 0),
        "clip": (3000, 32, 0.3),
    }
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
    return short(
        v
        | {
            "x": r.standard_normal((3, 7, 1, 9, 5)),
            "y": np.array([[0, 5, 1, 1, 5, 0, 0]] * 2 + [[3, 5, 1, 0, 0, 1, 5]]),
        }
    )


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
    v |= {
        "init/F/mlp.1.weight": np.ones(k),
        "init/F/mlp.1.bias": np.zeros(k),
        "init/F/mlp.1.num_batches_tracked": np.array(0),
    }
    v |= {"init/F/mlp.1.running_mean": r.standard_normal(k) / 9, "init/F/mlp.1.running_var": r.uniform(0.1, 0.4, k)}
    v |= {"init/F/mlp.3.weight": r.standard_normal((h, k)) / 2, "init/F/mlp.3.bias": r.standard_normal(h) / 3}
    points = r.standard_normal((n, k))
    v |= {
        "init/centroids": r.standard_normal((classes, h)),
        "protos": points / np.linalg.norm(points, axis=1, keepdims=True),
    }
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
            cut = min(1.0, 10 / float(torch.cat([g.detach().flatten() for g in grads.values()]).norm()))
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
