"""Compression baselines beside their information bounds: what one client's reply takes, in a real round.

    python benchmarks/paper/compression_bounds.py [dgc] … [--model resnet18:width=32] [--dataset cifar10] [--rounds 1]

Values count 32 bits, or, if that is less, the entropy of their sign and exponent and 23 bits; k places of d count
log2 C(d, k) bits, tensor by tensor; signs their entropy; batch-norm statistics, which no method compresses, what they
take in a frame of their own. Where places cluster, frames take less than this. `32-bit` is how many times smaller the
frame is than four bytes for each parameter.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fedpurin_table3 import entropy, plain_bits

import fewbytes as fb
from fewbytes.data import ClientData, FederatedData, load_dataset
from fewbytes.methods import dgc, fedcams, fedcom, fedpm, smartidx
from fewbytes.models import build_model


def choice_bits(d: int, k: int) -> float:
    """log2 C(d, k)."""
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


def value_bits(values: Iterable[torch.Tensor]) -> float:
    """Of float32 values: 32 each, or the entropy of sign and exponent and the mantissa's 23."""
    flat = torch.cat([torch.empty(0), *(value.reshape(-1) for value in values)]).numpy()
    return flat.size * min(32.0, plain_bits(flat)) if flat.size else 0.0


def symbol_bits(symbols: torch.Tensor) -> float:
    return symbols.numel() * entropy(symbols.numpy()) if symbols.numel() else 0.0


def topk_bits(sent: fb.TopK) -> float:
    places = {name: math.prod(shape[: sent.depth]) for name, shape in sent.shapes.items()}
    return value_bits(sent.values.values()) + sum(choice_bits(d, len(sent.indices[n])) for n, d in places.items())


def signs_bits(sent: fb.Signs) -> float:
    return symbol_bits(torch.cat([value.reshape(-1) for value in sent.signs.values()])) + 32


def packages_bits(sent: fb.Packages) -> float:
    """Of the packages: single values among those in no chosen kernel, kernels with a pattern among those not whole."""
    values = [v for part in (sent.single, sent.whole, sent.magnitudes) for v in part.values.values()]
    bits = value_bits(values) + symbol_bits(sent.which) + 9 * len(sent.patterns)
    for name, shape in sent.single.shapes.items():
        d = math.prod(shape)
        if name in sent.whole.shapes:
            kernels, whole = math.prod(shape[:2]), len(sent.whole.indices[name])
            patterned = len(sent.magnitudes.indices[name])
            bits += choice_bits(kernels, whole) + choice_bits(kernels - whole, patterned)
            d -= (whole + patterned) * math.prod(shape[2:])
        bits += choice_bits(d, len(sent.single.indices[name]))
    return bits


def levels_bits(sent: fb.Quantised) -> float:
    """Of levels the entropy of their highest byte, 8 bits for the other if there is one; of each grid two numbers."""
    flat = torch.cat([level.reshape(-1) for level in sent.levels.values()]).numpy()
    lower = 8 * (flat.itemsize - 1)
    return flat.size * (entropy(flat >> lower) + lower) + 64 * len(sent.levels)


def drawn_bits(sent: fb.Bits) -> float:
    return symbol_bits(torch.cat([value.reshape(-1) for value in sent.bits.values()]))


METHODS: dict[str, tuple[fb.Method, type, Callable[[Any], float]]] = {
    "dgc": (fb.DGC(batch=64, lr=0.05), dgc.Sparse, lambda reply: topk_bits(reply.change)),
    "fedcams": (fb.FedCAMS(batch=64, lr=0.05, epochs=1), fedcams.Signed, lambda reply: signs_bits(reply.change)),
    "smartidx": (fb.SmartIdx(batch=64, lr=0.05), smartidx.Packed, lambda reply: packages_bits(reply.change)),
    "fedcom": (fb.FedCOM(batch=64, lr=0.05), fedcom.Rounded, lambda reply: levels_bits(reply.change)),
    "fedcom-8": (fb.FedCOM(batch=64, lr=0.05, bits=8), fedcom.Rounded, lambda reply: levels_bits(reply.change)),
    "fedpm": (fb.FedPM(batch=64, epochs=1), fedpm.Drawn, lambda reply: drawn_bits(reply.mask)),
}
"""By name: the method, the class of its reply, and the bound of what a reply holds but for the statistics, in bits."""


@fb.payload
class Statistics:
    """Batch-norm statistics by themselves."""

    buffers: fb.Dense


def measure(name: str, task: fb.Task, rounds: int) -> None:
    method, reply_class, bound_of = METHODS[name]
    layout, model = task.problem.layout(0), task.problem.first_model()
    with tempfile.TemporaryDirectory() as folder:
        fb.run(method, task, rounds=rounds, out=Path(folder) / "run", keep_frames=True)
        for t in range(1, rounds + 1):
            up, down = (Path(folder) / "run" / "frames" / f"{t}-train-0-{way}.frame" for way in ("up", "down"))
            received = fb.unpack(fb.methods.fedavg.Model, down.read_bytes(), layout=layout)
            base = fb.wire.base_of(fb.wire.Parsed(down.read_bytes()).digest, received)
            reply = fb.unpack(reply_class, up.read_bytes(), layout=layout, base=base)
            statistics = len(fb.pack(Statistics(reply.buffers), layout=layout, base=base)) if reply.buffers.state else 0
            size, bound = up.stat().st_size, bound_of(reply) / 8 + statistics
            dense = 4 * sum(p.numel() for p in model.parameters())
            print(
                f"{name:10} round {t}: {size:>10,} bytes; bound {bound:>12,.0f}; {size / bound:.4f} of it; "
                f"32-bit {dense / size:6.2f}; without statistics ({statistics:,}) {dense / (size - statistics):6.2f}; "
                f"nominal {fb.wire.counted(reply).nominal_bytes:,}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help=", ".join(METHODS))
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="resnet18:width=32")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    dataset = load_dataset(options.dataset)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(dataset.train)))
    train, test = dataset.train.take(order[: options.samples]), dataset.test.take(torch.arange(10))
    data = FederatedData((ClientData(train, test),), test, dataset.classes)
    task = fb.Task.on(data, lambda: build_model(options.model, train.shape, len(dataset.classes)))
    for name in options.methods or METHODS:
        measure(name, task, options.rounds)
