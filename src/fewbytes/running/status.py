"""The status of a run, which it keeps in the file status.json for other processes to read. Needs no torch."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import msgspec

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.files import replacing
from fewbytes.base.processes import Process, is_alive, this_process

FILE = "status.json"


class Site(msgspec.Struct):
    """A client: its display name, whether its node is present, and since when; `seen`: when its last reply was
    accepted. Times are in seconds since 1970."""

    name: str
    present: bool
    since: float
    seen: float | None = None


class Status(msgspec.Struct):
    """The status of a run.

    `state`: "running", "waiting" (for sites), "ended" or "stopped"; `why`: what it waits for, or what ended or stopped
    it. `round`: the last finished one of `rounds`. `cohort`: number of clients that took part in it. Bytes are those of
    the run so far. `seconds`: of the last round; `usual_seconds`: the median of recent rounds. `absences`, `errors`:
    number of rounds that clients missed, and of replies that failed or were rejected. `score` is of `metric` and
    `kind`, and is a `share` (0 to 1) or not. `written`: in seconds since 1970. `host`, `process`: where the
    run's process is or was.
    """

    run: str
    method: str
    state: str = "running"
    why: str = ""
    round: int = 0
    rounds: int = 0
    cohort: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    seconds: float = 0.0
    usual_seconds: float = 0.0
    absences: int = 0
    errors: int = 0
    metric: str = ""
    kind: str = ""
    score: float | None = None
    share: bool = True
    written: float = 0.0
    host: str = msgspec.field(default_factory=platform.node)
    process: Process = msgspec.field(default_factory=this_process)
    sites: list[Site] = []

    def write(self, folder: Path) -> None:
        """Write the file in a run folder, at once."""
        with replacing(folder / FILE) as file:
            file.write(msgspec.json.encode(self))


def decode(text: bytes, where: str) -> Status:
    """The status in a text. Raises UserError, naming `where` the text is from."""
    try:
        return msgspec.json.decode(text, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is not the status of a run: {one_line(error)}") from None


def read(folder: Path) -> Status:
    """The status of the run in a folder; it is "stopped" if its process ended on this machine without writing so.
    Raises UserError if there is none."""
    path = folder / FILE
    try:
        status = decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {FILE}: it is not the folder of a run that has begun") from None
    if status.state in ("running", "waiting") and status.host == platform.node() and not is_alive(status.process):
        with suppress(FileNotFoundError):  # which the process may have written before it ended
            status = decode(path.read_bytes(), str(path))
        if status.state in ("running", "waiting"):
            status.state, status.why = "stopped", "its process ended without a message, as after kill -9"
    return status


def newest(folder: Path) -> Path:
    """The folder of the run below a folder, or in a comparison there, whose status was written last. Raises
    UserError."""
    found = [path for pattern in (f"*/{FILE}", f"*/*/{FILE}") for path in folder.glob(pattern)]
    if not found:
        raise UserError(f"{folder} holds no run that has begun: name a run's folder, or another --out")
    return max(found, key=lambda path: os.stat(path).st_mtime).parent
