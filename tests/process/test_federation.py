"""A year of a federation: members come, go, get new keys, and the server moves, in a running deployment."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from runs import configured, fingerprint, until
from started import started

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

FEWBYTES = [sys.executable, "-m", "fewbytes"]
SETTINGS = ["--dataset", "digits", "--samples", "40/10", "--set", "epochs=20", "--set", "lr=0.05", "--set", "batch=20"]
PATIENCE = 240  # seconds for a step
EQUAL = {
    "method": "fedavg", "dataset": "digits", "clients": 4, "samples": "40/10", "rounds": 2, "engine": "local",
    "parameters": {"epochs": 20, "lr": 0.05, "batch": 20},
}  # fmt: skip


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Consortium:
    """A server's folder, and sites in folders of their own."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self.place, self._stack = place, stack
        self.said = place / "server.log"
        self.nodes: dict[str, subprocess.Popen] = {}

    def does(self, *command: str) -> str:
        """What a command prints for others."""
        done = subprocess.run(
            [*FEWBYTES, *command], cwd=self.place, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def site(self, name: str, folder: str = "") -> None:
        """Have a site join, by a key made there, and start its node."""
        invitation = self.does("federation", "invite", name)
        request = self.does("node", "init", name, "--invitation", invitation, "--folder", folder or name)
        self.does("federation", "join", request)
        self.start(folder or name)

    def start(self, folder: str) -> None:
        command = ["sh", str(self.place / folder / "start.sh")]
        self.nodes[folder] = started(command, self.log(folder), self._stack, cwd="/")

    def log(self, folder: str) -> Path:
        return self.place / f"{folder}.log"

    def deploys(self, *command: str) -> subprocess.Popen:
        return started([*FEWBYTES, "deploy", *command], self.said, self._stack, cwd=self.place)

    @property
    def run(self) -> Path:
        return sorted((self.place / "runs").iterdir())[-1]

    def rows(self) -> list[dict]:
        files = sorted((self.place / "runs").glob("*/rounds.jsonl"))
        lines = files[-1].read_text().splitlines() if files else []
        return [row for row in map(json.loads, lines) if row["phase"] == "round"]

    def has_said(self, what: str, seconds: float = PATIENCE) -> None:
        assert until(lambda: re.search(what, self.said.read_text()), seconds), self.said.read_text()

    def all_take_part(self, count: int) -> bool:
        """In the last round."""
        rows = self.rows()
        return bool(rows) and rows[-1]["cohort"] == count and not rows[-1].get("left_out")


def test_a_year_of_a_federation(tmp_path):
    with ExitStack() as stack:
        there = Consortium(tmp_path, stack)
        there.does("federation", "init", "--address", free_address())
        for name in ("north", "south", "west"):
            there.site(name)
        later = ["--newcomers", "1", "--arrival", "2", "--stay", "--rounds", "5000"]
        server = there.deploys("fedavg", *SETTINGS, "--federation", "federation", *later)
        assert until(lambda: len(there.rows()) >= 2, PATIENCE), there.said.read_text()

        there.site("east")  # joins while the run goes
        there.has_said("east may take part from now on", 20)
        assert until(lambda: there.all_take_part(4), PATIENCE), there.said.read_text()

        there.does("federation", "remove", "south")
        there.has_said("south is no member any more, and refused", 10)
        seen = len(there.rows())
        assert until(lambda: len(there.rows()) >= seen + 3, PATIENCE), there.said.read_text()  # the others go on
        assert {left["client"] for left in there.rows()[-1]["left_out"]} == {1}
        # its node reads so with its next question: an open one waits for the server's answer
        assert until(lambda: "does not accept this node" in there.log("south").read_text(), PATIENCE)

        there.nodes["west"].kill()  # and its disk is lost
        there.site("west", "west-again")
        there.has_said("west has a new key", 20)
        there.start("west")  # whoever has the old disk
        assert until(lambda: "not registered there" in there.log("west").read_text(), PATIENCE), there.log(
            "west"
        ).read_text()
        there.site("south", "south-again")  # invited once more, with another key
        assert until(lambda: there.all_take_part(4), PATIENCE), there.said.read_text()
        assert there.does("federation", "list").count("SHA256:") == 4

        there.does("federation", "renew")  # under open connections
        seen = len(there.rows())
        assert until(lambda: len(there.rows()) >= seen + 2, PATIENCE), there.said.read_text()

        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE) == 130
        done, moved = len(there.rows()), free_address()
        there.does("federation", "renew", "--address", moved)
        nodes = ("north", "east", "west-again", "south-again")
        for folder in nodes:
            there.nodes[folder].send_signal(signal.SIGTERM)
            there.nodes[folder].wait(timeout=PATIENCE)
            path = tmp_path / folder / "node.toml"
            path.write_text(re.sub(r'superlink = ".*"', f'superlink = "{moved}"', path.read_text()))
            there.start(folder)
        server = there.deploys("--resume", str(there.run), "--rounds", str(done + 2))
        assert server.wait(timeout=PATIENCE) == 0, there.said.read_text()
        assert len(there.rows()) == done + 2
        assert there.all_take_part(4)

        command = ["fedavg", *SETTINGS, "--federation", "federation", "--rounds", "2", "--min-replies", "1"]
        assert there.deploys(*command).wait(timeout=PATIENCE) == 0, there.said.read_text()
        assert there.all_take_part(4)
        here, found = fingerprint(configured(tmp_path / "here", **EQUAL)), fingerprint(there.run)
        assert (found["server"], found["ledger"]) == (here["server"], here["ledger"])
        assert not [path for path in (tmp_path / "runs").rglob("keys/*") if path.suffix != ".pub"]
        what = [
            json.loads(line)["what"] for line in (tmp_path / "federation" / "history.jsonl").read_text().splitlines()
        ]
        assert what.count("joined") == 5
        assert what.count("replaced") == what.count("removed") == 1
