"""Two hosts of a Ray cluster on this machine, each with a network, processes, /dev/shm and files of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

from runs import PATIENCE

TOOLS = ("unshare", "nsenter", "ip", "mount")
WIRE = "wire"  # the network device between the two, at either
ADDRESS = "10.77.0.1:6379"
OWN = "mount -t tmpfs none /dev/shm && ip link set lo up"
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
QUICK = {"RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "500"}  # a dead host is soon missed


def permitted() -> bool:
    """Whether this machine lets us make such hosts."""
    if sys.platform != "linux" or not all(shutil.which(tool) for tool in TOOLS):
        return False
    tried = "mount -t tmpfs none /dev/shm && ip link add wire type veth peer name other"
    return subprocess.run(["unshare", "-mnpf", "sh", "-c", tried], capture_output=True).returncode == 0


class Host:
    """A host whose files are in `place`, which if `hidden` is another folder here than everywhere else."""

    def __init__(self, number: int, place: Path, hidden: bool = False) -> None:
        self.place, self.address = place, f"10.77.0.{number}"
        hide = f" && mount -t tmpfs none {place}" if hidden else ""
        command = ["unshare", "-mnpf", "--mount-proc", "--kill-child", "sh", "-c", f"{OWN}{hide} && exec sleep 1d"]
        libc = ctypes.CDLL(None)
        self._first = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),  # the host goes with us
        )  # fmt: skip
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        deadline = time.monotonic() + PATIENCE
        while not (there := children.read_text().split()) or b"sleep" not in _command(int(there[0])):
            assert time.monotonic() < deadline, "the host does not start"
            time.sleep(0.02)
        self.pid = int(there[0])

    def started(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """A command that runs on the host."""
        entered = ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", "--", *command]
        own = {"TMPDIR": str(self.place)}
        return subprocess.Popen(entered, env={**os.environ, **RAY, **QUICK, **own}, **options)

    def run(self, *command: str) -> str:
        """What a command on the host says."""
        with TemporaryFile("w+") as said:  # what a command leaves running holds a pipe open
            code = self.started(*command, stdout=said, stderr=subprocess.STDOUT).wait(timeout=PATIENCE)
            said.seek(0)
            text = said.read()
        assert code == 0, text
        return text

    def files(self, pattern: str) -> list[Path]:
        """Which files of the host there are, below `place`."""
        return list(Path(f"/proc/{self.pid}/root{self.place}").glob(pattern))

    def kill(self) -> None:
        """End all that runs on the host at once, as a loss of power does."""
        self._first.kill()
        self._first.wait()

    def moved(self) -> tuple[int, int]:
        """Bytes that have come to the host and left it, all that Ray says included."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        fields = next(line.split() for line in lines if line.strip().startswith(f"{WIRE}:"))
        return int(fields[1]), int(fields[9])


class Hosts:
    """A context: `near`, with the cluster's head, and `far`, which sees nothing of the folder `place`."""

    def __enter__(self) -> Self:
        self.place = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))  # short, for Ray's sockets lie below it
        with ExitStack() as ending:
            ending.callback(shutil.rmtree, self.place, ignore_errors=True)
            self.near = Host(1, self.place)
            ending.callback(self.near.kill)
            self.far = Host(2, self.place, hidden=True)
            ending.callback(self.far.kill)
            wire = ["ip", "link", "add", WIRE, "type", "veth", "peer", "name", WIRE, "netns", str(self.far.pid)]
            subprocess.run(["nsenter", "-t", str(self.near.pid), "-n", *wire], check=True)
            for host in (self.near, self.far):
                # on no device of the wire's, which is gone with the other host
                host.run("ip", "address", "add", f"{host.address}/32", "dev", "lo")
                host.run("ip", "link", "set", WIRE, "up")
                host.run("ip", "route", "add", "default", "dev", WIRE, "src", host.address)
            self._ray(self.near, "--head", "--port=6379", f"--temp-dir={self.place}/ray", "--include-dashboard=false")
            self.join()
            self._ending = ending.pop_all()
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
        self._ending.close()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
