"""Sends jobs as messages of a Flower grid, and checks their answers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from flwr.app import Message

from fewbytes.base.errors import FrameError, cleaned
from fewbytes.core.problem import Id
from fewbytes.engines.handlers import SAVE, SCORE, Done, Job
from fewbytes.engines.terms import Terms
from fewbytes.engines.transport import Answer, Transport
from fewbytes.flower.link import Link
from fewbytes.flower.messages import decoded, read_content, seal_of, sealed, write_content
from fewbytes.flower.node import DATA, DIFFERENT, Order, digest, in_common, run_name
from fewbytes.flower.nodes import Nodes
from fewbytes.flower.private.errors import away
from fewbytes.wire import Frame

KINDS = {SCORE: "evaluate.score", SAVE: "query.save", DATA: "query.data"}
"""The message types of the engine's own handlers."""
DONE_LIMIT = 1 << 16  # bytes of measurements beside a reply


class _Sent(NamedTuple):
    """A message that Flower accepted: its id, and the order in it."""

    id: str
    order: bytes


class GridTransport(Transport):
    """Sends jobs over a grid. `nonce`: distinguishes the run from others of the same name, which is its folder's."""

    def __init__(self, terms: Terms, link: Link, nodes: Nodes, nonce: bytes) -> None:
        self.ahead = link.exchange.ahead or sys.maxsize
        self.oldest: dict[Id, int] = {}
        """The version of each client's state that a kept checkpoint names: nodes may remove older ones."""
        self.declined: dict[Id, str] = {}
        """Clients whose sites declined an order since this was last emptied, and why."""
        self.declines = Counter[Id]()
        """How often each client's site declined since the client last sent a reply."""
        self._terms, self._link, self._nodes, self._nonce = terms, link, nodes, nonce
        self._run, self._frames = run_name(terms.folder), link.exchange.frame_folder
        self._agreed: dict[Any, bytes] = {}
        self._sent: dict[int, _Sent] = {}  # by the number of its job

    def reaches(self, client: Id) -> bool:
        """Whether its node was connected at the last check."""
        return client in self._nodes.of

    def put(self, frame: Frame) -> str:
        """In a simulation's folder of frames."""
        return "" if self._frames is None else self._frames.put(frame)

    def free(self, at: str) -> None:
        """Remove it there."""
        if self._frames is not None:
            self._frames.remove(at)

    def submit(self, job: Job, frames: Sequence[bytes], call: int) -> bool:
        """Send a job to the client's node; False if Flower rejects it."""
        order = msgspec.msgpack.encode(self._order(job, call))
        content = write_content(order, frames[0] if len(frames) == 1 else b"".join(frames))
        kind = KINDS.get(job.handler, "train.handler")
        number = self._link.push(kind, self._nodes.of[job.client], content, job.round)
        if number is not None:
            self._sent[job.number] = _Sent(number, order)
        return number is not None

    def poll(self, jobs: Sequence[Job], most: int) -> dict[int, Answer]:
        """Poll for replies, at most `most` at once; if there is none, wait a while."""
        ids = {self._sent[job.number].id: job for job in jobs}
        numbers = list(ids)
        for start in range(0, len(numbers), most):
            if found := self._link.pull(numbers[start : start + most]):
                return {ids[number].number: self._answer(ids[number], reply) for number, reply in found.items()}
        self._link.wait()
        return {}

    def end(self, jobs: Sequence[Job]) -> None:
        """Stop polling for answers that have not arrived."""
        for job in jobs:
            if (sent := self._sent.pop(job.number, None)) is not None:
                self._link.forget(sent.id)

    def _order(self, job: Job, call: int) -> Order:
        terms, key = self._terms, self._terms.task.problem.architecture(job.client)
        if key not in self._agreed:
            self._agreed[key] = digest(in_common(terms.method, terms.task, job.client))
        oldest = self.oldest.get(job.client, 0)
        return Order(self._run, self._agreed[key], job, call, oldest, terms.coded, self._nonce)

    def _answer(self, job: Job, reply: Message) -> Answer:
        """The answer in a client's reply to a job."""
        if reply.has_error():
            if why := away(reply.error):
                return Answer("unreachable", why)
            return Answer("failed", f"Flower's error {reply.error.code}: {cleaned(reply.error.reason)}")
        try:
            text, frame = read_content(reply.content, self._frames)
            if self._frames is not None and "name" in reply.content.config_records["fewbytes"]:
                self._frames.remove(str(reply.content.config_records["fewbytes"]["name"]))
            if len(text) > DONE_LIMIT:
                raise FrameError("length", f"{len(text)} bytes of measurements beside a reply")
            done = decoded(text, Done)
        except FrameError as error:
            return Answer("rejected", cleaned(str(error)))
        if done.error.startswith(DIFFERENT):
            why = self._difference(job.client, done.error.removeprefix(DIFFERENT))
            return Answer("failed", why, different=True)
        if done.error:
            if done.declined and job.handler != DATA:
                self.declined[job.client] = cleaned(done.error)
                self.declines[job.client] += 1
            return Answer("declined" if done.declined else "failed", cleaned(done.error), done, frame)
        sent = self._sent[job.number]
        if seal_of(reply.content) != sealed(sent.order, text, frame):
            return Answer("rejected", "it answers another order, of an earlier round or another run", done, frame)
        if job.handler not in KINDS:
            self.declines.pop(job.client, None)
        elapsed = self._link.elapsed(sent.id)
        return Answer("answered", "", done, frame, moving=None if elapsed is None else elapsed - done.seconds)

    def _difference(self, client: Id, text: str) -> str:
        """The differences between a node and this server, in one line."""
        ours, theirs = in_common(self._terms.method, self._terms.task, client), {}
        with suppress(msgspec.MsgspecError):
            theirs = msgspec.json.decode(text, type=dict[str, str])
        differing = [
            f"{cleaned(k)}: {cleaned(theirs.get(k, 'none'))} there, {ours.get(k, 'none')} here"
            for k in ours | theirs
            if theirs.get(k) != ours.get(k)
        ]
        return f"differs from this server in: {'; '.join(differing)}"[:1000]
