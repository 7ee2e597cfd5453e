"""partition.json: each client's number of samples by class, as far as the server knows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.files import write_text
from fewbytes.core.problem import Id
from fewbytes.data.clients import FederatedData
from fewbytes.engines.engine import Engine
from fewbytes.engines.handlers import SampleCounts
from fewbytes.running.promises.promise import Opening, Promise, Row


class PartitionCounts(Promise):
    """The content of partition.json, in `counts`; None for clients whose nodes have not reported yet."""

    def __init__(self, data: FederatedData, folder: Path) -> None:
        self._path = folder / "partition.json"
        self.counts: dict[str, Any] = data.label_counts()
        if data.names:
            self.counts["names"] = list(data.names)
        for i, client in enumerate(data.clients):
            if not len(client.train):  # its data are on a node, which reports its counts when it connects
                self.counts["train"][i] = self.counts["test"][i] = None
        self._entered: set[Id] = set()  # the clients whose nodes have reported
        self._resumed = False

    def recall(self, rows: Sequence[Row]) -> None:
        """Compare later reports with the counts in the file."""
        self._resumed = True

    def begin(self, engine: Engine) -> None:
        """Enter the counts reported by the first clients' nodes."""
        self._enter(engine.roster.sample_counts)

    def before_round(self, opening: Opening) -> None:
        """Enter the counts of clients that have arrived, before they join."""
        self._enter(opening.engine.roster.sample_counts)

    def _enter(self, reported: Mapping[Id, tuple[SampleCounts, SampleCounts]]) -> None:
        """Enter the counts of training and test samples that nodes report. Raises UserError if a client of a resumed
        run has another number of samples than before."""
        new = {i: counts for i, counts in reported.items() if i not in self._entered}
        if not new:
            return
        if not self._entered and self._resumed:
            with suppress(OSError, ValueError):  # lost, or damaged
                self.counts = json.loads(self._path.read_text())
        for client, counts in new.items():
            before = self.counts["train"][client], self.counts["test"][client]
            for was, now, split in zip(map(_total, before), map(_total, counts), ("training", "test"), strict=True):
                if was and now and was != now:
                    raise UserError(
                        f"client {client} has {now} {split} samples and had {was} when the run began: give its node "
                        "the data it had, or begin a new run"
                    )
            self.counts["train"][client], self.counts["test"][client] = counts
        self._entered |= new.keys()
        self.write()

    def write(self) -> None:
        """Write the file."""
        write_text(self._path, json.dumps(self.counts))


def _total(counts: SampleCounts) -> int | None:
    return sum(counts) if isinstance(counts, list) else counts
