"""What FuseFL's frozen branches cost beside one network of full width, and what keeping their outputs saves.

    python benchmarks/speed/fused.py [--depth 18] [--width 32] [--clients 5] [--batch 64]

One thread, forward passes without gradients, best of several, all kinds in turn within every repeat. The arithmetic of
five branches of width 32 is 1.25 times that of one network of width 64; adaptors come on top, so they are told apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from fewbytes.base.state import state_of
from fewbytes.core.training import fit
from fewbytes.models.blocks import classifier_of, cut, shapes
from fewbytes.models.build import ModelBuilder
from fewbytes.models.fused import Gather, Prefix, fused_network, make_adaptor

IMAGE, CLASSES, BLOCKS = (3, 32, 32), 10, 4


def best(repeats: int, **calls: Callable[[], object]) -> dict[str, float]:
    """The shortest time of each call in seconds, after one that warms up."""
    for call in calls.values():
        call()
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.process_time()
            call()
            times[name] = min(times[name], time.process_time() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=18)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build = ModelBuilder(f"resnet{args.depth}:width={args.width},stem=3x3", IMAGE, CLASSES)
    wide = ModelBuilder(f"resnet{args.depth}:width={2 * args.width},stem=3x3", IMAGE, CLASSES)(0).eval()
    models = [build(i).eval().to(memory_format=torch.channels_last) for i in range(args.clients)]
    takes = [IMAGE, *shapes(cut(models[0], BLOCKS), IMAGE)]
    sent = []
    for k in range(BLOCKS):
        row = {}
        for i, model in enumerate(models):
            adaptor = make_adaptor("conv", (args.clients * takes[k][0], *takes[k][1:]), takes[k]) if k else None
            row[i] = (state_of(adaptor) if adaptor else {}, cut(model, BLOCKS)[k].state(), takes[k])
        sent.append(row)
    network = fused_network(sent, state_of(classifier_of(models[0])), build, BLOCKS, (), "conv", "sum").eval()
    prefix = Prefix(network.blocks, Gather("conv", takes[-1])).folded()
    branches = [nn.Sequential(*(block.branches[i].block for block in prefix.blocks)) for i in range(args.clients)]
    x = torch.rand(args.batch, *IMAGE).contiguous(memory_format=torch.channels_last)
    for model in (network, wide, prefix, *branches):
        model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        times = best(
            args.repeats, wide=lambda: wide(x), plain=lambda: [model(x) for model in models],
            branches=lambda: [branch(x) for branch in branches], fused=lambda: network.activations(x),
            prefix=lambda: through(prefix, x),
        )  # fmt: skip
    print(f"one network of width {2 * args.width}, a batch of {args.batch}: {1e3 * times['wide']:.0f} ms = 1")
    for name, words in (
        ("plain", f"{args.clients} networks of width {args.width} one after another"),
        ("branches", "the frozen branches of all blocks, as a stage runs them"),
        ("prefix", "the same with the adaptors between them"),
        ("fused", "the fused network as it is scored"),
    ):
        print(f"{times[name] / times['wide']:6.2f}  {words}")

    samples = torch.rand(8 * args.batch, *IMAGE).contiguous(memory_format=torch.channels_last)
    labels = torch.arange(len(samples)) % CLASSES
    print(f"\nstage {BLOCKS} of {BLOCKS}, four epochs of {len(samples)} samples; outputs of the prefix kept = 1")
    before = Prefix(network.blocks[: BLOCKS - 1], Gather("conv", takes[BLOCKS - 1])).folded()
    adaptor = make_adaptor("conv", (args.clients * takes[-2][0], *takes[-2][1:]), takes[-2])
    own = nn.Sequential(adaptor, cut(models[0], BLOCKS)[-1], classifier_of(models[0]))
    given = {"epochs": 4, "lr": 0.01, "batch": args.batch, "frozen": before}
    kept = best(
        1, kept=lambda: fit(own, samples, labels, **given),
        anew=lambda: fit(own, samples, labels, transform=lambda x, y: x, **given),
    )  # fmt: skip
    print(f"{kept['anew'] / kept['kept']:6.2f}  computed anew for every batch, as with augmentation")


def through(prefix: Prefix, x: torch.Tensor) -> None:
    """All blocks of a prefix."""
    features = [x]
    for block in prefix.blocks:
        features = block(features)


if __name__ == "__main__":
    main()
