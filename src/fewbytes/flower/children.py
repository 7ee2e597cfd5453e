"""Child processes that end with their parent, and helpers to find commands and free ports."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.processes import Process, is_alive, started
from fewbytes.flower.application import REQUIREMENT
from fewbytes.flower.dated_lines import LogFile
from fewbytes.flower.private.programs import ENVIRONMENT, HOME, last_words

GRACE_SECONDS = 5  # between SIGTERM and SIGKILL


class Child:
    """A lasting process whose lines go to its log."""

    def __init__(
        self, command: Sequence[str], home: Path, log: Path, variables: Mapping[str, str] = ENVIRONMENT
    ) -> None:
        self.log = log
        self.process = start(command, home, subprocess.PIPE, subprocess.STDOUT, variables=variables)
        assert self.process.stdout is not None
        self._lines = LogFile(log, self.process.stdout)

    def reason(self) -> str:
        """Why it ended: the signal, or what it printed last."""
        if (self.process.returncode or 0) < 0:
            return f"killed by {signal.Signals(-self.process.returncode).name}"
        return last_words(self._lines.tail())


def start(
    command: Sequence[str],
    home: Path,
    output: Any,
    errors: Any,
    stdin: int = subprocess.DEVNULL,
    variables: Mapping[str, str] = ENVIRONMENT,
) -> subprocess.Popen[bytes]:
    """Start one of Flower's commands in a session of its own."""
    # Flower finds flower-superexec, flwr-serverapp and flwr-clientapp on PATH
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**variables, **os.environ, HOME: str(home.absolute()), "PATH": path}
    environment["PYTHONSAFEPATH"] = "1"  # files in the current folder must not shadow libraries
    for name in ("NO_PROXY", "no_proxy"):  # a proxy reaches itself at these names, not this machine
        environment[name] = ",".join(filter(None, [environment.get(name), "localhost", "127.0.0.1", "::1"]))
    libc, parent = ctypes.CDLL(None), os.getpid()

    def die_with_parent() -> None:
        if sys.platform == "linux":
            libc.prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of ours are never used there
        return subprocess.Popen(
            [executable(command[0]), *command[1:]], env=environment,
            stdin=stdin, stdout=output, stderr=errors,
            start_new_session=True, preexec_fn=die_with_parent, umask=0o077,
        )  # fmt: skip


def end(ending: list[Child]) -> None:
    """End processes and (Linux) all that they started: SIGTERM, then SIGKILL after GRACE_SECONDS."""
    alive = [each.process for each in ending if each.process.poll() is None]
    family = family_of({process.pid for process in alive})
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in alive) or family & running().keys():
        if time.monotonic() > deadline:
            for process in alive:
                process.kill()
            for each in family & running().keys():
                send(each, signal.SIGKILL)
        time.sleep(0.05)


def send(process: Process, number: signal.Signals) -> None:
    """Send a signal to that very process, if it runs."""
    if is_alive(process):  # ids are assigned in turn, so none is reused before the next line
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process[0], number)


def running() -> dict[Process, int]:
    """Every running process, and its parent's id; nothing where there is no /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        since, parent = started(path)
        if since:
            found[int(path.parent.name), since] = parent
    return found


def command_of(process: Process) -> list[str]:
    """The command line of a process, an argument each; none if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{process[0]}/cmdline").read_text(errors="replace").split("\0")
    return []


def family_of(pids: set[int]) -> set[Process]:
    """The processes of these ids and all they started."""
    there, family = running(), set[Process]()
    while more := {each for each, parent in there.items() if each[0] in pids or parent in pids} - family:
        family |= more
        pids = {pid for pid, _ in more}
    return family


def executable(command: str) -> str:
    """The path of a command. Raises UserError if it is not found."""
    beside = Path(sys.executable).parent / command
    path = str(beside) if beside.exists() else shutil.which(command)
    if path is None:
        raise UserError(f"{command} not found: a deployment needs Flower: pip install '{REQUIREMENT}'")
    return path


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, at `::` also for IPv4. Raises OSError."""
    family, both = socket.AF_INET6 if ":" in host else socket.AF_INET, host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, dualstack_ipv6=both)


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def free_port(host: str, taken: Iterable[int] = ()) -> int:
    """A free port of the host, not in `taken`. Raises UserError."""
    while True:
        try:
            with listen(host, 0) as free:
                port = int(free.getsockname()[1])
        except OSError as error:
            raise UserError(f"cannot listen on {host}: {why_of(error)}") from None
        if port not in taken:
            return port


def why_of(error: OSError) -> str:
    """The error's short reason."""
    return str(error.strerror).partition(" (")[0].lower()
