"""`fewbytes deploy` with a proxy between each SuperNode and the SuperLink."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from proxy import Proxy
from sockets_peer import ProxiedDeployment, Snapshot, snapshot

import fewbytes as fb
from fewbytes.experiments.deploy import Deployment, places
from fewbytes.experiments.settings import Experiment


class Snapshots(fb.Watcher):
    """What had passed each proxy at the start and at the end of each round, and the rounds' lines."""

    def __init__(self, proxies: list[Proxy]) -> None:
        self.proxies, self.taken, self.rows = proxies, list[Snapshot](), list[dict[str, Any]]()

    def started(self, folder: Path, rounds: int, done: int) -> None:
        self.taken.append(snapshot(self.proxies))

    def scored(self, row: dict[str, Any]) -> None:
        self.taken.append(snapshot(self.proxies))
        self.rows.append(row)


def deploy(
    experiment: Experiment, folder: Path, uplink: float | None = None, downlink: float | None = None
) -> Snapshots:
    """Run an experiment on Flower's processes, each client's link limited to so many bytes per second."""
    experiment.task()
    deployed = Deployment(experiment, folder / "run", places(experiment, None), "127.0.0.1:0", False)
    deployed.processes = through = ProxiedDeployment(deployed.folder)
    host, port = through.address.split(":")
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(host, int(port), uplink, downlink)) for _ in deployed.nodes]
        for site, proxy in zip(deployed.nodes, proxies, strict=True):
            through.through[site.name] = f"127.0.0.1:{proxy.port}"
        watcher = Snapshots(proxies)
        deployed.execute(watcher, print)
    return watcher
