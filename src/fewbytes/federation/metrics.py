"""The metrics of runs, nodes and their processes, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fewbytes.base.processes import is_alive
from fewbytes.running.node_status import NodeStatus
from fewbytes.running.status import Status

Sample = tuple[Mapping[str, str], float]
"""Labels beside those of the run or node, and a value."""


class Family(NamedTuple):
    """A metric: its description, and its samples of a status. A name that ends in `_total` is a counter's."""

    about: str
    samples: Callable[[Any], Iterable[Sample]]


def _one(of: Callable[[Any], float]) -> Callable[[Any], Iterable[Sample]]:
    return lambda status: [({}, of(status))]


def _both(first: str, second: str, of: Callable[[Any], tuple[int, int]]) -> Callable[[Any], Iterable[Sample]]:
    return lambda status: [({"direction": way}, value) for way, value in zip((first, second), of(status), strict=True)]


def _score(run: Status) -> Iterable[Sample]:
    return [] if run.score is None else [({"metric": run.metric, "kind": run.kind}, run.score)]


RUN = {
    "fewbytes_running": Family("1 until the run ends, then 0", _one(lambda r: r.state in ("running", "waiting"))),
    "fewbytes_rounds_done": Family("rounds finished", _one(lambda r: r.round)),
    "fewbytes_rounds_planned": Family("rounds in all", _one(lambda r: r.rounds)),
    "fewbytes_cohort_clients": Family("clients that took part in the last round", _one(lambda r: r.cohort)),
    "fewbytes_sites": Family("sites that have joined", _one(lambda r: len(r.sites))),
    "fewbytes_sites_present": Family("sites present", _one(lambda r: sum(site.present for site in r.sites))),
    "fewbytes_site_present": Family(
        "1 if the site is present, else 0", lambda r: [({"site": s.name}, s.present) for s in r.sites]
    ),
    "fewbytes_site_last_reply_timestamp_seconds": Family(
        "when the site's last reply was accepted, in seconds since 1970",
        lambda r: [({"site": s.name}, s.seen) for s in r.sites if s.seen is not None],
    ),
    "fewbytes_bytes_total": Family(
        "bytes of the run's messages", _both("up", "down", lambda r: (r.uplink_bytes, r.downlink_bytes))
    ),
    "fewbytes_round_seconds": Family("duration of the last round", _one(lambda r: r.seconds)),
    "fewbytes_score": Family("the last score, of a metric and kind", _score),
    "fewbytes_absences_total": Family("rounds that clients missed, summed over clients", _one(lambda r: r.absences)),
    "fewbytes_errors_total": Family("replies that failed or were rejected", _one(lambda r: r.errors)),
}
"""The metrics of a run, by name; all have the label `run`."""
NODE = {
    "fewbytes_node_connected": Family("1 while the server accepts the node, else 0", _one(lambda n: n.connected)),
    "fewbytes_node_last_contact_timestamp_seconds": Family(
        "when the server last answered, in seconds since 1970",
        lambda n: [] if n.contact is None else [({}, n.contact)],
    ),
    "fewbytes_node_runs": Family("runs that the node was asked in", _one(lambda n: n.runs)),
    "fewbytes_node_bytes_total": Family(
        "bytes of requests to the server and of its answers",
        _both("sent", "received", lambda n: (n.sent_bytes, n.received_bytes)),
    ),
    "fewbytes_node_refusals_total": Family("orders that the site's policy declined", _one(lambda n: n.refusals)),
    "fewbytes_node_errors_total": Family("orders that failed", _one(lambda n: n.errors)),
    "fewbytes_node_training_seconds_total": Family("time spent on orders", _one(lambda n: n.training_seconds)),
}
"""The metrics of a node since its process started, by name; all have the label `node`."""
PROCESS = "fewbytes"
"""How names of the metrics of a process begin: of a run's, which is its server's in a deployment, or of the nodes'."""


def text(status: Status | Iterable[NodeStatus] | None) -> bytes:
    """The metrics of a run or of nodes; none of a run that has not begun (None)."""
    registry = CollectorRegistry()
    registry.register(_Collected(status))
    if isinstance(status, Status):
        number = status.process[0]
        if is_alive(status.process):
            ProcessCollector(PROCESS, lambda: number, registry=registry)
    elif status is not None:
        ProcessCollector(PROCESS, registry=registry)
    return bytes(generate_latest(registry))


class _Collected:
    """The metrics of one status."""

    def __init__(self, status: Status | Iterable[NodeStatus] | None) -> None:
        is_run = isinstance(status, Status)
        self._families = RUN if is_run else NODE
        each = [status] if isinstance(status, Status) else list(status or ())
        self._labelled: list[tuple[dict[str, str], Any]] = [
            ({"run": of.run} if isinstance(of, Status) else {"node": of.name}, of) for of in each
        ]

    def collect(self) -> Iterator[Metric]:
        for name, family in self._families.items() if self._labelled else ():
            samples = [
                ({**label, **labels}, value) for label, of in self._labelled for labels, value in family.samples(of)
            ]
            names = list(samples[0][0]) if samples else []
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            made = kind(name, family.about, labels=names)
            for labels, value in samples:
                made.add_metric(list(labels.values()), float(value))
            yield made
