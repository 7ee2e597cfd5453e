"""Two hosts of a Ray cluster on this machine, each with a network, processes, /dev/shm and files of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

TOOLS = ("unshare", "nsenter", "ip", "mount")
ADDRESS = "10.77.0.1:6379"
OWN = "mount -t tmpfs none /dev/shm && ip link set lo up"
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
QUICK = {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "500"}  # a dead host is soon missed


def permitted() -> bool:
    """Whether this machine lets us make such hosts."""
    if sys.platform != "linux" or not all(shutil.which(tool) for tool in TOOLS):
        return False
    tried = "mount -t tmpfs none /dev/shm && ip link add a type veth peer name b"
    return subprocess.run(["unshare", "-mnpf", "sh", "-c", tried], capture_output=True).returncode == 0


class Host:
    """A host: processes that see `hidden` empty, if it is named, and of the network only the other host."""

    def __init__(self, number: int, hidden: Path | None = None) -> None:
        self.number, self.address = number, f"10.77.0.{number}"
        hide = "" if hidden is None else f" && mount -t tmpfs none {hidden}"
        command = ["unshare", "-mnpf", "--mount-proc", "--kill-child", "sh", "-c", f"{OWN}{hide} && exec sleep 1d"]
        self._first = subprocess.Popen(command)
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        deadline = time.monotonic() + 20
        while not (there := children.read_text().split()) or b"sleep" not in _command(int(there[0])):
            assert time.monotonic() < deadline and self._first.poll() is None, "the host does not start"
            time.sleep(0.02)
        self.pid = int(there[0])

    def started(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """A command that runs on the host."""
        entered = ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "--", *command]
        return subprocess.Popen(entered, env={**os.environ, **RAY, **QUICK}, **options)

    def run(self, *command: str) -> str:
        """What a command on the host says."""
        process = self.started(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = process.communicate(timeout=240)[0]
        assert process.returncode == 0, said
        return said

    def kill(self) -> None:
        """End all that runs on the host at once, as a loss of power does."""
        self._first.kill()
        self._first.wait()

    def moved(self) -> tuple[int, int]:
        """Bytes that have come to the host and left it, all that Ray says included."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        fields = next(line.split() for line in lines if line.strip().startswith("link:"))
        return int(fields[1]), int(fields[9])


class Hosts:
    """A context: `near`, with the cluster's head, and `far`, which sees nothing of the folder `place`."""

    def __enter__(self) -> Self:
        self.place = Path(tempfile.mkdtemp(prefix="fewbytes-", dir="/tmp"))  # short, for Ray's sockets lie below it
        self.near, self.far = Host(1), Host(2, self.place)
        pids = str(self.near.pid), str(self.far.pid)
        self.near.run("ip", "link", "add", "link", "type", "veth", "peer", "name", "link", "netns", pids[1])
        for host in (self.near, self.far):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "link")
            host.run("ip", "link", "set", "link", "up")
            host.run("ip", "route", "add", "default", "dev", "link")
        self._ray(self.near, "--head", "--port=6379", f"--temp-dir={self.place}/ray", "--include-dashboard=false")
        self.join()
        return self

    def join(self) -> None:
        """Make the far host one of the cluster's."""
        self._ray(self.far, f"--address={ADDRESS}")

    def _ray(self, host: Host, *options: str) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        host.run(
            ray, "start", *options, f"--node-ip-address={host.address}", "--num-cpus=1",
            "--object-store-memory=200000000", "--disable-usage-stats",
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        for host in (self.far, self.near):
            host.kill()
        shutil.rmtree(self.place, ignore_errors=True)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
