"""Rounds of a stated length on Flower's engine, in memory: steps follow from measured seconds."""

from __future__ import annotations

import pytest
from cases import task_of
from runs import StopAfter

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

import msgspec
from flower_grid import handler_of, run

from fewbytes.core.round_time import MOST
from fewbytes.engines.handlers import Done
from fewbytes.flower.messages import read_content, sealed
from fewbytes.flower.node import encoded

OWN = 2  # steps of an epoch of the case, on 17 to 20 samples in batches of 8; 20 are three
ROUNDS = 4


def steps(result: fb.Result) -> dict[int, list[int]]:
    """Of each round."""
    columns = result.ledger.columns()
    return {t: columns["steps"][columns["round"] == t].tolist() for t in range(1, ROUNDS + 1)}


def test_steps_follow_from_the_clients_seconds(tmp_path):
    result, grid = run("fednova", tmp_path / "run", round_time="0.3s", rounds=ROUNDS)
    taken = steps(result)
    assert all(count in (OWN, OWN + 1) for count in taken[1])
    columns = result.ledger.columns()
    again = {int(client) for client in columns["client"][columns["round"] == 1]}
    later = [
        int(count)
        for t, client, count in zip(columns["round"], columns["client"], columns["steps"], strict=True)
        if t > 1 and client in again
    ]
    assert later
    assert min(later) >= 1
    assert max(later) > OWN + 1  # a fraction of a second has room for more than an epoch
    assert not columns["simulated_ms"].any()
    assert all("local steps" in row["measured"] for row in result.rounds)
    assert grid.asked


def test_steps_that_cannot_be_do_not_reach_the_ledger(tmp_path):
    """Client 1 claims more steps than any number has room for."""

    def claims(message, reply):
        if handler_of(message) and message.metadata.dst_node_id == 1001:
            record = reply.content.config_records["fewbytes"]
            order, done = read_content(message.content)[0], msgspec.msgpack.decode(record["order"], type=Done)
            done.records.steps = 2**63
            record["order"] = encoded(done)
            record["seal"] = sealed(order, encoded(done), read_content(reply.content)[1])
        return [reply]

    result, _ = run("fednova-proximal", tmp_path / "run", fault=claims, round_time="0.3s", rounds=1)
    columns = result.ledger.columns()
    assert columns["steps"].max() == MOST
    assert not columns["outcome"].any()


def test_a_resumed_server_gives_the_steps_of_its_ledger(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run("fednova-proximal", tmp_path / "run", round_time="0.3s", rounds=ROUNDS, watcher=StopAfter(2))
    result, _ = run("fednova-proximal", tmp_path / "run", round_time="0.3s", rounds=ROUNDS, resume=True)
    taken = steps(result)
    assert taken[3] == taken[2]
    assert len(taken[4]) == 4


def test_without_a_round_time_no_steps_are_reported(tmp_path):
    result, _ = run("fednova", tmp_path / "run", rounds=2)
    assert not result.ledger.columns()["steps"].any()
    assert len(task_of("fednova").problem.clients) == 4


def test_links_and_speeds_are_for_simulations(tmp_path):
    with pytest.raises(fb.UserError, match="Flower's nodes are real: leave links out"):
        run("fednova", tmp_path / "run", links="1Mbps")
