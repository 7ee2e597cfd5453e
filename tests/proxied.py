"""`fewbytes deploy` with a proxy between each node and the SuperLink."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proxy import NONE, Faults, Proxy

import fewbytes as fb
from fewbytes.experiments.deploy import Deployment
from fewbytes.experiments.hosts import settled
from fewbytes.experiments.places import Nodes, places
from fewbytes.experiments.settings import Experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower.processes import Processes


class ProxiedDeployment(Processes):
    """A deployment whose nodes reach the SuperLink at addresses of their own, `through[name]`."""

    def __init__(self, folder: Path, resident: bool) -> None:
        super().__init__(folder, "127.0.0.1:0", any_app=False, resident=resident, lasting=False)
        self.through: dict[str, str] = {}

    def start_node(
        self, name: str, node_config: Mapping[str, str | int], home: Path | None = None, superlink: str | None = None
    ) -> None:
        super().start_node(name, node_config, home, self.through.get(name, superlink))


Snapshot = tuple[float, list[tuple[int, int]]]
"""When, and bytes (up, down) of each node until then."""


def snapshot(proxies: list[Proxy]) -> Snapshot:
    return time.monotonic(), [proxy.snapshot() for proxy in proxies]


def between(before: Snapshot, after: Snapshot) -> tuple[float, list[tuple[int, int]]]:
    """Seconds, and bytes (up, down) of each node."""
    return after[0] - before[0], [(u - v, d - e) for (u, d), (v, e) in zip(after[1], before[1], strict=True)]


class Snapshots(fb.Watcher):
    """What had passed each proxy at the start and at the end of each round, and the rounds' lines.

    `deployed`: the run; `notes`: what it told its user.
    """

    def __init__(self, deployed: Deployment, proxies: list[Proxy]) -> None:
        self.deployed, self.proxies = deployed, proxies
        self.taken, self.rows, self.notes = list[Snapshot](), list[dict[str, Any]](), list[str]()

    def started(self, folder: Path, rounds: int, done: int) -> None:
        self.taken.append(snapshot(self.proxies))

    def scored(self, row: dict[str, Any]) -> None:
        self.taken.append(snapshot(self.proxies))
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.notes.append(text)


def deploy(
    experiment: Experiment,
    folder: Path,
    up: Faults = NONE,
    down: Faults = NONE,
    watched_by: type[Snapshots] = Snapshots,
    node: str = "resident",
) -> Snapshots:
    """Run an experiment on Flower's processes in `folder`/run, each client's link with these faults; `node`: resident
    or stock."""
    experiment = find(experiment).experiment
    deployed = Deployment(settled(experiment, False), folder / "run", Nodes(places(experiment, None), kind=node), False)
    deployed.processes = through = ProxiedDeployment(deployed.folder, node == "resident")
    host, port = through.address.split(":")
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(host, int(port), up, down, seed)) for seed, _ in enumerate(deployed.nodes)]
        for site, proxy in zip(deployed.nodes, proxies, strict=True):
            through.through[site.name] = f"127.0.0.1:{proxy.port}"
        watcher = watched_by(deployed, proxies)
        deployed.execute(watcher, watcher.note, lambda what: None)
    return watcher
