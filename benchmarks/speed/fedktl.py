"""What FedKTL's server adds to a round: the transformer's training and the images, beside the clients' local training.

    python benchmarks/speed/fedktl.py [--samples 10000]

CIFAR-10's sizes: 20 clients of random pixels, ten classes each, one local epoch in batches of 10, two small models
in turn (a smaller model makes the server's part larger). Prints the server's share of a round's time; the goal is 0.10.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median

import torch

import fewbytes as fb
from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.models.build import ModelBuilder

spent: list[float] = []


@dataclass(frozen=True)
class Timed(fb.FedKTL):
    """FedKTL that tells how long its server takes."""

    def generate(self, *args: object) -> None:
        started = time.perf_counter()
        super().generate(*args)
        spent.append(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--model", default="cnn4@64+resnet8:width=16@64")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    each = args.samples // args.clients
    x = torch.randint(0, 256, (args.clients, each, 3, 32, 32), dtype=torch.uint8)
    y = torch.arange(each) % 10
    empty = Split(x[0], y).take([])
    data = FederatedData(tuple(ClientData(Split(images, y), empty) for images in x), Split(x[0], y), ("",) * 10)
    task = fb.Task.on(data, ModelBuilder(args.model, (3, 32, 32), 10))
    result = fb.run(Timed(), task, rounds=args.rounds, save_models=False, evaluate_every=args.rounds + 1)
    rounds = [row["seconds"] - row["seconds_scoring"] for row in result.rounds if row["phase"] == "round"]
    part = median(server / whole for server, whole in zip(spent[1:], rounds[1:], strict=True))
    print(f"{args.samples} images, {args.clients} clients, {args.model}: a round takes {median(rounds[1:]):.2f} s")
    print(f"the server's part: {median(spent[1:]):.3f} s, {part:.3f} of the round (goal 0.10)")


if __name__ == "__main__":
    main()
