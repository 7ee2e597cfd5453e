"""Seconds from `fewbytes deploy` to the end of round 1 when nodes wait already, and the memory of server and nodes.

    python benchmarks/flower/startup.py [--runs 3] [--rounds 10] [--parts]

A federation of two sites on this machine: a process each, started before the runs and warm from an earlier one. FedAvg
on the digits. Seconds: from the command to the first row of rounds.jsonl. Memory: PSS (shared pages are counted once)
of all processes that `deploy` has started, itself included, and of a node, while rounds go on. `--parts` prints each
process of the server and its share.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fewbytes.flower.children import command_of, family_of, free_port

FEWBYTES = [sys.executable, "-m", "fewbytes"]
SITES = ("north", "south")
SECONDS = 600  # that anything may take


class Measured(NamedTuple):
    """Seconds to the first row; PSS in bytes of the server's processes by what they are, and of each node."""

    seconds: float
    server: list[tuple[int, str]]
    nodes: list[int]


def pss(pid: int) -> int:
    """Bytes of a process, of shared pages its share; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pss:")))


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing has come of it in {SECONDS} s")
        time.sleep(0.02)


def answer(place: Path, *words: str) -> str:
    done = subprocess.run([*FEWBYTES, *words], cwd=place, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return done.stdout.decode().strip()


def rows(place: Path) -> int:
    """The rounds of the latest run."""
    file = max((place / "runs").glob("*")) / "rounds.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def measured(place: Path, nodes: list[int], rounds: int) -> Measured:
    """One run."""
    before = len(list((place / "runs").glob("*")))
    settings = ["--dataset", "digits", "--set", "epochs=1", "--rounds", "10000", "--federation", "federation"]
    started = time.monotonic()
    with open(place / "server.log", "ab") as log:
        server = subprocess.Popen([*FEWBYTES, "deploy", "fedavg", *settings], cwd=place, stdout=log, stderr=log)
    try:
        until(lambda: len(list((place / "runs").glob("*"))) > before and rows(place))
        seconds = time.monotonic() - started
        until(lambda: rows(place) >= rounds)
        family = [(pss(each[0]), named(command_of(each))) for each in family_of({server.pid})]
        return Measured(seconds, sorted(family, reverse=True), [pss(pid) for pid in nodes])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def named(command: list[str]) -> str:
    words = [Path(word).name for word in command if word and not word.startswith("-")]
    return " ".join(words[:3]) or "?"


def main() -> None:
    """Make the federation, run, print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--rounds", type=int, default=10, help="before memory is measured")
    options.add_argument("--parts", action="store_true")
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        place, processes = Path(folder), []
        answer(place, "federation", "init", "--address", f"127.0.0.1:{free_port('127.0.0.1')}")
        try:
            for name in SITES:
                request = answer(
                    place, "node", "init", name, "--invitation", answer(place, "federation", "invite", name)
                )
                answer(place, "federation", "join", request)
                with open(place / f"{name}.log", "ab") as log:
                    command = [*FEWBYTES, "node", str(place / name / "node.toml")]
                    processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            measured(place, [], 2)  # warms up nodes and files
            found = [measured(place, [each.pid for each in processes], given.rounds) for _ in range(given.runs)]
        finally:
            for process in processes:
                process.terminate()
                process.wait()
    print("seconds to round 1:", ", ".join(f"{each.seconds:.1f}" for each in found))
    print("server, MB:", ", ".join(f"{sum(part for part, _ in each.server) / 1e6:,.0f}" for each in found))
    print("a node, MB:", ", ".join(f"{each / 1e6:,.0f}" for each in found[-1].nodes))
    for part, what in found[-1].server if given.parts else ():
        print(f"  {part / 1e6:6.0f} MB  {what}")


if __name__ == "__main__":
    main()
