"""What grows with the clients: seconds, memory, files and bytes on disk of runs of a tiny model.

    python benchmarks/scale.py [--clients 1000,10000,100000] [--cohorts 10,100,1000,all] [--rounds 6] [--methods fedavg]
        [--paper 1000000]
    python benchmarks/scale.py --draw scale.png TABLE…

Each run is a process of its own, one worker. A client has four samples of eight numbers, and the model 18 parameters,
so that what is left is what the engine does: a round's seconds are those of rounds 2 on, median, training included.
Written a round: all that the process writes, to files and to its worker, on average. `--paper`: a row that is not run,
on the line through the two rows of most clients of the same cohort, or as the last where that falls. `--draw`: a
picture of tables that were printed before, by matplotlib, which the extra `detection` brings along.
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
from fewbytes.data.clients import FederatedData
from fewbytes.data.split import ClientData, Split
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
    """A list with commas; `all`: more than there are."""
    return [sys.maxsize if part == "all" else int(part) for part in text.split(",")]


def cells(row: str) -> list[float]:
    """The numbers of a row from its clients on."""
    return [float(cell.replace(",", "")) for cell in row.strip("| \n").split(" | ")[1:]]


def on_paper(method: str, clients: int, rows: list[list[float]]) -> str:
    """What rows of the same cohort, of fewer clients, lead to."""
    (some, *low), (more, *high) = rows[-2:]
    begins, cohort = (clients - more) / (more - some), low[0]
    found = [max(b, b + begins * (b - a)) for a, b in zip(low[1:], high[1:], strict=True)]
    told = [f"{x:,.{digits}f}" for x, digits in zip(found, (2, 3, 0, 0, 2, 3), strict=True)]
    return f"| {method} | {clients:,} (on paper) | {cohort:,.0f} | {' | '.join(told)} |"


def draw(path: Path, tables: list[Path]) -> None:
    """Seconds, memory and bytes written over clients, a line a cohort."""
    import matplotlib.pyplot as plt

    lines = [line for table in tables for line in table.read_text().splitlines()]
    rows = sorted(cells(line) for line in lines if line.startswith("| fed") and "paper" not in line)
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    shown = ((3, "seconds a round"), (4, "memory, MB"), (7, "MB written a round"))
    for ax, (column, label) in zip(axes, shown, strict=True):
        for cohort in (10, 100, 1000, None):
            here = [row for row in rows if row[1] == (cohort or row[0])]
            ax.plot(
                [r[0] for r in here], [r[column] for r in here], "o-", ms=4, label=f"{cohort:,}" if cohort else "all"
            )
        ax.set_xscale("log")
        ax.set_yscale("linear" if column == 4 else "log")
        ax.set_ylim(bottom=0 if column == 4 else None)
        ax.set_xlabel("clients")
        ax.set_title(label)
        ax.grid(alpha=0.3)
    axes[0].legend(title="a cohort of")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=numbers, default=[1_000, 10_000, 100_000])
    parser.add_argument("--cohorts", type=numbers, default=[10, 100, 1_000, sys.maxsize])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--paper", type=int)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # method, clients, cohort: in this process
    parser.add_argument("--draw", nargs="+", type=Path)
    options = parser.parse_args()
    if options.draw:
        draw(options.draw[0], options.draw[1:])
        return
    if options.one:
        measure(options.one[0], *map(int, options.one[1:]), options.rounds)
        return
    print("| method | clients | cohort | start s | round s | memory MB | files | disk MB | written MB a round |")
    print("| --- |" + " ---: |" * 8, flush=True)
    for method in options.methods.split(","):
        rows: dict[int, list[list[float]]] = {}
        for clients in options.clients:
            for cohort in sorted({min(cohort, clients) for cohort in options.cohorts}):
                one = ["--one", method, str(clients), str(cohort), "--rounds", str(options.rounds)]
                done = subprocess.run([sys.executable, __file__, *one], check=False, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    print(f"| {method} | {clients:,} | {cohort:,} | failed |", flush=True)
                    continue
                print(done.stdout, end="", flush=True)
                rows.setdefault(cohort, []).append(cells(done.stdout))
        for of_cohort in rows.values() if options.paper else ():
            if len(of_cohort) > 1:
                print(on_paper(method, options.paper, of_cohort), flush=True)


if __name__ == "__main__":
    main()
