"""Flower's simulation over two hosts: Ray nodes on this machine with a network, /dev/shm and files of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import fewbytes
from hosts import ADDRESS, Hosts, permitted
from modules import needs
from runs import PATIENCE, fingerprint, lines, until

needs("ray")
pytestmark = [
    pytest.mark.skipif(not permitted(), reason="this machine lets nobody make hosts (unshare, ip link): no cluster"),
]
FAR = "fewbytes-node-*/*/checkpoint/clients/*"  # what a node on the far host works with
RUNS = {"fedavg": ["--model", "mlp"], "fedbn": ["--model", "resnet8:width=4"]}  # without and with clients' states
TERMS = ["--dataset", "digits", "--clients", "4", "--set", "batch=20", "--set", "epochs=1"]


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as both:
        yield both


def command(name: str, rounds: int, address: str) -> list[str]:
    """A run on the cluster, as the near host takes it."""
    cluster = ["--engine", "flower-simulation", "--ray-address", address]
    run = [sys.executable, "-m", "fewbytes", "run", name, *RUNS[name], *TERMS]
    return [*run, "--rounds", str(rounds), *cluster]


def local(name: str, rounds: int, out: Path) -> dict:
    """What the local engine leaves of the same run."""
    done = fewbytes("run", name, *RUNS[name], *TERMS, "--rounds", str(rounds), "--workers", "1", "--out", out)
    assert done.returncode == 0, done.stderr
    (folder,) = out.glob("[!.]*")
    return fingerprint(folder)


def wait_for_rounds(out: Path, count: int, process: subprocess.Popen) -> Path:
    """The run folder, once so many rounds are done."""
    assert until(lambda: lines(out) >= count or process.poll() is not None, every=0.01)
    assert process.poll() is None
    (folder,) = out.glob("[!.]*")
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_hosts_are_the_local_engine(name, hosts, tmp_path):
    out, worked = hosts.place / name, False
    process = hosts.near.started(*command(name, 3, "auto"), "--out", str(out))
    while process.poll() is None:
        worked |= bool(hosts.far.files(FAR))
        time.sleep(0.02)
    assert (process.returncode, worked) == (0, True)
    (folder,) = out.glob("[!.]*")
    assert fingerprint(folder) == local(name, 3, tmp_path)


def test_a_killed_run_goes_on_where_it_was(hosts, tmp_path):
    out = hosts.place / "killed"
    process = hosts.near.started(*command("fedbn", 5, ADDRESS), "--out", str(out), stderr=subprocess.DEVNULL)
    folder = wait_for_rounds(out, 2, process)
    (driver,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(driver), signal.SIGKILL)
    process.wait()
    hosts.near.run(sys.executable, "-m", "fewbytes", "run", "--resume", str(folder))
    assert fingerprint(folder) == local("fedbn", 5, tmp_path)


def test_a_host_that_dies_mid_round_costs_nothing(tmp_path):
    with Hosts() as hosts:
        out = hosts.place / "runs"
        process = hosts.near.started(*command("fedbn", 6, ADDRESS), "--out", str(out))
        folder = wait_for_rounds(out, 2, process)
        while not hosts.far.files(f"{FAR}.state"):
            assert process.poll() is None, "the far host had nothing to do"
        hosts.far.kill()
        assert process.wait(timeout=PATIENCE) == 0
        assert fingerprint(folder) == local("fedbn", 6, tmp_path)
