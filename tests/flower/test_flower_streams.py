"""Streams on Flower's engine, in memory: the order is that of arrival, and what a real network does to it."""

from __future__ import annotations

import functools
import logging

import pytest
from cases import CASES, task_of
from runs import ROUNDS, fingerprint

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from flower_grid import CLIENTS, MemoryGrid, handler_of, left_out, rounds_of, run
from flwr.app import Error, Message

from fewbytes.flower.apps import client_app


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


class SlowGrid(MemoryGrid):
    """Replies of some clients are there only when they have been looked for so many times."""

    slow: dict[int, int]

    def pull_messages(self, message_ids):
        ready = []
        for number in message_ids:
            for message in self._replies.get(number, []):
                left = message.metadata.__dict__.setdefault("looks", self.slow.get(message.metadata.dst_node_id, 0))
                message.metadata.__dict__["looks"] = left - 1
                if left <= 0:
                    ready.append(number)
        return super().pull_messages(ready)


def slow_run(folder, slow, **settings):
    grid = SlowGrid(client_app(CASES["fedbuff"], task_of("fedbuff"), folder.parent), CLIENTS)
    grid.slow = {1000 + client: looks for client, looks in slow.items()}
    return run("fedbuff", folder, grid=grid, **settings)[0]


def heard(result) -> list[list[int]]:
    columns = result.ledger.columns()
    return [columns["client"][columns["round"] == t].tolist() for t in range(1, ROUNDS + 1)]


def test_who_is_slow_is_waited_for_over_rounds_and_the_others_go_on(tmp_path):
    result = slow_run(tmp_path / "run", {0: 3})
    assert heard(result)[0] == [1, 2, 3]  # three replies are a round
    assert any(0 in clients for clients in heard(result)[1:])
    assert max(row.get("staleness", 0) for row in result.rounds) > 0
    assert {outcome for *_, outcome in left_out(tmp_path / "run")} <= {"surplus"}
    assert result.summary["status"] == "done"


def test_what_was_done_before_the_server_died_is_not_done_again(tmp_path, uninterrupted, monkeypatch):
    trained = []
    train = fb.FedBuff.train

    @functools.wraps(train)
    def counting(self, state, message, site):
        trained.append((site.round, site.me))
        return train(self, state, message, site)

    monkeypatch.setattr(fb.FedBuff, "train", counting)

    class Stop(fb.Watcher):
        def replied(self, client):
            if client == 1 and len(rounds_of(tmp_path / "run")) == 2:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        run("fedbuff", tmp_path / "run", watcher=Stop())
    run("fedbuff", tmp_path / "run", resume=True)
    assert len(trained) == len(set(trained))
    assert fingerprint(tmp_path / "run") == uninterrupted("fedbuff")
    run("fedbuff", tmp_path / "run", resume=True, from_round=ROUNDS - 1)
    assert fingerprint(tmp_path / "run") == uninterrupted("fedbuff")


def cleared(message, reply):
    reply.content.clear()
    return [reply]


LOST = {
    "late": lambda message, reply: [],
    "failed": lambda message, reply: [Message(Error(2, "it raised"), reply_to=message)],
    "unreachable": lambda message, reply: [Message(Error(5, "gone"), reply_to=message)],
    "rejected": cleared,
}


@pytest.mark.parametrize("outcome", LOST)
def test_who_gives_no_reply_frees_the_place_and_is_named(outcome, tmp_path):
    """Client 1 in every round; who is not there at the first look is late."""

    def fault(message, reply):
        of_one = handler_of(message) and message.metadata.dst_node_id == 1001
        return LOST[outcome](message, reply) if of_one else [reply]

    policy = fb.Policy(round_timeout=1e-9, connect_timeout=0.5, retries=0)
    result, _ = run("fedbuff", tmp_path / "run", fault=fault, policy=policy)
    named = [(client, what) for _, client, what in left_out(tmp_path / "run") if what not in ("surplus", "excluded")]
    assert set(named) == {(1, outcome)}
    answered = result.ledger.columns()["outcome"] == 0
    assert 1 not in result.ledger.columns()["client"][answered]
    assert answered.sum() == 3 * ROUNDS
    assert result.summary["status"] == "done"


def test_a_node_that_is_not_there_is_asked_again_once_it_is(tmp_path):
    class Comes(fb.Watcher):
        def scored(self, row):
            grid.present = [0, 1, 2, 3] if row["round"] >= 3 else [0, 1, 2]

    grid = MemoryGrid(client_app(CASES["fedbuff"], task_of("fedbuff"), tmp_path), CLIENTS)
    run("fedbuff", tmp_path / "run", grid=grid, watcher=Comes())
    assert (3, 3, "unreachable") in left_out(tmp_path / "run")
    assert not [left for left in left_out(tmp_path / "run") if left[0] > 3 and left[2] != "surplus"]


def test_a_round_that_too_few_answered_is_taken_again_with_who_was_at_work(tmp_path, uninterrupted):
    """Everybody is gone when round 3 begins, and comes back; what the nodes had done is not lost."""
    answering = {"not": 0}

    def fault(message, reply):
        if handler_of(message) and message.metadata.group_id == "3" and answering["not"] < 3:
            answering["not"] += 1
            return [Message(Error(5, "gone"), reply_to=message)]
        return [reply]

    policy = fb.Policy(round_timeout=0.5, connect_timeout=0.5, retries=1, min_replies=1.0)
    run("fedbuff", tmp_path / "run", fault=fault, policy=policy)
    assert answering["not"] > 0
    assert fingerprint(tmp_path / "run")["server"] == uninterrupted("fedbuff")["server"]
