"""What operators see of a real deployment: a site that goes away and comes back, one with other versions, at the
server and at the nodes, from other processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import pytest
from commands import fewbytes
from runs import PATIENCE, until
from started import started

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from scraping import free_port, get, scraped

from fewbytes.flower.dated_lines import DATED

FEWBYTES = [sys.executable, "-m", "fewbytes"]
SETTINGS = ["--dataset", "digits", "--samples", "40/10", "--set", "epochs=1", "--connect-timeout", "60"]


class Sites:
    """A server and its sites north, south and west, on this machine but in folders of their own."""

    def __init__(self, place: Path, stack: ExitStack, rounds: int) -> None:
        self.place, self._stack = place, stack
        self.ports = {name: free_port() for name in ("server", "north", "south", "west")}
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.command = [
            "fedavg", *SETTINGS, "--hosts", "north,south,west", "--address", address, "--rounds", str(rounds),
            "--monitor", str(self.ports["server"]),
        ]  # fmt: skip
        self.said = place / "server.log"

    def deploys(self) -> None:
        self.server = started([*FEWBYTES, "deploy", *self.command], self.said, self._stack, cwd=self.place)
        assert until(lambda: list(self.place.glob("runs/*/deployment/nodes/west/start.sh")), PATIENCE), self.text()

    def starts(self, name: str, versions: dict[str, str] | None = None):
        """Start a node, where other `versions` of packages appear to be installed."""
        (folder,) = self.place.glob(f"runs/*/deployment/nodes/{name}")
        for package, version in (versions or {}).items():
            about = self.place / f"with-{name}" / f"{package}-{version}.dist-info"
            about.mkdir(parents=True)
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        paths = [str(self.place / f"with-{name}"), os.environ.get("PYTHONPATH", "")]
        variables = [f"PYTHONPATH={os.pathsep.join(paths)}", f"FEWBYTES_MONITOR={self.ports[name]}"]
        command = ["env", *variables, "sh", str(folder / "start.sh")]
        return started(command, self.place / f"{name}.log", self._stack, cwd="/")

    def text(self, name: str = "server") -> str:
        return (self.place / f"{name}.log").read_text()

    def status(self, *arguments: str) -> str:
        return fewbytes("status", *arguments, cwd=self.place).stdout


def test_operators_see_a_site_go_and_come_back(tmp_path):
    with ExitStack() as stack:
        there = Sites(tmp_path, stack, 100_000)
        there.deploys()
        north, south = there.starts("north"), there.starts("south")
        assert until(lambda: "waiting for clients: 2 of 3 are connected" in there.text(), PATIENCE), there.text()
        steps = ("starting Flower's SuperLink on ", "starting the run's server", "waiting for clients: ")
        places = [there.text().find(f"fedavg: {step}") for step in steps]
        assert 0 <= places[0] < places[1] < places[2], there.text()
        assert until(lambda: "waiting (for client 2 (west))" in there.status(), PATIENCE), there.text()
        there.starts("west")
        server = there.ports["server"]
        assert until(lambda: scraped(server).get("fewbytes_rounds_done", 0) >= 2, PATIENCE), there.text()
        assert "sites: 3 of 3 present" in there.status()
        node = scraped(there.ports["south"])
        assert node["fewbytes_node_connected"] == node["fewbytes_node_runs"] == 1
        assert node["fewbytes_node_bytes_total sent"] > 1000 < node["fewbytes_node_bytes_total received"]
        assert node["fewbytes_node_training_seconds_total"] > 0 == node["fewbytes_node_refusals_total"]
        assert get(there.ports["south"], "/health") == (200, "healthy\n")
        south.send_signal(signal.SIGTERM)
        south.wait(timeout=PATIENCE)
        url = f"http://127.0.0.1:{server}"
        assert until(lambda: "(south): ABSENT since" in there.status(url), PATIENCE), there.text()
        assert scraped(server)["fewbytes_site_present client 1 (south)"] == 0
        assert get(server, "/health")[0] == 200  # the run goes on
        there.starts("south")
        assert until(lambda: scraped(server)["fewbytes_sites_present"] == 3, PATIENCE), there.text()
        assert scraped(server)["fewbytes_absences_total"] > 0
        there.server.send_signal(signal.SIGINT)
        assert there.server.wait(timeout=PATIENCE) == 130
        assert "stopped (interrupted" in there.status()
        assert until(lambda: get(there.ports["north"], "/health")[0] == 503, PATIENCE)
        assert "north is not connected to 127.0.0.1:" in get(there.ports["north"], "/health")[1]
        assert north.poll() is None
        for name in ("server", "north", "south"):
            lines = [line for line in there.text(name).splitlines() if line.strip()]
            assert not [line for line in lines if not DATED.match(line)]


def test_other_versions_are_refused_or_noted_in_words(tmp_path):
    with ExitStack() as stack:
        there = Sites(tmp_path, stack, 2)
        there.deploys()
        there.starts("north", {"torch": "2.6.0"})
        there.starts("south", {"fewbytes": "0.1.7"})
        there.starts("west")
        assert there.server.wait(timeout=PATIENCE) == 0, there.text()
        said = there.text()
        assert said.count("client 0 (north) has other versions") == 1
        assert re.search(r"client 0 \(north\) has other versions.*: torch 2\.6\.0 there, \S+ here", said)
        refused = r"south: this node has fewbytes 0\.1\.7 .*, the server \d.*: install the same version at both"
        assert re.search(refused, said)
        at_node = [line for line in there.text("south").splitlines() if "install the same version" in line]
        assert len(at_node) == 1
        (run,) = tmp_path.glob("runs/*")
        rows = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        assert {row["cohort"] for row in rows if row["phase"] == "round"} == {2}
        (found,) = json.loads((run / "result.json").read_text())["versions_at_clients"].items()
        assert (found[0], found[1]["torch"]["node"]) == ("0", "2.6.0")
        assert (
            f"client 0 (north): torch 2.6.0 (server: {metadata.version('torch')})" in (run / "report.html").read_text()
        )
