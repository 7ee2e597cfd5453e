"""Seconds per round of the same FedAvg: our local engine, Flower's own on its simulation, ours on Flower's simulation.

    FEWBYTES_DATA=… python benchmarks/flower/speed.py [cnn4] [mlp] [--rounds 5] [--repeats 5]

Each is measured in a process of its own, in turn, round's end to round's end; start-up (Ray's too) and the first round
are not counted. Nothing is evaluated; our frames are coded, but for `plain`, as Flower's arrays are not, and our
checkpoints written. Two workers or Ray actors of one thread. Memory is the peak of all processes together, start-up
included, shared pages counted once; Ray's own processes belong to it. One part alone: `--part peer --workload cnn4`
(JSON).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from peer import WORK, PeakMemory, make_task, peer_rounds

import fewbytes as fb

PARTS = {
    "plain": "fewbytes, local engine, uncoded",
    "local": "fewbytes, local engine",
    "peer": "Flower's FedAvg, its simulation",
    "simulation": "fewbytes, Flower's simulation",
}


def method(workload: str) -> fb.Method:
    """Our FedAvg with a workload's settings."""
    *_, epochs, batch, lr = WORK[workload]
    return fb.FedAvg(epochs=epochs, batch=batch, lr=lr)


class Ends(fb.Watcher):
    """Notes when each round has ended, its checkpoint written."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def scored(self, row: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())


def our_rounds(workload: str, rounds: int, engine: str, coded: bool = True) -> list[float]:
    """Seconds of each of `rounds` rounds, end to end; one before, and one after in which the end is scored, are not
    counted."""
    ends = Ends()
    fb.run(
        method(workload), make_task(workload), rounds=rounds + 2, engine=engine, workers=2, evaluate_every=10**6,
        save_models=False, watcher=ends, coded=coded,
    )  # fmt: skip
    return [end - start for start, end in itertools.pairwise(ends.times[:-1])]


MEASURE = {
    "plain": lambda workload, rounds: our_rounds(workload, rounds, "local", coded=False),
    "local": lambda workload, rounds: our_rounds(workload, rounds, "local"),
    "peer": peer_rounds,
    "simulation": lambda workload, rounds: our_rounds(workload, rounds, "flower-simulation"),
}


def measure(part: str, workload: str, rounds: int) -> tuple[list[float], int]:
    """One part in a fresh process: seconds per round, peak memory in bytes. Raises RuntimeError if it fails."""
    command = [sys.executable, __file__, "--part", part, "--workload", workload, "--rounds", str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with PeakMemory(process.pid) as peak:
        out, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{errors[-2000:]}")
    return json.loads(out.splitlines()[-1])["seconds"], peak.bytes


def table(workload: str, times: dict[str, list[list[float]]], memory: dict[str, int]) -> str:
    """The measurements of a workload as text; ratios to ours in the same repeat: the least of all, and their median."""
    middles = {part: [statistics.median(values) for values in repeats] for part, repeats in times.items()}
    bases = [part for part in ("plain", "local") if part in times] or list(times)[:1]
    heads = "".join(f" {'to ' + part:>18}" for part in bases)
    lines = [f"{workload:34} {'s/round':>8} {'min-max':>15}{heads} {'peak MiB':>9}"]
    for part, repeats in times.items():
        values = [value for repeat in repeats for value in repeat]
        spread = f"{min(values):.2f}-{max(values):.2f}"
        ratios = ""
        for base in bases:
            found = [theirs / own for theirs, own in zip(middles[part], middles[base], strict=True)]
            ratios += f" {f'{min(found):.2f}x {statistics.median(found):.2f}x':>18}"
        size = memory[part] / 2**20
        lines.append(f"  {PARTS[part]:32} {statistics.median(values):8.2f} {spread:>15}{ratios} {size:9.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", default=list(WORK))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS))
    parser.add_argument("--workload", choices=list(WORK))
    options = parser.parse_args()
    if options.part:
        print(json.dumps({"seconds": MEASURE[options.part](options.workload, options.rounds)}))
        sys.exit()
    print(f"{os.cpu_count()} cores; {options.repeats} x {options.rounds} rounds of each")
    for workload in options.work:
        times: dict[str, list[list[float]]] = {part: [] for part in options.parts}
        memory = dict.fromkeys(options.parts, 0)
        for _ in range(options.repeats):
            for part in options.parts:
                values, peak = measure(part, workload, options.rounds)
                times[part].append(values)
                memory[part] = max(memory[part], peak)
        print(table(workload, times, memory), flush=True)
