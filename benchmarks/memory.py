"""Peak memory of a run with a thousand clients of ResNet-8, all processes together (goal: under 2 GiB).

    FEWBYTES_DATA=… python benchmarks/memory.py [--clients 1000] [separate fedavg fedpurin]

Few samples and one epoch: memory does not depend on them. `separate` keeps a whole model for every client; FedPURIN's
server needs its cohort's uploads at once, so it takes a tenth of the clients a round.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

LOCAL = {"epochs": 1, "lr": 0.01, "batch": 20}
METHODS = {
    "separate": fb.Separate(**LOCAL),
    "fedavg": fb.FedAvg(**LOCAL, buffers="local"),
    "fedpurin": fb.FedPURIN(**LOCAL, fraction=0.1),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    parser.add_argument("--clients", type=int, default=1000)
    options = parser.parse_args()
    cifar = load_dataset("cifar10")
    data = federate(cifar, Partition("dirichlet", options.clients, alpha=0.1, samples=(20, 5)), seed=1)
    task = fb.Task.on(data, lambda: build_model("resnet8", cifar.train.shape, 10), seed=1)
    for name in options.methods:
        folder = Path(tempfile.mkdtemp())
        result = fb.run(METHODS[name], task, rounds=2, out=folder / "run", save_models=False, evaluate_every=2)
        disk = sum(f.stat().st_size for f in (folder / "run").rglob("*") if f.is_file())
        peak = result.summary["peak_memory_bytes"]
        print(f"{name}: {options.clients} clients, peak {peak / 2**30:.2f} GiB, run folder {disk / 1e9:.2f} GB, "
              f"{result.summary['seconds'] / 2:.1f} s a round", flush=True)  # fmt: skip
        shutil.rmtree(folder)
