"""Rounded messages: who holds which, what is made up for, who gets what when rounds were missed."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from cases import CASES, task_of, tiny_data, tiny_task
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import StopAfter, fingerprint
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.ranges import EXACT
from fewbytes.base.rate import Rate
from fewbytes.base.state import State
from fewbytes.engines.downlink import Downlink, LazyMessage
from fewbytes.engines.handlers import Handlers
from fewbytes.experiments.plan import make_plan
from fewbytes.methods.parts.averaging import Model
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import Parsed, unpack

CLIENTS = 4
QUIET: dict[str, Any] = {"workers": 1, "save_models": False}


@fb.payload
class Told:
    """Server to client: numbers that are rounded, others that are not, and how many rounds there were."""

    theta: fb.Dense
    fine: Annotated[fb.Dense, EXACT]
    round: int


@fb.payload
class Heard:
    """Client to server: what it was told, as it came."""

    theta: Annotated[fb.Dense, EXACT]
    fine: Annotated[fb.Dense, EXACT]
    round: int


@dataclass
class Server:
    """What is told, and what each client heard last."""

    theta: State
    heard: dict[int, State]


@dataclass(frozen=True)
class Telling(fb.Method):
    """The server walks towards a target and tells; clients say what they heard. `asked`: by round, who is."""

    asked: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
    own: bool = False  # each client is told by a message of its own
    size: int = 4000

    def server(self, problem: fb.Problem) -> Server:
        return Server({"x": torch.zeros(self.size)}, {})

    def target(self) -> Tensor:
        return torch.linspace(-1, 1, self.size) ** 3

    def round(self, state: Server, net: fb.Network, t: int) -> None:
        state.theta = {"x": state.theta["x"] + 0.3 * (self.target() - state.theta["x"])}
        message = Told(fb.Dense(state.theta), fb.Dense({"y": self.target()[:50] * t}), t)
        to = self.asked[(t - 1) % len(self.asked)]
        calls = net.call(self.hear, to=dict.fromkeys(to, message)) if self.own else net.call(self.hear, to, message)
        for client, reply in calls:
            assert reply.round == t
            assert torch.equal(reply.fine.state["y"], self.target()[:50] * t)
            state.heard[client] = reply.theta.dense()

    def hear(self, state: None, message: Told, site: fb.Site) -> Heard:
        return Heard(message.theta, message.fine, message.round)


def server_of(folder: Path) -> Server:
    return unpack(Server, read_checkpoint(folder).server, limit=1 << 40)


def tell(method: Telling, folder: Path, rounds: int, **how: Any) -> Server:
    how = {"downlink_bits": 1.0, "keep_frames": True} | QUIET | how
    fb.run(method, tiny_task(CLIENTS), rounds=rounds, out=folder, **how)
    return server_of(folder)


def frames(folder: Path, t: int, client: int) -> list[int]:
    """Bytes of what a client was sent in a round, frame by frame."""
    return [path.stat().st_size for path in sorted((folder / "frames").glob(f"{t}-hear*-{client}-down.frame"))]


# ----------------------------------------------------------------------------------------------- what clients hold

COHORTS = st.lists(st.sets(st.integers(0, CLIENTS - 1), min_size=1).map(sorted).map(tuple), min_size=2, max_size=7)


@settings(max_examples=15, deadline=None)
@given(COHORTS)
def test_whoever_missed_what_all_hear_the_same(tmp_path_factory: Any, cohorts: list[tuple[int, ...]]) -> None:
    """As the server's own tensors are what was heard, and the message names the round, each is that round's."""
    folder = tmp_path_factory.mktemp("run") / "run"
    ends: list[Server] = []

    class Look(fb.Watcher):
        def scored(self, row: dict[str, Any]) -> None:
            if row["phase"] == "round":
                ends.append(server_of(folder))

    tell(Telling(tuple(cohorts)), folder, len(cohorts), watcher=Look())
    for to, end in zip(cohorts, ends, strict=True):
        assert all(torch.equal(end.heard[i]["x"], end.theta["x"]) for i in to)


@pytest.mark.parametrize("missed", [1, 2, 12])
def test_who_missed_rounds_gets_one_frame_smaller_than_what_it_missed(missed: int, tmp_path: Path) -> None:
    everybody, others = (0, 1, 2, 3), (0, 1, 2)
    folder, last = tmp_path / "run", missed + 2
    server = tell(Telling((everybody, *[others] * missed, everybody)), folder, last)
    [merged] = frames(folder, last, 3)
    assert merged < sum(frames(folder, t, 0)[0] for t in range(2, last + 1))
    assert merged < frames(folder, 1, 3)[0]
    assert torch.equal(server.heard[3]["x"], server.heard[0]["x"])


@dataclass(frozen=True)
class FromTheFirst(fb.FedAvg):
    """FedAvg of the clients in `asked`, by round."""

    asked: tuple[tuple[int, ...], ...] = ()

    def round(self, state: Any, net: fb.Network, t: int) -> None:
        mean = net.mean(state.theta)
        for _, reply in net.call(self.train, to=self.asked[t - 1], send=Model(fb.Dense(state.theta))):
            mean.add(reply.theta.dense(), weight=reply.samples)
        state.theta = mean()


def wide_task() -> fb.Task:
    return fb.Task.on(tiny_data(CLIENTS), lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 600), nn.Linear(600, 3)))


@pytest.mark.parametrize("bits", [None, 1.0])
def test_the_first_message_is_nothing_where_the_first_weights_are_known(bits: float | None, tmp_path: Path) -> None:
    method = FromTheFirst(asked=((0, 1, 2, 3),))
    fb.run(method, wide_task(), rounds=1, out=tmp_path / "run", downlink_bits=bits, keep_frames=True, **QUIET)
    assert 0 < (tmp_path / "run" / "frames" / "1-train-0-down.frame").stat().st_size < 400


def test_a_newcomer_gets_what_changed_since_the_first_weights(tmp_path: Path) -> None:
    """Client 3 is first asked in round 8: the first message, which is nothing, and one frame."""
    method = FromTheFirst(asked=(*[(0, 1, 2)] * 7, (2, 3)), local=fb.Local(lr=0.05))
    folder = tmp_path / "run"
    result = fb.run(method, wide_task(), rounds=8, out=folder, downlink_bits=1.0, keep_frames=True, **QUIET)
    sent = {path.name: path.stat().st_size for path in (folder / "frames").glob("8-train*-down.frame")}
    assert sent["8-train.origin-3-down.frame"] < 400
    values = sum(value.numel() for value in wide_task().problem.first_state().values())
    assert 2 * sent["8-train-2-down.frame"] < 2 * sent["8-train-3-down.frame"] < 4 * values
    again = fb.run(method, wide_task(), rounds=8, downlink_bits=1.0, **QUIET | {"workers": 2})
    assert again.rounds[-1]["loss"] == result.rounds[-1]["loss"]


def test_a_client_with_other_first_weights_gets_messages_in_full() -> None:
    problem = wide_task().problem
    handlers = Handlers(fb.FedAvg())
    message = Model(fb.Dense(problem.first_state()))
    for rate in (Rate(), Rate(1.0)):
        downlink = Downlink(rate, problem, True, {2})
        downlink.to_all(handlers.named("train"), message, [1, 2], "")
        first, other = (
            downlink.frames(handlers.named("train"), LazyMessage.of(message), client, own=False) for client in (1, 2)
        )
        assert len(first) == len(other) == 1
        assert first[0].key != other[0].key
        short, long = first[0].build().frame, other[0].build().frame
        assert short is not None
        assert long is not None
        assert 10 * len(short) < len(long)
        assert not Parsed(bytes(long)).base_hash


def test_values_that_outgrow_the_grid_are_sent_in_full(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Growing(Telling):
        def round(self, state: Server, net: fb.Network, t: int) -> None:
            state.theta = {"x": state.theta["x"] + 30.0 ** (t - 2) * self.target()}
            message = Told(fb.Dense(state.theta), fb.Dense({"y": self.target()[:50] * t}), t)
            for client, reply in net.call(self.hear, (0, 1, 2, 3), message):
                state.heard[client] = reply.theta.dense()

    server = tell(Growing(), tmp_path / "run", 4)
    error = (server.heard[0]["x"] - server.theta["x"]).norm() / server.theta["x"].norm()
    assert error == 0
    assert torch.allclose(server.theta["x"], (1 / 30 + 1 + 30 + 900) * Growing().target(), rtol=0, atol=1e-3)


def test_cohorts_of_one_follow_through_each_others_rounds(tmp_path: Path) -> None:
    """No round's client holds the message before it, but each holds one that a frame leads on from."""
    folder = tmp_path / "run"
    tell(Telling(((0,), (1,), (2,))), folder, 6)
    for t, client in ((4, 0), (5, 1), (6, 2)):
        assert len(frames(folder, t, client)) == 1
        assert sum(frames(folder, t, client)) < sum(frames(folder, t - 3, client)) / 4


def test_a_message_of_a_clients_own_differs_from_its_last(tmp_path: Path) -> None:
    """Client 3 misses a round, and nothing of it counts; the server's tensors are left as they are."""
    folder = tmp_path / "run"
    server = tell(Telling(((0, 1, 2, 3), (0, 1, 2)), own=True), folder, 3)
    exact = tell(Telling(((0, 1, 2, 3), (0, 1, 2)), own=True), tmp_path / "exact", 3, downlink_bits=None)
    assert torch.equal(server.theta["x"], exact.theta["x"])
    assert not torch.equal(server.heard[0]["x"], exact.heard[0]["x"])
    assert frames(folder, 3, 3)[0] < frames(folder, 1, 3)[0] / 5


# ----------------------------------------------------------------------------------------------------- what is lost


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bits", [1.0, 4.0])
def test_nothing_is_lost_for_good(bits: float, own: bool, tmp_path: Path) -> None:
    method = Telling(own=own)
    server = tell(method, tmp_path / "run", 30, downlink_bits=bits, keep_frames=False)
    error = (server.heard[0]["x"] - method.target()).norm() / method.target().norm()
    assert error < 0.1


def test_the_server_goes_on_from_what_clients_hold(tmp_path: Path) -> None:
    server = tell(Telling(), tmp_path / "run", 5)
    assert torch.equal(server.theta["x"], server.heard[2]["x"])
    assert not torch.equal(server.theta["x"], tell(Telling(), tmp_path / "exact", 5, downlink_bits=None).theta["x"])


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedadam", "genefl", "fedkgf", "dgc"])
def test_many_bits_change_hardly_anything(name: str) -> None:
    losses = [
        fb.run(CASES[name], task_of(name), rounds=5, **QUIET, **how).rounds[-1]["loss"]["train"]
        for how in ({}, {"downlink_bits": 8.0})
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_few_bits_still_learn_and_are_few() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 400), nn.ReLU(), nn.Linear(400, 3))

    task = fb.Task.on(tiny_data(CLIENTS), net)
    exact, rounded = (fb.run(CASES["fedavg"], task, rounds=8, **QUIET, **how) for how in ({}, {"downlink_bits": 0.5}))
    assert rounded.summary["score"]["final"] >= exact.summary["score"]["final"] - 0.05
    later = [sum(row["downlink_bytes"] for row in result.rounds[1:]) for result in (exact, rounded)]
    assert 12 * later[1] < later[0]
    assert (
        rounded.summary["downlink_bits_per_value"] < 0.85
    )  # 0.5 of the values, and what a frame of 8,003 has beside them


# ------------------------------------------------------------------------------------------- what can go wrong


@dataclass(frozen=True)
class Stumbling(Telling):
    """Client 1's second reply is not a number: it is refused, and the client is as it was before."""

    def hear(self, state: None, message: Told, site: fb.Site) -> Heard:
        theta = message.theta
        if site.me == 1 and message.round == 2:
            theta = fb.Dense({"x": theta.state["x"] * torch.nan})
        return Heard(theta, message.fine, message.round)


def test_whose_reply_was_refused_is_sent_what_it_missed_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.warns(RuntimeWarning, match="client 1 rejected"):
        server = tell(Stumbling(), folder, 3, policy=fb.Policy(min_replies=0.5))
    assert frames(folder, 3, 1) > frames(folder, 3, 0)
    assert torch.equal(server.heard[1]["x"], server.heard[0]["x"])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("own", [False, True])
def test_stopped_and_gone_on_with_with_other_rates(own: bool, workers: int, tmp_path: Path) -> None:
    """Rounded, exact, coarser: a client goes on from what it heard last of the rounded ones."""
    folder, method = tmp_path / "run", Telling(((0, 1, 2, 3), (0, 1)), own=own)
    rates = [1.0, 1.0, None, 0.5, 4.0]
    for t, rate in enumerate(rates, 1):
        how = {"rounds": len(rates), "resume": t > 1, "downlink_bits": rate, "workers": workers}
        with pytest.raises(KeyboardInterrupt):
            tell(method, folder, watcher=StopAfter(t), **how)
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    measured = [row.get("measured", {}).get("downlink bits a value") for row in rows]
    assert measured[0] is None is measured[2]
    assert measured[3] < measured[1] < measured[4]


def test_an_earlier_round_can_be_gone_back_to(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    tell(Telling(((0, 1, 2, 3), (0, 1))), whole, 4)
    again = tmp_path / "again"
    tell(Telling(((0, 1, 2, 3), (0, 1))), again, 4)
    tell(Telling(((0, 1, 2, 3), (0, 1))), again, 4, resume=True, from_round=3)
    assert fingerprint(again) == fingerprint(whole)


@dataclass(frozen=True)
class InGroups(Telling):
    """Each half of the clients is told another message by the same handler."""

    def round(self, state: Server, net: fb.Network, t: int) -> None:
        for half, group in enumerate(((0, 1), (2, 3))):
            theta = {"x": torch.full((self.size,), float(t + half))}
            for _ in net.call(self.hear, group, Told(fb.Dense(theta), fb.Dense({"y": theta["x"][:50]}), t)):
                pass


def test_groups_with_a_message_each_are_refused_as_they_would_be_mixed_up(tmp_path: Path) -> None:
    with pytest.raises(fb.UserError, match="'hear'"):
        tell(InGroups(), tmp_path / "run", 2)


@pytest.mark.parametrize("bits", [0.05, 17, -1, float("nan"), "auto"])
def test_bits_that_cannot_be_are_refused(bits: Any, tmp_path: Path) -> None:
    with pytest.raises(fb.UserError, match="downlink_bits"):
        tell(Telling(), tmp_path / "run", 1, downlink_bits=bits)
    assert not list(tmp_path.iterdir())


def test_what_is_not_coded_and_what_is_streamed_is_refused() -> None:
    with pytest.raises(fb.UserError, match="downlink_bits, or coding"):
        fb.run(CASES["fedavg"], tiny_task(), rounds=1, downlink_bits=1.0, coded=False)
    with pytest.raises(fb.UserError, match="several rounds"):
        fb.run(CASES["fedbuff"], tiny_task(), rounds=1, downlink_bits=1.0)


# ------------------------------------------------------------------------------------------------- what is said


def test_papers_count_a_message_once_and_the_ledger_all_frames(tmp_path: Path) -> None:
    folder, method = tmp_path / "run", Telling(((0, 1, 2, 3), (0, 1, 2)))
    how = {"downlink_bits": 1.0, "keep_frames": True} | QUIET
    result = fb.run(method, tiny_task(CLIENTS), rounds=3, out=folder, **how)
    columns, sent = result.ledger.columns(), defaultdict(int)
    for path in (folder / "frames").glob("*-down.frame"):
        sent[path.name.split("-")[0], path.name.split("-")[-2]] += path.stat().st_size
    for i in range(len(result.ledger)):
        assert columns["bytes_down"][i] == sent[str(columns["round"][i]), str(columns["client"][i])]
    assert len(set(columns["value_bytes_down"].tolist())) == 1


def test_a_plan_measures_rounded_messages() -> None:
    method = dataclasses.replace(CASES["fedavg"], fraction=1.0)
    whole, rounded = (make_plan(method, tiny_task(), 5, 1e6, 1e6, rounding=how) for how in ({}, {"downlink_bits": 1.0}))
    assert rounded.down < whole.down / 2
    assert whole.downlink_bits_per_value is None
    values = sum(value.numel() for value in tiny_task().problem.first_state().values())
    assert rounded.downlink_bits_per_value == pytest.approx(8 * rounded.down / values, rel=0.2)


def test_a_plan_counts_a_clients_first_message() -> None:
    method = dataclasses.replace(CASES["fedavg"], fraction=1.0)
    plan = make_plan(method, tiny_task(), 8, 1e6, 1e6, rounding={"downlink_bits": 1.0})
    sent = fb.run(method, tiny_task(), rounds=8, downlink_bits=1.0, **QUIET).ledger.columns()
    assert plan.first_down < 0
    assert plan.total == pytest.approx((sent["bytes_up"].sum(), sent["bytes_down"].sum()), rel=0.05)


@pytest.mark.parametrize("rounds", [1, 2, 8])
def test_no_figure_of_a_plan_is_negative(rounds: int) -> None:
    """A first message that both ends can make is nearly nothing, so the first rounds take fewer bytes than others."""
    method, task = dataclasses.replace(CASES["fedavg"], fraction=1.0), tiny_task()
    plan = make_plan(method, task, rounds, 1e6, 1e6, rounding={"bits": 1.0})
    cells = [cell for column in plan.table().columns[1:] for cell in map(str, column.cells)]
    assert not [cell for cell in cells if cell.startswith("-")]
    assert plan.first_rounds == min(rounds, 2)
    sent = fb.run(method, task, rounds=rounds, bits=1.0, **QUIET).ledger.columns()
    assert plan.total == pytest.approx((sent["bytes_up"].sum(), sent["bytes_down"].sum()), rel=0.05)


def test_the_first_message_has_another_base_than_the_next(tmp_path: Path) -> None:
    tell(Telling(), tmp_path / "run", 2)
    first, second = (Parsed((tmp_path / "run" / "frames" / f"{t}-hear-0-down.frame").read_bytes()) for t in (1, 2))
    assert len(first.base_hash) == len(second.base_hash) == 8
    assert first.base_hash != second.base_hash
