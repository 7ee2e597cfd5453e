"""Seconds per round on a GPU, one client after another and with workers: 20 clients, ResNet-8, 5 epochs of 500 samples.

    python benchmarks/speed/gpu.py [--precisions float32,tf32,bf16] [--workers 1,6,12] [--rounds 4]

The floor: the same SGD steps in a bare PyTorch loop of one process, data on the GPU, one client after another; of its
time, what the GPU's kernels take (the profiler's sum over one round). Ours: FedAvg, then FedPURIN, coded, without
evaluation; and without recorded steps. Each row is a process of its own; the median of rounds, of which the first is
left out. Needs FEWBYTES_DATA for cifar10. Workers run side by side only under NVIDIA's multi-process service: start it
before (nvidia-cuda-mps-control -d).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import fewbytes as fb
from fewbytes.core import training
from fewbytes.core.devices import arithmetic, prepare_device
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

TERMS = fb.Local(epochs=5, lr=0.1, batch=100, momentum=0.9)


def task(precision: str) -> fb.Task:
    loaded = load_dataset("cifar10")
    data = federate(loaded, Partition("dirichlet", 20, alpha=0.1, samples=(500, 100)), seed=1)
    return fb.Task.on(
        data, lambda: build_model("resnet8", loaded.train.shape, 10), seed=1, precision=precision, device="cuda"
    )


def bare(task: fb.Task, rounds: int) -> dict[str, float]:
    """Median seconds of a round of the bare loop, and those that kernels take."""
    precision = task.problem.precision
    prepare_device("cuda", precision)
    model = task.problem.model(0).cuda().to(memory_format=torch.channels_last)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    data = [task.data.clients[i].train.load() for i in task.problem.clients]
    data = [(x.cuda().contiguous(memory_format=torch.channels_last), y.cuda()) for x, y in data]

    def one_round() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for x, y in data:
            model.load_state_dict(first)
            optimiser = torch.optim.SGD(model.parameters(), lr=TERMS.lr, momentum=TERMS.momentum)
            for _ in range(TERMS.epochs):
                for chosen in torch.randperm(len(y)).cuda().split(TERMS.batch):
                    optimiser.zero_grad()
                    with arithmetic(precision, "cuda"):
                        loss = F.cross_entropy(model(x[chosen]), y[chosen])
                    loss.backward()
                    optimiser.step()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    one_round()
    seconds = [one_round() for _ in range(rounds)]
    data = data[:4]  # enough for the profiler, whose own time is not told
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        one_round()
    kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 * 5
    return {"seconds": statistics.median(seconds), "kernel_seconds": kernels}


def ours(task: fb.Task, method: str, workers: int, recorded: bool, rounds: int) -> dict[str, float]:
    """Median seconds of a round."""
    if not recorded:
        training.recording = lambda kept, model, step, *_: step
    made = {"fedavg": fb.FedAvg, "fedpurin": fb.FedPURIN}[method](local=TERMS)
    result = fb.run(made, task, rounds=rounds + 1, workers=workers, evaluate_every=10**6, save_models=False)
    return {"seconds": statistics.median(row["seconds"] - row["seconds_scoring"] for row in result.rounds[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default="float32,tf32,bf16")
    parser.add_argument("--workers", default="1,6,12")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        row = json.loads(options.row)
        precision, rounds = row.pop("precision"), options.rounds
        made = task(precision)
        print(json.dumps(ours(made, rounds=rounds, **row) if row else bare(made, rounds)))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for precision in options.precisions.split(","):
        rows = [{}]
        rows += [{"method": "fedavg", "workers": 1, "recorded": False}]
        for method in ("fedavg", "fedpurin"):
            rows += [{"method": method, "workers": int(w), "recorded": True} for w in options.workers.split(",")]
        for row in rows:
            asked = json.dumps({"precision": precision, **row})
            command = [sys.executable, __file__, "--rounds", str(options.rounds), "--row", asked]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(asked, done.stdout.strip() or done.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
