"""Faults in a real deployment: SuperNodes killed with SIGKILL, flipped bits, a SuperLink killed and the run resumed.

    python benchmarks/flower/faults.py

Part one: five clients on digits; a SuperNode is killed in each of three rounds and one client's reply has a bit flipped
in a fourth. Part two: the SuperLink is killed in the middle, then `fewbytes deploy --resume`. Takes about six minutes:
Flower takes a dead node for alive for a minute.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import fewbytes as fb
from fewbytes.experiments.deploy import Deployment, places
from fewbytes.experiments.settings import make_experiment, make_method

FLIPPING = """
from flwr.clientapp import ClientApp
from fewbytes.experiments.app import client as honest, server

class Flipping(ClientApp):
    def __call__(self, message, context):
        reply = honest(message, context)
        if context.node_config["partition-id"] == 4 and message.metadata.group_id == "8":
            record = reply.content.config_records["fewbytes"]
            data = bytearray(record["frame"])
            data[len(data) // 2] ^= 1
            record["frame"] = bytes(data)
        return reply

client = Flipping()
__all__ = ["client", "server"]
"""
KILLED = {2: 1, 3: 2, 4: 3}  # round: client


class Killer(fb.Watcher):
    """Kills a SuperNode when its round's first reply is in."""

    def __init__(self, deployed: Deployment) -> None:
        self.deployed, self.round, self.killed = deployed, 1, set[int]()

    def replied(self, client: int) -> None:
        victim = KILLED.get(self.round)
        if victim is not None and self.round not in self.killed:
            self.killed.add(self.round)
            process = self.deployed.processes._nodes[f"client-{victim}"].process
            print(f"round {self.round}: SIGKILL to the SuperNode of client {victim}", flush=True)
            process.send_signal(signal.SIGKILL)

    def scored(self, row: dict[str, Any]) -> None:
        self.round = row["round"] + 1
        left = [(x["client"], x["outcome"]) for x in row.get("left_out", [])]
        print(f"round {row['round']}: {row['accuracy']}, {row['seconds']:.0f} s, left out {left}", flush=True)


def nodes_killed(folder: Path) -> None:
    own = {"epochs": 2, "lr": 0.1, "batch": 20, "momentum": 0.9}
    settings = {
        "method": "fedavg", "clients": 5, "rounds": 10, "parameters": own, "engine": "flower-deployment",
        "min_replies": 0.2,
    }  # fmt: skip
    experiment = make_experiment(settings)
    task = experiment.task()
    deployed = Deployment(experiment, folder / "run", places(experiment, None), "127.0.0.1:0", False)
    write = deployed._write
    deployed._write = lambda: (write(), (deployed.folder / "app" / "apps.py").write_text(FLIPPING))  # type: ignore[method-assign]
    deployed.execute(Killer(deployed), lambda text: print(f"note: {text[:150]}", flush=True))
    result = json.loads((folder / "run" / "result.json").read_text())
    clean = fb.run(make_method("fedavg", own), task, rounds=10)
    print(
        f"status {result['status']}, {result['left_out']} left out; global accuracy {result['accuracy']['final']:.1%}, "
    )
    print(f"without any fault {clean.accuracy:.1%}")
    page = (folder / "run" / "report.html").read_text()
    print("the report says:", *re.findall(r"[0-9]+ of [0-9]+ exchanges[^<]*", page))


def superlink_killed(folder: Path) -> None:
    options = ["fedpurin", "--clients", "3", "--rounds", "4", "--set", "batch=20"]
    command = [sys.executable, "-m", "fewbytes"]
    process = subprocess.Popen(
        [*command, "deploy", *options, "--out", str(folder / "there")], stderr=subprocess.PIPE, text=True
    )
    while not any(len(p.read_text().splitlines()) == 2 for p in (folder / "there").glob("*/rounds.jsonl")):
        time.sleep(0.1)
    (run,) = (folder / "there").iterdir()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"flower-superlink" in (entry / "cmdline").read_bytes()
                and str(run).encode() in (entry / "cmdline").read_bytes()
            ):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
    errors = process.communicate()[1]
    print(f"SuperLink killed after round 2: exit code {process.returncode}: {errors.strip().splitlines()[-1]}")
    started = time.monotonic()
    subprocess.run([*command, "deploy", "--resume", str(run)], check=True, capture_output=True)
    print(f"resumed and ended in {time.monotonic() - started:.0f} s")
    subprocess.run([*command, "run", *options, "--out", str(folder / "here")], check=True, capture_output=True)
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from runs import fingerprint

    there, here = fingerprint(run), fingerprint(next((folder / "here").iterdir()))
    print("equal to an uninterrupted local run:", {name: there[name] == here[name] for name in here})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        if "superlink" not in sys.argv:
            nodes_killed(Path(name))
        superlink_killed(Path(name))
