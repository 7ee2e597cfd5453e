"""Flower's engine in memory: the laws again, and what a real network does to a round."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import logging
import re
import time
from contextlib import closing

import msgspec
import pytest
import torch
from cases import CASES, COME_AND_GO, PRESENCE, TinyNet, scheduled_task, tiny_data, tiny_task
from rich.console import Console
from runs import ROUNDS, fingerprint

import fewbytes as fb
from fewbytes.engines.handlers import Done
from fewbytes.experiments.display import PLAIN
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.report import read_run, write_report
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

pytest.importorskip("flwr", reason="Flower is not installed")

from flower_grid import CLIENTS, MemoryGrid, handler_of, left_out, rounds_of, run
from flwr.app import Array, ArrayRecord, Message

from fewbytes.engines.handlers import Runner
from fewbytes.experiments.app import _EventLog
from fewbytes.flower.application import EVENTS
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.flower.messages import read_content, sealed
from fewbytes.methods.parts.averaging import Model, Trained


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def test_what_was_done_before_the_server_died_is_not_done_again(tmp_path, monkeypatch):
    trained = []
    train = fb.FedPURIN.train

    @functools.wraps(train)
    def counting(self, state, message, site):
        trained.append((site.round, site.me))
        return train(self, state, message, site)

    monkeypatch.setattr(fb.FedPURIN, "train", counting)

    class Stop(fb.Watcher):
        def replied(self, client):
            if client == 1 and len(rounds_of(tmp_path / "run")) == 2:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        run("fedpurin", tmp_path / "run", watcher=Stop())
    run("fedpurin", tmp_path / "run", resume=True)
    assert sorted(trained) == [(t, i) for t in range(1, ROUNDS + 1) for i in range(CLIENTS)]


@pytest.mark.parametrize("name", ["fedpurin", "fedkd"])
def test_gone_back_to_an_earlier_round_its_nodes_have_the_states_of_then(name, uninterrupted, tmp_path):
    run(name, tmp_path / "run")
    states = [path.name.split("-") for path in (tmp_path / "run" / "checkpoint" / "clients").glob("*.state")]
    for back in (1, 1):  # once more from a round that came after going back
        run(name, tmp_path / "run", resume=True, from_round=ROUNDS - back)
        assert fingerprint(tmp_path / "run") == uninterrupted(name)
    assert {client for client, _ in states} == {str(i) for i in range(CLIENTS)}
    with pytest.raises(fb.UserError, match=f"checkpoint of round 1 .* {ROUNDS - 1} and {ROUNDS}"):
        run(name, tmp_path / "run", resume=True, from_round=1)


def test_nodes_keep_the_states_of_as_many_rounds_as_the_run_does(uninterrupted, tmp_path):
    for t in (1, 2, 3):
        folder = tmp_path / str(t)
        run("fedpurin", folder, keep_checkpoints=ROUNDS)
        run("fedpurin", folder, keep_checkpoints=ROUNDS, resume=True, from_round=t)
        assert fingerprint(folder) == uninterrupted("fedpurin")


def test_asked_twice_a_node_gives_the_stored_reply(tmp_path):
    seen = {}

    def twice(message, reply):
        seen[message.metadata.message_id] = (message, reply)
        return [reply, reply]  # and the same reply arrives twice

    result, grid = run("fedpurin", tmp_path / "run", fault=twice)
    plain, _ = run("fedpurin", tmp_path / "plain")
    assert result.rounds[-1]["scores"]["accuracy"] == plain.rounds[-1]["scores"]["accuracy"]
    message, reply = [pair for pair in seen.values() if handler_of(pair[0]) == "receive"][-1]
    again = grid.answer(message)
    assert [bytes(x) for x in read_content(again.content)] == [bytes(x) for x in read_content(reply.content)]
    older = next(pair[0] for pair in seen.values() if handler_of(pair[0]) == "train")
    assert b"older than one" in read_content(grid.answer(older).content)[0]


def flipped(reply: Message, at: int) -> Message:
    """The reply with one bit of its frame flipped."""
    record = reply.content.config_records["fewbytes"]
    data = bytearray(record["frame"])
    data[at % len(data)] ^= 1
    record["frame"] = bytes(data)
    return reply


def of_round(message: Message, t: int, client: int) -> bool:
    return handler_of(message) == "train" and (
        message.metadata.group_id == str(t) and message.metadata.dst_node_id == 1000 + client
    )


@pytest.mark.parametrize("name", ["fedavg", "fedpurin"])
def test_flipped_bits_leave_one_client_out_of_one_round(name, tmp_path):
    for at in (0, 70, 500, -1):
        folder = tmp_path / f"run{at}"
        result, _ = run(name, folder, fault=lambda m, r, at=at: [flipped(r, at) if of_round(m, 2, 1) else r])
        assert left_out(folder) == [(2, 1, "rejected")]
        assert result.summary["status"] == "done"
        assert result.summary["left_out"] == 1
        columns = result.ledger.columns()
        (row,) = columns["outcome"].nonzero()[0]
        assert columns["bytes_up"][row] > 0
        assert columns["round"][row] == 2


def test_garbage_of_every_kind_is_rejected(tmp_path):
    def nothing(m, r):
        r.content.clear()
        return [r]

    def record(**fields):
        def fault(m, r):
            for key, value in fields.items():
                r.content.config_records["fewbytes"][key] = value
            return [r]

        return fault

    def array(m, r):
        r.content["frame"] = ArrayRecord({"frame": Array("uint8", (3,), "x", b"abc")})
        return [r]

    faults = [nothing, array, record(order=b""), record(order=b"\xc1"), record(order=7), record(order=b"\x90" * 70_000)]
    faults += [record(frame=b""), record(frame=b"FEWB"), record(frame="text"), record(frame=b"\x00" * 10_000)]
    for i, fault in enumerate(faults):
        folder = tmp_path / str(i)
        run("fedavg", folder, rounds=2, fault=lambda m, r, fault=fault: fault(m, r) if of_round(m, 2, 0) else [r])
        assert left_out(folder) == [(2, 0, "rejected")], i


def test_numbers_that_are_not_finite_never_reach_the_method(tmp_path, monkeypatch):
    train = fb.FedAvg.train

    @functools.wraps(train)
    def poisoned(self, state, message, site):
        reply = train(self, state, message, site)
        if site.me == 2 and site.round == 2:
            next(iter(reply.theta.dense().values()))[:] = float("nan")
        return reply

    monkeypatch.setattr(fb.FedAvg, "train", poisoned)
    with pytest.warns(RuntimeWarning, match="client 2 rejected"):
        result, _ = run("fedavg", tmp_path / "run")
    assert left_out(tmp_path / "run") == [(2, 2, "rejected")]
    with pytest.warns(RuntimeWarning, match="client 2 rejected"):
        fb.run(CASES["fedavg"], tiny_task(), rounds=ROUNDS, out=tmp_path / "local")
    assert fingerprint(tmp_path / "local") == fingerprint(tmp_path / "run")
    assert all(torch.isfinite(v).all() for v in result.global_model.state_dict().values())


def test_late_dead_and_failing_clients_do_not_stop_a_round(tmp_path):
    def fault(message, reply):
        if of_round(message, 1, 0):
            return []  # never answers
        if of_round(message, 2, 1):
            grid.present.remove(2)  # dies while the round runs
        return [reply]

    task = tiny_task()
    grid = MemoryGrid(client_app(CASES["fedpurin"], task, tmp_path), CLIENTS, fault)
    policy = fb.Policy(round_timeout=0.3, connect_timeout=0.3)
    result, _ = run("fedpurin", tmp_path / "run", task=task, grid=grid, policy=policy, rounds=3)
    outcomes = left_out(tmp_path / "run")
    assert (1, 0, "late") in outcomes
    assert {(t, o) for t, i, o in outcomes if i == 2} >= {(3, "unreachable")}
    assert result.summary["status"] == "done"
    assert 0 in {int(c) for c in result.ledger.columns()["client"][result.ledger.columns()["round"] == 3]}


def test_a_silent_client_goes_on_from_its_last_accepted_state(tmp_path):
    """What the server did not accept did not happen: the run equals one in which the client is never asked."""
    run("fedpurin", tmp_path / "late", fault=lambda m, r: [] if of_round(m, 2, 0) else [r])
    run("fedpurin", tmp_path / "damaged", fault=lambda m, r: [flipped(r, 99) if of_round(m, 2, 0) else r])
    late, damaged = (fingerprint(tmp_path / name) for name in ("late", "damaged"))
    assert late["models"] == damaged["models"]
    assert late["states"] == damaged["states"]
    assert late["server"] == damaged["server"]


def test_too_few_replies_end_the_run_and_it_can_be_resumed(tmp_path, uninterrupted):
    policy = fb.Policy(min_replies=0.75, round_timeout=0.3, connect_timeout=0.3, retries=0)
    with pytest.raises(fb.FewbytesError, match=r"round 3.* 2 of 4 .*3 .*client 0 late"):
        run("fedpurin", tmp_path / "run", policy=policy, fault=lambda m, r: [] if m.metadata.group_id == "3" else [r])
    run("fedpurin", tmp_path / "run", policy=policy, resume=True)
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")


def test_over_selection_takes_the_first_to_answer(tmp_path):
    half = dataclasses.replace(CASES["fedavg"], fraction=0.5)
    task, silent = tiny_task(), ("train", 1001)
    grid = MemoryGrid(client_app(half, task, tmp_path), CLIENTS)
    grid.fault = lambda m, r: [] if (handler_of(m), m.metadata.dst_node_id) == silent else [r]
    policy = fb.Policy(over_selection=0.5, round_timeout=60, connect_timeout=1)
    started = time.monotonic()
    result = serve_run(
        grid, Run.of(half, task, Settings(rounds=6, out=tmp_path / "run"), policy), exchange=Exchange(poll=0.001)
    )
    assert time.monotonic() - started < 30  # nobody waited for the silent one
    columns = result.ledger.columns()
    for t in range(1, 7):
        assert sum(columns["round"] == t) == 3  # two and a half more
        assert sum((columns["round"] == t) & (columns["outcome"] == 0)) >= 2
    assert {(i, o) for _, i, o in left_out(tmp_path / "run")} == {(1, "surplus")}


def test_with_over_selection_who_fails_takes_nobodys_place(tmp_path):
    class Fails(fb.FedAvg):
        def train(self, state: None, message: Model, site: fb.Site) -> Trained:
            if site.me == 1:
                raise ValueError("no such thing")
            return super().train(state, message, site)

    class OneByOne(MemoryGrid):
        """Client 1 answers first, then one after another."""

        def pull_messages(self, message_ids):
            there = [number for number in message_ids if number in self._replies]
            first = [number for number in there if self._replies[number][0].metadata.dst_node_id == 1001]
            return super().pull_messages(first or there[:1])

    method, task = Fails(fraction=0.5, lr=0.1), tiny_task()
    grid = OneByOne(client_app(method, task, tmp_path), CLIENTS)
    policy = fb.Policy(over_selection=0.5, round_timeout=60, connect_timeout=60)
    made = Settings(rounds=6, out=tmp_path / "run")
    columns = serve_run(grid, Run.of(method, task, made, policy), exchange=Exchange(poll=0.001)).ledger.columns()
    assert [int(((columns["round"] == t) & (columns["outcome"] == 0)).sum()) for t in range(1, 7)] == [2] * 6
    assert (1, "failed") in {(i, o) for _, i, o in left_out(tmp_path / "run")}


def test_a_newcomer_is_served_between_rounds(tmp_path):
    task = tiny_task()
    grid = MemoryGrid(client_app(CASES["fedavg"], task, tmp_path), CLIENTS)
    grid.present = [0, 1, 2]
    joined = []

    class Late(fb.Watcher):
        def scored(self, row):
            if row["round"] == 2:
                grid.present.append(3)

        def joined(self, client):
            joined.append(client)

    policy = fb.Policy(connect_timeout=0.2)
    result, _ = run("fedavg", tmp_path / "run", task=task, grid=grid, policy=policy, watcher=Late())
    columns = result.ledger.columns()
    assert joined == [3]
    assert set(columns["round"][columns["client"] == 3]) == {3, 4}
    with pytest.raises(fb.UserError, match="has ended"):
        run("fedavg", tmp_path / "run", task=task, grid=grid, policy=policy, rounds=9, resume=True)


def test_a_newcomer_that_is_gone_again_is_not_missed(tmp_path, monkeypatch):
    def join(self, state, net, client):
        next(net.call(self.train, to=[client], send=None), None)

    monkeypatch.setattr(fb.FedAvg, "join", join)
    task = tiny_task()

    def fault(message, reply):
        return [] if message.metadata.dst_node_id == 1003 else [reply]

    grid = MemoryGrid(client_app(CASES["fedavg"], task, tmp_path), CLIENTS, named=True, fault=fault)
    grid.present = [0, 1, 2]

    class Late(fb.Watcher):
        def scored(self, row):
            grid.present = [0, 1, 2, 3]

    policy = fb.Policy(connect_timeout=0.2, round_timeout=0.2)
    result, _ = run("fedavg", tmp_path / "run", task=task, grid=grid, policy=policy, watcher=Late())
    assert result.summary["status"] == "done"
    assert set(result.ledger.columns()["client"][result.ledger.columns()["outcome"] == 0]) == {0, 1, 2}


class Nodes(fb.Watcher):
    """Connects the nodes of a grid while their clients are there by the schedule, and may stop the run."""

    def __init__(self, grid, first, stop=None):
        self.grid, self.stop = grid, stop
        self.connect(first)

    def connect(self, t):
        there = (i for i, (first, last) in enumerate(PRESENCE) if first <= t and (last is None or t <= last))
        self.grid.present[:] = there

    def scored(self, row):
        self.connect(row["round"] + 1)

    def replied(self, client):
        if self.stop is not None and client == 0 and len(rounds_of(self.stop)) >= 4:
            raise RuntimeError("the server's process dies in round 3")


def scheduled_run(name, folder, watcher=None, **settings):
    """A run with the schedule whose nodes are always there, or as `watcher`, made of the grid, says."""
    grid = MemoryGrid(client_app(COME_AND_GO[name], scheduled_task(), folder.parent), len(PRESENCE))
    told = watcher(grid) if watcher else fb.Watcher()
    policy = fb.Policy(round_timeout=5, connect_timeout=60)
    asked = Settings(rounds=ROUNDS, out=folder, watcher=told, **settings)
    return serve_run(grid, Run.of(COME_AND_GO[name], scheduled_task(), asked, policy), exchange=Exchange(poll=0.001))


@pytest.mark.parametrize("name", COME_AND_GO)
def test_with_a_schedule_flower_is_the_local_engine(name, scheduled, tmp_path):
    scheduled_run(name, tmp_path / "run")
    assert fingerprint(tmp_path / "run") == scheduled(name)


@pytest.mark.parametrize("name", ["fedavg", "greeting"])
def test_nodes_that_come_and_go_are_waited_for_only_while_they_are_due(name, scheduled, tmp_path):
    folder, started = tmp_path / "run", time.monotonic()
    with pytest.raises(RuntimeError, match="round 3"):
        scheduled_run(name, folder, lambda grid: Nodes(grid, 1, folder))
    scheduled_run(name, folder, lambda grid: Nodes(grid, 3), resume=True)
    assert time.monotonic() - started < 30
    made, wanted = fingerprint(folder), scheduled(name)
    if name != "fedavg":  # whoever has left saves no model of its own any more
        assert wanted["models"].keys() - made["models"].keys() == {f"client-{i}.safetensors" for i in (1, 4)}
    wanted = wanted | {"models": {key: wanted["models"][key] for key in made["models"]}}
    assert made == wanted


def test_clients_tested_on_all_of_their_classes_score_alike_in_both_engines(tmp_path):
    """And a run so tested is not gone on with by another test."""
    given = {"method": "fedavg", "dataset": "digits", "clients": 4, "model": "mlp", "parameters": {"batch": 50}}
    own, held = (make_experiment(given | {"test": test}) for test in ("own-share", "held-classes"))
    assert "test" not in own.settings()
    assert held.settings()["test"] == "held-classes"
    task, method = find(held).task, held.build_method()
    local = fb.run(method, task, rounds=2, out=tmp_path / "local")
    grid = MemoryGrid(client_app(method, find(held).task, tmp_path / "nodes"), CLIENTS)
    settings = Settings(rounds=2, out=tmp_path / "flower")
    result = serve_run(grid, Run.of(method, task, settings, fb.Policy()), exchange=Exchange(poll=0.001))
    assert result.summary["score"] == local.summary["score"]
    assert fingerprint(tmp_path / "flower") == fingerprint(tmp_path / "local")
    with pytest.raises(fb.UserError, match="of another configuration"):
        fb.run(method, find(own).task, rounds=2, out=tmp_path / "local", resume=True)


def test_newcomers_are_waited_for_when_nobody_else_is_left(tmp_path):
    task = fb.Task.on(dataclasses.replace(tiny_data(), presence=((1, 1), (1, 1), (2, None), (2, None))), TinyNet)
    grid = MemoryGrid(client_app(CASES["fedavg"], task, tmp_path), CLIENTS)
    grid.present = [0, 1]
    waited = []

    class Late(fb.Watcher):
        def waiting(self, there, wanted):
            waited.append((there, wanted))
            grid.present = [2, 3]

    settings, policy = Settings(rounds=2, out=tmp_path / "run", watcher=Late()), fb.Policy(connect_timeout=60)
    result = serve_run(grid, Run.of(CASES["fedavg"], task, settings, policy), exchange=Exchange(poll=0.001))
    assert waited == [(0, 2)]
    assert set(result.ledger.columns()["client"][result.ledger.columns()["round"] == 2]) == {2, 3}


def test_nodes_are_known_by_their_registered_names(tmp_path, uninterrupted):
    grid = MemoryGrid(client_app(CASES["fedpurin"], tiny_task(), tmp_path), CLIENTS, named=True)
    run("fedpurin", tmp_path / "run", grid=grid)
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")
    assert not any(m.metadata.message_type == "query.hello" for m in grid.asked)  # nobody is asked who he is
    grid = MemoryGrid(client_app(CASES["fedpurin"], tiny_task(), tmp_path), CLIENTS, named=True)
    grid.config = {"partition-id": 1}
    with pytest.raises(fb.FewbytesError, match=r"client 1, .*client 0"):
        run("fedpurin", tmp_path / "wrong", grid=grid)


def test_unnamed_nodes_that_claim_the_same_client_are_left_out(tmp_path):
    grid = MemoryGrid(client_app(CASES["fedavg"], tiny_task(), tmp_path), CLIENTS)
    grid.config = {"partition-id": 1}
    soon = fb.Policy(connect_timeout=0.5)
    for claimed, why in ((1, "holds client 1, as another node does"), (9, "holds client 9, not one of 0 to 3")):
        grid.config = {"partition-id": claimed}
        with pytest.warns(RuntimeWarning, match=why), pytest.raises(fb.FewbytesError, match="of 4 clients connected"):
            run("fedavg", tmp_path / f"run-{claimed}", grid=grid, policy=soon)


class OtherNet(TinyNet):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4 * 16, 5)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (fb.Task.on(tiny_data(), OtherNet), r"client 0 .*: model .* there, .* here$"),
        (tiny_task(seed=3), "seed: 3 there, 0 here"),
        (fb.Task.on(tiny_data(), TinyNet, agreed={"classes": "a, b"}), "classes: a, b there, none here$"),
    ],
)
def test_a_node_with_another_task_is_told_in_one_line(task, words, tmp_path):
    with pytest.raises(fb.UserError, match=words):
        run("fedavg", tmp_path / "run", node_task=task)


def test_a_node_with_another_method_is_told_in_one_line(tmp_path):
    other = dataclasses.replace(CASES["fedavg"], lr=0.7)
    grid = MemoryGrid(client_app(other, tiny_task(), tmp_path), CLIENTS)
    with pytest.raises(fb.UserError, match=r"FedAvg\(.*lr=0.7.*there, FedAvg\(.*lr=0.1.* here"):
        run("fedavg", tmp_path / "run", grid=grid)


def test_a_node_that_says_it_runs_something_else_before_anybody_has_answered_is_left_out(tmp_path):
    def fault(message, reply):
        if of_round(message, 1, 0):
            done = msgspec.msgpack.decode(reply.content.config_records["fewbytes"]["order"])
            done[Done.__struct_fields__.index("error")] = "different:{}"
            said(message, reply, msgspec.msgpack.encode(done))
        return [reply]

    run("fedavg", tmp_path / "run", fault=fault)
    assert left_out(tmp_path / "run") == [(1, 0, "failed")]


def test_a_node_that_changes_its_task_in_the_middle_is_left_out(tmp_path):
    grid = MemoryGrid(client_app(CASES["fedavg"], tiny_task(), tmp_path), CLIENTS)
    honest, other = grid.app, client_app(CASES["fedavg"], tiny_task(seed=3), tmp_path)
    grid.app = lambda message, context: (other if of_round(message, 2, 1) else honest)(message, context)
    run("fedavg", tmp_path / "run", grid=grid)
    assert left_out(tmp_path / "run") == [(2, 1, "failed")]
    assert "seed: 3 there, 0 here" in (tmp_path / "run" / "rounds.jsonl").read_text()


def said(message, reply, words):
    """Have a node say these words beside its reply, sealed as it would seal them."""
    record = reply.content.config_records["fewbytes"]
    order, _ = read_content(message.content)
    _, frame = read_content(reply.content)
    record["order"], record["seal"] = words, sealed(order, words, frame)


def beside(change):
    """The fault that changes what stands beside client 1's reply of round 2: `change` is given its fields."""

    def fault(message, reply):
        if of_round(message, 2, 1):
            record = reply.content.config_records["fewbytes"]
            done = dict(zip(Done.__struct_fields__, msgspec.msgpack.decode(record["order"]), strict=True))
            change(done)
            said(message, reply, msgspec.msgpack.encode(list(done.values())))
        return [reply]

    return fault


RUDE = "\x1b[2J\x1b]0;mine\x07<script>alert(1)</script> [bold red]\u202egnikrow\x00\n\r"


def test_what_is_said_beside_a_reply_cannot_make_it_cost_other_bytes(tmp_path):
    """What papers count is counted here, of the reply: nothing beside it says so."""
    run("fedavg", tmp_path / "honest", save_models=False)

    def fault(message, reply):
        if handler_of(message):
            record = reply.content.config_records["fewbytes"]
            done = msgspec.msgpack.decode(record["order"])
            said(message, reply, msgspec.msgpack.encode([*done, [2**62, 1]]))
        return [reply]

    run("fedavg", tmp_path / "run", fault=fault, save_models=False)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "honest")
    assert left_out(tmp_path / "run") == []


@pytest.mark.parametrize("depth", [40_000, 60_000])
def test_what_is_nested_deeply_beside_a_reply_is_rejected(depth, tmp_path):
    def fault(message, reply):
        if of_round(message, 2, 1):
            record = reply.content.config_records["fewbytes"]
            fields = msgspec.msgpack.decode(record["order"])
            head = b"\xdc" + (len(fields) + 1).to_bytes(2, "big") + b"".join(map(msgspec.msgpack.encode, fields))
            said(message, reply, head + b"\x91" * depth + b"\xc0")  # a field of a later version, as it were
        return [reply]

    run("fedavg", tmp_path / "run", fault=fault, rounds=2)
    assert left_out(tmp_path / "run") == [(2, 1, "rejected")]


def test_measurements_that_cannot_be_are_passed_over(tmp_path):
    def change(done):
        scores, losses, measures, _ = done["records"]
        scores["personalised"] = {"accuracy": (25.5, 1), "made-up": (1.0, 1)}
        scores |= {RUDE: {"accuracy": (1.0, 1)}, "x" * 65: {"accuracy": (1.0, 1)}}
        losses |= {RUDE: 1.0, "": 1.0, "huge": 1e300}
        measures |= {f"many {i}": 1.0 for i in range(1000)}

    run("fedavg", tmp_path / "run", fault=beside(change))
    (row,) = [row for row in rounds_of(tmp_path / "run") if row["round"] == 2 and row["phase"] == "round"]
    assert left_out(tmp_path / "run") == []
    assert all(0 <= value <= 1 for of in row["scores"].values() for value in of.values())
    assert set(row["scores"]) == {"accuracy"}
    assert "<script>" not in str(row)
    assert len(row["measured"]) == 64
    assert all(len(name) <= 64 for name in row["loss"])
    assert "huge" not in row["loss"]


@pytest.mark.parametrize("difference", [False, True])
def test_what_a_node_says_steers_no_terminal_and_no_page(difference, tmp_path, capsys):
    words = f"different:{msgspec.json.encode({'classes': RUDE, RUDE: 'x'}).decode()}" if difference else RUDE
    run("fedavg", tmp_path / "run", fault=beside(lambda done: done.update(error=words)))
    (left,) = [x for row in rounds_of(tmp_path / "run") for x in row.get("left_out", [])]
    assert left["why"].isprintable()
    assert "[2J ]0;mine <script>alert(1)</script> [bold red] gnikrow" in left["why"]
    page = write_report([read_run(tmp_path / "run")], tmp_path / "report.html").read_text("utf-8")
    assert "<script>alert(1)" not in page
    assert difference or "&lt;script&gt;alert(1)" in page  # a difference is long, and cut
    shown = capsys.readouterr()
    assert "\x1b[2J" not in shown.out + shown.err
    console = Console(file=io.StringIO(), **PLAIN)
    console.print(left["why"], soft_wrap=True)
    assert console.file.getvalue().strip() == left["why"]  # as it is: markup is not read


@pytest.mark.parametrize("name", [RUDE, "", "x" * 65, "a<b>", "a\nb"])
def test_a_handler_that_measures_under_such_a_name_is_told(name, tmp_path, monkeypatch):
    train = fb.FedAvg.train

    @functools.wraps(train)
    def measuring(self, state, message, site):
        site.measure(name, 1.0)
        return train(self, state, message, site)

    monkeypatch.setattr(fb.FedAvg, "train", measuring)
    with pytest.raises(fb.MethodError, match="letters and digits"):
        fb.run(CASES["fedavg"], tiny_task(), rounds=1, out=tmp_path / "run")


def test_nobody_there_is_told_in_one_line(tmp_path):
    grid = MemoryGrid(client_app(CASES["fedavg"], tiny_task(), tmp_path), CLIENTS)
    grid.present = [2]
    with pytest.raises(fb.FewbytesError, match=r"1 of 4 clients .*0.2 s, .*2 .*client 0"):
        run("fedavg", tmp_path / "run", grid=grid, policy=fb.Policy(connect_timeout=0.2))


def test_a_handler_that_raises_leaves_its_client_out(tmp_path, monkeypatch):
    train = fb.FedAvg.train

    @functools.wraps(train)
    def raising(self, state, message, site):
        if site.me == 3 and site.round == 2:
            raise ValueError("no\nluck")
        return train(self, state, message, site)

    monkeypatch.setattr(fb.FedAvg, "train", raising)
    run("fedavg", tmp_path / "run")
    (left,) = [x for row in rounds_of(tmp_path / "run") for x in row.get("left_out", [])]
    assert re.fullmatch(r"ValueError, its own log says more \(test_flower.py, line \d+\)", left.pop("why"))
    assert left == {"client": 3, "handler": "train", "outcome": "failed"}


def test_a_state_that_is_gone_from_its_node_leaves_its_client_out(tmp_path):
    class Wipe(fb.Watcher):
        def scored(self, row):
            if row["round"] == 1:
                for file in (tmp_path / "run" / "checkpoint" / "clients").glob("1-*"):
                    file.unlink()

    run("fedpurin", tmp_path / "run", watcher=Wipe(), rounds=2, save_models=False)
    assert (2, 1, "failed") in left_out(tmp_path / "run")


def test_a_node_that_lost_what_it_was_sent_misses_one_round(tmp_path, monkeypatch):
    """A method without states of clients needs none of it, so it is then sent a message in full."""

    def alone(self, *given, received=Runner._received):
        self._messages = {}  # what other clients of this process were sent is not known to a node
        return received(self, *given)

    class Wipe(fb.Watcher):
        def scored(self, row):
            if row["round"] == 1:
                for file in (tmp_path / "run" / "checkpoint" / "clients").glob("0-*"):
                    file.unlink()

    monkeypatch.setattr(Runner, "_received", alone)
    run("fedavg", tmp_path / "run", watcher=Wipe(), rounds=4, save_models=False, bits=1.0)
    assert left_out(tmp_path / "run") == [(2, 0, "failed")]


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", ".hidden", "x" * 200])
def test_a_run_name_that_is_no_folder_is_refused_by_the_node(name, tmp_path):
    from fewbytes.flower.node import Node

    with pytest.raises(fb.FewbytesError, match="name a folder"):
        Node(CASES["fedavg"], tiny_task(), tmp_path, name)


def test_a_server_that_outlives_its_deployment_says_nothing_to_the_next(tmp_path):
    (tmp_path / EVENTS).parent.mkdir()
    with closing(_EventLog(tmp_path)) as old:
        old.write("started")
        (tmp_path / EVENTS).unlink()
        with closing(_EventLog(tmp_path)) as new:
            new.write("waiting")
        old.write("interrupted")
    assert [json.loads(line)["event"] for line in (tmp_path / EVENTS).read_text().splitlines()] == ["waiting"]
