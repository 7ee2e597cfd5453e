"""Fed-KGF: generated kernels, groups of modules, counts, and its baselines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

from second_golden.common import (
    FIRST,
    TABLES,
    Arrays,
    archive,
    endings,
    live,
    put,
    slopes,
    under,
)


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
    shapes = [
        (2, 5, (2, 5, 5), 2, 2, (3, 2, 9, 8)),
        (3, 7, (1, 3, 3), 1, 0, (1, 1, 6, 6)),
        (4, 4, (2, 1, 1), 1, 0, (2, 2, 4, 3)),
    ]
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
    state |= {
        "bn.bias": r.standard_normal(6) / 3,
        "fc.weight": r.standard_normal((3, 6)),
        "fc.bias": r.standard_normal(3),
    }
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
    for i, (seed, layer, shape) in enumerate(
        [(2**40 + 3, 2, (5, 4, 3, 3)), (0, 11, (9, 2, 1, 1)), (7, 0, (3, 1, 5, 5))]
    ):
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


ASSEMBLIES = [
    {"modules": 7, "clients": 3, "perm": [1, 2, 0]},
    {"modules": 2, "clients": 5, "perm": [4, 1, 0, 3, 2]},
    {"modules": 4, "clients": 4, "perm": [3, 2, 0, 1]},
]
"""`perm`: the group of each client."""


def groups_of(modules: int, clients: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(modules), min(modules, clients))]


def assembly_inputs(r: Generator) -> Arrays:
    v: Arrays = {}
    for a, case in enumerate(ASSEMBLIES):
        for c, m in itertools.product(range(case["clients"]), range(case["modules"])):
            v[f"a{a}_client{c}__m{m}.weight"], v[f"a{a}_client{c}__m{m}.bn"] = r.random((3, 1 + m % 2)), r.random(2)
    return v


@archive("fedkgf/assembly", assembly_inputs)
def assembly(v: Arrays, cases: Any = ASSEMBLIES) -> Arrays:
    out: Arrays = {}
    for a, case in enumerate(cases):
        for g, own in enumerate(groups_of(case["modules"], case["clients"])):
            for m, part in itertools.product(own, ("weight", "bn")):
                out[f"a{a}_global__m{m}.{part}"] = v[f"a{a}_client{case['perm'].index(g)}__m{m}.{part}"]
    return out


def grouping(found: Any) -> Any:
    groupings = []
    for case in found["groupings"]:
        groups = groups_of(case["modules"], case["clients"])
        groupings.append(case | {"groups": groups, "sizes": [len(own) for own in groups]})
    assemblies = []
    for case in found["assemblies"]:
        groups = groups_of(case["modules"], case["clients"])
        case = case | {"groups": groups, "owner_of_group": [case["perm"].index(g) for g in range(len(groups))]}
        assemblies.append(case | {"uploaded_group_of_client": [g if g < len(groups) else None for g in case["perm"]]})
    return {"groupings": groupings, "assemblies": assemblies}


SHAPES = [(23, 6), (6, 23), (8, 8), (83, 7), (2, 1)]
GROUPINGS = [{"modules": modules, "clients": clients} for modules, clients in SHAPES]
TABLES["fedkgf/grouping"] = {"groupings": GROUPINGS, "assemblies": ASSEMBLIES}, grouping


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


def resnet18_counts(num_classes: int, stem: int, downsample: str, base: int) -> Any:
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
    modules.append({"name": "fc", "full": 513 * num_classes, "kgf": 513 * num_classes, "buffers": 0})
    totals = {kind: sum(m[kind] for m in modules) for kind in ("full", "kgf", "buffers")}
    config = {"num_classes": num_classes, "stem": stem, "downsample": downsample, "base": base}
    return {"config": config, "totals": {"modules": len(modules)} | totals, "modules": modules}


def yolox_counts(base: int, listed: Any) -> Any:
    modules = []
    for m in listed:
        predicts = "preds" in m["name"]
        full, kgf = (
            n * m["cin"] * m["k"] ** 2 + (1 if predicts else 2) * m["out"] for n in (m["out"], min(m["out"], base))
        )
        modules.append(m | {"full": full, "kgf": kgf, "buffers": 0 if predicts else 2 * m["out"] + 1})
    totals = {kind: sum(m[kind] for m in modules) for kind in ("full", "kgf", "buffers")}
    return {"base": base, "n_modules": len(modules), **totals, "modules": modules}


def counts(found: Any) -> Any:
    resnets = [resnet18_counts(**case["config"]) for case in found["resnet18"]]
    return {"resnet18": resnets, "yolox_s": [yolox_counts(case["base"], case["modules"]) for case in found["yolox_s"]]}


def count_configurations() -> Any:
    """ResNet-18s, and YOLOX-S of 20 classes, whose convolutions the first set lists."""
    names = ("num_classes", "stem", "downsample", "base")
    rows = [(7, 3, "kgf", 4), (7, 7, "full", 4), (12, 3, "none", 32), (12, 7, "kgf", 100)]
    listed = json.loads((FIRST / "fedkgf" / "counts.json").read_text())["yolox_s"][0]["modules"]
    modules = [m | {"out": 20} if "cls_preds" in m["name"] else m for m in listed]
    configs = [{"config": dict(zip(names, row, strict=True))} for row in rows]
    return {"resnet18": configs, "yolox_s": [{"base": 8, "modules": modules}]}


TABLES["fedkgf/counts"] = count_configurations(), counts


def main_categories(n_classes: int, per_class: int, n_clients: int, main_frac: float) -> Any:
    """What a class has left after its owner's share goes to the others alike, what does not divide to the next."""
    table, block = np.zeros((n_clients, n_classes), int), n_classes // n_clients
    for c in range(n_classes):
        main = round(main_frac * per_class)
        table[c // block, c] = main
        each, over = divmod(per_class - main, n_clients - 1)
        for k in range(1, n_clients):
            table[(c // block + k) % n_clients, c] = each + ((k - 1 - c % block) % (n_clients - 1) < over)
    case = {"n_classes": n_classes, "per_class": per_class, "n_clients": n_clients, "main_frac": main_frac}
    return case | {"counts": table.tolist()}


def noniid(found: Any) -> Any:
    names = ("n_classes", "per_class", "n_clients", "main_frac")
    return [main_categories(*(case[name] for name in names)) for case in found]


TABLES["fedkgf/noniid_counts"] = (
    [
        {"n_classes": 6, "per_class": 70, "n_clients": 6, "main_frac": 0.7},
        {"n_classes": 12, "per_class": 100, "n_clients": 4, "main_frac": 0.7},
    ],
    noniid,
)
