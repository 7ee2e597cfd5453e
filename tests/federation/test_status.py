"""The status of a run, as another process reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import fewbytes

import fewbytes as fb
from fewbytes.base.processes import started
from fewbytes.running.node_status import NodeWatch
from fewbytes.running.status import Site, Status, newest, read

X, Y = torch.eye(4).repeat(4, 1), torch.arange(4).repeat(4)


def make_task(clients: int = 2) -> fb.Task:
    return fb.Task.of(lambda: torch.nn.Linear(4, 4), [((X, Y), (X, Y))] * clients, test=(X, Y))


class Looking(fb.Watcher):
    """Reads the status after each round, as another process would."""

    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def scored(self, row):
        if (self.folder / "status.json").exists():
            self.seen.append(read(self.folder))

    def note(self, text):
        pass


def test_the_status_of_a_run_that_goes_on(tmp_path):
    looking = Looking(tmp_path / "run")
    done = fb.run(fb.FedAvg(), make_task(), rounds=4, out=tmp_path / "run", watcher=looking)
    status = looking.seen[-1]  # watchers are called before the file is written: it is a round behind
    assert (status.state, status.round, status.rounds, status.cohort) == ("running", 3, 4, 2)
    assert [(site.name, site.present, site.seen is None) for site in status.sites] == [
        ("client 0", True, False),
        ("client 1", True, False),
    ]
    last, result = read(tmp_path / "run"), done.summary
    assert (last.state, last.why, last.round) == ("ended", "", 4)
    assert (last.uplink_bytes, last.downlink_bytes) == (result["uplink_bytes"], result["downlink_bytes"])
    assert (last.metric, last.kind, last.score) == ("accuracy", "global", result["score"]["final"])


def test_a_temporary_run_has_no_status(tmp_path):
    result = fb.run(fb.FedAvg(), make_task(), rounds=1)
    assert not (result.folder / "status.json").exists()


def test_a_run_that_fails_says_why(tmp_path):
    class Failing(fb.Watcher):
        def scored(self, row):
            raise RuntimeError("the watcher's own error")

    with pytest.raises(RuntimeError):
        fb.run(fb.FedAvg(), make_task(), rounds=3, out=tmp_path / "run", watcher=Failing())
    status = read(tmp_path / "run")
    assert (status.state, status.why) == ("stopped", "the watcher's own error")
    shown = fewbytes("status", tmp_path / "run")
    assert shown.returncode == 1
    assert "stopped (the watcher's own error), round" in shown.stdout


def test_a_resumed_run_counts_on(tmp_path):
    class Stops(fb.Watcher):
        def scored(self, row):
            if row["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.run(fb.FedAvg(), make_task(), rounds=4, out=tmp_path / "run", watcher=Stops())
    assert read(tmp_path / "run").why == "interrupted by Ctrl-C or SIGTERM"
    fb.run(fb.FedAvg(), make_task(), rounds=4, out=tmp_path / "run", resume=True)
    status = read(tmp_path / "run")
    assert (status.state, status.round, status.usual_seconds > 0) == ("ended", 4, True)


def test_a_limit_that_ends_a_run_is_named(tmp_path):
    fb.run(fb.FedAvg(), make_task(), rounds=9, out=tmp_path / "run", stop_when="global>=0")
    status = read(tmp_path / "run")
    assert (status.state, status.round, status.rounds) == ("ended", 1, 1)
    assert "global" in status.why


def test_another_runs_status_is_left_alone(tmp_path):
    fb.run(fb.FedAvg(), make_task(), rounds=1, out=tmp_path / "run")
    before = (tmp_path / "run" / "status.json").read_bytes()
    with pytest.raises(fb.UserError, match="already holds a run"):
        fb.run(fb.FedAvg(), make_task(), rounds=1, out=tmp_path / "run")
    assert (tmp_path / "run" / "status.json").read_bytes() == before


def test_a_status_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "run" / "status.json").mkdir(parents=True)
    looking = Looking(tmp_path / "elsewhere")
    notes = []
    looking.note = notes.append
    assert fb.run(fb.FedAvg(), make_task(), rounds=2, out=tmp_path / "run", watcher=looking).summary["rounds"] == 2
    assert "status.json failed" in notes[0]


def test_a_killed_run_is_recognised(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    its = process.pid, started(Path(f"/proc/{process.pid}/stat"))[0]
    Status("run", "fedavg", round=3, rounds=9, process=its).write(tmp_path)
    assert read(tmp_path).state == "running"
    process.kill()
    process.wait()
    assert read(tmp_path).state == "stopped"
    assert "kill -9" in read(tmp_path).why
    Status("run", "fedavg", round=3, rounds=9, process=its, host="another").write(tmp_path)
    assert read(tmp_path).state == "running"  # nothing is known of another machine's processes


def test_the_command_takes_the_newest_run(tmp_path):
    for name, when in (("b", 1000), ("a", 2000)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        Status(name, "fedavg", "ended").write(tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "status.json", (when, when))
    assert newest(tmp_path / "runs").name == "a"
    assert fewbytes("status", cwd=tmp_path).stdout.startswith("a (fedavg): ended")
    assert json.loads(fewbytes("status", "runs/b", "--json", cwd=tmp_path).stdout)["run"] == "b"


def test_absent_sites_and_the_time_left_are_printed(tmp_path):
    now = time.time()
    sites = [Site("client 0 (north)", True, now - 100, now - 2), Site("client 1 (south)", False, now - 250)]
    status = Status("r", "fedavg", "waiting", "for south", 12, 50, usual_seconds=10.0, sites=sites)
    status.write(tmp_path)
    lines = fewbytes("status", tmp_path).stdout.splitlines()
    assert lines[0].endswith("waiting (for south), round 12 of 50 finished, about 6 min 20 s left")
    assert "sites: 1 of 2 present" in lines
    assert [line for line in lines if "south): ABSENT since" in line and line.endswith("no reply yet")]


@pytest.mark.parametrize("text", ["", "{}", '{"run": 3}', "\udcff"])
def test_what_is_no_status_is_one_line(tmp_path, text):
    (tmp_path / "status.json").write_bytes(text.encode(errors="surrogateescape"))
    shown = fewbytes("status", tmp_path)
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    assert "is not the status of a run" in shown.stderr


def test_no_run_is_one_line(tmp_path):
    for arguments in ([], ["runs"], ["http://127.0.0.1:1"]):
        shown = fewbytes("status", *arguments, cwd=tmp_path)
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)


def test_a_node_is_in_trouble_until_it_is_connected():
    node = NodeWatch("north", "server:9092")
    assert "north is not connected to server:9092" in node.read().trouble()
    node.connected()
    node.moved(10, 20)
    assert node.read().trouble() == ""
    silent = node.read()
    silent.written += 1000
    assert "no contact with server:9092 for" in silent.trouble()
    node.cut_off("it does not know this node's key")
    assert node.read().trouble().endswith("it does not know this node's key")
