"""What a round of small models cannot do without, against the raw floor of engine.py: 100 MLPs on MNIST.

    python benchmarks/speed/minimum.py [--repeats 5]

Beside the floor's steps: each client's state out of the model into shared memory and into the mean; then also a digest
of it at both ends, which tells that it came whole; then also what a reply must pass (finite, its norm). Nothing is
packed, counted, kept or scored. Ratios to the floor, measured in turn: the least of the repeats, and their median.
Needs FEWBYTES_DATA.
"""

from __future__ import annotations

import argparse
import statistics
import time
from multiprocessing import get_context
from multiprocessing.connection import wait

import torch
import torch.nn.functional as F
from blake3 import blake3

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

FLOOR, MEAN, DIGESTS, CHECKS = range(4)
WORDS = {MEAN: "states out, and their mean", DIGESTS: "and digests", CHECKS: "and checks"}


def digest(row: torch.Tensor) -> bytes:
    return blake3(memoryview(row.numpy()).cast("B")).digest()


def worker(task: fb.Task, clients: list[int], what: int, down: torch.Tensor, up: torch.Tensor, pipe) -> None:
    torch.set_num_threads(1)
    model = task.problem.model(0)
    parameters = list(model.parameters())
    shapes = [p.shape for p in parameters]
    held = [(i, *task.data.clients[i].train.load()) for i in clients]
    while pipe.recv():
        for i, x, y in held:
            parts = down.split([shape.numel() for shape in shapes])
            with torch.no_grad():
                torch._foreach_copy_(parameters, [p.view(s) for p, s in zip(parts, shapes, strict=True)])
            optimiser = torch.optim.SGD(parameters, lr=0.005)
            for chosen in torch.randperm(len(y)).split(10):
                optimiser.zero_grad()
                F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimiser.step()
            if what:
                torch.cat([p.detach().view(-1) for p in parameters], out=up[i])
                if what >= DIGESTS:
                    digest(up[i])
                pipe.send(i)
        pipe.send(-1)


class Round:
    """Two processes of one thread, and a parent that reads what they leave."""

    def __init__(self, task: fb.Task, what: int) -> None:
        first = torch.cat([value.view(-1) for value in task.problem.first_state(0).values()])
        self.what, self.down = what, first.share_memory_()
        self.up = torch.zeros(len(task.problem.clients), len(first)).share_memory_()
        context, self.pipes = get_context("fork"), []
        for k in range(2):
            here, there = context.Pipe()
            arguments = task, task.problem.clients[k::2], what, self.down, self.up, there
            context.Process(target=worker, args=arguments, daemon=True).start()
            self.pipes.append(here)

    def seconds(self) -> float:
        started, mean, working = time.perf_counter(), torch.zeros_like(self.down), len(self.pipes)
        for pipe in self.pipes:
            pipe.send(True)
        while working:
            for pipe in wait(self.pipes):
                client = pipe.recv()
                working -= client < 0
                if client >= 0:
                    self.read(self.up[client], mean)
        if self.what:
            self.down.copy_(mean)
        return time.perf_counter() - started

    def read(self, row: torch.Tensor, mean: torch.Tensor) -> None:
        if self.what >= DIGESTS:
            digest(row)
        if self.what >= CHECKS:
            assert bool(row.isfinite().all())
            assert row.norm() < 1e6
        mean.add_(row, alpha=1 / len(self.up))

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    loaded = load_dataset("mnist")
    data = federate(loaded, Partition("dirichlet", 100, alpha=0.1, samples=(100, 20)), seed=1)
    task = fb.Task.on(data, lambda: build_model("mlp", loaded.train.shape, 10), seed=1)
    torch.set_num_threads(1)
    found: dict[int, list[float]] = {what: [] for what in (FLOOR, *WORDS)}
    for _ in range(repeats):
        for what, times in found.items():
            rounds = Round(task, what)
            rounds.seconds()
            times.append(statistics.median(rounds.seconds() for _ in range(5)))
            rounds.stop()
    print(f"floor {statistics.median(found[FLOOR]):.3f} s a round")
    for what, words in WORDS.items():
        ratios = [one / floor for one, floor in zip(found[what], found[FLOOR], strict=True)]
        print(f"{words}: {min(ratios):.3f}, {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
