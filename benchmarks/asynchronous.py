"""FedBuff against FedAvg at equal time, where clients' speeds differ tenfold: accuracy over simulated seconds.

    python benchmarks/asynchronous.py [--spread 10] [--seeds 0 1 2] [--seconds 300]

Digits on ten clients, uneven labels (Dirichlet, alpha 0.3), one local epoch an exchange. An exchange takes the fastest
client one second and the slowest `--spread`, the others between (`--speeds 10x`), by the run's simulated clock: a round
of FedAvg takes as long as the slowest of its cohort. Means over seeds, each of which deals data and speeds anew:
accuracy of the server's model at a time, and when, and after how many megabytes sent, it first reached a share.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import suppress
from dataclasses import replace

from rich.console import Console

import fewbytes as fb
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.report.table import figures_table
from fewbytes.running.run import Run

METHODS = {
    "fedavg": ("fedavg", {}),
    "fedavg, half of the clients": ("fedavg", {"fraction": 0.5}),
    "fedbuff, K = 1": ("fedbuff", {"buffer": 1}),
    "fedbuff, K = 3": ("fedbuff", {"buffer": 3}),
    "fedbuff, K = 5": ("fedbuff", {"buffer": 5}),
}
LOCAL = {"epochs": 1, "lr": 0.1, "batch": 20}
PARTS = (0.8, 0.9)


class Enough(fb.Watcher):
    """Ends a run when its clock has."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.points: list[tuple[float, float, float]] = []  # seconds, megabytes sent, accuracy
        self.sent = 0

    def scored(self, row: dict) -> None:
        self.sent += row["uplink_bytes"]
        if row["scores"]:
            self.points.append((row["simulated_seconds"], self.sent / 1e6, row["scores"]["accuracy"]["global"]))
        if row["simulated_seconds"] >= self.seconds:
            raise KeyboardInterrupt

    def note(self, text: str) -> None: ...


def curve(method: str, parameters: dict, spread: float, seconds: float, seed: int) -> list[tuple[float, float, float]]:
    """(simulated seconds, megabytes sent, accuracy) after each round."""
    experiment = make_experiment(
        {
            "method": method, "dataset": "digits", "clients": 10, "alpha": 0.3, "rounds": 100_000, "seed": seed,
            "speeds": f"{spread:g}x", "parameters": LOCAL | parameters,
        }
    )  # fmt: skip
    watcher, task = Enough(seconds), find(experiment).task
    how = replace(experiment.run, workers=1, save_models=False, watcher=watcher)
    with suppress(KeyboardInterrupt):
        run_with(Run.of(experiment.build_method(), task, how, experiment.policy))
    return watcher.points


def main(spread: float, seeds: list[int], seconds: float) -> None:
    times = [seconds * part for part in (1 / 12, 1 / 6, 1 / 3, 2 / 3, 1)]
    heads = [f"{time:.0f} s" for time in times] + [f"s to {part:.0%}" for part in PARTS] + [f"MB to {PARTS[-1]:.0%}"]
    table = figures_table(
        f"accuracy by simulated time, speeds {spread:g}x; means over {len(seeds)} seeds", ["method"], heads
    )
    for name, (method, parameters) in METHODS.items():
        curves = [curve(method, parameters, spread, seconds, seed) for seed in seeds]
        row = []
        for time in times:
            reached = [max((p for p in points if p[0] <= time), default=(0, 0, 0))[2] for points in curves]
            row.append(f"{statistics.fmean(reached):.1%}")
        first = {part: [next((p for p in points if p[2] >= part), None) for points in curves] for part in PARTS}
        row += [mean([p and p[0] for p in first[part]], 0) for part in PARTS]
        row.append(mean([p and p[1] for p in first[PARTS[-1]]], 1))
        table.add_row(name, *row)
    Console(width=120).print(table)


def mean(values: list[float | None], decimals: int) -> str:
    """A dash where not every run got there."""
    found = [value for value in values if value is not None]
    return f"{statistics.fmean(found):.{decimals}f}" if len(found) == len(values) else "—"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spread", type=float, default=10)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    main(options.spread, options.seeds, options.seconds)
