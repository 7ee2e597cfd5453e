"""What FedPURIN's server takes of a cohort: seconds and peak memory, from uploads that come to messages that wait.

    python benchmarks/speed/fedpurin.py [--clients 100,200,1000] [--model resnet8] [--round 50]

Each cohort is a process of its own, of one thread; uploads are random, half of the values critical. Nothing is trained.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from fewbytes.core.network import Handler
from fewbytes.engines.waiting import WaitingMessages
from fewbytes.methods.fedpurin import Critical, FedPURIN
from fewbytes.models import build_model
from fewbytes.wire import Masked


def uploads(clients: int, model: str) -> Iterator[tuple[int, Critical]]:
    """One upload after another."""
    shapes = {name: p.shape for name, p in build_model(model, (3, 32, 32), 10).named_parameters()}
    for i in range(clients):
        generator = torch.Generator().manual_seed(i)
        state = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
        yield i, Critical(Masked.of(state, {name: value > 0.5 for name, value in state.items()}), 1)


def measure(clients: int, model: str, t: int) -> None:
    """Print one row."""
    torch.set_num_threads(1)
    method = FedPURIN()
    handler = Handler.of(method.receive)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        waiting = WaitingMessages(Path(folder) / "waiting", lambda name: handler)
        started = time.perf_counter()
        combined, _ = method.aggregate(uploads(clients, model), t)
        aggregated = time.perf_counter()
        waiting.leave(handler, combined, None, "")
        left = time.perf_counter()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"| {clients:,} | {aggregated - started:.1f} | {left - aggregated:.1f} | {before * 1024 / 1e6:,.0f} | "
        f"{most * 1024 / 1e6:,.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="100,200,1000")
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--round", type=int, default=50)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.model, options.round)
        return
    print(
        "| clients | aggregating s | leaving messages s | memory before MB | memory MB |\n|" + " ---: |" * 5, flush=True
    )
    for clients in map(int, options.clients.split(",")):
        one = ["--one", str(clients), "--model", options.model, "--round", str(options.round)]
        subprocess.run([sys.executable, __file__, *one], check=True)


if __name__ == "__main__":
    main()
