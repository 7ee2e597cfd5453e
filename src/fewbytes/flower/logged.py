"""What a method that `serve` runs does, line by line in Flower's log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fewbytes.base.units import moved
from fewbytes.running.watcher import Watcher

LOG = logging.getLogger("flwr.fewbytes")


class Logged(Watcher):
    """Writes a line for each round, and for what happens between rounds."""

    def waiting(self, there: int, wanted: int) -> None:
        """The run waits for clients."""
        LOG.info("fewbytes: %d of %d clients are connected", there, wanted)

    def awaited(self, clients: Sequence[str]) -> None:
        """Replies take long."""
        LOG.info("fewbytes: still waiting for %s", ", ".join(clients))

    def refused(self, client: int, why: str) -> None:
        """A client cannot take part."""
        LOG.warning("fewbytes: client %s is refused: %s", client, why)

    def note(self, text: str) -> None:
        """A note for the user."""
        LOG.warning("fewbytes: %s", text)

    def scored(self, row: dict[str, Any]) -> None:
        """A round has ended."""
        scores = [
            f"{metric} {value:.4g} ({kind})" for metric, by in row["scores"].items() for kind, value in by.items()
        ]
        what = [*scores, moved(row["uplink_bytes"], row["downlink_bytes"]), f"{row['seconds']:.2g} s"]
        LOG.info("fewbytes: round %d: %s", row["round"], ", ".join(what))

    def stopped(self, t: int, why: str) -> None:
        """The run ends early."""
        LOG.info("fewbytes: round %d was the last: %s", t, why)

    def ended(self, result: dict[str, Any]) -> None:
        """The run is over."""
        LOG.info("fewbytes: the run is %s", result["status"])
