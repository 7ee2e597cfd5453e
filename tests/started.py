"""Commands of this package as processes of a test, which end with it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from runs import PATIENCE


def started(command: list[str], log: Path, stack: ExitStack, **how) -> subprocess.Popen:
    """A process that ends with the test."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    file = stack.enter_context(log.open("ab"))
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where these tests run behind nohup
    process = subprocess.Popen(
        command, stdout=file, stderr=file, env=environment, start_new_session=True, preexec_fn=heard, **how
    )

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=PATIENCE)

    stack.callback(end)
    return process
