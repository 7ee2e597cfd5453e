"""Nodes without names on a grid: a stranger is left out and named, and the run is as if it were not there."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from cases import CASES
from flower_grid import CLIENTS, MemoryGrid, left_out, run
from flwr.app import Error, Message
from hostile import task_of

import fewbytes as fb
from fewbytes.flower.apps import client_app
from fewbytes.flower.messages import write_content
from fewbytes.running.watcher import Watcher

STRANGER = CLIENTS  # beside the nodes of clients 0 to 3


class Heard(Watcher):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Strangers(MemoryGrid):
    """One more node, which answers `what`: an error, another number, or nothing that this package would write."""

    def __init__(self, app, what: str) -> None:
        super().__init__(app, CLIENTS + 1)
        self.what = what

    def answer(self, message: Message) -> Message:
        if message.metadata.dst_node_id - 1000 != STRANGER:
            return super().answer(message)
        self.asked.append(message)
        if self.what == "no app":
            return Message(Error(2, "No module named 'fewbytes'"), reply_to=message)
        if self.what == "another app":
            return Message(write_content(b"\xc1"), reply_to=message)
        return Message(write_content(msgspec.msgpack.encode(int(self.what))), reply_to=message)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no app", "does not start its app: No module named 'fewbytes'"),
        ("another app", "does not run this package's app"),
        ("-1", "says that it holds client -1, not one of 0 to 3: set its partition-id"),
        ("1", "says that it holds client 1, as another node does: give each its own partition-id"),
    ],
)
def test_a_stranger_is_left_out_and_named(what, why, tmp_path):
    task, heard = task_of("fedavg"), Heard()
    grid = Strangers(client_app(CASES["fedavg"], task, tmp_path), what)
    result, _ = run("fedavg", tmp_path / "run", task=task, grid=grid, watcher=heard)
    nodes = {1000 + STRANGER} if what != "1" else {1001, 1000 + STRANGER}  # the one that answers first is taken
    assert [note for note in heard.notes if "left out" in note] in [
        [f"node {node} is left out: it {why}"] for node in nodes
    ]
    if what == "1":
        return  # either may be the client
    alone, _ = run("fedavg", tmp_path / "alone", task=task)
    assert not left_out(tmp_path / "run")
    assert {name: value.tolist() for name, value in result.global_model.state_dict().items()} == {
        name: value.tolist() for name, value in alone.global_model.state_dict().items()
    }


def test_a_site_that_stays_away_is_told_every_few_rounds(tmp_path):
    heard, task = Heard(), task_of("fedavg")
    grid = MemoryGrid(client_app(CASES["fedavg"], task, tmp_path), CLIENTS, named=True)

    def leave(message: Message, reply: Message) -> list[Message]:
        if message.metadata.group_id == "2":
            grid.present = [0, 1, 3]
        return [reply]

    grid.fault = leave
    policy = fb.Policy(round_timeout=600, connect_timeout=0.01, retries=0)
    run("fedavg", tmp_path / "run", task=task, grid=grid, policy=policy, watcher=heard, rounds=13)
    told = [note for note in heard.notes if "still absent" in note]
    assert [note.partition(":")[0] for note in told] == ["round 6", "round 11"]
    assert "client 2 (site-2) for 5 rounds; the run continues with 3 of 4 clients. With --min-replies 1," in told[0]
    assert "client 2 (site-2) for 10 rounds" in told[1]


def test_a_site_that_never_came_counts_as_one_of_all(tmp_path):
    heard, task = Heard(), task_of("fedavg")
    grid = MemoryGrid(client_app(CASES["fedavg"], task, tmp_path), CLIENTS, named=True)
    grid.present = [0, 1, 3]
    policy = fb.Policy(round_timeout=600, connect_timeout=0.01, retries=0)
    run("fedavg", tmp_path / "run", task=task, grid=grid, policy=policy, watcher=heard, rounds=5)
    (told,) = [note for note in heard.notes if "still absent" in note]
    assert "client 2 (site-2) for 5 rounds; the run continues with 3 of 4 clients" in told
