"""Keeps status.json, by which other processes follow the run."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fewbytes.core.method import Method
from fewbytes.core.metrics import Metric
from fewbytes.core.policy import ABSENT
from fewbytes.core.problem import Id
from fewbytes.engines.engine import Engine
from fewbytes.running.promises.promise import Phase, Promise, Row
from fewbytes.running.status import FILE, Site, Status
from fewbytes.running.watcher import Recorder

SOON_SECONDS = 1.0  # between writes because of replies within a round
RECENT = 20  # rounds whose median duration predicts the next ones'
AWAY = "unreachable"  # the outcome of a request to a client whose node is not connected
WRONG = ("failed", "rejected")


class StatusFile(Promise, Recorder):
    """Keeps a run's status.json: as a promise it learns who its clients are, as a watcher what happens."""

    def __init__(self, folder: Path, method: Method, metrics: Sequence[Metric]) -> None:
        self._folder, self._headline = folder, method.promises.headline
        self._metrics = {metric.name: metric for metric in metrics}
        self.status = Status(folder.absolute().name, method.method_name)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._sites: dict[Id, Site] = {}
        self._engine: Engine | None = None
        self._limit = ""  # what ends the run early

    def place(self) -> str:
        """The file."""
        return FILE

    def recall(self, rows: Sequence[Row]) -> None:
        """Count what earlier lines report."""
        for row in rows:
            self._count(row)

    def begin(self, engine: Engine) -> None:
        """Get to know the clients."""
        self._engine = engine
        self._note_sites(set())

    def kept(self, phase: Phase) -> None:
        """Note which clients were present."""
        if phase.phase == "round":
            self._note_sites({left["client"] for left in phase.row.get("left_out", []) if _is_absent(left)})

    def waiting(self, there: int, wanted: int) -> None:
        """The run waits for clients to connect."""
        self._write("waiting", f"{there} of {wanted} clients are connected")

    def started(self, folder: Path, rounds: int, done: int) -> None:
        """The run starts, or resumes."""
        self.status.rounds, self.status.round = rounds, done
        self._write("running")

    def replied(self, client: Id) -> None:
        """A client's reply was accepted."""
        if client in self._sites:
            self._sites[client].seen = time.time()
        if self.status.state != "running" or time.time() > self.status.written + SOON_SECONDS:
            self._write("running")

    def awaited(self, clients: Sequence[str]) -> None:
        """Replies, or nodes, take long."""
        self._write("waiting", f"for {', '.join(clients[:5])}{' and others' if len(clients) > 5 else ''}")

    def moved(self, uplink_bytes: int, downlink_bytes: int) -> None:
        """Bytes so far; written with the round."""
        self.status.uplink_bytes, self.status.downlink_bytes = uplink_bytes, downlink_bytes

    def scored(self, row: dict[str, Any]) -> None:
        """A round has ended."""
        self._count(row)
        self._write("running")

    def stopped(self, t: int, why: str) -> None:
        """Round t was the last."""
        self.status.rounds, self._limit = t, why

    def ended(self, result: dict[str, Any]) -> None:
        """The run is over."""
        done = result["status"] == "done"
        why = self._limit if done else result.get("why") or "interrupted by Ctrl-C or SIGTERM"
        self._write("ended" if done else "stopped", why)

    @contextmanager
    def of_failure(self) -> Iterator[None]:
        """Write why the run inside stops, also before it begins."""
        try:
            yield
        except BaseException as error:
            if self.status.state in ("running", "waiting"):
                with suppress(OSError):
                    self.ended({"status": "failed", "why": str(error)})
            raise

    def _count(self, row: Row) -> None:
        status, missing = self.status, row.get("left_out", [])
        status.absences += sum(map(_is_absent, missing))
        status.errors += sum(left["handler"] != ABSENT and left["outcome"] in WRONG for left in missing)
        if row["phase"] == "round":
            status.round, status.cohort, status.seconds = row["round"], row["cohort"], row["seconds"]
            self._recent.append(row["seconds"])
            status.usual_seconds = statistics.median(self._recent)
        for metric, kinds in list(row["scores"].items())[:1]:
            kind = self._headline if self._headline in kinds else next(iter(kinds), "")
            if kind and metric in self._metrics:  # not of a run with other metrics, which is refused next
                status.metric, status.kind, status.score = metric, kind, kinds[kind]
                status.share = self._metrics[metric].in_percent

    def _note_sites(self, away: set[Id]) -> None:
        """Note who is absent; other clients that have joined are present if their nodes are connected."""
        assert self._engine is not None
        sites = self._engine.sites
        for client in {*self._engine.roster.clients, *away}:
            present = client not in away and sites.reaches(client)
            site = self._sites.setdefault(client, Site(sites.called(client), present, time.time()))
            if site.present != present:
                site.present, site.since = present, time.time()
        self.status.sites = [self._sites[client] for client in sorted(self._sites)]

    def _write(self, state: str, why: str = "") -> None:
        self.status.state, self.status.why, self.status.written = state, why, time.time()
        self.status.write(self._folder)


def _is_absent(left: dict[str, Any]) -> bool:
    """Whether a client missed a round, by an entry of the round's line."""
    return bool(left["handler"] == ABSENT or left["outcome"] == AWAY)
