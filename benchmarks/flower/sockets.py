"""Bytes on the socket per round trip of a method deployed over loopback with TLS, against its ledger.

    python benchmarks/flower/sockets.py [fedavg] [--model resnet8] [--clients 2] [--rounds 4]

Every SuperNode reaches the SuperLink through a counting proxy. The first round, in which the app itself is fetched, is
shown but not counted. Polls are not subtracted: `sockets_peer.py` measures the same of Flower's own FedAvg.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import pyarrow.parquet as pq
from proxied import between, deploy

from fewbytes.experiments.settings import make_experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", nargs="?", default="fedavg")
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    o = parser.parse_args()
    settings = {
        "method": o.method, "dataset": "cifar10", "clients": o.clients, "samples": "40/10", "model": o.model,
        "rounds": o.rounds, "evaluate_every": 1000, "save_models": False,
        "parameters": {"epochs": 1, "lr": 0.05, "batch": 20},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        seen = deploy(make_experiment(settings), Path(name), node="stock")  # whose rounds can be told apart
        ledger = pq.read_table(Path(name) / "run" / "ledger.parquet").to_pylist()
    print(
        f"{'round':6} {'client':7} {'seconds':>7} {'ledger up':>10} {'socket up':>10} "
        f"{'ledger down':>11} {'socket down':>11}"
    )
    over: list[tuple[int, int]] = []
    for t in range(o.rounds - 1):  # the last round's end includes its scoring
        seconds, passed = between(seen.taken[t], seen.taken[t + 1])
        for client, (up, down) in enumerate(passed):
            rows = [r for r in ledger if r["round"] == t + 1 and r["client"] == client]
            sent, got = sum(r["bytes_up"] for r in rows), sum(r["bytes_down"] for r in rows)
            print(f"{t + 1:6} {client:<7} {seconds:7.1f} {sent:10,} {up:10,} {got:11,} {down:11,}")
            if t:
                over.append((up + down - sent - got, sent + got))
    extra, payload = (statistics.mean(pair[way] for pair in over) for way in (0, 1))
    limit = 0.02 * payload + 15e3
    print(
        f"{o.method}, {o.model}: over the frames {extra / 1e3:.1f} kB a round trip = {extra / payload:.2%} of "
        f"{payload / 1e6:.2f} MB; goal 2 % + 15 kB = {limit / 1e3:.1f} kB: {'met' if extra <= limit else 'NOT met'}"
    )


if __name__ == "__main__":
    main()
