"""Runs `flwr` commands in one process: loading Flower takes a second, a command only milliseconds.

`python -m fewbytes.flower.commands` reads a command's arguments as a line of JSON, and ends what it prints with END.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fewbytes.base.errors import FewbytesError
from fewbytes.flower.children import start
from fewbytes.flower.private.cli import flwr_commands
from fewbytes.flower.private.programs import last_words

END = "-- end of the answer --"
COMMAND_SECONDS = 120  # for a command; the first loads Flower


class Commands:
    """A process that runs `flwr` commands (`fewbytes.flower.commands`), with the FLWR_HOME `home`."""

    def __init__(self, home: Path) -> None:
        command = [sys.executable, "-m", __name__]
        self.process = start(command, home, subprocess.PIPE, subprocess.STDOUT, subprocess.PIPE)

    def run(self, command: Sequence[str]) -> bytes:
        """Run a command and return its output. Raises FewbytesError if it does not finish in COMMAND_SECONDS."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        end, output = f"\n{END}\n".encode(), b""
        deadline = time.monotonic() + COMMAND_SECONDS
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(list(command[1:])).encode() + b"\n")
            self.process.stdin.flush()
        while not output.endswith(end):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not more:
                why = "it has ended: " + last_words(output) if ready else f"no answer in {COMMAND_SECONDS} s"
                raise FewbytesError(f"{' '.join(command)}: {why}")
            output += more
        return output.removesuffix(end)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    """Run the commands from standard input, until it ends."""
    run = flwr_commands()
    for line in sys.stdin:
        with suppress(SystemExit):
            run(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        print(f"\n{END}", flush=True)


if __name__ == "__main__":
    main()
