"""The status of runs and nodes in words, from a run's folder or from a monitoring endpoint. Needs no torch."""

from __future__ import annotations

import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import msgspec

from fewbytes.base.errors import UserError, cleaned
from fewbytes.base.units import moved, written
from fewbytes.running.node_status import NodeStatus
from fewbytes.running.status import Site, Status

SECONDS = 10.0  # for an endpoint to answer
LONGEST = 1 << 24  # bytes of an endpoint's answer
MANY = 20  # sites, above which only the absent ones are listed


def of_url(url: str) -> Status | list[NodeStatus]:
    """The status of the run, or of the nodes, whose monitoring endpoint is at http://HOST:PORT. Raises UserError."""
    place = urllib.parse.urlsplit(url)
    here = place.hostname in ("localhost", "127.0.0.1", "::1", "0.0.0.0")
    ways = [urllib.request.ProxyHandler({})] if here else []  # a proxy's loopback is not this machine's
    try:
        with urllib.request.build_opener(*ways).open(f"{url.rstrip('/')}/status", timeout=SECONDS) as answer:
            text = answer.read(LONGEST)
    except urllib.error.HTTPError as error:
        with nullcontext(error):
            why = cleaned(error.read(1000).decode(errors="replace").strip())
        raise UserError(f"{url}: {why or f'HTTP status {error.code}'}") from None
    except (OSError, ValueError) as error:
        why = cleaned(str(getattr(error, "reason", error)))
        raise UserError(f"{url} does not answer: {why}; is `--monitor` given there, with this address?") from None
    try:
        return msgspec.json.decode(text, type=Status | list[NodeStatus])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UserError(f"{url} is not a monitoring endpoint of fewbytes") from None


def trouble(status: Status | Sequence[NodeStatus]) -> str:
    """What is wrong, in one line; empty if all is well."""
    if not isinstance(status, Status):
        return "; ".join(filter(None, (node.trouble() for node in status)))
    return f"the run {status.run} has stopped: {status.why}" if status.state == "stopped" else ""


def words(status: Status | Sequence[NodeStatus]) -> Iterator[str]:
    """The lines that `fewbytes status` prints."""
    if not isinstance(status, Status):
        for node in status:
            yield from _of_node(node)
        return
    yield _headline(status)
    now = time.time()
    if status.score is not None:
        yield f"score: {status.metric} {written(status.score, status.share)} ({status.kind})"
    yield f"bytes: {moved(status.uplink_bytes, status.downlink_bytes)}"
    present = sum(site.present for site in status.sites)
    many = len(status.sites) > MANY
    hint = " (only absent ones are listed)" if many and present < len(status.sites) else ""
    yield f"sites: {present} of {len(status.sites)} present{hint}"
    for site in status.sites:
        if not (many and site.present):
            yield f"  {_of_site(site, now)}"
    if status.absences or status.errors:
        yield f"so far: {status.absences} absences, {status.errors} replies that failed or were rejected"
    yield f"written {duration(now - status.written)} ago, on {status.host}"


def _headline(status: Status) -> str:
    done = f"round {status.round} of {status.rounds}" if status.rounds else "before the first round"
    why = f" ({status.why})" if status.why else ""
    left = ""
    if status.state in ("running", "waiting") and status.usual_seconds and status.round < status.rounds:
        left = f", about {duration(status.usual_seconds * (status.rounds - status.round))} left"
    return f"{status.run} ({status.method}): {status.state}{why}, {done} finished{left}"


def _of_site(site: Site, now: float) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(site.since))
    there = f"{'present' if site.present else 'ABSENT'} since {since}"
    seen = "no reply yet" if site.seen is None else f"last reply {duration(now - site.seen)} ago"
    return f"{site.name}: {there}, {seen}"


def _of_node(node: NodeStatus) -> Iterator[str]:
    contact = "never" if node.contact is None else f"{duration(node.written - node.contact)} ago"
    yield node.trouble() or f"{node.name}: connected to {node.superlink}"
    yield f"  last contact {contact}; {node.runs} runs, {node.training_seconds:.1f} s of training"
    yield f"  bytes: {moved(node.sent_bytes, node.received_bytes)}"
    yield f"  {node.refusals} orders declined by the site's policy, {node.errors} failed"


def duration(seconds: float) -> str:
    """A duration in words, of at most two units.

    >>> from fewbytes.federation.status import duration
    >>> duration(41), duration(125), duration(8000)
    ('41 s', '2 min 5 s', '2 h 13 min')
    """
    whole = max(0, round(seconds))
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {small}"
    return f"{whole} s"
