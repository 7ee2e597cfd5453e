"""Bytes and seconds of Flower's simulation over two hosts of a Ray cluster, beside one host with as many workers.

    python benchmarks/flower/cluster.py [fedavg fedbn] [--model resnet8] [--clients 4] [--rounds 6]

The hosts are namespaces on this machine (tests/hosts.py), with a processor each; what passes between them is counted
at the far one's network device, all that Ray says included. The first round, in which the task travels, is told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from hosts import ADDRESS, Hosts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["fedavg", "fedbn"])
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    o = parser.parse_args()
    with Hosts() as hosts:
        for name in o.methods:
            for address in ("local", ADDRESS):
                print(json.dumps({"method": name, **measured(hosts, name, address, o)}), flush=True)


def measured(hosts: Hosts, name: str, address: str, o: argparse.Namespace) -> dict[str, object]:
    """What a run took: MB of frames a round, MB to and from the far host, seconds."""
    out = hosts.place / f"{name}-{address}"
    terms = ["--dataset", "digits", "--set", "batch=20", "--set", "epochs=1", "--model", o.model, "--no-models"]
    counts = ["--clients", str(o.clients), "--rounds", str(o.rounds), "--workers", "2"]
    where = ["--engine", "flower-simulation", "--ray-address", address]
    command = [sys.executable, "-m", "fewbytes", "run", name, *terms, *counts, *where]
    started, moved = time.monotonic(), [hosts.far.moved()]
    process = hosts.near.started(*command, "--out", str(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if len(moved) == 1 and any(path.stat().st_size for path in out.glob("*/rounds.jsonl")):
            moved.append(hosts.far.moved())
        time.sleep(0.02)
    assert process.returncode == 0
    took = time.monotonic() - started
    moved.append(hosts.far.moved())
    rows = [json.loads(line) for path in out.glob("*/rounds.jsonl") for line in path.read_text().splitlines()]
    later = [row for row in rows[1:] if row["phase"] == "round"]
    start, first, end = moved
    return {
        "hosts": 1 if address == "local" else 2,
        "seconds": round(took, 1),
        "seconds_a_round": round(statistics.median(row["seconds"] for row in later), 2),
        "frames_down_MB_a_round": round(statistics.mean(row["downlink_bytes"] for row in later) / 1e6, 2),
        "frames_up_MB_a_round": round(statistics.mean(row["uplink_bytes"] for row in later) / 1e6, 2),
        "to_far_MB_first": round((first[0] - start[0]) / 1e6, 2),
        "to_far_MB_a_round": round((end[0] - first[0]) / 1e6 / len(later), 2),
        "from_far_MB_a_round": round((end[1] - first[1]) / 1e6 / len(later), 2),
    }


if __name__ == "__main__":
    main()
