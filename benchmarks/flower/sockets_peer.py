"""Bytes on the socket per round trip of Flower's own FedAvg, deployed over loopback with TLS and node authentication.

    python benchmarks/flower/sockets_peer.py [--model resnet8] [--nodes 2] [--rounds 3] [--idle 60]

Every SuperNode reaches the SuperLink through a counting proxy of its own. The payload is the sum of the tensors' bytes
each way. Polls and heartbeats are measured while nothing runs and subtracted; the first round, in which the app itself
is fetched, is shown but not counted.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import tomli_w
from proxied import Snapshot, between, snapshot
from proxy import Proxy

from fewbytes.flower.processes import Processes
from fewbytes.models import build_model

HERE = Path(__file__).parent
ROUND_SECONDS = 120  # the longest a round may take


def write_app(folder: Path, config: dict[str, str | int]) -> Path:
    """The Flower app as a folder that `flwr run` takes."""
    (folder / "peer").mkdir(parents=True)
    (folder / "peer" / "__init__.py").touch()
    shutil.copy(HERE / "sockets_app.py", folder / "peer" / "apps.py")
    shutil.copy(HERE.parents[1] / "LICENSE", folder)
    project = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": "peer",
            "version": "0.1.0",
            "license": {"file": "LICENSE"},
            "dependencies": ["flwr>=1.41"],
        },
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {
                    "publisher": "fewbytes",
                    "fab-format-version": 1,
                    "flwr-version-target": "1.41.0",
                    "components": {"serverapp": "peer.apps:server", "clientapp": "peer.apps:client"},
                    "config": config,
                }
            },
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))
    return folder


def wait_online(deployment: Processes, nodes: int) -> None:
    """Wait until all nodes are there. Raises RuntimeError if one ends or a minute passes."""
    deadline = time.monotonic() + 60
    while list(deployment.node_status().values()).count("online") < nodes:
        if deployment.ended() or time.monotonic() > deadline:
            raise RuntimeError(f"SuperNodes not online: {deployment.ended()} {deployment.node_status()}")
        time.sleep(1)


def follow(deployment: Processes, run: int, marks: Path, rounds: int, proxies: list[Proxy]) -> list[Snapshot]:
    """What has passed at the start and at each round's end. Raises RuntimeError if a round fails or is too slow."""
    taken: list[Snapshot] = []
    moved = time.monotonic()
    while len(taken) <= rounds:
        lines = marks.read_text().splitlines() if marks.exists() else []
        if len(lines) > len(taken):
            taken.append(snapshot(proxies))
            moved = taken[-1][0]
        if any(line.startswith("failed") for line in lines) or time.monotonic() - moved > ROUND_SECONDS:
            raise RuntimeError(f"run {run}: {deployment.run_status(run)}, marks {lines}")
        deployment.check()
        time.sleep(0.01)
    return taken


def measure(model: str, nodes: int, rounds: int, idle_seconds: float, folder: Path) -> None:
    """Deploy, measure and print."""
    payload = sum(v.nbytes for v in build_model(model, (3, 32, 32), 10).state_dict().values())
    names = [f"node-{i}" for i in range(nodes)]
    marks = folder / "marks"
    app = write_app(folder / "app", {"model": model, "nodes": nodes, "rounds": rounds + 1, "marks": str(marks)})
    with ExitStack() as stack:
        deployment = stack.enter_context(Processes(folder / "deployment", "127.0.0.1:0"))
        host, port = deployment.address.split(":")
        proxies = [stack.enter_context(Proxy(host, int(port))) for _ in names]
        deployment.start_superlink()
        deployment.register(names)
        for i, (name, proxy) in enumerate(zip(names, proxies, strict=True)):
            config = {"partition-id": i, "num-partitions": nodes}
            deployment.start_node(name, config, superlink=f"127.0.0.1:{proxy.port}")
        wait_online(deployment, nodes)
        time.sleep(2)
        before = snapshot(proxies)
        time.sleep(idle_seconds)
        seconds, idle = between(before, snapshot(proxies))
        rates = [(up / seconds, down / seconds) for up, down in idle]
        for name, (up, down) in zip(names, rates, strict=True):
            print(f"{name} idle: {up:.0f} B/s up, {down:.0f} B/s down")
        taken = follow(deployment, deployment.submit(app), marks, rounds + 1, proxies)
        connections = [proxy.connections for proxy in proxies]

    print(f"{model}, TLS and node authentication; payload {payload:,} bytes each way")
    print(f"{'round':6} {'node':8} {'seconds':>7} {'up':>11} {'down':>11} {'idle up':>8} {'idle down':>9}")
    net: list[tuple[float, float]] = []  # of the rounds that count
    raw: list[tuple[int, int]] = []
    for t in range(rounds + 1):
        seconds, passed = between(taken[t], taken[t + 1])
        for name, (up, down), (idle_up, idle_down) in zip(names, passed, rates, strict=True):
            less = idle_up * seconds, idle_down * seconds
            first = "" if t else "  (not counted)"
            print(f"{t + 1:<6} {name:8} {seconds:7.1f} {up:11,} {down:11,} {less[0]:8,.0f} {less[1]:9,.0f}{first}")
            if t:
                raw.append((up, down))
                net.append((up - less[0], down - less[1]))
    for title, values in (("as counted", raw), ("less idle polls", net)):
        up, down = (statistics.mean(value[way] for value in values) for way in (0, 1))
        over = up + down - 2 * payload
        print(
            f"{title:16} {up:,.0f} up ({up / payload - 1:+.2%}), {down:,.0f} down ({down / payload - 1:+.2%}); over "
            f"the payload: {over / 1000:.1f} kB a round trip, {over / payload / 2:.2%}"
        )
    print(f"connections: {connections}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=60, help="seconds; heartbeats come every 30")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options.model, options.nodes, options.rounds, options.idle, Path(folder))
