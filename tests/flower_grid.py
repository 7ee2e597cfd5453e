"""A Flower grid in memory that hands messages to a ClientApp, and the faults a real network has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import msgspec
from cases import CASES, task_of
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from runs import ROUNDS

import fewbytes as fb
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.flower.messages import read_content
from fewbytes.flower.node import Order
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

CLIENTS = 4
Fault = Callable[[Message, Message], Iterable[Message]]
"""What becomes of a reply: (the message, its reply) -> the replies that arrive."""


class MemoryGrid(Grid):
    """Nodes 1000, 1001, … each with one client's data; replies land in the reverse order of asking.

    `fault`: what becomes of replies. `present`: the clients whose nodes are there, looked at each time.
    """

    def __init__(self, app: ClientApp, clients: int, fault: Fault | None = None, named: bool = False) -> None:
        self.app, self.fault, self.named = app, fault or (lambda message, reply: [reply]), named
        self.present = list(range(clients))
        self.config: dict[str, Any] = {}
        self.run_config: dict[str, Any] = {}
        self.asked: list[Message] = []
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # what Flower's own processes set
        self._replies: dict[str, list[Message]] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [1000 + i for i in self.present]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=1000 + i, name=f"site-{i}" if self.named else "") for i in self.present]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            number = str(uuid4())
            message.metadata.__dict__["_message_id"] = number
            self._replies[number] = [message]
            ids.append(number)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for number in reversed(list(message_ids)):
            for message in self._replies.pop(number, []):
                yield from self.fault(message, self.answer(message))

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def answer(self, message: Message) -> Message:
        """What the node answers."""
        self.asked.append(message)
        client = message.metadata.dst_node_id - 1000
        if client not in self.present:
            return Message(Error(5, "node unavailable"), reply_to=message)
        config = {"partition-id": client, **self.config}
        context = Context(1, message.metadata.dst_node_id, config, RecordDict(), self.run_config)
        try:
            return self.app(message, context)
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)


def handler_of(message: Message) -> str:
    """The handler that a message asks a client to run; empty for other questions."""
    if message.metadata.message_type != "train.handler":
        return ""
    return msgspec.msgpack.decode(read_content(message.content)[0], type=Order).job.handler


class Exchanges:
    """Remembers what client 1 was asked and what it replied."""

    def __init__(self, kept: list[tuple[Message, Message]] | None = None) -> None:
        self.kept = kept or []

    def before(self, message: Message, reply: Message) -> list[tuple[Message, Message]]:
        """Its earlier exchanges of the same handler, if this is one of its; which is remembered."""
        if not handler_of(message) or message.metadata.dst_node_id != 1001:
            return []
        earlier = [old for old in self.kept if handler_of(old[0]) == handler_of(message)]
        self.kept.append((message, reply))
        return earlier


def run(name, folder, *, fault=None, policy=None, task=None, node_task=None, grid=None, **settings):
    """Run a case through a Flower grid in memory, server and nodes in one run folder; returns (result, grid)."""
    task = task or task_of(name)
    grid = grid or MemoryGrid(client_app(CASES[name], node_task or task, folder.parent), CLIENTS, fault)
    settings = Settings(**{"rounds": ROUNDS, "out": folder} | settings)
    patience = 600 if fault is None else 0.5  # who drops replies is not to be waited for
    policy = policy or fb.Policy(round_timeout=patience, connect_timeout=patience, retries=0)
    names = [f"site-{i}" for i in range(len(task.problem.clients))] if grid.named else ()
    return serve_run(grid, Run.of(CASES[name], task, settings, policy), names, exchange=Exchange(poll=0.001)), grid


def rounds_of(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def left_out(folder):
    return [(r["round"], x["client"], x["outcome"]) for r in rounds_of(folder) for x in r.get("left_out", [])]
