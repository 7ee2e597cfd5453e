"""Clients that join during a run: they are served before a round begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fewbytes.base.errors import FewbytesError
from fewbytes.core.ledger import LeftOut
from fewbytes.core.method import Method
from fewbytes.core.network import Refused
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id, Problem
from fewbytes.running.promises.promise import Opening, Phase, Promise, Row
from fewbytes.running.watcher import Watcher


class Joiners(Promise):
    """Serves clients that are new to the run."""

    def __init__(self, method: Method, watcher: Watcher) -> None:
        self._method, self._watcher = method, watcher
        self._refused: dict[Id, str] = {}  # newcomers the method cannot serve, and why
        self._missed: list[LeftOut] = []  # newcomers that could not be served before this round

    def recall(self, rows: Sequence[Row]) -> None:
        """Restore the refused clients."""
        self._refused = {left["client"]: left["why"] for left in refusals(rows)}

    def before_round(self, opening: Opening) -> None:
        """Serve the clients that have arrived. Raises FewbytesError if no client is present."""
        for client in opening.arrived:
            if client not in self._refused:
                self._serve(opening, client)
        if not opening.engine.roster.clients:
            raise FewbytesError(f"round {opening.t} cannot begin: every client has left or could not join")

    def _serve(self, opening: Opening, client: Id) -> None:
        """Serve a client; one that disconnects meanwhile may return later."""
        engine = opening.engine
        engine.roster.clients = sorted([*engine.roster.clients, client])

        def join(state: Any) -> None:
            try:
                self._method.join(state, engine.network, client)
            except Refused as error:
                engine.scheduler.abandon()
                engine.roster.clients = [i for i in engine.roster.clients if i != client]
                engine.roster.versions.pop(client, None)  # its state is of no use any more
                engine.step.left_out.append(LeftOut(client, "join", "rejected", str(error)))
                self._refused[client] = str(error)

        try:
            opening.take("join", join, client)
        except TooFewReplies:
            engine.roster.clients = [i for i in engine.roster.clients if i != client]
            engine.scheduler.abandon()
            self._missed += engine.step.left_out  # reported with the round: the step has no line of its own
        else:
            if client in self._refused:
                self._watcher.refused(client, self._refused[client])
            else:
                self._watcher.joined(client)

    def row(self, phase: Phase) -> Row:
        """The clients left out, and newcomers that could not be served."""
        left_out, self._missed = [*self._missed, *phase.left_out], []
        return {"left_out": [asdict(left) for left in left_out]} if left_out else {}


def staying(clients: Sequence[Id], problem: Problem, t: int) -> list[Id]:
    """Those of the clients that have not left before round t."""
    present = set(problem.clients_in(t))
    return [i for i in clients if i in present]


def refusals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The entries in lines of rounds.jsonl of newcomers that the method could not serve."""
    left_out = [left for row in rows if row["phase"] == "join" for left in row.get("left_out", [])]
    return [left for left in left_out if left["handler"] == "join"]
