"""The clients of a run: which take part, which are not asked, and their states' versions and sample counts."""

from __future__ import annotations

from fewbytes.core.ledger import Ledger
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.engines.handlers import SampleCounts
from fewbytes.engines.terms import Origin

Software = dict[str, dict[str, str]]
"""By name of software, the versions at a `node` and at the `server`."""


class Roster:
    """The clients of a run that begins from `origin`."""

    def __init__(self, task: Task, policy: Policy, origin: Origin) -> None:
        self.problem, self._data, self._strikes = task.problem, task.data, policy.strikes
        self.clients = list(origin.known)
        self.versions: dict[Id, int] = dict(origin.versions)
        """The version of each client's state, as of its last accepted reply."""
        self.unable: dict[Id, str] = {}
        """Clients whose nodes cannot take part, and why."""
        self.has_replies = False
        """Whether any client has answered yet."""
        self.not_asked: dict[Id, str] = dict.fromkeys(policy.excluded, "by the operator's wish (exclude)")
        """Clients that are skipped, and why."""
        self.other_firsts: set[Id] = set()
        """Clients whose models start from other weights than here, as on another kind of processor."""
        self.sample_counts: dict[Id, tuple[SampleCounts, SampleCounts]] = {}
        """Counts of training and test samples, as nodes report them, for clients whose data are elsewhere."""
        self.software: dict[Id, Software] = {}
        """Versions at clients' nodes that differ from those here."""

    @property
    def clients(self) -> list[Id]:
        """The clients that have joined and not left, in ascending order."""
        return self._ascending

    @clients.setter
    def clients(self, clients: list[Id]) -> None:
        self._ascending, self.present = clients, frozenset(clients)

    def ever(self) -> list[Id]:
        """All clients that take part or did before they left, in ascending order."""
        return sorted({*self.clients, *self.versions})

    def due(self, t: int) -> list[Id]:
        """The clients scheduled for round t that have not joined yet, in ascending order."""
        return [i for i in self.problem.clients_in(t) if i not in self.present]

    def has_left(self, client: Id, t: int) -> bool:
        """Whether a client has left before round t, by the schedule."""
        last = self.problem.present[client][1] if client in self.problem.clients else None
        return last is not None and last < t

    def bar(self, ledger: Ledger) -> None:
        """Stop asking clients whose replies were refused in too many consecutive rounds."""
        for client, rounds in ledger.refused_in_a_row().items():
            if rounds >= self._strikes:
                self.not_asked.setdefault(client, f"{rounds} refused replies in a row")

    def samples_of(self, client: Id) -> int | None:
        """A client's number of training samples, if known."""
        counts = self.sample_counts.get(client, (None, None))[0]
        if counts is None:
            return len(self._data.clients[client].train) or None
        return counts if isinstance(counts, int) else sum(counts)

    def classes_of(self, client: Id) -> list[int] | None:
        """A client's number of training samples by class, if known."""
        counts = self.sample_counts.get(client, (None, None))[0]
        if counts is None and self._data.groups is None and len(self._data.clients[client].train):
            counts = self._data.label_counts()["train"][client]
        return counts if isinstance(counts, list) else None
