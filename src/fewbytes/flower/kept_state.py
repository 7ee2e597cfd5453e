"""What the mod of a node keeps between messages: in Flower's context if it is small, else in a file of FLWR_HOME.

Flower stops a ClientApp five seconds after its reply, even while the app is still handing over its context. The node
then confuses the messages that follow, and the server waits forever. So a large state never goes through the context.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ConfigRecord, Context

from fewbytes.base.errors import FrameError, UserError
from fewbytes.base.files import make_folder, replacing
from fewbytes.flower.records import KEY
from fewbytes.wire import pack_state, unpack_state

MOST_IN_CONTEXT = 1 << 22  # bytes
UNUSED = 7 * 86400  # seconds after which a file of another run is removed


@dataclass
class KeptState:
    """The number of the last reply; the states of `Decoder`s and `Encoder`s by record."""

    number: int = 0
    decoders: dict[str, bytes] = field(default_factory=dict)
    encoders: dict[str, bytes] = field(default_factory=dict)


def load_state(context: Context) -> KeptState:
    """What was saved last; a new state if there is none, or it is damaged."""
    try:
        data: object = _file(context).read_bytes()
    except OSError:
        kept: Mapping[str, object] = context.state.config_records.get(KEY, {})
        data = kept.get("state")
    if isinstance(data, bytes):
        with suppress(FrameError):
            return unpack_state(KeptState, data)
    return KeptState()


def save_state(context: Context, state: KeptState) -> None:
    """Keep a state for the node's next message. Raises UserError if its file cannot be written."""
    data, path = bytes(pack_state(state)), _file(context)
    if len(data) <= MOST_IN_CONTEXT and not path.exists():
        context.state[KEY] = ConfigRecord({"state": data})
        return
    context.state.pop(KEY, None)
    try:
        make_folder(path.parent, 0o700)
        if not path.exists():
            _remove_unused(path.parent)
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise UserError(f"fewbytes cannot keep this node's state in {path}: {error}; set FLWR_HOME") from None


def forget_run(run: int) -> None:
    """Remove the files of a run that has ended, if nodes have their FLWR_HOME here, as in a simulation."""
    for path in _folder().glob(f"{run}-*.state"):
        with suppress(OSError):
            path.unlink()


def _folder() -> Path:
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "fewbytes"


def _file(context: Context) -> Path:
    return _folder() / f"{context.run_id}-{context.node_id}.state"


def _remove_unused(folder: Path) -> None:
    for path in folder.glob("*.state"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - UNUSED:
                path.unlink()
