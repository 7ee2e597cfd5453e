"""What holds for every method: the same results whatever runs it, however often it is stopped, and an honest ledger."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from cases import CASES, COME_AND_GO, PRESENCE, SCHEDULED, TinyNet, scheduled_task, task_of, tiny_data, tiny_task
from runs import ROUNDS, fingerprint

import fewbytes as fb
from fewbytes.methods import Clustered


def stops(name):
    """After which rounds a run is stopped: each of methods whose rounds differ, else an early one and the last."""
    last = CASES[name].planned_rounds(ROUNDS)
    return range(1, last + 1) if last != ROUNDS or name in SCHEDULED else (2, last)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_workers_gives_the_same(name, uninterrupted, tmp_path):
    for workers in (1, 3):
        fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=tmp_path / str(workers), workers=workers)
        assert fingerprint(tmp_path / str(workers)) == uninterrupted(name)


@pytest.mark.parametrize("name", CASES)
def test_without_worker_processes_it_is_the_same(name, uninterrupted, tmp_path, monkeypatch):
    import sklearn.cluster  # noqa: F401 (what it imports asks for the platform)

    monkeypatch.setattr(sys, "platform", "elsewhere")  # where processes cannot be forked, handlers run right here
    fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=tmp_path / "run")
    assert fingerprint(tmp_path / "run") == uninterrupted(name)


@pytest.mark.parametrize(("name", "stop"), [(name, stop) for name in CASES for stop in stops(name)])
def test_stopped_and_resumed_is_uninterrupted(name, stop, uninterrupted, tmp_path):
    class Stop(fb.Watcher):
        def scored(self, row):
            if row["round"] == stop:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=tmp_path / "run", workers=2, watcher=Stop())
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "interrupted"
    fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=tmp_path / "run", workers=1, resume=True)
    assert fingerprint(tmp_path / "run") == uninterrupted(name)


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_the_bytes_of_the_frames(name, tmp_path):
    for coded in (True, False):
        folder = tmp_path / str(coded)
        result = fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=folder, workers=2, keep_frames=True, coded=coded)
        columns = result.ledger.columns()
        sizes = {p.stem: p.stat().st_size for p in (folder / "frames").glob("*")} if result.ledger else {}
        for i in range(len(result.ledger)):
            stem = f"{columns['round'][i]}-{result.ledger.handlers[columns['handler'][i]]}-{columns['client'][i]}"
            assert columns["bytes_up"][i] == sizes.get(f"{stem}-up", 0)
            assert columns["bytes_down"][i] == sizes.get(f"{stem}-down", 0)
        totals = result.ledger.totals()
        assert totals["uplink_bytes"] == sum(v for k, v in sizes.items() if k.endswith("up"))
        rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        assert (
            sum(row["downlink_bytes"] for row in rows) == totals["downlink_bytes"] == result.summary["downlink_bytes"]
        )


def test_coding_changes_bytes_and_nothing_else(tmp_path):
    for name in ("fedavg", "fedpurin"):
        runs = [fb.run(CASES[name], tiny_task(), rounds=ROUNDS, workers=2, coded=coded) for coded in (True, False)]
        assert runs[0].rounds[-1]["accuracy"] == runs[1].rounds[-1]["accuracy"]
        assert runs[0].rounds[-1]["loss"] == runs[1].rounds[-1]["loss"]


def test_bytes_follow_the_formula_of_the_docstring():
    model = TinyNet()
    values = sum(v.nbytes for v in model.state_dict().values())
    learnt = sum(p.nbytes for p in model.parameters())
    scored = learnt - sum(p.nbytes for p in model.norm.parameters())
    for method, up, down in (
        (CASES["fedavg"], values, values),
        (CASES["fedavg-local-buffers"], learnt, learnt),
    ):
        columns = fb.run(method, tiny_task(), rounds=2).ledger.columns()
        assert set(columns["value_bytes_up"]) == {up}
        assert set(columns["value_bytes_down"]) == {down}
    columns = fb.run(CASES["ensemble"], tiny_task(), rounds=2).ledger.columns()
    assert set(columns["round"]) == {1}
    assert set(columns["value_bytes_up"]) == {values}
    assert not columns["bytes_down"].any()
    assert len(fb.run(CASES["separate"], tiny_task(), rounds=2).ledger.columns()["bytes_up"].nonzero()[0]) == 0
    columns = fb.run(CASES["fedpurin"], tiny_task(), rounds=2).ledger.columns()
    trained = columns["round"] <= 2
    assert set(columns["mask_bits_up"][trained]) == {scored // 4}  # one bit an element, elements of four bytes
    kept = sum(p.numel() // 2 for n, p in model.named_parameters() if not n.startswith("norm"))
    assert set(columns["value_bytes_up"][trained]) == {4 * kept}
    assert (columns["bytes_down"][columns["round"] == 1] == 0).all()  # the first model is drawn from the seed


@pytest.mark.parametrize("name", CASES)
def test_one_client_alone(name):
    method = CASES[name]
    if isinstance(method, Clustered):
        method = replace(method, clusters=1)
    result = fb.run(method, task_of(name, clients=1), rounds=2)
    assert result.summary["rounds"] == method.planned_rounds(2)
    assert result.summary["status"] == "done"


@pytest.mark.parametrize("name", CASES)
def test_clients_without_test_samples_are_not_scored(name):
    task = task_of(name)
    clients = tuple(replace(client, test=client.test.take([])) for client in task.data.clients)
    result = fb.run(CASES[name], replace(task, data=replace(task.data, clients=clients)), rounds=2)
    assert {kind for row in result.rounds for kind in row["accuracy"]} <= {"global"}


def test_another_seed_gives_another_run(uninterrupted, tmp_path):
    fb.run(CASES["fedavg"], tiny_task(seed=1), rounds=ROUNDS, out=tmp_path / "run")
    assert fingerprint(tmp_path / "run")["models"] != uninterrupted("fedavg")["models"]


def test_a_worker_killed_in_the_middle_of_a_handler_is_replaced(uninterrupted, tmp_path, monkeypatch):
    """Every worker kills itself in its first handler of round 2, after training and before replying."""
    marker = tmp_path / "killed"
    train = fb.FedPURIN.train

    @functools.wraps(train)
    def deadly(self, state, message, site):
        reply = train(self, state, message, site)
        if site.round == 2 and len(list(tmp_path.glob("killed*"))) < 2:
            marker.with_name(f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    monkeypatch.setattr(fb.FedPURIN, "train", deadly)
    fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=2)
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")


def test_workers_killed_from_outside_again_and_again(uninterrupted, tmp_path):
    class Kill(fb.Watcher):
        replies, killed = 0, 0

        def replied(self, client):
            self.replies += 1
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            if self.replies % 4 == 2 and children:  # a client is tried again, but not for ever
                os.kill(int(children[0]), signal.SIGKILL)
                self.killed += 1

    kill = Kill()
    fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=2, watcher=kill)
    assert kill.killed >= 3
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")


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
    with pytest.raises(fb.UserError, match="no client is there in round 3 of 4"):
        fb.run(CASES["fedavg"], fb.Task(TinyNet, data), rounds=4, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fb.run(CASES["fedavg"], fb.Task(TinyNet, data), rounds=2).summary["status"] == "done"


def test_a_run_is_not_gone_on_with_by_another_schedule(tmp_path):
    fb.run(CASES["fedavg"], scheduled_task(), rounds=2, out=tmp_path / "run")
    with pytest.raises(fb.UserError, match="another configuration"):
        fb.run(CASES["fedavg"], tiny_task(len(PRESENCE)), rounds=2, out=tmp_path / "run", resume=True)


def test_when_every_newcomer_is_refused_and_the_others_have_left_the_run_ends_in_one_line(tmp_path):
    data = replace(tiny_data(5), presence=((1, 1), (1, 1), (1, 1), (2, None), (2, None)))
    with pytest.raises(fb.FewbytesError, match="round 2 cannot begin: every client has left or could not join"):
        fb.run(COME_AND_GO["choosy"], fb.Task(TinyNet, data), rounds=2, out=tmp_path / "run")
