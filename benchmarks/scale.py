"""What grows with the clients: seconds, memory, files and bytes on disk of runs of a tiny model.

    python benchmarks/scale.py [--clients 1000,10000,100000] [--cohorts 10,100,1000] [--rounds 6] [--methods fedavg]

Each run is a process of its own, one worker. A client has four samples of eight numbers, and the model 18 parameters,
so that what is left is what the engine does: a round's seconds are those of rounds 2 on, median, training included.
Written a round: all that the process writes, to files and to its worker, on average.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fewbytes as fb
from fewbytes.data.clients import ClientData, FederatedData
from fewbytes.data.split import Split
from fewbytes.methods import method_class

SAMPLES, FEATURES = 4, 8


class Clock(fb.Watcher):
    """When rounds ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def scored(self, row: dict) -> None:
        self.ends.append(time.perf_counter())


def written() -> int:
    """Bytes this process has written so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def measure(method: str, clients: int, cohort: int, rounds: int) -> None:
    """Print one row."""
    x = torch.randn(SAMPLES * clients, FEATURES, generator=torch.Generator().manual_seed(0))
    y, nothing = (x[:, 0] > 0).long(), np.arange(0)
    rows = np.arange(len(x)).reshape(clients, SAMPLES)
    held = tuple(ClientData(Split(x, y, mine), Split(x, y, nothing)) for mine in rows)
    data = FederatedData(held, Split(x, y, np.arange(min(1000, len(x)))), ("no", "yes"))
    task = fb.Task.on(data, lambda: nn.Linear(FEATURES, 2))
    made, clock, before = method_class(method)(epochs=1, lr=0.1, batch=SAMPLES, fraction=cohort / clients), Clock(), 0
    with tempfile.TemporaryDirectory() as folder:
        before, started = written(), time.perf_counter()
        result = fb.run(made, task, rounds=rounds, workers=1, out=Path(folder) / "run", watcher=clock)
        files = [path.stat().st_size for path in (Path(folder) / "run").rglob("*") if path.is_file()]
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    begins = clock.ends[0] - started - statistics.median(seconds)
    cells = [
        method, f"{clients:,}", f"{cohort:,}", f"{begins:.2f}", f"{statistics.median(seconds):.3f}",
        f"{result.summary['peak_memory_bytes'] / 1e6:.0f}", f"{len(files):,}", f"{sum(files) / 1e6:.2f}",
        f"{(written() - before) / rounds / 1e6:.3f}",
    ]  # fmt: skip
    print(f"| {' | '.join(cells)} |", flush=True)


def numbers(text: str) -> list[int]:
    """A list with commas."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=numbers, default=[1_000, 10_000, 100_000])
    parser.add_argument("--cohorts", type=numbers, default=[10, 100, 1_000])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # method, clients, cohort: in this process
    options = parser.parse_args()
    if options.one:
        measure(options.one[0], *map(int, options.one[1:]), options.rounds)
        return
    print("| method | clients | cohort | start s | round s | memory MB | files | disk MB | written MB a round |")
    print("| --- |" + " ---: |" * 8, flush=True)
    for method in options.methods.split(","):
        for clients in options.clients:
            for cohort in sorted({min(cohort, clients) for cohort in options.cohorts}):
                one = ["--one", method, str(clients), str(cohort), "--rounds", str(options.rounds)]
                if subprocess.run([sys.executable, __file__, *one], check=False).returncode:
                    print(f"| {method} | {clients:,} | {cohort:,} | failed |", flush=True)


if __name__ == "__main__":
    main()
