"""Flower's launcher of runs' servers, which becomes the server of its first run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace

from flwr.supercore.cli import flower_superexec

from fewbytes.flower.private import replaced


def run_launcher() -> None:
    """`flower-superexec`; when a run comes, this process becomes its server, rather than start another: a deployment
    has one run, and a launcher takes 100 MB. Raises AttributeError where Flower has changed."""
    by = SimpleNamespace(Popen=_become, DEVNULL=subprocess.DEVNULL)
    replaced("flwr.supercore.superexec.executor.subprocess_executor", "subprocess", by)
    flower_superexec()


def _become(command: Sequence[str], stdout: int | None = None, stderr: int | None = None) -> None:
    """Become the process of a command, which watches the launcher's parent instead of the launcher; what it prints is
    dropped if that is asked for."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream, to in ((1, stdout), (2, stderr)):
        if to is not None:
            os.dup2(nowhere, stream)
    words = list(command)
    words[words.index("--parent-pid") + 1] = str(os.getppid())
    os.execvp(words[0], words)
