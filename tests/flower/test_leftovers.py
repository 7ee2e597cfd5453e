"""Which processes a deployment ends that finds what a killed one has left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: nothing to deploy", exc_type=ImportError)

from runs import until

import fewbytes as fb
from fewbytes.base.processes import Process, is_alive
from fewbytes.experiments.deploy import Deployment
from fewbytes.experiments.hosts import settled
from fewbytes.experiments.places import Nodes, places
from fewbytes.experiments.settings import make_experiment
from fewbytes.flower.children import Child, end, running, send
from fewbytes.flower.private import programs
from fewbytes.flower.processes import Processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process started")
SETTINGS = {"method": "fedavg", "dataset": "digits", "clients": 1, "rounds": 1, "engine": "flower-deployment"}
Start = Callable[[str], Process]


@pytest.fixture
def start(tmp_path) -> Iterator[Start]:
    """Starts a process that sleeps, called as told, with all of a deployment's environment."""
    started: list[subprocess.Popen[bytes]] = []

    def new(called: str) -> Process:
        environment = {**os.environ, programs.HOME: str(tmp_path / "deployment" / "flower-home")}
        started.append(subprocess.Popen([called, "60"], executable=shutil.which("sleep"), env=environment))
        pid = started[-1].pid
        assert until(lambda: called.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
        return next(each for each in running() if each[0] == pid)

    yield new
    for each in started:
        each.kill()
        each.wait()


def prepare(folder: Path, left: str | None) -> None:
    """Prepare a deployment in a folder where another has left that in its log of events."""
    (folder / "deployment").mkdir(exist_ok=True)
    if left is not None:
        (folder / "deployment" / "events.jsonl").write_text(left)
    experiment = make_experiment(SETTINGS)
    Deployment(settled(experiment, False), folder, Nodes(places(experiment, None)), False).prepare()


def test_the_server_that_a_killed_deployment_left_is_ended_and_no_process_that_only_looks_like_it(tmp_path, start):
    server, copy = start(programs.SERVER), start(programs.SERVER)
    prepare(tmp_path, json.dumps({"event": "began", "pid": server[0], "started": server[1]}) + "\n")
    assert until(lambda: not is_alive(server))
    assert is_alive(copy)


@pytest.mark.parametrize(
    ("called", "started"),
    [(programs.SERVER, "1"), (programs.SERVER, ""), ("sleep", None)],
    ids=["reused", "none", "other"],
)
def test_a_process_that_has_the_id_but_is_another_is_left_alone(tmp_path, start, called, started):
    """Its id was given again; or the file is a stranger's, and names a process of the user's."""
    process = start(called)
    event = {"event": "began", "pid": process[0], "started": process[1] if started is None else started}
    prepare(tmp_path, json.dumps(event) + "\n")
    assert is_alive(process)


@pytest.mark.parametrize("left", [None, "", '{"event": "beg', "[1]\n", '{"pid": 99999999999, "started": "1"}\n'])
def test_a_log_of_events_that_names_no_process_hinders_nothing(tmp_path, start, left):
    process = start(programs.SERVER)
    prepare(tmp_path, left)
    assert is_alive(process)


def test_a_signal_reaches_that_very_process_only(start):
    pid, started = start("sleep")
    send((pid, str(int(started) + 1)), signal.SIGKILL)
    assert is_alive((pid, started))
    send((pid, started), signal.SIGKILL)
    assert until(lambda: not is_alive((pid, started)))


def test_that_nothing_can_start_the_runs_server_any_more_is_noticed(tmp_path):
    """As when what the SuperLink starts for it is killed: the run would stand still for ever."""
    processes = Processes(tmp_path, "127.0.0.1:0")
    script = tmp_path / f"{programs.LAUNCHER}.sh"  # a file: the bare name is in no command line but the launcher's
    script.write_text(f"(exec -a {programs.LAUNCHER} sleep 600) & wait")
    link = Child(["bash", str(script)], tmp_path, tmp_path / "log")
    processes._superlink, processes._answered = link, time.monotonic()
    try:
        processes.check_launcher()
        deadline = time.monotonic() + 60
        while not processes._launchers and time.monotonic() < deadline:
            processes.check_launcher()
        (launcher,) = processes._launchers
        os.kill(launcher[0], signal.SIGKILL)
        assert until(lambda: not is_alive(launcher), every=0.01)
        with pytest.raises(fb.FewbytesError, match="has ended"):
            processes.check_launcher()
    finally:
        end([link])
