"""Clients on nodes of a Flower grid: waits for them, asks for their sample counts, adds new ones between rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError, cleaned
from fewbytes.core.ledger import LeftOut
from fewbytes.core.metrics import MOST_SAMPLES
from fewbytes.core.policy import ABSENT, TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.engines.dispatcher import Dispatcher
from fewbytes.engines.firsts import Firsts
from fewbytes.engines.handlers import SAVE, SampleCounts
from fewbytes.engines.store import ClientStore
from fewbytes.engines.terms import Terms
from fewbytes.engines.transport import Sites
from fewbytes.flower.link import Link
from fewbytes.flower.node import DATA
from fewbytes.flower.nodes import Nodes
from fewbytes.flower.transport import GridTransport
from fewbytes.flower.versions import compared, packed, words_of
from fewbytes.running.watcher import Watcher

MISSING_SECONDS = 10.0  # before clients that have not connected are named, after the last that has
MOST_WAITING = 300.0  # seconds between tries of a round that too few answered


class GridSites(Sites):
    """The sites of clients on nodes."""

    def __init__(
        self, terms: Terms, link: Link, nodes: Nodes, transport: GridTransport, dispatcher: Dispatcher, watcher: Watcher
    ) -> None:
        self._terms, self._policy, self._problem = terms, terms.policy, terms.task.problem
        self._link, self._nodes, self._transport, self._dispatcher = link, nodes, transport, dispatcher
        self._roster, self._unable, self._watcher = dispatcher.roster, dispatcher.roster.unable, watcher
        self._firsts, self._agreed = Firsts(self._problem), set[Id]()
        self._declined = set[Id]()  # clients that are not asked, as their sites have declined or were removed
        nodes.on_stranger = watcher.note
        dispatcher.on_awaited = lambda clients: watcher.awaited([nodes.called(i) for i in clients])

    def called(self, client: Id) -> str:
        """A client by number and registered name."""
        return self._nodes.called(client)

    def reaches(self, client: Id) -> bool:
        """Whether its node was connected at the last check."""
        return self._transport.reaches(client)

    def gather(self, new: bool) -> None:
        """Wait for the clients that take part from the start or, if the run is not `new`, from the resumption."""
        wanted = set(self._roster.clients)
        there = self._agree(self._connected(wanted, starting=True))
        if (first := next(iter(self._unable), None)) is not None and len(there) < self._needed(wanted):
            raise UserError(f"{self.called(first)} cannot take part: {self._unable[first]}")
        if new:
            self._roster.clients = there

    def arrivals(self, due: Sequence[Id]) -> tuple[list[Id], list[LeftOut]]:
        """The due clients whose nodes are connected and can take part; waits for them if no other client is left."""
        self._nodes.refresh()
        self._without_declined()
        there = [i for i in due if i in self._nodes.of]
        if due and not self._roster.clients:
            there = self._connected(set(due))
        able = self._agree(there)
        return able, [self._absence(i) for i in due if i not in able and i not in self._nodes.vacant]

    def _without_declined(self) -> None:
        """Ask no more the clients whose sites have declined or were removed, until they agree again; one that then
        declines again, without an answer between, only takes part after a resumption. Raises TooFewReplies if too few
        are left of those that were not removed."""
        not_asked, present, vacant = self._roster.not_asked, self._roster.clients, self._nodes.vacant
        for client in vacant.intersection(present) - self._declined:
            self._declined.add(client)
            self._agreed.discard(client)
            self._unable[client] = "it is no longer a member"
            not_asked[client] = self._with_name(client, self._unable[client])
        for client, why in self._transport.declined.items():
            self._declined.add(client)
            self._agreed.discard(client)
            not_asked[client] = self._with_name(client, why)
            self._unable[client] = why  # which the round's line reports
        self._transport.declined.clear()
        again = [i for i in sorted(self._declined) if i in self._nodes.of and self._transport.declines[i] < 2]
        for client in self._agree(again):
            self._declined.remove(client)
            del not_asked[client]
        out = [i for i in present if i in not_asked]
        left, needed = len(present) - len(out), self._needed(set(present))
        if not self._declined.isdisjoint(present) and left < max(1, needed):
            others = self._unable.keys() - set(present)  # that never took part
            reasons = [f"{self.called(i)}: {self._unable.get(i) or not_asked[i]}" for i in sorted({*out, *others})]
            why = "; ".join([*reasons[:9], *["…"] * (len(reasons) > 9)])
            raise TooFewReplies(
                f"{left} of {len(present)} clients are left, at least {max(1, needed)} must be (--min-replies "
                f"{self._policy.min_replies:g} of them): {why}; the run can be resumed"
            )

    def patient(self, tries: int) -> bool:
        """Wait for clients to return: 1, 2, 4, … seconds, up to five minutes."""
        if tries > self._policy.retries:
            return False
        self._without_declined()
        present = self._roster.clients
        self._watcher.waiting(sum(map(self.reaches, present)), len(present))
        self._link.wait(min(2.0 ** (tries - 1), MOST_WAITING))
        self._nodes.refresh()
        return True

    def places(self, before: Mapping[Id, int]) -> list[Path]:
        """Only a simulation's state files: real nodes sync their own before they answer."""
        if self._link.exchange.frame_folder is None:
            return []
        return ClientStore(self._terms.states).places(self._roster.versions.items() - before.items())

    def keep(self, kept: Sequence[Mapping[Id, int]], busy: Collection[Id]) -> None:
        """Let nodes remove older states, with the next requests."""
        self._transport.oldest = {i: min(versions.get(i, 0) for versions in kept) for i in self._roster.versions}

    def save_models(self, folder: Path, about: dict[str, Any], t: int) -> None:
        """Have the nodes save the models in their own folders."""
        if self._terms.method.has_local_models(self._terms.task.problem.own):
            for _ in self._dispatcher.ask(SAVE, self._roster.ever(), t, frame=msgspec.json.encode(about)):
                pass

    def _connected(self, wanted: set[Id], starting: bool = False) -> list[Id]:
        """Those of the wanted clients that are connected, as soon as all are or connect_timeout is over. Clients that
        have no node, such as removed members, are not waited for.

        Raises TooFewReplies.
        """
        deadline, reported, of = time.monotonic() + self._policy.connect_timeout, -1, self._nodes
        name_them = math.inf  # the time to do so
        of.refresh(starting)
        while not wanted - of.vacant <= of.of.keys() and time.monotonic() < deadline:
            if len(wanted & of.of.keys()) != reported:
                reported = len(wanted & of.of.keys())
                self._watcher.waiting(reported, len(wanted))
                name_them = time.monotonic() + MISSING_SECONDS
            elif time.monotonic() > name_them:
                self._watcher.awaited([self.called(i) for i in sorted(wanted - of.of.keys())])
                name_them = math.inf
            new = sorted(wanted & of.of.keys() - self._unable.keys())
            self._agree(new)  # to learn at once what must be fixed
            self._link.wait(max(self._link.exchange.poll, 0.2))
            of.refresh(starting)
        there, needed = sorted(wanted & of.of.keys()), self._needed(wanted)
        if len(there) < needed:
            raise TooFewReplies(
                f"{len(there)} of {len(wanted)} clients connected within {self._policy.connect_timeout:g} s, at least "
                f"{needed} must (--min-replies {self._policy.min_replies:g} of them); absent: "
                f"{', '.join(self.called(i) for i in sorted(wanted - set(there))[:5])}"
            )
        return there

    def _needed(self, wanted: set[Id]) -> int:
        """How many of the wanted clients must take part; removed members do not count."""
        return math.ceil(self._policy.min_replies * len(wanted - self._nodes.vacant))

    def _agree(self, clients: Sequence[Id]) -> list[Id]:
        """Ask each node once for what the server must know: sample counts, unless the data are here, and whether models
        start from the same weights, unless it is a simulation's node. Returns the clients that can take part.

        Each reason why a client cannot is reported once, and the client is asked again before the next round.
        """
        data, real = self._terms.task.data.clients, self._link.exchange.frame_folder is None
        asked = [i for i in clients if i not in self._agreed and (real or not len(data[i].train))]
        able = [i for i in clients if i not in asked]
        for client, answer in self._dispatcher.ask(DATA, asked, t=0, frame=packed() if real else b""):
            if answer.done.error or answer.different:
                self._pass_over(client, f"it {answer.why}" if answer.different else cleaned(answer.done.error, 1000))
                continue
            self._unable.pop(client, None)
            self._agreed.add(client)
            if (others := compared(answer.done.versions)) and others != self._roster.software.get(client):
                self._roster.software[client] = others
                called, words = self.called(client), words_of(others)
                self._watcher.note(f"{called} has other versions, which may change results: {words}")
            if answer.done.first != self._firsts.of(client).digest:
                self._roster.other_firsts.add(client)
            able.append(client)
            if len(data[client].train):
                continue
            train, test = answer.done.sample_counts or (None, None)
            self._roster.sample_counts[client] = self._counts(train), self._counts(test)
            if answer.done.spent is not None and (spent := answer.done.spent[0]) > 0:
                self._watcher.note(
                    f"earlier runs have spent epsilon {spent:.3g} of the samples of {self.called(client)}"
                )
        return sorted(able)

    def _pass_over(self, client: Id, why: str) -> None:
        if self._unable.get(client) != why:
            self._unable[client] = why
            self._watcher.refused(client, self._with_name(client, why))

    def _counts(self, reported: SampleCounts) -> SampleCounts:
        """A node's reported counts, or None if they are invalid; their sum if its classes differ from the server's."""
        counts = [reported] if isinstance(reported, int) else reported
        if counts is None or not all(0 <= count < MOST_SAMPLES for count in counts):
            return None
        if isinstance(reported, int) or reported is None:
            return reported
        return (
            reported if len(reported) == len(self._terms.task.data.groups or self._problem.classes) else sum(reported)
        )

    def _absence(self, client: Id) -> LeftOut:
        if self._transport.reaches(client) and client in self._unable:
            return LeftOut(client, ABSENT, "rejected", self._with_name(client, self._unable[client]))
        return LeftOut(client, ABSENT, "unreachable", self._with_name(client, "its node is not connected"))

    def _with_name(self, client: Id, why: str) -> str:
        return f"{self._nodes.names[client]}: {why}" if self._nodes.names else why
