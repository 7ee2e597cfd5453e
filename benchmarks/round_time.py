"""Rounds of a stated length against FedAvg and FedBuff, where clients' speeds and links differ tenfold.

    python benchmarks/round_time.py [--spread 10] [--seeds 0 1 2] [--rounds 40]

Digits on ten clients, uneven labels (Dirichlet, alpha 0.3). One epoch takes the fastest client one second and the
slowest `--spread`; links have 1 Mbit/s down to a `--spread`th of it, evenly on a logarithmic scale. All times are of
the run's simulated clock, transfers from the bytes of each frame. FedAvg's accuracy after `--rounds` is the goal; the
table has the simulated seconds until each method's global model first reaches shares of it. Means over seeds, each of
which splits data and speeds again.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from asynchronous import mean
from rich.console import Console

import fewbytes as fb
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.report.table import figures_table
from fewbytes.running.run import Run

CLIENTS, FASTEST = 10, 125_000  # bytes a second
LOCAL = {"epochs": 1, "lr": 0.1, "batch": 20}
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fedavg": ("fedavg", {}, {}),
    "fedavg, half of the clients": ("fedavg", {"fraction": 0.5}, {}),
    "fedbuff, K = 3": ("fedbuff", {"buffer": 3}, {}),
    "fednova, one epoch": ("fednova", {}, {}),
    "fednova, 5 s": ("fednova", {}, {"round_time": "5s"}),
    "fednova, 10 s": ("fednova", {}, {"round_time": "10s"}),
    "fednova, 20 s": ("fednova", {}, {"round_time": "20s"}),
}
PARTS = (0.8, 0.9, 1.0)  # of FedAvg's accuracy
PATIENCE = 2.0  # times FedAvg's seconds, after which a run is ended


@dataclass
class Until(fb.Watcher):
    """Ends a run when it has reached an accuracy, or a time."""

    accuracy: float = 2.0
    seconds: float = float("inf")
    points: list[tuple[float, float, float]] = field(default_factory=list)  # seconds, megabytes both ways, accuracy
    sent: int = 0

    def scored(self, row: dict[str, Any]) -> None:
        self.sent += row["uplink_bytes"] + row["downlink_bytes"]
        if row["scores"]:
            accuracy = row["scores"]["accuracy"]["global"]
            self.points.append((row["simulated_seconds"], self.sent / 1e6, accuracy))
            if accuracy >= self.accuracy or row["simulated_seconds"] > self.seconds:
                raise KeyboardInterrupt

    def note(self, text: str) -> None: ...


def curve(name: str, spread: float, seed: int, watcher: Until, rounds: int) -> Until:
    """The watcher of a run, which has its points."""
    method, parameters, more = METHODS[name]
    rates = [FASTEST * spread ** (-i / (CLIENTS - 1)) for i in range(CLIENTS)]
    experiment = make_experiment(
        {
            "method": method, "dataset": "digits", "clients": CLIENTS, "alpha": 0.3, "rounds": rounds, "seed": seed,
            "speeds": f"{spread:g}x", "links": ",".join(f"{rate:.0f}B/s" for rate in rates),
            "parameters": LOCAL | parameters, **more,
        }
    )  # fmt: skip
    task = find(experiment).task
    how = replace(experiment.run, workers=1, save_models=False, watcher=watcher)
    with suppress(KeyboardInterrupt):
        run_with(Run.of(experiment.build_method(), task, how, experiment.policy))
    return watcher


def main(spread: float, seeds: list[int], rounds: int) -> None:
    heads = ["rounds", *(f"s to {part:.0%}" for part in PARTS), "MB to 100%"]
    found: dict[str, list[list[tuple[float, float] | None]]] = {name: [] for name in METHODS}
    counts: dict[str, list[int]] = {name: [] for name in METHODS}
    goals = []
    for seed in seeds:
        first = curve("fedavg", spread, seed, Until(), rounds)
        seconds, _, accuracy = first.points[-1]
        goals.append(accuracy)
        for name in METHODS:
            run = first
            if name != "fedavg":
                run = curve(name, spread, seed, Until(accuracy, PATIENCE * seconds), 100_000)
            found[name].append([next((p[:2] for p in run.points if p[2] >= part * accuracy), None) for part in PARTS])
            counts[name].append(len(run.points))
    table = figures_table(
        f"simulated time to FedAvg's accuracy after {rounds} rounds ({statistics.fmean(goals):.1%}), speeds and links "
        f"{spread:g}x; means over {len(seeds)} seeds",
        ["method"],
        heads,
    )
    for name, runs in found.items():
        cells = [mean([run[i] and run[i][0] for run in runs], 0) for i in range(len(PARTS))]
        table.add_row(
            name, f"{statistics.fmean(counts[name]):.0f}", *cells, mean([run[-1] and run[-1][1] for run in runs], 1)
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spread", type=float, default=10)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    main(options.spread, options.seeds, options.rounds)
