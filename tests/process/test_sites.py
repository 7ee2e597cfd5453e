"""Two hosts with a table each of their own: who has to mend something hears it at once; nothing is carried twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from runs import until

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)
pytestmark = pytest.mark.process


def table(path: Path, rows: int, missing: bool = False) -> None:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 3))
    lines = [f"{a:.3f},{b:.3f},{c:.3f},{int(a + b > 0)}" for a, b, c in x]
    if missing:
        lines[2] = "," + lines[2].partition(",")[2]
    path.write_text("\n".join(["age,bmi,lab,outcome", *lines]) + "\n")


def started(command: list[str], log: Path, stack: ExitStack, **how) -> subprocess.Popen:
    """A process that ends with the test."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    file = stack.enter_context(log.open("ab"))
    process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True, **how)

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)

    stack.callback(end)
    return process


def test_a_site_that_is_not_fit_hears_so_at_once_and_the_same_folders_serve_once_it_is_mended(tmp_path):
    for name, rows in (("server", 60), ("north", 80), ("south", 60)):
        table(tmp_path / f"{name}.csv", rows, missing=name == "south")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    deploy = [sys.executable, "-m", "fewbytes", "deploy"]
    data = ["--dataset", "server.csv", "--target", "outcome", "--partition", "local"]
    hosts = ["--hosts", "north,south", "--address", address, "--min-replies", "1", "--rounds", "2"]
    said = tmp_path / "server.log"

    with ExitStack() as stack:
        server = started([*deploy, "fedavg", *data, *hosts, "--set", "batch=20"], said, stack, cwd=tmp_path)
        assert until(lambda: "sh start.sh" in said.read_text()), said.read_text()
        (run,) = (tmp_path / "runs").iterdir()

        def host(name: str) -> None:
            shutil.copytree(run / "deployment" / "nodes" / name, tmp_path / name)
            with open(tmp_path / name / "node.toml", "a") as file:
                file.write(f'client-data = "{tmp_path / name}.csv"\n')
            started(["sh", str(tmp_path / name / "start.sh")], tmp_path / f"{name}.log", stack, cwd="/")

        host("south")
        assert until(lambda: "client 1 cannot join: south: south.csv: column 'age', row 3" in said.read_text())
        assert server.poll() is None  # it waits for the other
        host("north")
        assert server.wait(timeout=60) == 2
        assert f"go on with: fewbytes deploy --resume {run}" in said.read_text()
        assert not (run / "checkpoint" / "round-0.state").exists()

        table(tmp_path / "south.csv", 60)
        again = started([*deploy, "--resume", str(run), "--rounds", "3"], said, stack, cwd=tmp_path)
        assert again.wait(timeout=120) == 0, said.read_text()

    assert json.loads((run / "result.json").read_text())["rounds"] == 3
    assert json.loads((run / "partition.json").read_text())["train"] == [64, 48]
    assert "the data of client 1 are " in (tmp_path / "south.log").read_text()
    assert "if the run is over, Ctrl-C ends this node" in (tmp_path / "north.log").read_text()
