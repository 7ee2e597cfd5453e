"""Seconds per round of the local engine against the raw floor: the same SGD steps in a bare PyTorch loop.

    python benchmarks/speed/engine.py [resnet8] [cnn4] [mlp] [--rounds 3] [--repeats 5]

The floor: two processes of one thread, data in memory as tensors, channels-last images, torch.optim.SGD; no
aggregation, no evaluation, no bytes. The engine runs FedAvg with two workers and no evaluation, in a run folder in the
current folder, with checkpoints that survive a loss of power. Both are measured in turn; ratios are of medians, paired:
the least of the repeats, and their median. Needs FEWBYTES_DATA for cifar10 and mnist.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

WORK = {  # name: data set, model, clients, samples, epochs, batch, lr, momentum, goal without and with coding
    "resnet8": ("cifar10", "resnet8", 20, 500, 5, 100, 0.1, 0.9, 1.05, 1.05),
    "cnn4": ("cifar10", "cnn4", 100, 100, 1, 10, 0.005, 0.0, 1.08, 1.2),
    "mlp": ("mnist", "mlp", 100, 100, 1, 10, 0.005, 0.0, 1.15, 1.3),
}


def raw_worker(
    task: fb.Task, clients: list[int], epochs: int, batch: int, lr: float, momentum: float, bf16: bool, pipe
) -> None:
    torch.set_num_threads(1)
    model = task.problem.model(0)
    image = any(isinstance(m, torch.nn.Conv2d) for m in model.modules())
    model = model.to(memory_format=torch.channels_last) if image else model
    first = {k: v.clone() for k, v in model.state_dict().items()}
    data = [task.data.clients[i].train.load() for i in clients]
    if image:
        data = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in data]
    while pipe.recv():
        for x, y in data:
            model.load_state_dict(first)
            optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
            for _ in range(epochs):
                for chosen in torch.randperm(len(y)).split(batch):
                    optimiser.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                        loss = F.cross_entropy(model(x[chosen]), y[chosen])
                    loss.backward()
                    optimiser.step()
        pipe.send(True)


class Raw:
    def __init__(self, task: fb.Task, *settings) -> None:
        context, self.pipes = get_context("fork"), []
        for k in range(2):
            here, there = context.Pipe()
            clients = task.problem.clients[k::2]
            context.Process(target=raw_worker, args=(task, clients, *settings, there), daemon=True).start()
            self.pipes.append(here)

    def round(self) -> float:
        started = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()
        return time.perf_counter() - started

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)


class Clock(fb.Watcher):
    """When each round was over, its checkpoint included."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def scored(self, row: dict) -> None:
        self.times.append(time.perf_counter())


def engine_round(task: fb.Task, method: fb.Method, rounds: int, coded: bool) -> float:
    """Median seconds from one round's end to the next's, in a run folder that survives a loss of power; the first
    round, which warms the workers up, is left out."""
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        how = {"coded": coded, "evaluate_every": 10**6, "save_models": False, "watcher": clock}
        fb.run(method, task, rounds=rounds + 2, workers=2, out=Path(folder) / "run", **how)
    spans = [after - before for before, after in itertools.pairwise(clock.times[:-1])]  # the last round is scored
    return statistics.median(spans)


def measure(name: str, rounds: int, repeats: int, precision: str) -> dict[str, object]:
    dataset, model, clients, samples, epochs, batch, lr, momentum, goal_plain, goal_coded = WORK[name]
    loaded = load_dataset(dataset)
    data = federate(loaded, Partition("dirichlet", clients, alpha=0.1, samples=(samples, samples // 5)), seed=1)
    task = fb.Task.on(
        data, lambda: build_model(model, loaded.train.shape, len(loaded.classes)), seed=1, precision=precision
    )
    method = fb.FedAvg(epochs=epochs, lr=lr, batch=batch, momentum=momentum)
    floor, plain, coded = [], [], []
    for _ in range(repeats):
        for coding, times in ((False, plain), (True, coded)):
            raw = Raw(task, epochs, batch, lr, momentum, precision == "bf16")
            raw.round()
            floor.append(statistics.median(raw.round() for _ in range(rounds)))
            raw.stop()
            times.append(engine_round(task, method, rounds, coding) / floor[-1])
    row = {
        "work": name, "precision": precision, "floor_s": statistics.median(floor),
        "uncoded": {"least": min(plain), "median": statistics.median(plain), "goal": goal_plain},
        "coded": {"least": min(coded), "median": statistics.median(coded), "goal": goal_coded},
        "all_uncoded": plain, "all_coded": coded,
    }  # fmt: skip
    print(json.dumps(rounded(row)), flush=True)
    return row


def rounded(value):
    """With four digits after the point."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="*", default=list(WORK))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, torch {torch.__version__}")
    for name in options.work:
        measure(name, options.rounds, options.repeats, options.precision)
