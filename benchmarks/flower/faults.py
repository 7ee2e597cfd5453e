"""What befalls the nodes and links of a real deployment, one after another, and what becomes of the run.

    python benchmarks/flower/faults.py [--node stock] [FAULT ...]

Each row is a deployment of two clients, FedAvg, a model of 14 MB, three rounds, over TLS and a proxy a node. It is
equal if the server's model and the clients' states are those of the local engine, bit for bit. Seconds are those of the
rounds, and those beyond the row without a fault; bytes are what passed the proxies beyond what the ledger counts.
Prints the table of docs/flower.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import pyarrow.parquet as pq
import torch
from proxied import Snapshots, deploy
from proxy import NONE, Faults
from runs import configured, fingerprint

from fewbytes.base.errors import FewbytesError
from fewbytes.experiments.deploy import Deployment
from fewbytes.experiments.hosts import settled
from fewbytes.experiments.places import Nodes, places
from fewbytes.experiments.settings import Experiment, make_experiment
from fewbytes.flower.children import family_of

MB = 1_000_000
ROUNDS = 3


def wide(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A model of 14 MB."""
    layers = torch.nn.Linear(64, 1850), torch.nn.ReLU(), torch.nn.Linear(1850, 1850), torch.nn.ReLU()
    return torch.nn.Sequential(torch.nn.Flatten(), *layers, torch.nn.Linear(1850, classes))


SETTINGS = {
    "method": "fedavg", "dataset": "digits", "model": "faults:wide", "clients": 2, "samples": "40/10",
    "rounds": ROUNDS, "evaluate_every": 1000, "save_models": False, "min_replies": 1, "round_timeout": 300,
    "parameters": {"epochs": 5, "lr": 0.05, "batch": 20}, "engine": "flower-deployment",
}  # fmt: skip


def kill(process: Any) -> None:
    """SIGKILL to a process and all it started."""
    for pid, _ in family_of({process.pid}):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Killing(Snapshots):
    """Kills client 1's node in the second round, when `share` of its message has come down, or of its reply gone up."""

    way, share = "up", 0.5

    def scored(self, row: dict[str, Any]) -> None:
        super().scored(row)
        if row["round"] == 1 and row["phase"] == "round":
            link = getattr(self.proxies[1], self.way)
            threading.Thread(target=self._kill, args=(link, link.bytes * (1 + self.share)), daemon=True).start()

    def _kill(self, link: Any, far: float) -> None:
        while link.bytes < far:
            time.sleep(0.005)
        kill(self.deployed.processes._nodes["client-1"].process)


class Training(Killing):
    """The same as it trains."""

    way, share = "down", 0.995


class LinkKilling(Snapshots):
    """Kills the SuperLink in the second round."""

    def scored(self, row: dict[str, Any]) -> None:
        super().scored(row)
        if row["round"] == 1 and row["phase"] == "round" and not hasattr(self, "before"):
            self.before = True
            kill(self.deployed.processes._superlink.process)


Fault = tuple[str, Faults, Faults, type[Snapshots]]
FAULTS: dict[str, Fault] = {
    "none": ("none", NONE, NONE, Snapshots),
    "training": ("a node killed (kill -9) as it trains, and started again", NONE, NONE, Training),
    "upload": ("a node killed half-way through its upload, and started again", Faults(rate=4 * MB), NONE, Killing),
    "superlink": ("the SuperLink killed in round 2, then `deploy --resume`", NONE, NONE, LinkKilling),
    "reset": ("links reset after every 2 MB, both ways", Faults(reset_at=2 * MB), Faults(reset_at=2 * MB), Snapshots),
    "flip": ("a bit flipped in every 3 MB, both ways", Faults(flip=3 * MB), Faults(flip=3 * MB), Snapshots),
    "half": (
        "links half-closed after some 3 MB, both ways",
        Faults(half_close=3 * MB),
        Faults(half_close=3 * MB),
        Snapshots,
    ),
    "stall": ("links that fall silent after some 8 MB up", Faults(stall=8 * MB), NONE, Snapshots),
    "slow": ("links of 1 MB/s up, 2 MB/s down", Faults(rate=MB), Faults(rate=2 * MB), Snapshots),
}


def deployed(experiment: Experiment, folder: Path, fault: Fault, node: str) -> Snapshots:
    """A deployment with the fault; resumed, as its user would, if it ends."""
    _, up, down, watched_by = fault
    seen: list[Snapshots] = []

    def watch(*arguments: Any) -> Snapshots:
        seen.append(watched_by(*arguments))
        return seen[0]

    try:
        deploy(experiment, folder, up, down, watch, node)  # type: ignore[arg-type]
    except FewbytesError as error:
        if "--resume" not in str(error):
            raise
        again = Deployment(settled(experiment, False), folder / "run", Nodes(places(experiment, None), kind=node), True)
        again.execute(Rest(seen[0]), seen[0].note)
    return seen[0]


class Rest(Snapshots):
    """What is left of a run is seen by who saw its beginning."""

    def __init__(self, before: Snapshots) -> None:
        super().__init__(before.deployed, before.proxies)
        self.rows, self.notes = before.rows, before.notes


def row(name: str, node: str, folder: Path, same: Callable[[Path], bool], before: float) -> float:
    """Measure a fault and print its row; its seconds."""
    seen = deployed(make_experiment(SETTINGS), folder, FAULTS[name], node)
    ledger = pq.read_table(folder / "run" / "ledger.parquet").to_pylist()
    seconds = sum(each["seconds"] for each in seen.rows)
    missed = sum(each["outcome"] != "answered" for each in ledger)
    sent, passed = (
        sum(each["bytes_up"] + each["bytes_down"] for each in ledger),
        sum(sum(p.snapshot()) for p in seen.proxies),
    )
    struck = sum((p.up.struck.total() + p.down.struck.total() for p in seen.proxies), 0)
    what = FAULTS[name][0] + (f" ({struck})" if struck else "")
    later = f" ({seconds - before:+.1f})" if before else ""
    over = "" if name == "superlink" else f"{passed / sent - 1:.0%}"  # it is resumed without proxies
    cells = what, f"{missed} of {2 * ROUNDS}", "yes" if same(folder / "run") else "no", f"{seconds:.1f} s{later}", over
    print(f"| {' | '.join(cells)} |", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--node", default="resident", choices=("resident", "stock"))
    o = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        here = fingerprint(configured(Path(name) / "here", **SETTINGS | {"engine": "local"}))

        def same(run: Path) -> bool:
            there = fingerprint(run)
            return all(there[part] == here[part] for part in ("server", "states"))

        print("| fault (how often) | replies missed | equal | seconds of the rounds | bytes beyond the frames |")
        print("| --- | --- | --- | --- | --- |")
        before = 0.0
        for fault in ["none", *(o.faults or [each for each in FAULTS if each != "none"])]:
            seconds = row(fault, o.node, Path(name) / fault, same, before)
            before = before or seconds


if __name__ == "__main__":
    main()
