"""Clients that come and go by a schedule: who takes part, and the same results however the run is stopped."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from cases import CASES, COME_AND_GO, PRESENCE, TinyNet, scheduled_task, tiny_data, tiny_task
from runs import ROUNDS, fingerprint

import fewbytes as fb


def who(run: dict) -> dict[int, set[int]]:
    """Per round the clients that took part in it, a join before it not counted."""
    ledger = fb.Ledger.frombytes(run["ledger"], ["?"]).columns()
    joins = {(row["round"], row["client"]) for row in run["rounds"] if row["phase"] == "join" and row["cohort"]}
    counted = Counter(zip(ledger["round"].tolist(), ledger["client"].tolist(), strict=True))
    counted.subtract(joins)
    return {t: {i for (r, i), n in counted.items() if r == t and n > 0} for t in range(1, ROUNDS + 1)}


@pytest.mark.parametrize("name", ["fedavg", "fedpurin", "greeting"])
def test_clients_come_and_go_by_the_schedule(name, scheduled):
    run = scheduled(name)
    assert who(run) == {1: {0, 1, 2}, 2: {0, 1, 2, 5}, 3: {0, 2, 3, 4, 5}, 4: {0, 2, 3, 5}}
    joins = [(row["round"], row["client"]) for row in run["rounds"] if row["phase"] == "join"]
    assert joins == [(2, 5), (3, 3), (3, 4)]
    if name != "fedavg":  # a model of everybody's own, of those that have left too
        assert set(run["models"]) == {f"client-{i}.safetensors" for i in range(len(PRESENCE))}


@pytest.mark.parametrize("name", COME_AND_GO)
def test_with_a_schedule_any_number_of_workers_gives_the_same(name, scheduled, tmp_path):
    fb.run(COME_AND_GO[name], scheduled_task(), rounds=ROUNDS, out=tmp_path / "run", workers=1)
    assert fingerprint(tmp_path / "run") == scheduled(name)


class StopAt(fb.Watcher):
    """Stops a run at an event: ("scored", round), ("joined", client) or ("refused", client)."""

    def __init__(self, *event) -> None:
        self.event = event

    def scored(self, row):
        self.at("scored", row["round"])

    def joined(self, client):
        self.at("joined", client)

    def refused(self, client, why):
        self.at("refused", client)

    def at(self, *event):
        if event == self.event:
            raise KeyboardInterrupt


STOPS = [(name, "scored", t) for name in COME_AND_GO for t in (2, 3)]  # around the round that most come in
STOPS += [("greeting", "scored", 1), ("greeting", "scored", 4), ("greeting", "joined", 3), ("choosy", "refused", 3)]


@pytest.mark.parametrize(("name", "event", "at"), STOPS)
def test_with_a_schedule_resumed_is_uninterrupted(name, event, at, scheduled, tmp_path):
    method, folder = COME_AND_GO[name], tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fb.run(method, scheduled_task(), rounds=ROUNDS, out=folder, workers=2, watcher=StopAt(event, at))
    fb.run(method, scheduled_task(), rounds=ROUNDS, out=folder, workers=1, resume=True)
    assert fingerprint(folder) == scheduled(name)


def test_a_newcomer_the_method_cannot_serve_stays_outside(scheduled):
    run = scheduled("choosy")
    assert who(run) == {1: {0, 1, 2}, 2: {0, 1, 2, 5}, 3: {0, 2, 5}, 4: {0, 2, 5}}
    rows = {row["client"]: row for row in run["rounds"] if row["phase"] == "join"}
    assert [client for client in rows if "left_out" in rows[client]] == [3, 4]
    why = "a client of 20 samples is not welcome"
    assert rows[3]["left_out"] == [{"client": 3, "handler": "join", "outcome": "rejected", "why": why}]
    assert set(run["models"]) == {f"client-{i}.safetensors" for i in (0, 1, 2, 5)}
    assert set(run["states"]) == {0, 1, 2, 5}


def test_a_schedule_that_leaves_a_round_empty_is_told_before_anything_is_written(tmp_path):
    data = replace(tiny_data(2), presence=((1, 2), (4, None)))
    with pytest.raises(fb.UserError, match="round 3 of 4"):
        fb.run(CASES["fedavg"], fb.Task.on(data, TinyNet), rounds=4, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fb.run(CASES["fedavg"], fb.Task.on(data, TinyNet), rounds=2).summary["status"] == "done"


def test_a_run_is_not_gone_on_with_by_another_schedule(tmp_path):
    fb.run(CASES["fedavg"], scheduled_task(), rounds=2, out=tmp_path / "run")
    with pytest.raises(fb.UserError, match="another configuration"):
        fb.run(CASES["fedavg"], tiny_task(len(PRESENCE)), rounds=2, out=tmp_path / "run", resume=True)


def test_when_every_newcomer_is_refused_and_the_others_have_left_the_run_ends_in_one_line(tmp_path):
    data = replace(tiny_data(5), presence=((1, 1), (1, 1), (1, 1), (2, None), (2, None)))
    with pytest.raises(fb.FewbytesError, match=r"round 2 .*every client"):
        fb.run(COME_AND_GO["choosy"], fb.Task.on(data, TinyNet), rounds=2, out=tmp_path / "run")
