"""Which node each client's data are on, and whether it is connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flwr.app import Message, RecordDict

from fewbytes.base.errors import FrameError, UserError, cleaned
from fewbytes.core.problem import Id, Problem
from fewbytes.flower.link import Link
from fewbytes.flower.messages import decoded, read_content

HELLO_SECONDS = 30.0  # that a round waits for a node without a name to report its client
STARTING_SECONDS = 600.0  # maximum for the same wait at the start
STRANGER_SECONDS = 30.0  # before a node that was left out is asked again


class Nodes:
    """The nodes of a grid by client: identified by their registered `names`, in the order of the clients, or without
    names by the clients that nodes report."""

    def __init__(self, link: Link, problem: Problem, names: Sequence[str], connect_timeout: float) -> None:
        if names and len(names) != len(problem.clients):
            raise UserError(f"there are {len(names)} names of nodes for {len(problem.clients)} clients")
        self.names = list(names)
        self.vacant: set[Id] = set()
        """Clients that have no node now, such as removed members."""
        self.of: dict[Id, int] = {}
        """The node of each client that can be reached."""
        self._link, self._problem, self._connect_timeout = link, problem, connect_timeout
        self._clients: dict[int, Id] = {}  # the client of each node without a name
        self._strangers: dict[int, float] = {}  # nodes that are left out, and when to ask them again
        self.on_stranger: Callable[[str], None] = lambda why: None
        """Called with a line about a node that is left out, once for each node and reason."""
        self._told: set[tuple[int, str]] = set()

    def called(self, client: Id) -> str:
        """A client by number and registered name."""
        return f"client {client} ({self.names[client]})" if self.names else f"client {client}"

    def refresh(self, starting: bool = False) -> None:
        """Find the reachable clients: by their nodes' registered names, or by asking nodes without one. A node that
        gives no valid answer is left out, and named. `starting`: nodes may take long to load."""
        nodes, unnamed, now = {}, [], time.monotonic()
        for node, name in self._link.nodes().items():
            if self.names:
                if name in self.names:
                    nodes[self.names.index(name)] = node
            elif node in self._clients:
                nodes[self._clients[node]] = node
            elif self._strangers.get(node, now) <= now:
                unnamed.append(node)
        ids = {self._link.push("query.hello", node, RecordDict({}), 0): node for node in unnamed}
        ids.pop(None, None)
        deadline = now + min(self._connect_timeout, STARTING_SECONDS if starting else HELLO_SECONDS)
        while ids and time.monotonic() < deadline:
            for number, reply in self._link.pull([i for i in ids if i is not None]).items():
                node = ids.pop(number)
                self._link.forget(number)
                client = self._claimed(reply)
                if client in nodes:
                    client = f"says that it holds client {client}, as another node does: give each its own partition-id"
                if isinstance(client, str):
                    self._leave_out(node, client)
                else:
                    nodes[client], self._clients[node] = node, client
            if ids:
                self._link.wait()
        for node in ids.values():
            self._leave_out(node, "does not answer")
        vacant = self._link.exchange.vacant()
        self.vacant = {client for client, name in enumerate(self.names) if name in vacant}
        self.of = {client: node for client, node in nodes.items() if client not in self.vacant}

    def _leave_out(self, node: int, why: str) -> None:
        self._strangers[node] = time.monotonic() + STRANGER_SECONDS
        if (node, why) not in self._told:
            self._told.add((node, why))
            self.on_stranger(f"node {node} is left out: it {why}")

    def _claimed(self, reply: Message) -> Id | str:
        """The client that a node reports, or what is wrong with the report."""
        if reply.has_error():
            return f"does not start its app: {cleaned(reply.error.reason)}"
        try:
            client = decoded(read_content(reply.content)[0], int)
        except FrameError:
            return "does not run this package's app"
        if client not in self._problem.clients:
            last = len(self._problem.clients) - 1
            return f"says that it holds client {client}, not one of 0 to {last}: set its partition-id"
        return client
