"""FuseFL: fused networks, CCVR, partitions, shapes, probes, and the losses of its baselines."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator, RandomState
from PIL import Image, ImageDraw
from torch import Tensor

from second_golden.common import (
    TABLES,
    Arrays,
    archive,
    endings,
    live,
    norm,
    put,
    slopes,
    under,
)

CUTS = {2: [4, 9], 3: [0, 4, 9], 4: [0, 4, 6, 9], 8: [0, 1, 2, 3, 5, 7, 8, 9]}
"""ResNet-18's last layer of each block."""


def last_layers(units: Sequence[int], blocks: int) -> list[int]:
    """CUTS, of other depths at the same ends of stages (4 blocks)."""
    first, last = int(sum(units[:2])), int(sum(units)) + 1
    return CUTS[blocks] if list(units) == [2, 2, 2, 2] else [0, first, first + int(units[2]), last]


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

    v, j, into = (
        {f"layer0/{k}": a for k, a in ({"0.weight": conv(width, channels, 3)} | bn(width, "1")).items()},
        1,
        width,
    )
    for stage, count in enumerate(units):
        for unit in range(int(count)):
            out = width << stage
            own = {
                "conv1.weight": conv(out, into, 3),
                "conv2.weight": conv(out, out, 3),
                **bn(out, "bn1"),
                **bn(out, "bn2"),
            }
            if stage and not unit:
                own |= {"shortcut.0.weight": conv(out, into, 1), **bn(out, "shortcut.1")}
            v |= {f"layer{j}/{k}": a for k, a in own.items()}
            j, into = j + 1, out
    v |= {
        "classifier/weight": r.standard_normal((classes, into)) / 3,
        "classifier/bias": r.standard_normal(classes) / 10,
    }
    return {k: a.astype(np.float32) for k, a in v.items()}


def adaptor_state(r: Generator, into: int, out: int) -> Arrays:
    v = {"weight": r.standard_normal((out, into, 1, 1)) / math.sqrt(into), "bias": r.standard_normal(out) / 10}
    return {k: a.astype(np.float32) for k, a in v.items()}


def fused_inputs(
    r: Generator, units: list[list[int]], width: int, channels: int, classes: int, size: int, ks: list[int]
) -> Arrays:
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
archive("fusefl/forward", lambda r: fused_inputs(r, [R18] * 2, 3, 1, 4, 12, [3, 4]))(fused)
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


PARAM_NAMES = ("M", "width", "K", "adapter", "num_classes", "in_channels")
PARAM_ROWS = [(3, 12, 3, "conv", 7, 1), (7, 5, 8, "conv", 4, 3), (2, 16, 4, "avg", 20, 3), (4, 6, 2, "conv", 2, 2)]
TABLES["fusefl/param_counts"] = (
    {"cases": [dict(zip(PARAM_NAMES, row, strict=True)) for row in PARAM_ROWS]},
    lambda found: {"cases": [param_case(*(case[name] for name in PARAM_NAMES)) for case in found["cases"]]},
)


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


SPLIT_NAMES = ("np_random_seed", "M", "alpha", "classes", "train_per_class", "test_per_class", "label_layout")
SPLIT_ROWS = [
    (5, 3, 0.4, 7, 90, 31, "sorted"),
    (12, 6, 0.2, 4, 200, 50, "interleaved"),
    (0, 2, 5.0, 11, 40, 10, "sorted"),
]
TABLES["fusefl/partition"] = (
    {"cases": [dict(zip(SPLIT_NAMES, row, strict=True)) for row in SPLIT_ROWS]},
    lambda found: {"cases": [partition_case(*(case[name] for name in SPLIT_NAMES)) for case in found["cases"]]},
)


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
            [
                ("ellipse", [(0, 0), (h, h)]),
                ("ellipse", [(h, 0), (s, h)]),
                ("polygon", [(0, s // 3), (s, s // 3), (h, s)]),
            ],
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
    v |= {
        "decoder/decoder.0.weight": r.standard_normal((12, 6, 3, 3)) / 7,
        "decoder/decoder.0.bias": r.standard_normal(12),
    }
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
    v |= {
        "bn_running_mean": r.standard_normal(3),
        "bn_running_var": r.uniform(0.5, 2, 3),
        "images": r.random((9, 1, 6, 5)),
    }
    v |= {"coboost/w_before": np.array([0.3, 0.002, 0.999]), "coboost/mu_decay_epoch": np.array([0.02, 0.9, 3])}
    v |= {"coboost/ods_A": r.standard_normal((6, 8)), "coboost/ods_x": r.standard_normal((9, 8))}
    v |= {"coboost/ods_u": r.uniform(-1, 1, (9, 6))}
    named = ["kd/kl_batchmean_times_T2_T2", "kd/kl_batchmean_times_T2_T7", "feddf/avg_losses_T2"]
    named += ["gen/adv_masked_T2", "gen/adv_masked_T5", "adi/js_T3", "coboost/hard_ce_hs1", "coboost/hard_ce_hs3"]
    return {**v, **dict.fromkeys(named)}


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
        out |= {
            f"gen/adv_masked_T{t}": -(int(t) ** 2) * (kl * differ).mean(),
            f"gen/adv_unmasked_T{t}": -(int(t) ** 2) * kl.mean(),
        }
    rows, b = np.arange(len(p)), v["bn_input"]
    out |= {"gen/ce": -np.log(p[rows, v["labels"]]).mean(), "dafl/one_hot": -np.log(p.max(1)).mean()}
    own = p[rows, v["labels"]]
    for h in endings(v, "coboost/hard_ce_hs"):
        out[f"coboost/hard_ce_hs{h}"] = ((1 - own) ** int(h) * -np.log(own)).mean()
    w, (mu, decay, epoch) = v["coboost/w_before"], v["coboost/mu_decay_epoch"].astype(float)
    q = soft(np.tensordot(w / w.sum(), each, 1)) - np.eye(p.shape[1])[v["labels"]]
    slope = ((each - np.tensordot(w / w.sum(), each, 1)) * q).sum(2).mean(1) / w.sum()
    w = np.clip(w - mu * decay**epoch * np.sign(slope), 0, 1)
    out |= {"coboost/w_grad": slope, "coboost/w_after": w}
    out["coboost/weighted_logits_after"] = np.tensordot(w / w.sum(), each, 1)
    at, u = v["coboost/ods_x"], v["coboost/ods_u"]
    s = soft(at @ v["coboost/ods_A"].T, 4)
    slope = (s * (u - (s * u).sum(1, keepdims=True))) @ v["coboost/ods_A"]
    out["coboost/ods_x_perturbed"] = at + 8 / 255 * np.sign(slope)
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
