"""Replies as they come: who is at work while rounds go by, by a simulated clock."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import ClassVar

import pytest
from cases import late_task, tiny_data, tiny_task
from runs import StopAfter, fingerprint

import fewbytes as fb
from fewbytes.cli.shared import speeds_of
from fewbytes.core.speeds import Speeds
from fewbytes.engines.local import local_engine
from fewbytes.engines.terms import Terms
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.running.checkpoint import read_checkpoint

ROUNDS = 5


@fb.payload
class Message:
    number: int


@fb.payload
class Reply:
    """What a client was sent, how often it has been asked, and something random."""

    number: int
    asked: int
    noise: float


@dataclass
class Times:
    asked: int = 0


@dataclass
class Heard:
    """Of every round the clients, how stale their replies were, what they were sent, and their noise."""

    clients: list[list[int]] = field(default_factory=list)
    staleness: list[list[int]] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Streamed(fb.Method):
    """Takes `buffer` replies a round, of `at_once` clients at work; sends the number of the round."""

    at_once: int = 3
    buffer: int = 2

    promises = fb.Promises(streams=True)

    def server(self, problem: fb.Problem) -> Heard:
        return Heard()

    def client(self, site: fb.Site) -> Times:
        return Times()

    def round(self, state: Heard, net: fb.Network, t: int) -> None:
        replies = list(islice(net.stream(self.work, send=Message(t), at_once=self.at_once), self.buffer))
        state.clients.append([client for client, _, _ in replies])
        state.staleness.append([staleness for *_, staleness in replies])
        state.sent.append([reply.number for _, reply, _ in replies])
        state.noise += [reply.noise for _, reply, _ in replies]

    def work(self, state: Times, message: Message, site: fb.Site) -> Reply:
        state.asked += 1
        return Reply(message.number, state.asked, float(site.rng.random()))

    def other(self, state: Times, message: Message, site: fb.Site) -> Reply:
        return self.work(state, message, site)

    def told(self, state: Times, message: Message, site: fb.Site) -> None: ...


def heard(folder) -> Heard:
    from fewbytes.wire import unpack

    return unpack(Heard, read_checkpoint(folder).server)


def run(folder, method=None, task=None, **settings) -> fb.Result:
    settings = {"rounds": ROUNDS, "workers": 1, "out": folder} | settings
    return fb.run(method or Streamed(), task or tiny_task(), **settings)


def left_out(result) -> list[tuple[int, str]]:
    return [(left["client"], left["outcome"]) for row in result.rounds for left in row.get("left_out", [])]


# ---------------------------------------------------------------------------------------------------- whose turn it is


def test_who_is_done_first_by_the_clock_is_heard_first(tmp_path):
    """All four are always at work, but who was heard in a round is asked again in the next: the third is done at 4."""
    result = run(tmp_path / "run", Streamed(at_once=4, buffer=2), speeds="1,2,4,100", rounds=3)
    found = heard(tmp_path / "run")
    assert found.clients == [[0, 1], [0, 2], [1, 0]]  # at 1, 2; 3, 4; 4 (asked at 2), 5
    assert found.staleness == [[0, 0], [0, 1], [1, 0]]
    assert found.sent == [[1, 1], [2, 1], [2, 3]]
    rounds = [row for row in result.rounds if row["phase"] == "round"]
    assert [row["simulated_seconds"] for row in rounds] == [2, 4, 5]
    assert [row["staleness"] for row in rounds] == [0, 0.5, 0.5]
    assert result.summary["simulated_seconds"] == 5


def test_without_speeds_who_was_asked_first_is_heard_first_and_no_time_is_told(tmp_path):
    result = run(tmp_path / "run", Streamed(at_once=4, buffer=3))
    assert heard(tmp_path / "run").clients[:3] == [[0, 1, 2], [3, 0, 1], [2, 0, 1]]
    assert "simulated_seconds" not in result.summary
    assert all("simulated_seconds" not in row for row in result.rounds)


def test_a_client_answers_once_in_a_round_and_never_draws_the_same_twice(tmp_path):
    """However fast it is: the stream of one who would take ten replies a round ends when all have answered."""
    run(tmp_path / "run", Streamed(at_once=2, buffer=10), speeds="0.1,1,1,1")
    found = heard(tmp_path / "run")
    assert all(sorted(clients) == [0, 1, 2, 3] for clients in found.clients)
    assert len(set(found.noise)) == len(found.noise) == 4 * ROUNDS


def test_no_more_clients_are_at_work_than_places(tmp_path):
    for at_once in (1, 2, 3):
        result = run(tmp_path / str(at_once), Streamed(at_once=at_once, buffer=2), speeds="8x")
        exchanges = len(result.ledger)
        assert 2 * ROUNDS <= exchanges <= 2 * ROUNDS + at_once - 1
        assert left_out(result) == [(client, "surplus") for client, _ in left_out(result)]
        assert len(left_out(result)) == exchanges - 2 * ROUNDS


def test_a_call_takes_as_long_as_its_slowest_client():
    result = fb.run(fb.FedAvg(epochs=1), tiny_task(), rounds=3, workers=1, speeds="1,2,4,3")
    assert [row["simulated_seconds"] for row in result.rounds] == [4, 8, 12]
    half = fb.run(fb.FedAvg(epochs=1, fraction=0.5), tiny_task(), rounds=3, workers=1, speeds="1,2,4,3")
    assert half.summary["simulated_seconds"] < 12


class Both(Streamed):
    """Calls whoever was heard, too."""

    def round(self, state: Heard, net: fb.Network, t: int) -> None:
        super().round(state, net, t)
        for _ in net.call(self.other, to=state.clients[-1], send=Message(t)):
            pass


def test_who_was_done_while_others_were_called_is_heard_next_and_the_clock_never_goes_back(tmp_path):
    result = run(tmp_path / "run", Both(at_once=4, buffer=2), speeds="1,9,2,10", rounds=4)
    assert heard(tmp_path / "run").clients == [[0, 2], [0, 2], [1, 0], [3, 2]]  # the last two were done at 10
    seconds = [row["simulated_seconds"] for row in result.rounds if row["phase"] == "round"]
    assert seconds == [4, 8, 18, 28]


# ---------------------------------------------------------------------------------------------------- the same results


def test_any_number_of_workers_gives_the_same(tmp_path, monkeypatch):
    run(tmp_path / "3", speeds="10x", workers=3)
    run(tmp_path / "1", speeds="10x", workers=1)
    monkeypatch.setattr(sys, "platform", "elsewhere")
    run(tmp_path / "none", speeds="10x")
    assert fingerprint(tmp_path / "3") == fingerprint(tmp_path / "1") == fingerprint(tmp_path / "none")


def test_stopped_after_every_round_it_is_the_same_and_so_is_one_that_goes_back(tmp_path):
    task = tiny_task(clients=6)
    run(tmp_path / "whole", task=task, speeds="10x", workers=2)
    for t in range(1, ROUNDS + 1):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", task=task, speeds="10x", workers=1 + t % 3, watcher=StopAfter(t), resume=t > 1)
        assert read_checkpoint(tmp_path / "run").under_way.work
    run(tmp_path / "run", task=task, speeds="10x", resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    run(tmp_path / "run", task=task, speeds="10x", resume=True, from_round=ROUNDS - 1)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_run_is_not_gone_on_with_by_other_speeds(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", speeds="10x", watcher=StopAfter(2))
    with pytest.raises(fb.UserError, match="another configuration"):
        run(tmp_path / "run", speeds="11x", resume=True)


# ---------------------------------------------------------------------------------------------------- who fails


class Broken(Streamed):
    """Replies of client 1 hold a number that is not finite."""

    broken: ClassVar[set[int]] = {1}

    def work(self, state: Times, message: Message, site: fb.Site) -> Reply:
        reply = super().work(state, message, site)
        return replace(reply, noise=float("nan")) if site.me in self.broken else reply


class AllBroken(Broken):
    broken: ClassVar[set[int]] = {0, 1, 2, 3}


def test_who_is_refused_frees_the_place_and_is_not_asked_after_some_rounds(tmp_path):
    with pytest.warns(RuntimeWarning, match="client 1 rejected"):
        result = run(tmp_path / "run", Broken(at_once=4, buffer=2), rounds=8)
    found = heard(tmp_path / "run")
    assert all(len(clients) == 2 and 1 not in clients for clients in found.clients)
    outcomes = [outcome for client, outcome in left_out(result) if client == 1]
    assert outcomes[:3] == ["rejected"] * 3
    assert set(outcomes[3:]) == {"excluded"}


def test_a_run_whose_clients_all_fail_ends_in_one_line(tmp_path):
    with pytest.raises(fb.FewbytesError, match=r"1 of 4 clients .* 2 "):
        run(tmp_path / "run", AllBroken(at_once=3, buffer=2))


def test_who_is_excluded_or_leaves_while_at_work_is_named(tmp_path):
    method = Streamed(at_once=4, buffer=1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "two", method, speeds="1,100,1,1", watcher=StopAfter(2))
    result = run(tmp_path / "two", method, speeds="1,100,1,1", resume=True, policy=fb.Policy(exclude="1"))
    assert left_out(result)[:1] == [(1, "excluded")]
    down = result.ledger.columns()["bytes_down"][result.ledger.columns()["client"] == 1]
    assert down[0] > 0  # it was sent its message
    assert not down[1:].any()

    data = replace(tiny_data(4), presence=((1, None), (1, 2), (1, None), (1, None)))
    result = run(tmp_path / "three", method, fb.Task.on(data, tiny_task().problem.build), speeds="1,100,1,1")
    assert left_out(result)[0] == (1, "surplus")
    assert result.rounds[2]["left_out"][0]["why"] == "it has left"


def test_newcomers_are_asked_too(tmp_path):
    run(tmp_path / "run", Streamed(at_once=3, buffer=3), late_task(), speeds="1,1,1")
    assert all(2 in clients for clients in heard(tmp_path / "run").clients[1:])


def test_who_is_at_work_when_the_last_round_ends_was_sent_its_message_and_sends_nothing(tmp_path):
    result = run(tmp_path / "run", Streamed(at_once=4, buffer=2), speeds="1,1,1,50", keep_frames=True)
    last = result.rounds[-1]
    assert (last["phase"], last["round"], last["uplink_bytes"]) == ("finish", ROUNDS + 1, 0)
    assert {left["client"] for left in last["left_out"]} >= {3}
    assert last["left_out"][0]["why"] == "still at work when the last round ended"
    frames = list((tmp_path / "run" / "frames").glob(f"{ROUNDS + 1}-work-*-down.frame"))
    assert sum(frame.stat().st_size for frame in frames) == last["downlink_bytes"] > 0
    assert not list((tmp_path / "run" / "checkpoint" / "clients").glob("3-*"))  # what nobody accepted did not happen


# ---------------------------------------------------------------------------------------------------- what cannot be


@pytest.fixture
def engine(tmp_path):
    with local_engine(Terms(Streamed(), tiny_task(), tmp_path), workers=2) as made:
        made.begin(1)
        yield made


def test_what_does_not_go_with_a_stream_is_refused_in_one_line(engine):
    net, method = engine.network, engine.method
    with pytest.raises(fb.MethodError, match=r"at least one .* not 0"):
        net.stream(method.work, send=Message(1), at_once=0)
    with pytest.raises(fb.MethodError, match="not of a part"):
        net.among([0, 1], "some").stream(method.work, send=Message(1))
    ((client, *_),) = islice(net.stream(method.work, send=Message(1), at_once=4), 1)
    busy = [i for i in net.clients if i != client]
    with pytest.raises(fb.MethodError, match=f"still work .*\\[{busy[0]}"):
        net.call(method.work, to=net.clients, send=Message(1))
    assert [i for i, _ in net.call(method.work, to=[client], send=Message(1))] == [client]
    with pytest.raises(fb.MethodError, match="still work on 'work'"):
        net.stream(method.other, send=Message(1))
    net.tell(method.told, send=Message(1), when="next")
    with pytest.raises(fb.MethodError, match="messages wait"):
        net.stream(method.work, send=Message(1))


def test_a_method_says_that_it_streams(tmp_path):
    class Silent(Streamed):
        promises = fb.Promises(streams=False)

    with pytest.raises(fb.MethodError, match=r"must declare it: Promises\(streams=True\)"):
        run(tmp_path / "run", Silent())
    with pytest.raises(fb.UserError, match="clusters"):
        Clustered(Streamed(), clusters=2)


def test_speeds_are_numbers_a_file_or_a_spread(tmp_path):
    table = tmp_path / "speeds.csv"
    table.write_text("1\n2.5\n10\n")
    assert speeds_of(str(table)) == "1,2.5,10" == str(Speeds.read(" 1, 2.5,1e1"))
    spread = Speeds.read("10x").seconds(11, seed=0)
    assert (min(spread), max(spread), sorted(spread)[5]) == (1, 10, pytest.approx(10**0.5, abs=1e-3))
    assert spread == Speeds.read("10x").seconds(11, seed=0) != Speeds.read("10x").seconds(11, seed=1)
    for wrong in ("0x", "nothing", "1,,2", "1,-2", "0,1", "1,nan", "", "x", str(table)):
        with pytest.raises(fb.UserError, match=r"^speeds are "):
            Speeds.read(wrong)
    table.write_text("1\nsecret\n")
    with pytest.raises(fb.UserError, match=r"speeds\.csv") as told:
        speeds_of(str(table))
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"speeds": "1,2"}, "2 clients, .* 4"),
        ({"speeds": "10x", "engine": "flower-simulation"}, "Flower"),
    ],
)
def test_speeds_that_cannot_be_are_refused_before_anything_is_written(settings, why, tmp_path):
    with pytest.raises(fb.UserError, match=why):
        run(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_config_keeps_the_numbers_of_a_table(tmp_path):
    from runs import configured

    from fewbytes.cli.shared import settings_of

    table = tmp_path / "table.txt"
    table.write_text("1\n2\n3\n4\n")
    folder = configured(
        tmp_path / "run", "fedbuff", dataset="digits", clients=4, rounds=2, **settings_of({"speeds": str(table)}),
        parameters={"buffer": "2", "lr": "0.1"},
    )  # fmt: skip
    assert 'speeds = "1,2,3,4"' in (folder / "config.toml").read_text()
    assert json.loads((folder / "result.json").read_text())["speeds"] == "1,2,3,4"
