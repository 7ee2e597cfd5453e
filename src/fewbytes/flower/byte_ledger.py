"""The bytes of a Flower app with encoded messages: a line per message in `bytes.jsonl`, one per round in the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from flwr.app import Message

from fewbytes.base.encoded import out_of

NAME = "bytes.jsonl"


class ByteLedger:
    """Counts the bytes of arrays as they travel (`up`, `down`), and as they would without encoding (`plain_up`,
    `plain_down`)."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / NAME
        self.totals = {"up": 0, "down": 0, "plain_up": 0, "plain_down": 0}
        """In bytes, of all messages so far."""
        self._before = dict(self.totals)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text("")  # of this run alone

    def sent(self, message: Message, nbytes: int, plain: int) -> None:
        """A message to a client."""
        self._add("down", message.metadata.dst_node_id, message, nbytes, plain)

    def received(self, message: Message, nbytes: int, plain: int) -> None:
        """The reply to a message."""
        self._add("up", message.metadata.dst_node_id, message, nbytes, plain)

    def _add(self, way: str, node: int, message: Message, nbytes: int, plain: int) -> None:
        self.totals[way] += nbytes
        self.totals[f"plain_{way}"] += plain
        if self._file is not None:
            about = message.metadata
            row = {"round": _round(message), "kind": about.message_type, "node": str(node), "way": way}
            with self._file.open("a") as file:
                file.write(json.dumps(row | {"bytes": nbytes, "plain": plain}) + "\n")

    def log(self, log: logging.Logger) -> None:
        """A line on the bytes since the last one."""
        now = {key: value - self._before[key] for key, value in self.totals.items()}
        self._before = dict(self.totals)
        moved = {way: (now[way], now[f"plain_{way}"]) for way in ("up", "down") if now[f"plain_{way}"]}
        if not moved:
            return
        nbytes, plain = (sum(each) for each in zip(*moved.values(), strict=True))
        words = ", ".join(f"{out_of(*each)} {way}" for way, each in moved.items())
        words += f"; in both directions {out_of(nbytes, plain)}" if len(moved) == 2 else ""
        times = f", {plain / nbytes:.3g} times fewer bytes than plain" if nbytes else ""
        log.info("fewbytes: %s%s", words, times)


def _round(message: Message) -> str:
    """The round that a strategy states in a message."""
    for record in message.content.config_records.values() if message.has_content() else ():
        if "server-round" in record:
            return str(record["server-round"])
    return message.metadata.group_id
