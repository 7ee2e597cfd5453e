"""FedBuff, and FedNova with a round time, against FedAvg on a real deployment whose links differ tenfold.

    python benchmarks/flower/asynchronous.py [--seconds 120] [--fastest 100kB/s] [--spread 10] [--clients 6] [--slow 10]

As benchmarks/asynchronous.py, by the clock on the wall: resident nodes reach the SuperLink through proxies that limit
them, the first to `--fastest` each way, the last to a tenth of it, the others between. With `--slow 10`, the last node
also runs only a tenth of each second, as on a slow machine, and those between accordingly. Accuracy of the server's
model at a time since the first round began, and when it first reached a share. The load of the machine is printed:
figures of a busy one are of its other work, too.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from proxied import Snapshots, deploy
from proxy import Faults, Proxy

from fewbytes.base.units import parse_rate
from fewbytes.experiments.deploy import Deployment
from fewbytes.experiments.settings import make_experiment
from fewbytes.report.table import figures_table

METHODS = {
    "fedavg": ("fedavg", {}, {}),
    "fedbuff, K = 1": ("fedbuff", {"buffer": 1}, {}),
    "fedbuff, K = 3": ("fedbuff", {"buffer": 3}, {}),
    "fednova, 10 s": ("fednova", {}, {"round_time": "10s"}),
}
LOCAL = {"epochs": 1, "lr": 0.1, "batch": 20}
PARTS = (0.8, 0.9)


def slowed(process: int, share: float) -> None:
    """Let a process run for this share of each second, until it ends."""
    with suppress(ProcessLookupError):
        while share < 1:
            os.kill(process, signal.SIGSTOP)
            time.sleep(1 - share)
            os.kill(process, signal.SIGCONT)
            time.sleep(share)


def run(name: str, given: argparse.Namespace) -> list[tuple[float, float]]:
    """(seconds since the first round began, accuracy) after each round."""
    method, own, more = METHODS[name]
    points: list[tuple[float, float]] = []

    class Clock(Snapshots):
        def __init__(self, deployed: Deployment, proxies: list[Proxy]) -> None:
            super().__init__(deployed, proxies)
            for i, proxy in enumerate(proxies):
                rate = parse_rate(given.fastest) / given.spread ** (i / max(1, len(proxies) - 1))
                proxy.up.faults = proxy.down.faults = Faults(rate)

        def started(self, folder: Path, rounds: int, done: int) -> None:
            self.begun = time.monotonic()
            nodes = [each.process.pid for each in self.deployed.processes._nodes.values()]
            for i, node in enumerate(nodes if given.slow > 1 else ()):
                share = 1 / given.slow ** (i / max(1, len(nodes) - 1))
                threading.Thread(target=slowed, args=(node, share), daemon=True).start()

        def scored(self, row: dict[str, Any]) -> None:
            points.append((time.monotonic() - self.begun, row["scores"]["accuracy"]["global"]))
            if points[-1][0] > given.seconds:
                raise KeyboardInterrupt

        def ended(self, result: dict[str, Any]) -> None: ...

    settings = {
        "method": method, "dataset": "digits", "clients": given.clients, "alpha": 0.3, "rounds": 100_000,
        "engine": "flower-deployment", "save_models": False, "parameters": LOCAL | own,
        **more,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        deploy(make_experiment(settings), Path(folder), watched_by=Clock)
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--fastest", default="100kB/s")
    parser.add_argument("--spread", type=float, default=10)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--slow", type=float, default=1)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    given = parser.parse_args()
    times = [given.seconds * part for part in (1 / 8, 1 / 4, 1 / 2, 1)]
    heads = ["rounds", *(f"{t:.0f} s" for t in times), *(f"s to {part:.0%}" for part in PARTS)]
    table = figures_table(
        f"{given.clients} clients, links of {given.fastest} to a {given.spread:g}th, machines to a {given.slow:g}th; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the start",
        ["method"],
        heads,
    )
    for name in given.methods:
        points = run(name, given)
        row = [str(len([t for t, _ in points if t <= given.seconds]))]
        row += [f"{max(((t, a) for t, a in points if t <= at), default=(0, 0))[1]:.1%}" for at in times]
        row += [f"{t:.0f}" if (t := next((t for t, a in points if a >= part), 0)) else "—" for part in PARTS]
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
