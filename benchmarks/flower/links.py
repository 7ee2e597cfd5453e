"""Seconds to an accuracy over slow links, measured on Flower's processes, beside what `fewbytes plan` says.

    python benchmarks/flower/links.py [fedavg fedpurin] [--uplink 1MB/s] [--downlink 1MB/s] [--clients 2] [--rounds 8]

Every node reaches the SuperLink through a proxy that limits it. Scoring is left out of the measured seconds, as
the plan leaves it out; the rounds it takes to the accuracy are those of the run itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from proxied import deploy
from proxy import Faults

from fewbytes.base.units import parse_rate
from fewbytes.experiments.plan import EXCHANGE_SECONDS, make_plan
from fewbytes.experiments.settings import make_experiment, make_method
from fewbytes.experiments.tasks import find


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["fedavg", "fedpurin"])
    parser.add_argument("--uplink", default="1MB/s")
    parser.add_argument("--downlink", default="1MB/s")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--accuracy", type=float, default=0.45, help="personalised, of the models clients have trained")
    o = parser.parse_args()
    up, down = parse_rate(o.uplink), parse_rate(o.downlink)
    print(f"{'method':10} {'rounds':>6} {'measured s':>10} {'planned s':>9} {'off':>6} {'s/round':>8} {'planned':>8}")
    for name in o.methods:
        own = {"epochs": 2, "lr": 0.05, "batch": 50, "momentum": 0.9} | (
            {"buffers": "local"} if name == "fedavg" else {}
        )
        settings = {
            "method": name, "dataset": "cifar10", "clients": o.clients, "samples": "500/200", "alpha": 0.5,
            "model": "resnet8", "rounds": o.rounds, "save_models": False, "engine": "flower-deployment",
            "parameters": own,
        }  # fmt: skip
        experiment = make_experiment(settings)
        task = find(experiment).task
        plan = make_plan(make_method(name, own), task, o.rounds, up, down, EXCHANGE_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            seen = deploy(make_experiment(settings), Path(folder), Faults(up), Faults(down))
        kind = "sparse" if name == "fedpurin" else "personalised"
        curve = [row["scores"]["accuracy"][kind] for row in seen.rows]
        seconds = [row["seconds"] - row["seconds_scoring"] for row in seen.rows]
        rounds = next((t + 1 for t, value in enumerate(curve) if value >= o.accuracy), o.rounds)
        took, planned = sum(seconds[:rounds]), plan.round_seconds * rounds
        each = took / rounds
        print(
            f"{name:10} {rounds:6} {took:10.1f} {planned:9.1f} {planned / took - 1:+6.0%} {each:8.2f} "
            f"{plan.round_seconds:8.2f}"
        )
        print(json.dumps({"accuracy": [round(v, 3) for v in curve], "seconds": [round(s, 1) for s in seconds]}))


if __name__ == "__main__":
    main()
