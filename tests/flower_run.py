"""Runs a Flower app in Flower's simulation by `flwr run`, with a SuperLink of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from runs import PATIENCE


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def flower_run(app: Path, place: Path, config: str, **variables: str) -> str:
    """What `flwr run` prints. `place`: an empty folder for Flower; `variables`: more of the environment."""
    scripts = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "FLWR_HOME": str(place / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": "local",  # not a cluster that somebody left on this machine
        "FLWR_LOCAL_CONTROL_API_PORT": free_port(), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": free_port(), **variables,
    }  # fmt: skip
    command = ["flwr", "run", ".", "--stream", "--run-config", config]
    try:
        for _ in range(5):  # Flower gives its SuperLink 15 s to start, which a busy machine may not
            done = subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, timeout=PATIENCE)
            if "Failed to start local SuperLink" not in done.stdout + done.stderr:
                break
    finally:
        _end_superlink(place)
    return done.stdout + done.stderr


def _end_superlink(place: Path) -> None:
    """Flower's local SuperLink stays up."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if (
                b"flower-superlink" in process.read_bytes()
                and str(place).encode() in (process.parent / "environ").read_bytes()
            ):
                os.kill(int(process.parent.name), signal.SIGTERM)
        except OSError:
            continue
