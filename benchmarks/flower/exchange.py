"""Seconds an exchange takes on a real deployment, resident nodes against stock ones, beside the same without Flower.

    python benchmarks/flower/exchange.py [--mb 1 50] [--exchanges 10] [--kinds resident stock] [--rate 8MB/s]

One client on this machine, over TLS with node authentication, FedAvg on a layer of so many MB that is sent uncoded each
way. The floor is the same round in this process (training, packing, hashing) and moving: the same bytes through a TLS
socket on loopback, once each way; with `--rate`, for which a proxy limits the link each way, at that rate. What a run
takes before its first exchange, and what its first takes more, is told apart.
"""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from proxied import Snapshots, deploy
from proxy import Faults

import fewbytes as fb
from fewbytes.base.units import parse_rate
from fewbytes.experiments.deploy import Deployment
from fewbytes.experiments.hosts import settled
from fewbytes.experiments.places import KINDS, Nodes, places
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.flower.certificates import write_certificates


class Layer(torch.nn.Module):
    """A classifier of digits whose parameters are mostly a layer that nothing uses, and that so costs no training."""

    def __init__(self, classes: int = 10, inputs: int = 64, mb: int = 1) -> None:
        super().__init__()
        self.head = torch.nn.Linear(inputs, classes)
        self.idle = torch.nn.Parameter(torch.randn(mb * 250_000 - (inputs + 1) * classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)) + 0 * self.idle[0]


def layer1() -> torch.nn.Module:
    return Layer(mb=1)


def layer50() -> torch.nn.Module:
    return Layer(mb=50)


class Seconds(Snapshots):
    """When the run started, and the seconds of each round without scoring."""

    def __init__(self, *_: object) -> None:
        self.begun, self.before, self.rounds = time.monotonic(), 0.0, list[float]()

    def note(self, text: str) -> None: ...

    def started(self, folder: Path, rounds: int, done: int) -> None:
        self.before = time.monotonic() - self.begun

    def scored(self, row: dict[str, Any]) -> None:
        if row["phase"] == "round":
            self.rounds.append(row["seconds"] - row["seconds_scoring"])


def settings(mb: int, rounds: int, **others: Any) -> dict[str, Any]:
    own = {"epochs": 1, "batch": 20, "lr": 0.1, "weight_decay": 0.01}  # changes all: Flower sends what it has once
    return {
        "method": "fedavg", "clients": 1, "dataset": "digits", "part": 0.1, "model": f"exchange:layer{mb}",
        "rounds": rounds, "coding": False, "evaluate_every": 10**6, "save_models": False, "parameters": own, **others,
    }  # fmt: skip


def deployed(mb: int, rounds: int, kind: str, rate: float | None) -> Seconds:
    experiment = make_experiment(settings(mb, rounds, engine="flower-deployment"))
    with tempfile.TemporaryDirectory() as folder:
        if rate is not None:
            return deploy(experiment, Path(folder), Faults(rate), Faults(rate), Seconds, kind)
        nodes = places(experiment, None)
        run = Deployment(settled(experiment, False), Path(folder) / "run", Nodes(nodes, kind=kind), False)
        seen = Seconds()
        run.execute(seen, lambda text: None)
    return seen


def here(mb: int, rounds: int) -> Seconds:
    experiment = make_experiment(settings(mb, rounds))
    seen, task = Seconds(), find(experiment).task
    with tempfile.TemporaryDirectory() as folder:
        fb.run(
            experiment.build_method(), task, rounds=rounds, out=folder, workers=1, coded=False, evaluate_every=10**6,
            save_models=False, watcher=seen,
        )  # fmt: skip
    return seen


def through_tls(size: int, times: int) -> float:
    """Median seconds of so many bytes each way over TLS on loopback."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as server:
        folder = Path(name)
        write_certificates(folder, ["127.0.0.1"])
        there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        there.load_cert_chain(folder / "server.pem", folder / "server.key")

        def echo() -> None:
            plain, _ = server.accept()
            with there.wrap_socket(plain, server_side=True) as link:
                for _ in range(times):
                    link.sendall(read(link, size))

        thread = threading.Thread(target=echo)
        thread.start()
        seconds, payload = [], os.urandom(size)
        ours = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with ours.wrap_socket(socket.create_connection(server.getsockname()), server_hostname="127.0.0.1") as link:
            for _ in range(times):
                started = time.monotonic()
                link.sendall(payload)
                read(link, size)
                seconds.append(time.monotonic() - started)
        thread.join()
    return statistics.median(seconds)


def read(link: ssl.SSLSocket, size: int) -> bytes:
    parts, left = [], size
    while left:
        parts.append(link.recv(min(left, 1 << 20)))
        left -= len(parts[-1])
    return b"".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, nargs="+", default=[1, 50], choices=[1, 50])
    parser.add_argument("--exchanges", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--rate", type=parse_rate, help="of the link, each way; exact up to 8MB/s")
    o = parser.parse_args()
    here_folder = str(Path(__file__).parent)
    sys.path.insert(0, here_folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here_folder, os.environ.get("PYTHONPATH")]))
    print(
        f"{'MB each way':>11} {'node':10} {'before':>7} {'first':>6} {'median':>7} {'least':>6} {'most':>6} "
        f"{'floor':>6} {'above':>6}"
    )
    for mb in o.mb:
        local = statistics.median(here(mb, o.exchanges + 1).rounds[1:])
        floor = local + (through_tls(mb * 1_000_000, o.exchanges) if o.rate is None else 2e6 * mb / o.rate)
        for kind in o.kinds:
            seen = deployed(mb, o.exchanges + 1, kind, o.rate)
            times = seen.rounds[1:]
            median = statistics.median(times)
            print(
                f"{mb:11} {kind:10} {seen.before:7.1f} {seen.rounds[0]:6.2f} {median:7.2f} {min(times):6.2f} "
                f"{max(times):6.2f} {floor:6.2f} {median - floor:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
