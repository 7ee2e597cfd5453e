"""Sizes on the wire of real updates, beside their entropy bounds: how far lossless coding goes, and when a base helps.

    FEWBYTES_DATA=… python benchmarks/wire_sizes.py [--model resnet8] [--steps 16]

A model trained for 170 steps on CIFAR-10 is what the server sends; a client that holds two classes trains it for a few
steps more (learning rate 0.02, momentum 0.9, batch 50) and answers: the whole model, or FedPURIN's critical values for
tau 0.5, 0.3 and 0.05. Sizes are parts of what papers count (4 bytes a value, 1 bit a mask entry). A base helps
as far as training moves the values little; in FedPURIN's own runs (learning rate 0.1, a whole round) it moves them by a
quarter and the bound itself is above 0.8 (`benchmarks/paper/fedpurin_table3.py`).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from paper.fedpurin_table3 import base_bits, entropy, flat, plain_bits

import fewbytes as fb
from fewbytes.base.state import gradients_of
from fewbytes.core.training import fit
from fewbytes.data import load_dataset
from fewbytes.methods.fedpurin import taking_part
from fewbytes.methods.parts.critical import critical, scores
from fewbytes.models import build_model
from fewbytes.wire import Layout, Parsed, base_of, counted


@fb.payload
class Whole:
    theta: fb.Dense


@fb.payload
class Sparse:
    theta: fb.Masked


def main(name: str, steps: int) -> None:
    torch.manual_seed(0)
    cifar = load_dataset("cifar10")
    model = build_model(name, cifar.train.shape, 10).to(memory_format=torch.channels_last)
    x, y = cifar.train.take(torch.randperm(len(cifar.train))[: 170 * 50]).load()
    fit(model, x, y, fb.Local(epochs=1, lr=0.02, momentum=0.9, batch=50))
    before = fb.state_of(model)
    two = cifar.train.take(torch.nonzero(cifar.train.labels < 2).flatten()[: steps * 50])
    fit(model, *two.load(), fb.Local(epochs=1, lr=0.02, momentum=0.9, batch=50))
    after = fb.state_of(model)
    layout = Layout.of(after)
    message = Whole(fb.Dense(before))
    base = base_of(fb.pack(message, layout=layout).digest, message)

    def show(what: str, payload: Whole | Sparse, values: np.ndarray, reference: np.ndarray, mask: np.ndarray) -> None:
        count = counted(payload).nominal_bytes
        mask_bits = entropy(mask) * mask.size
        for how, options, bits in (
            ("no base", {}, plain_bits(values)), ("base", {"base": base}, base_bits(values, reference)),
        ):  # fmt: skip
            frame = bytes(fb.pack(payload, layout=layout, **options))
            bound = (bits * values.size + mask_bits) / 8
            stored = (
                f"; mask {8 * Parsed(frame).header.sections[0][0] / mask_bits:.3f} of its entropy" if mask_bits else ""
            )
            sizes = f"{len(frame):>10,} bytes = {len(frame) / count:.3f}; bound {bound / count:.3f}"
            print(f"{what:16} {how:8} {sizes}{stored}")

    learnt = {k: v for k, v in after.items() if v.is_floating_point()}
    values, reference = flat(learnt), flat({k: before[k] for k in learnt})
    show("dense", Whole(fb.Dense(after)), values, reference, np.zeros(0))
    gradient = gradients_of(model)
    for tau in (0.5, 0.3, 0.05):
        mask = {k: critical(scores(after[k], gradient[k]), tau) for k in taking_part(model)}
        chosen = flat(mask).astype(bool)
        kept, told = flat({k: after[k] for k in mask})[chosen], flat({k: before[k] for k in mask})[chosen]
        show(f"critical {tau}", Sparse(fb.Masked.of(after, mask)), kept, told, chosen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    main(options.model, options.steps)
