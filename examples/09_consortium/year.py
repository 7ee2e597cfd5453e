"""A year of a federation, each host in its own network namespace; README.md says what happens."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from networks import Network

SECONDS = 600  # that anything may take
REFUSED_SECONDS = 10  # until a removed member is refused, and reads so
FEWBYTES = [sys.executable, "-m", "fewbytes"]
SETTINGS = ["--dataset", "digits", "--samples", "40/10", "--set", "epochs=20", "--set", "lr=0.05", "--set", "batch=20"]
LATER = ["--newcomers", "1", "--arrival", "2", "--stay"]  # a place for a site that joins in the run
SHOW_CERTIFICATE = """
import ssl, sys
host, port, ca = sys.argv[1:]
print(ssl.get_server_certificate((host, int(port)), ca_certs=ca))
"""


class Consortium:
    """A server and its sites: each has a host of the network, a folder, and a process."""

    def __init__(self, place: Path, network: Network, stack: ExitStack) -> None:
        self.place, self.network, self._stack = place, network, stack
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.federation = place / "server" / "federation"

    def host(self, name: str) -> str:
        """Make a host with an empty folder; its address."""
        (self.place / name).mkdir()
        return self.network.add(name)

    def fewbytes(self, host: str, *words: str) -> str:
        """Run a command in a host's folder; what it prints for others."""
        command = self.network.on(host, [*FEWBYTES, *words])
        done = subprocess.run(command, cwd=self.place / host, capture_output=True, text=True, timeout=SECONDS)
        insist(done.returncode == 0, f"{host}: fewbytes {' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    def start(self, host: str, command: list[str], folder: Path) -> subprocess.Popen[bytes]:
        """Start a host's process; what it prints goes to HOST.log."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        with self.log(host).open("ab") as log:
            process = subprocess.Popen(
                self.network.on(host, command), cwd=folder, env=os.environ | {"PATH": path},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.processes[host] = process
        self._stack.callback(end, process)
        return process

    def log(self, host: str) -> Path:
        """The file of what a host's process prints."""
        return self.place / f"{host}.log"

    def joins(self, name: str, host: str) -> None:
        """Have a site join: an invitation goes there, a request with a key made there comes back. Start its node."""
        invitation = self.fewbytes("server", "federation", "invite", name)
        request = self.fewbytes(host, "node", "init", name, "--invitation", invitation, "--folder", "node")
        self.fewbytes("server", "federation", "join", request)
        self.start(host, ["sh", "node/start.sh"], self.place / host)

    def deploys(self, host: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a run, or resume one, at the server's folder."""
        return self.start(host, [*FEWBYTES, "deploy", *words], self.place / "server")

    def run(self) -> Path:
        """The folder of the latest run."""
        return max((self.place / "server" / "runs").iterdir())

    def rows(self) -> list[dict[str, Any]]:
        """The rounds of the latest run."""
        files = sorted((self.place / "server" / "runs").glob("*/rounds.jsonl"))
        return rounds(files[-1]) if files else []

    def absent(self, count: int) -> set[int] | None:
        """The clients left out of the last round; None if it was not planned with `count` clients."""
        last = (self.rows() or [{}])[-1]
        return {left["client"] for left in last.get("left_out", [])} if last.get("cohort") == count else None

    def until(self, holds: Callable[[], object], what: str, seconds: float = SECONDS) -> float:
        """Wait until something holds; how many seconds it took."""
        started = time.monotonic()
        while not holds():
            logs = "".join(f"\n--- {path.name}\n{path.read_text()[-1500:]}" for path in self.place.glob("*.log"))
            insist(time.monotonic() < started + seconds, f"not within {seconds:g} s: {what}{logs}")
            time.sleep(0.1)
        return time.monotonic() - started

    def says(self, host: str, what: str, since: int = 0) -> Callable[[], object]:
        """Whether a host's process has printed something after the first `since` bytes of its log."""
        return lambda: re.search(what, self.log(host).read_bytes()[since:].decode())

    def further(self, rounds: int) -> None:
        """Wait for further rounds."""
        seen = len(self.rows())
        self.until(lambda: len(self.rows()) >= seen + rounds, "rounds continue")

    def story(self) -> None:
        """The year."""
        address = f"{self.host('server')}:9092"
        self.fewbytes("server", "federation", "init", "--address", address)
        for name in ("north", "south", "west"):
            self.host(name)
            self.joins(name, name)
        server = self.deploys("server", "fedavg", *SETTINGS, *LATER, "--federation", "federation", "--rounds", "5000")
        self.until(lambda: len(self.rows()) >= 2, "two rounds")
        tell(f"January: north, south and west made their keys; round {len(self.rows())} is done at {address}")

        self.host("east")
        self.joins("east", "east")
        self.until(lambda: self.absent(4) == set(), "all four take part")
        tell(f"March: east joined the running deployment, and took part in round {len(self.rows())}")

        self.processes["west"].kill()
        self.host("west-2")
        self.joins("west", "west-2")
        self.until(self.says("server", "west has a new key"), "the new key is registered")
        self.until(lambda: self.absent(4) == set(), "all four take part")
        since = self.log("west").stat().st_size
        self.start("west", ["sh", "node/start.sh"], self.place / "west")  # somebody has found the old disk
        self.until(self.says("west", "not registered there|does not accept", since), "the old key is refused")
        end(self.processes.pop("west"))
        tell(f"May: west lost its machine; a new key takes part in round {len(self.rows())}, the old one is refused")

        since = self.log("south").stat().st_size
        self.fewbytes("server", "federation", "remove", "south")
        removed = time.monotonic()
        self.until(self.says("server", "south is no longer a member, and refused"), "south is removed", REFUSED_SECONDS)
        self.until(self.says("south", "does not accept this node", since), "south reads so", REFUSED_SECONDS)
        took = time.monotonic() - removed
        insist(took < REFUSED_SECONDS, f"south was refused after {took:.1f} s")
        self.further(3)
        insist(self.absent(4) == {1}, f"absent: {self.absent(4)}")
        tell(f"July: south was removed, and refused after {took:.1f} s; the others did round {len(self.rows())}")

        before = self.certificate(address)
        self.fewbytes("server", "federation", "renew")
        self.until(lambda: self.certificate(address) != before, "the renewed certificate is served")
        self.further(2)
        tell(
            f"August: the certificate was renewed from the CA under open connections; round {len(self.rows())} is done"
        )

        server.send_signal(signal.SIGTERM)
        server.wait(SECONDS)
        done, address = len(self.rows()), f"{self.host('server-2')}:9443"
        self.fewbytes("server", "federation", "renew", "--address", address)
        server = self.deploys("server-2", "--resume", str(self.run()), "--rounds", str(done + 3))
        for host in ("north", "west-2", "east"):
            self.fewbytes(host, "node", "moved", "node", address)
        insist(server.wait(SECONDS) == 0, self.log("server-2").read_text())
        insist([row["round"] for row in self.rows()] == list(range(1, done + 4)), "a round was lost, or done twice")
        insist(self.absent(4) == {1}, f"absent: {self.absent(4)}")
        tell(f"October: the server moved to {address} and resumed after round {done}; no node was restarted")
        self.same_as_here(self.run(), ["--clients", "3", *LATER, "--rounds", "2"], until=1)

        again = ["fedavg", *SETTINGS, "--federation", "federation", "--rounds", "3", "--min-replies", "1"]
        insist(self.deploys("server-2", *again).wait(SECONDS) == 0, self.log("server-2").read_text())
        insist(self.absent(3) == set(), f"absent: {self.absent(3)}")
        self.same_as_here(self.run(), ["--clients", "3", "--rounds", "3"], until=3)
        tell("December: a second run of the same federation; its rounds, model and ledger equal the local engine's")
        insist(not [path for path in self.place.glob("server/**/keys/*") if path.suffix != ".pub"], "a private key")

    def certificate(self, address: str) -> str:
        """The server's certificate as north gets it, verified by north's copy of the CA's."""
        host, _, port = address.rpartition(":")
        ca = str(self.place / "north" / "node" / "certificates" / "ca.crt")
        command = self.network.on("north", [sys.executable, "-c", SHOW_CERTIFICATE, host, port, ca])
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def same_as_here(self, run: Path, words: list[str], until: int) -> None:
        """Insist that a run's first rounds equal the local engine's and, if these are all, its model and ledger."""
        out = self.place / "here" / run.name
        self.fewbytes("server", "run", "fedavg", *SETTINGS, *words, "--out", str(out))
        (here,) = out.iterdir()
        insist(rounds(run / "rounds.jsonl")[:until] == rounds(here / "rounds.jsonl")[:until], "the rounds differ")
        if len(rounds(run / "rounds.jsonl")) == until:
            model = Path("models") / "global.safetensors"
            insist((run / model).read_bytes() == (here / model).read_bytes(), "the models differ")
            tables = [pq.read_table(each / "ledger.parquet").drop_columns("time") for each in (run, here)]
            insist(tables[0].equals(tables[1]), "the ledgers differ")


def rounds(path: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without their times."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times = ("seconds", "seconds_scoring", "time")
    return [{k: v for k, v in row.items() if k not in times} for row in rows if row["phase"] == "round"]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process."""
    process.terminate()
    process.wait()


def insist(holds: object, what: str) -> None:
    """End the story unless something holds."""
    if not holds:
        raise SystemExit(what)


def tell(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Play the year."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("consortium"), help="a new folder for all hosts' files")
    options.add_argument("--loopback", action="store_true", help="use no network namespaces")
    given = options.parse_args()
    place = given.out.absolute()
    insist(not place.exists(), f"{place} is there already: remove it, or name another folder (--out)")
    place.mkdir(parents=True)
    with Network(not given.loopback) as network, ExitStack() as stack:
        Consortium(place, network, stack).story()


if __name__ == "__main__":
    main()
