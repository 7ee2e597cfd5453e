"""Seeds of zeroth-order steps for adapters, as in FedKSeed and DeComFL: perplexity with messages under 1 kB.

    cd examples/05_adapters && python prepare.py
    python ../../benchmarks/language/zeroth_order.py [WORDS]     # rows whose names contain the words
    python ../../benchmarks/language/zeroth_order.py --check     # derivatives by differences, against exact ones

Both ends draw directions z_k from seeds. A client sends scalars: derivatives of its loss along them, or how far it went
along each. A zeroth-order client measures a derivative by two forward passes, (f(w + eps z) - f(w - eps z)) / (2 eps).
Here a derivative is the product of z and the gradient: the limit of small eps, and the best that differences can be. So
a row takes minutes instead of hours; `--check` measures the error of differences. The task is that of `variants.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewbytes.codec import encode
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

sys.path.append(str(Path(__file__).parents[2] / "examples" / "05_adapters"))
from variants import TASK

BATCH = 16
BETA, BETA2 = 0.9, 0.95  # of Adam and of momentum


@dataclass(frozen=True)
class Row:
    """`seeds`: directions a round. `fresh`: other seeds each round (DeComFL), else the same (FedKSeed). `server`: its
    optimiser; "": it takes the mean of what clients did in `steps` local steps of Adam, each along `along` seeds."""

    lora: str
    seeds: int
    lr: float
    server: str = ""
    fresh: bool = False
    steps: int = 1
    along: int = 0
    rounds: int = 20

    @property
    def passes(self) -> int:
        """Forward passes of a batch, of a client in a round, by differences."""
        return 2 * self.steps * (self.along or self.seeds)


ROWS = {
    "fresh seeds, momentum, LoRA-XS 4": Row("rank=4,core=xs", 450, 0.4, "momentum", fresh=True),
    "fresh seeds, Adam, LoRA-XS 4": Row("rank=4,core=xs", 450, 0.05, "adam", fresh=True),
    "fresh seeds, Adam, LoRA-XS 8": Row("rank=8,core=xs", 450, 0.02, "adam", fresh=True),
    "fresh seeds, Adam, LoRA-XS 32": Row("rank=32,core=xs", 450, 0.005, "adam", fresh=True),
    "fresh seeds, Adam, LoRA 8": Row("rank=8", 450, 0.002, "adam", fresh=True),
    "same seeds, Adam, LoRA-XS 32": Row("rank=32,core=xs", 450, 0.0015, "adam"),
    "same seeds, 9 local steps along 50, LoRA-XS 32": Row("rank=32,core=xs", 450, 0.001, steps=9, along=50, rounds=8),
    "same seeds, 9 local steps along all, LoRA-XS 32": Row("rank=32,core=xs", 450, 0.001, steps=9, rounds=8),
}


class Adam:
    """Adam's step for a gradient, or that of Nesterov's momentum."""

    def __init__(self, size: int, kind: str = "adam") -> None:
        self.m, self.v, self.t, self.kind = torch.zeros(size), torch.zeros(size), 0, kind

    def step(self, gradient: Tensor, lr: float) -> Tensor:
        self.t += 1
        if self.kind == "momentum":
            self.m = BETA * self.m + gradient
            return -lr * (gradient + BETA * self.m)
        self.m = BETA * self.m + (1 - BETA) * gradient
        self.v = BETA2 * self.v + (1 - BETA2) * gradient**2
        return -lr * (self.m / (1 - BETA**self.t)) / ((self.v / (1 - BETA2**self.t)).sqrt() + 1e-8)


class Adapted:
    """The example's task, with the trained values as one vector."""

    def __init__(self, lora: str) -> None:
        task = find(make_experiment(TASK | {"lora": lora})).task
        of = task.problem.objective.samples
        self.model = task.problem.first_model().eval()
        self.clients = [of(client.train, "cpu") for client in task.data.clients]
        tests = [of(client.test, "cpu") for client in task.data.clients]
        self.test = [(x[i : i + 32], y[i : i + 32]) for x, y in tests for i in range(0, len(y), 32)]
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.first = torch.cat([p.detach().flatten() for p in self.parameters])

    def loss(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch's tokens with trained values w."""
        with torch.no_grad():
            for p, values in zip(self.parameters, w.split([p.numel() for p in self.parameters]), strict=True):
                p.copy_(values.view_as(p))
        return cross_entropy(self.model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    def gradient(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(self.loss(w, x, y), self.parameters)])

    @torch.no_grad()
    def perplexity(self, w: Tensor) -> float:
        """Of all clients' test texts."""
        tokens = [int((y != -100).sum()) for _, y in self.test]
        losses = [float(self.loss(w, x, y)) for x, y in self.test]
        return math.exp(np.average(losses, weights=tokens))

    def batch(self, client: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        x, y = self.clients[client]
        rows = torch.from_numpy(rng.permutation(len(y))[:BATCH])
        return x[rows], y[rows]


def directions(seed: int, n: int, size: int) -> Tensor:
    """The z_k of n seeds, normal (n, size)."""
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


def sent(scalars: Tensor) -> tuple[Tensor, int]:
    """Scalars as they arrive, in two bytes each, and the bytes of their message."""
    half = scalars.half()
    return half.float(), len(encode({"scalars": half}))


def local_steps(
    task: Adapted, row: Row, lr: float, w: Tensor, z: Tensor, batches: Iterator[tuple[Tensor, Tensor]]
) -> Tensor:
    """How far a client goes along each of its seeds."""
    gone, adam, n = torch.zeros(len(z)), Adam(len(z)), row.along or len(z)
    for x, y in batches:
        derivatives = z @ task.gradient(w + gone @ z, x, y)
        if n < len(z):
            keep = torch.zeros(len(z))
            keep[torch.randperm(len(z))[:n]] = len(z) / n
            derivatives = derivatives * keep
        gone = gone + adam.step(derivatives, lr)
    return gone


def perplexities(task: Adapted, row: Row, marks: tuple[int, ...]) -> tuple[dict[int, float], int]:
    """By round, and the largest message."""
    torch.manual_seed(0)
    w, size, most = task.first, len(task.first), 0
    found: dict[int, float] = {}
    z = directions(1, row.seeds, size)
    optimiser = Adam(size if row.fresh else row.seeds, row.server or "adam")
    rngs = [np.random.default_rng([0, client]) for client in range(len(task.clients))]
    weights = torch.tensor([len(y) for _, y in task.clients]) / sum(len(y) for _, y in task.clients)
    for t in range(1, row.rounds + 1):
        z = directions(t, row.seeds, size) if row.fresh else z
        lr, mean = row.lr * (1 - (t - 1) / row.rounds), torch.zeros(row.seeds)
        for client, rng in enumerate(rngs):
            batches = (task.batch(client, rng) for _ in range(row.steps))
            here = z @ task.gradient(w, *next(batches)) if row.server else local_steps(task, row, lr, w, z, batches)
            arrived, up = sent(here)
            mean, most = mean + weights[client] * arrived, max(most, up)
        mean, down = sent(mean)
        most = max(most, down)
        if not row.server:
            w = w + mean @ z
        elif row.fresh:
            w = w + optimiser.step(mean @ z / (row.seeds + size), lr)
        else:
            w = w + optimiser.step(mean, lr) @ z
        if t in marks:
            found[t] = task.perplexity(w)
    return found, most


def check(lora: str) -> None:
    """Print the relative error of differences along eight directions, by eps."""
    task = Adapted(lora)
    x, y = task.batch(0, np.random.default_rng(0))
    z = directions(1, 8, len(task.first))
    exact = z @ task.gradient(task.first, x, y)
    for eps in (0.1, 0.03, 0.01, 0.003, 0.001, 0.0001):
        with torch.no_grad():
            ends = [[float(task.loss(task.first + sign * eps * each, x, y)) for sign in (1, -1)] for each in z]
        found = torch.tensor([(up - down) / (2 * eps) for up, down in ends])
        print(f"{lora}, eps {eps}: {float((found - exact).norm() / exact.norm()):.2%}", flush=True)


def main() -> None:
    """Print the table, a row a setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="?", default="", help="in the names of rows to run")
    parser.add_argument("--check", action="store_true", help="measure the error of differences instead")
    given = parser.parse_args()
    if given.check:
        for lora in ("rank=4,core=xs", "rank=32,core=xs", "rank=8"):
            check(lora)
        return
    marks = (4, 8, 20)
    heads = ["", "values", "lr", "bytes a message", "forward passes", *(f"{t} rounds" for t in marks)]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    for name, row in ROWS.items():
        if given.words in name:
            task = Adapted(row.lora)
            found, size = perplexities(task, row, marks)
            cells = [name, f"{len(task.first):,}", row.lr, size, f"{row.passes:,}"]
            cells += [f"{found[t]:.1f}" if t in found else "" for t in marks]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
