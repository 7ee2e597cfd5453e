"""Two hosts with a table each of their own: who has to mend something hears it at once; nothing is carried twice."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from runs import PATIENCE, until
from started import started

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)


MARK = "MEIER1961"  # a patient: in the names of a site's folders, files and columns, and in its values


def table(path: Path, rows: int, age: str | None = None, patient: str = "") -> None:
    """A table whose third row has this age; with a column called as the patient, who is in each row."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 3))
    lines = [f"{a:.3f},{b:.3f},{c:.3f},{int(a + b > 0)}" for a, b, c in x]
    if age is not None:
        lines[2] = age + "," + lines[2].partition(",")[2]
    lines = ["age,bmi,lab,outcome", *lines]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line},{patient}\n" if patient else f"{line}\n" for line in lines))


def holding(mark: str, folder: Path) -> list[Path]:
    """The files below a folder that hold it."""
    return [path for path in folder.rglob("*") if path.is_file() and mark.encode() in path.read_bytes()]


@pytest.fixture
def sites(tmp_path) -> list[str]:
    """The options of a deployment of two hosts, whose tables lie in tmp_path; a value is missing in one."""
    table(tmp_path / "server.csv", 60)
    table(tmp_path / MARK / "north.csv", 80, patient=MARK)
    table(tmp_path / MARK / "south.csv", 60, age="", patient=MARK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    data = ["--dataset", "server.csv", "--target", "outcome", "--partition", "local"]
    return [*data, "--hosts", "north,south", "--address", address, "--min-replies", "1", "--set", "batch=20"]


def host(run: Path, name: str, stack: ExitStack) -> None:
    """Carry a host's folder there, and start its node."""
    there = run.parents[1]
    shutil.copytree(run / "deployment" / "nodes" / name, there / name)
    with open(there / name / "node.toml", "a") as file:
        file.write(f'client-data = "{there / MARK / name}.csv"\n')
    started(["sh", str(there / name / "start.sh")], there / f"{name}.log", stack, cwd="/")


DEPLOY = [sys.executable, "-m", "fewbytes", "deploy"]


def begun(there: Path, sites: list[str], said: Path, what: str, stack: ExitStack) -> tuple[subprocess.Popen, Path]:
    """A server that has said so, and its run's folder."""
    server = started([*DEPLOY, "fedavg", *sites, "--rounds", "2"], said, stack, cwd=there)
    assert until(lambda: what in said.read_text()), said.read_text()
    (run,) = (there / "runs").glob("[!.]*")
    return server, run


def test_a_site_that_is_not_fit_hears_so_at_once_and_the_same_folders_serve_once_it_is_mended(tmp_path, sites):
    """And the server learns nothing of names of files, of columns that it does not have, and of values."""
    said = tmp_path / "server.log"
    table(tmp_path / MARK / "south.csv", 60, age=MARK, patient=MARK)
    with ExitStack() as stack:
        server, run = begun(tmp_path, sites, said, "sh start.sh", stack)
        host(run, "south", stack)
        why = "a table's column 'age' has a value that is not a number"
        assert until(lambda: f"client 1 cannot join: south: {why}" in said.read_text())
        assert server.poll() is None  # it waits for the other
        assert list(run.rglob("*.db"))  # all that it received
        assert not holding(MARK, run)
        host(run, "north", stack)
        assert server.wait(timeout=PATIENCE) == 2
        assert f"resume with: fewbytes deploy --resume {run}" in said.read_text()
        assert not (run / "checkpoint" / "round-0.state").exists()

        table(tmp_path / MARK / "south.csv", 60, patient=MARK)
        again = started([*DEPLOY, "--resume", str(run), "--rounds", "3"], said, stack, cwd=tmp_path)
        assert again.wait(timeout=PATIENCE) == 0, said.read_text()

    assert json.loads((run / "result.json").read_text())["rounds"] == 3
    assert json.loads((run / "partition.json").read_text())["train"] == [64, 48]
    assert not holding(MARK, run)
    assert MARK not in said.read_text()
    assert MARK in (tmp_path / "south.log").read_text()  # which has the file, the row and the value
    assert "the data of client 1 are " in (tmp_path / "south.log").read_text()
    assert "If the run has finished, press Ctrl-C" in (tmp_path / "north.log").read_text()


def test_a_server_that_was_stopped_as_it_waited_goes_on_with_what_is_said_anew(tmp_path, sites):
    said = tmp_path / "server.log"
    with ExitStack() as stack:
        server, run = begun(tmp_path, sites, said, "waiting for clients: 0 of 2", stack)
        second = started([*DEPLOY, "--resume", str(run)], tmp_path / "second.log", stack, cwd=tmp_path)
        assert second.wait(timeout=PATIENCE) == 2  # and takes nothing away
        assert "another deployment is running there: stop it" in (tmp_path / "second.log").read_text()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=PATIENCE) == 130
        assert f"interrupted; resume with: fewbytes deploy --resume {run.relative_to(tmp_path)}" in said.read_text()

        again = [*DEPLOY, "--resume", str(run), "--missing", "drop"]
        for kill in (True, False):
            server = started(again, said, stack, cwd=tmp_path)
            if kill:
                assert until(lambda: (run / "config.toml").exists())
                server.kill()
                server.wait(timeout=PATIENCE)
        for name in ("north", "south"):
            host(run, name, stack)
        assert server.wait(timeout=PATIENCE) == 0, said.read_text()
    counts = json.loads((run / "partition.json").read_text())
    assert counts["train"] == [64, 47]  # a row of 60 is left out
    assert counts["names"] == ["north", "south"]
    page = (run / "report.html").read_text()
    assert "By site" in page
    assert '<th scope="row">south</th>' in page
