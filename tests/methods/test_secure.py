"""Secure aggregation: the server reads the sum, to the bit, and of one client noise."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
import torch
from cases import CASES, LOCAL, TinyNet, opened, task_of, tiny_data, tiny_task
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ROUNDS, fingerprint
from safetensors.torch import load_file
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.analysis.attack import attack
from fewbytes.analysis.settings import Attacking
from fewbytes.core.policy import TooFewReplies
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.methods.parts import masks, secure
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.methods.parts.exchange import (
    Arrived,
    ByClient,
    Confirmed,
    Dealt,
    Neighbours,
    Received,
    Revealed,
    graph,
    masks_of,
    numbers,
    view,
)
from fewbytes.methods.parts.masks import dequantised, masked, quantised, ring, secret_of, shares_of, threshold
from fewbytes.methods.parts.secure import SecureAggregation
from fewbytes.methods.parts.summable import tensors_of
from fewbytes.methods.parts.summable import words_of as all_words
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.run import Run
from fewbytes.wire import unpack

FEDAVG = fb.FedAvg(**LOCAL)
LEARNING = {name: case.inner if isinstance(case, Clustered) else case for name, case in CASES.items()}
"""The cases' methods, without clusters."""


# ------------------------------------------------------------------------------------- the same, summed in plain sight


@dataclass(frozen=True)
class Plain(SecureAggregation):
    """The quantised sum of replies that all can see: no keys, shares or masks; those `silent` take no part, of them
    those that are `late` in the sum's scale alone."""

    silent: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()

    def handle_inner(self, handler, state, message, site):
        return self.inner.handle(handler, state, message, site)

    def client(self, site):
        return self.inner.client(site)

    def local_model(self, state, site):
        return self.inner.local_model(state, site)

    def state_class(self, half):
        return self.inner.state_class(half)

    def round(self, state, net, t):
        self.inner.round(state, PlainNetwork(self, net), t)


class PlainNetwork(fb.Network):
    def __init__(self, method: Plain, net: fb.Network) -> None:
        super().__init__(net._engine)
        self.method = method

    def call(self, handler, to, send=None, check=None):
        replies = dict(super().call(handler, to, send, check))
        if not any(replies.values()):
            return iter(())
        weights = {i: getattr(reply, "samples", 1) for i, reply in replies.items() if i not in self.method.silent}
        whole = sum(weights.values())
        there = [i for i in weights if i not in self.method.late]
        part = sum(weights[i] for i in there) / whole
        first = replies[there[0]].theta.dense()
        mean = {}
        for name, like in first.items():
            most = 64.0 if like.is_floating_point() else 2.0**24
            total = sum(
                quantised(replies[i].theta.dense()[name], most, weights[i] / whole).view(np.int32).astype(np.int64)
                for i in there
            )
            value = torch.from_numpy(total).double() * (most / (part * 2**30))
            mean[name] = (value if like.is_floating_point() else value.round()).to(like.dtype).view(like.shape)
        samples = {"samples": sum(weights[i] for i in there)} if hasattr(replies[there[0]], "samples") else {}
        return iter([(there[0], replace(replies[there[0]], theta=fb.Dense(mean), **samples))])


def server(method, task, folder, rounds=3, **more) -> bytes:
    """The server's state after a run."""
    fb.run(method, task, rounds=rounds, out=folder, workers=1, save_models=False, **more)
    return read_checkpoint(folder).server


def models_of(name: str) -> Any:
    return task_of(name, 6) if isinstance(LEARNING[name], fb.FML | fb.LG_FedAvg) else tiny_task(6)


def left(method: fb.Method, folder: Path) -> dict[tuple[str, str], Tensor]:
    """All tensors of the models and of the server's state after a run."""
    states = {path.name: load_file(path) for path in (folder / "models").glob("*.safetensors")}
    if (kind := method.state_class("server")) is not None:
        state = vars(unpack(kind, read_checkpoint(folder).server))
        states |= {field: value for field, value in state.items() if isinstance(value, dict)}
    return {(file, name): value for file, of in states.items() for name, value in of.items() if hasattr(value, "shape")}


@pytest.mark.parametrize("name", [name for name, method in LEARNING.items() if method.promises.sums])
def test_the_mean_is_that_of_the_plain_quantised_sum_to_the_bit_and_the_methods_own_but_for_rounding(name, tmp_path):
    """For every method that says it needs no more than sums."""
    method = LEARNING[name]
    for folder, made in (("secure", SecureAggregation(method)), ("plain", Plain(method)), ("own", method)):
        fb.run(made, models_of(name), rounds=2, out=tmp_path / folder, workers=1)
    one, other = (fingerprint(tmp_path / folder) for folder in ("secure", "plain"))
    assert one["server"] == other["server"]
    assert one["models"] == other["models"]
    assert [row["scores"] for row in one["rounds"]] == [row["scores"] for row in other["rounds"]]
    own, summed = (left(method, tmp_path / folder) for folder in ("own", "secure"))
    assert own.keys() == summed.keys()
    assert own
    for name, value in own.items():
        assert torch.allclose(value.double(), summed[name].double(), rtol=1e-5, atol=1e-5), name


def test_a_sum_of_float32_values_loses_hardly_more_than_they_do():
    plain, summed = (
        fb.run(method, tiny_task(6), rounds=1, workers=1).global_model.state_dict()
        for method in (FEDAVG, SecureAggregation(FEDAVG))
    )
    for name, value in plain.items():
        assert torch.allclose(value.double(), summed[name].double(), rtol=3e-7, atol=3 * 64 / 2**30), name
    assert plain["norm.num_batches_tracked"] == summed["norm.num_batches_tracked"]


def test_two_runs_by_any_number_of_workers_are_equal_although_no_frame_is(tmp_path):
    for folder, workers in (("one", 1), ("two", 2)):
        method = SecureAggregation(FEDAVG)
        fb.run(method, tiny_task(), rounds=2, out=tmp_path / folder, workers=workers, keep_frames=True)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    frames = [
        {path.name: path.read_bytes() for path in (tmp_path / run / "frames").iterdir()} for run in ("one", "two")
    ]
    assert frames[0].keys() == frames[1].keys()
    equal = {name for name, frame in frames[0].items() if frame == frames[1][name]}
    handlers = {tuple(name.split("-")[i] for i in (1, 3)) for name in equal}
    assert handlers == {("train", "down.frame"), ("confirm", "down.frame")}  # the model, and who is there


class Stop(fb.Watcher):
    def scored(self, row):
        if row["round"] == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("inner", [FEDAVG, fb.FedBN(**LOCAL)], ids=["fedavg", "fedbn"])
def test_stopped_and_resumed_it_is_the_same_and_no_state_keeps_a_secret(inner, tmp_path):
    method = SecureAggregation(inner)
    fb.run(method, tiny_task(), rounds=ROUNDS, out=tmp_path / "whole", workers=1)
    with pytest.raises(KeyboardInterrupt):
        fb.run(method, tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=1, watcher=Stop())
    fb.run(method, tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=1, resume=True)
    left = fingerprint(tmp_path / "run")
    assert left == fingerprint(tmp_path / "whole")
    assert len(left["states"]) == 4
    assert all(unpack(secure.Hidden, frame).secrets is None for frame in left["states"].values())


# ------------------------------------------------------------------------------------------------ clients that drop out

DROPS = {
    "advertise_keys": lambda reply: replace(reply, sealing=b""),
    "deal_shares": lambda reply: replace(reply, digest=b""),
    "train": lambda reply: replace(reply, samples=0),
    "confirm": lambda reply: Confirmed(ByClient.of({})),
    "reveal_shares": lambda reply: Revealed(ByClient.of({}), ByClient.of({})),
}
"""By handler, a reply that says nothing; all but the last are refused as they come."""
KINDS = {
    "advertise_keys": "Keys", "deal_shares": "Dealt", "train": "Trained", "confirm": "Confirmed",
    "reveal_shares": "Revealed",
}  # fmt: skip


def dropping(stages: dict[str, set[int]]) -> Any:
    """Replies of these clients to these handlers are refused, or say nothing."""
    by_kind = {KINDS[stage]: (DROPS[stage], clients) for stage, clients in stages.items()}

    def change(client: int, reply: Any) -> Any:
        drop, clients = by_kind.get(type(reply).__name__, (None, ()))
        return drop(reply) if client in clients else reply

    return hostile.lying(change)


@pytest.mark.parametrize(
    ("stages", "silent", "late"),
    [
        ({"advertise_keys": {1, 4}}, {1, 4}, set()),
        ({"deal_shares": {0, 5}}, {0, 5}, set()),
        ({"train": {2, 3}}, set(), {2, 3}),
        ({"confirm": {0, 6}}, set(), set()),
        ({"reveal_shares": {0, 6}}, set(), set()),
        ({"advertise_keys": {8}, "deal_shares": {7}, "train": {1}, "reveal_shares": {2}}, {7, 8}, {1}),
    ],
    ids=["keys", "shares", "numbers", "marks", "reveals", "all"],
)
def test_who_drops_out_at_any_stage_is_not_in_the_sum_which_is_that_of_the_others_to_the_bit(
    stages, silent, late, tmp_path
):
    policy = fb.Policy(strikes=100)
    with dropping(stages):
        found = server(SecureAggregation(FEDAVG), tiny_task(9), tmp_path / "run", policy=policy)
    plain = Plain(FEDAVG, silent=frozenset(silent), late=frozenset(late))
    assert found == server(plain, tiny_task(9), tmp_path / "plain")


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ({"advertise_keys": {0, 1, 2}}, "2 of 5 clients, .*3"),
        ({"deal_shares": {0, 1, 2}}, "0 of 5 clients"),
        ({"train": {3, 4}}, "2 of 3 neighbours .*client 0"),
        ({"confirm": {3, 4}}, "2 of 5 clients .*agree"),
        ({"reveal_shares": {3, 4}}, "2 shares of client 0.* 3 "),
    ],
    ids=["keys", "shares", "numbers", "marks", "reveals"],
)
def test_more_than_the_threshold_bears_end_the_round_as_too_few_replies_do(stages, why):
    with dropping(stages), pytest.raises(TooFewReplies, match=f"secure aggregation: .*{why}.*resume"):
        fb.run(SecureAggregation(FEDAVG), tiny_task(5), rounds=1, policy=fb.Policy(min_replies=0.1))


@pytest.mark.parametrize("stage", [None, "advertise_keys", "deal_shares", "train", "confirm", "reveal_shares"])
def test_on_flower_it_is_the_same_also_where_a_client_says_nothing(stage, tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import MemoryGrid, handler_of

    from fewbytes.flower.apps import client_app, serve_run
    from fewbytes.flower.link import Exchange
    from fewbytes.running.settings import Settings

    method, task = SecureAggregation(FEDAVG), tiny_task(5)

    def fault(message, reply):
        silent = message.metadata.dst_node_id == 1003 and handler_of(message) in (stage, "keep_shares")
        return [] if silent else [reply]

    grid = MemoryGrid(client_app(method, task, tmp_path), 5, fault)
    how, policy = Settings(rounds=2, out=tmp_path / "run"), fb.Policy(round_timeout=0.4, connect_timeout=0.5)
    result = serve_run(grid, Run.of(method, task, how, policy), exchange=Exchange(poll=0.001))
    assert result.summary["status"] == "done"
    silent = {3} if stage in ("advertise_keys", "deal_shares") else set()
    late = {3} if stage == "train" else set()
    plain = Plain(FEDAVG, silent=frozenset(silent), late=frozenset(late))
    assert read_checkpoint(tmp_path / "run").server == server(plain, task, tmp_path / "plain", rounds=2)
    if stage is None:
        fb.run(method, task, rounds=2, out=tmp_path / "local", workers=1)
        assert fingerprint(tmp_path / "local")["ledger"] == fingerprint(tmp_path / "run")["ledger"]


# ---------------------------------------------------------------------------------------- clients that lie, and servers


def fewer(shares: ByClient) -> ByClient:
    return ByClient.of(dict(list(shares.each(masks.SEALED).items())[1:]))


@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        ("Keys", lambda reply: replace(reply, masking=bytes(32))),
        ("Dealt", lambda reply: replace(reply, shares=fewer(reply.shares))),
        ("Dealt", lambda reply: replace(reply, shares=replace(reply.shares, data=reply.shares.data[1:]))),
        ("Trained", lambda reply: replace(reply, theta=fb.Dense({n: 1e-9 * v for n, v in reply.theta.state.items()}))),
        ("Revealed", lambda reply: replace(reply, seeds=ByClient.of({**reply.seeds.each(33), 17: bytes(33)}))),
    ],
    ids=["a key that hides nothing", "a share missing", "shares cut off", "plain numbers", "shares of others"],
)
def test_the_round_is_taken_without_a_client_that_lies_where_it_shows(kind, lie, tmp_path):
    def change(client: int, reply: Any) -> Any:
        return lie(reply) if client == 2 and type(reply).__name__ == kind else reply

    with hostile.lying(change):
        found = server(SecureAggregation(FEDAVG), tiny_task(6), tmp_path / "run", 2, watcher=hostile.Quiet())
    assert found == server(Plain(FEDAVG, silent=frozenset({2})), tiny_task(6), tmp_path / "plain", 2)


def test_one_wrong_share_is_told_from_true_ones(tmp_path):
    def change(client: int, reply: Any) -> Any:
        if client != 0 or type(reply).__name__ != "Revealed":
            return reply
        wrong = [
            {i: bytes([share[0] ^ 1]) + share[1:] for i, share in shares.each(33).items()}
            for shares in (reply.seeds, reply.keys)
        ]
        return Revealed(*map(ByClient.of, wrong))

    with hostile.lying(change):
        found = server(SecureAggregation(FEDAVG), tiny_task(6), tmp_path / "run", 2)
    assert found == server(Plain(FEDAVG), tiny_task(6), tmp_path / "plain", 2)


def test_a_sum_that_no_honest_numbers_add_up_to_is_found_out():
    def change(client: int, reply: Any) -> Any:
        if client != 1 or type(reply).__name__ != "Trained":
            return reply
        noise = {name: torch.randint_like(value, 1 << 30) for name, value in reply.theta.state.items()}
        return replace(reply, theta=fb.Dense(noise))

    with (
        hostile.lying(change),
        pytest.raises(fb.FewbytesError, match="some client"),
    ):
        fb.run(SecureAggregation(FEDAVG), tiny_task(), rounds=1)


class Wide(nn.Sequential):
    """8,003 values."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 400), nn.ReLU(), nn.Linear(400, 3))


class Exchange:
    """One exchange of six clients, handler by handler, after which all that anybody knows can be looked at. Client 0
    has one sample."""

    clients = range(6)

    def __init__(self) -> None:
        data = tiny_data(6)
        first = replace(data.clients[0], train=data.clients[0].train.take([1]))
        self.task = fb.Task.on(replace(data, clients=(first, *data.clients[1:])), Wide)
        self.sample = first.train.load("cpu")[0][0]
        self.method = SecureAggregation(fb.FedAvg(epochs=1, lr=0.1, batch=8))
        self.states = {i: self.method.client(self.site(i, "client")) for i in self.clients}
        self.start = self.task.problem.first_state()
        self.keys = {i: self.method.advertise_keys(self.states[i], None, self.site(i)) for i in self.clients}
        self.weight = sum(key.samples for key in self.keys.values())
        public = {i: key.sealing + key.masking for i, key in self.keys.items()}
        self.neighbours = {i: {j: public[j] for j in self.clients if j != i} for i in self.clients}

    def site(self, client: int, what: str = "") -> fb.Site:
        return opened(self.task, client, 1, what)

    def deal(self, client: int, cohort: Sequence[int] = (), keys: Mapping[int, bytes] | None = None) -> Dealt:
        message = Neighbours(numbers(cohort or self.clients), ByClient.of(keys or self.neighbours[client]))
        return self.method.deal_shares(self.states[client], message, self.site(client))

    def deal_all(self) -> None:
        self.dealt = {i: self.deal(i).shares.each(masks.SEALED) for i in self.clients}

    def keep(self, client: int, *others: int, weight: int = 0, going: Sequence[int] = ()) -> None:
        shares = {j: self.dealt[j][client] for j in others or self.neighbours[client]}
        message = Received(numbers(going or self.clients), ByClient.of(shares), weight or self.weight)
        self.method.keep_shares(self.states[client], message, self.site(client))

    def train(self, client: int, start: Mapping[str, Tensor] | None = None) -> Trained:
        message = Model(fb.Dense(dict(start or self.start)))
        return self.method.handle("train", self.states[client], message, self.site(client, "train"))

    def plain(self, client: int) -> masks.Words:
        """What the client would send without masks."""
        reply = self.method.inner.train(None, Model(fb.Dense(self.start)), self.site(client, "train"))
        part = self.keys[client].samples / self.weight
        words = [quantised(value, 64.0, part) for _, value in sorted(reply.theta.dense().items())]
        return np.concatenate(words)

    def confirm(self, client: int, there: Sequence[int] = ()) -> dict[int, bytes]:
        told = Arrived(numbers(there or self.clients))
        return self.method.confirm(self.states[client], told, self.site(client)).marks.each(16)

    def reveal(self, client: int, marks: Mapping[int, bytes]) -> Revealed:
        return self.method.reveal_shares(self.states[client], Confirmed(ByClient.of(marks)), self.site(client))

    def to_the_end(self, there: Sequence[int] = ()) -> None:
        """All have sent their numbers; those who are there confirm it."""
        self.deal_all()
        for i in self.clients:
            self.keep(i)
            self.train(i)
        self.marks = {i: self.confirm(i, there) for i in there or self.clients}

    def marks_for(self, client: int) -> dict[int, bytes]:
        return {i: marks[client] for i, marks in self.marks.items() if client in marks}


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


def words_of(reply: Trained) -> masks.Words:
    return all_words(tensors_of(reply))


def is_noise(words: masks.Words) -> bool:
    """Whether bytes are as often each of the 256 as chance has it (of a million of noise one is not)."""
    from scipy.stats import chi2

    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(chi2.sf(float(((counts - expected) ** 2).sum() / expected), 255) > 1e-6)


def inverted(words: masks.Words, exchange: Exchange) -> Tensor:
    """Client 0's one sample, from its numbers: a Linear's change of weights over that of its bias is what it was given
    (Phong et al. 2018)."""
    shapes = {name: value.shape for name, value in sorted(exchange.start.items())}
    values = dequantised(words, 64.0, 1 / exchange.weight)
    theta = dict(zip(shapes, values.split([shape.numel() for shape in shapes.values()]), strict=True))
    change = {name: value.view(shapes[name]) - exchange.start[name] for name, value in theta.items()}
    row = int(change["1.bias"].abs().argmax())
    return change["1.weight"][row] / change["1.bias"][row]


def colluded(words: masks.Words, exchange: Exchange, liars: list[int]) -> masks.Words:
    """Client 0's numbers, as well as the server and these of its neighbours can clear them of masks together."""
    states, seen = {i: exchange.states[i].secrets for i in liars}, masks_of(exchange.states[0].secrets.view)
    others = {
        i: masks.agreed(masks.private_key(each.masking), exchange.keys[0].masking, seen) for i, each in states.items()
    }
    shares = {}
    for i, each in states.items():
        key = masks.agreed(masks.private_key(each.sealing), exchange.keys[0].sealing, f"shares from 0 for {i}")
        shares[i] = masks.opened(key, exchange.dealt[0][i])
    seed, private = (secret_of({i: share[half] for i, share in shares.items()}) for half in (slice(33), slice(33, 66)))
    if masks.public_key(private) == exchange.keys[0].masking:
        others = {i: masks.agreed(masks.private_key(private), exchange.keys[i].masking, seen) for i in range(1, 6)}
        return masked(words, (), [seed, *others.values()])
    return masked(words, (), others.values())  # client 0 added them, as the others' numbers are greater


def test_what_the_server_gets_of_a_client_is_noise_unless_enough_of_its_neighbours_tell_all(exchange):
    """Of client 0's five neighbours, three can open its secrets."""
    exchange.deal_all()
    exchange.keep(0)
    plain, sent = exchange.plain(0), words_of(exchange.train(0))
    assert not is_noise(plain)  # the test can tell
    assert len(sent) == 8003
    assert is_noise(sent)
    assert is_noise(sent - plain)
    assert threshold(5) == 3
    for few in itertools.combinations(range(1, 6), 2):
        assert is_noise(colluded(sent, exchange, list(few)))
    assert np.array_equal(colluded(sent, exchange, [1, 3, 4]), plain)


def test_an_image_comes_back_from_plain_numbers_and_not_from_masked_ones(exchange):
    exchange.deal_all()
    exchange.keep(0)
    plain, sent = exchange.plain(0), words_of(exchange.train(0))
    image = exchange.sample.flatten().double()
    assert torch.allclose(inverted(plain, exchange), image, atol=1e-3)
    assert (inverted(sent, exchange) - image).abs().max() > 0.1
    correlation = np.corrcoef(sent.view(np.int32), plain.view(np.int32))[0, 1]
    assert abs(correlation) < 0.08  # seven deviations of chance


def test_the_same_numbers_are_other_ones_each_time():
    sent = []
    for each in (Exchange(), Exchange()):
        each.deal_all()
        each.keep(0)
        assert np.array_equal(each.plain(0), Exchange().plain(0))
        sent.append(words_of(each.train(0)))
    assert is_noise(sent[0] - sent[1])


def test_of_one_client_all_but_its_numbers_does_not_depend_on_its_data(exchange):
    """Keys, shares and seeds are drawn before it trains; what it reveals is of others."""
    exchange.to_the_end([0, 1, 2, 3])
    revealed = exchange.reveal(0, exchange.marks_for(0))
    assert revealed.seeds.clients.tolist() == [1, 2, 3]
    assert revealed.keys.clients.tolist() == [4, 5]


def test_a_client_refuses_what_would_open_a_secret_to_the_server(exchange):
    two = {i: exchange.neighbours[0][i] for i in (1, 2)}
    with pytest.raises(fb.MethodError, match="not those that follow"):
        exchange.deal(0, exchange.clients, two)  # any neighbours the server likes
    for cohort in ([0, 1], [1, 2, 3], [0, 1, 1, 2]):
        with pytest.raises(fb.MethodError, match=r"not those that follow|names each once"):
            exchange.deal(0, cohort, {i: exchange.neighbours[0][i] for i in set(cohort) - {0}})
    exchange.deal_all()
    with pytest.raises(fb.MethodError, match="too few to hide"):
        exchange.train(0)
    for others, going in (((1, 2), (0, 1, 2)), ((1, 2, 3), (0, 1, 2, 3, 4)), ((1, 2, 3), (1, 2, 3, 4, 5))):
        exchange.keep(0, *others, going=going)
        with pytest.raises(fb.MethodError, match="too few"):
            exchange.train(0)
    exchange.keep(0, weight=exchange.keys[0].samples - 1 or -1)
    with pytest.raises(fb.MethodError, match="together weigh"):
        exchange.train(0)
    exchange.keep(0)
    with pytest.raises(fb.MethodError, match="out of turn, or again"):
        exchange.confirm(0)
    exchange.train(0)
    with pytest.raises(fb.MethodError, match="nothing masks"):
        exchange.train(0)  # twice under one mask would tell the difference
    with pytest.raises(fb.MethodError, match="reveal shares out of turn"):
        exchange.reveal(0, {})
    for there in ([0, 1, 2], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]):
        with pytest.raises(fb.MethodError, match="too few to hide"):
            exchange.confirm(0, there)
    exchange.confirm(0)
    with pytest.raises(fb.MethodError, match="out of turn, or again"):
        exchange.confirm(0, [0, 1, 2, 3])


def test_a_client_reveals_nothing_unless_most_of_its_neighbours_received_the_same(exchange):
    exchange.to_the_end()
    marks = exchange.marks_for(0)
    for few in ({}, {1: marks[1], 2: marks[2]}, marks | dict.fromkeys((2, 3, 4), bytes(16)),
                {i: exchange.marks[i][1 if i != 1 else 2] for i in marks}):  # fmt: skip
        with pytest.raises(fb.MethodError, match="neighbours"):
            exchange.reveal(0, few)
    assert exchange.reveal(0, marks | {4: bytes(16)}).seeds.clients.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(fb.MethodError, match="out of turn, or again"):
        exchange.reveal(0, marks)


@pytest.mark.parametrize("gone", [(0,), ()])
def test_of_clients_told_unlike_things_of_who_is_there_none_reveals_both_secrets_of_one(gone, exchange):
    """Half is told that client 0 is there, half that it is gone: whoever reveals has most of its neighbours with it."""
    exchange.deal_all()
    for i in exchange.clients:
        exchange.keep(i)
        exchange.train(i)
    told = {i: [0, 1, 2, 3] if i < 3 else [j for j in exchange.clients if j not in gone] for i in exchange.clients}
    exchange.marks = {i: exchange.confirm(i, told[i]) for i in exchange.clients if i in told[i]}
    seeds, keys = dict.fromkeys(exchange.clients, 0), dict.fromkeys(exchange.clients, 0)
    for i in exchange.marks:
        with suppress(fb.MethodError):
            revealed = exchange.reveal(i, exchange.marks_for(i))
            for j in revealed.seeds.clients.tolist():
                seeds[j] += 1
            for j in revealed.keys.clients.tolist():
                keys[j] += 1
    assert not any(seeds[i] >= threshold(5) and keys[i] >= threshold(5) for i in exchange.clients)
    assert sum(seeds.values()) + sum(keys.values()) == 0  # three against three: nobody has most


@pytest.mark.parametrize(
    ("what", "others"),
    [
        ("weight", {"weight": 1000}),  # which makes the others' parts nothing beside it
        ("model", {"start": 0.0}),
        ("cohort", {"going": (0, 1, 2, 3, 4)}),
        ("nothing", {}),
    ],
)
def test_masks_cancel_of_clients_that_were_told_the_same_alone(what, others, exchange):
    """A server that sends a dead model to all but one would read that one's update through the sum."""
    exchange.deal_all()
    sent = []
    for i in exchange.clients:
        unlike = others if i and (what != "cohort" or i < 5) else {}
        going = unlike.get("going", exchange.clients)
        there = [j for j in going if j != i]
        exchange.keep(i, *there, weight=unlike.get("weight", 0) and exchange.weight + 1000, going=going)
        start = {n: torch.zeros_like(v) for n, v in exchange.start.items()} if "start" in unlike else None
        sent.append(words_of(exchange.train(i, start)))
    seeds = [exchange.states[i].secrets.seed for i in exchange.clients]
    total = masked(np.sum(sent, axis=0, dtype=np.uint32), (), seeds)
    assert is_noise(total) == (what != "nothing")


def test_whose_client_heard_something_else_before_has_masks_of_its_own(exchange):
    told = [1, 2], [1, 2], 7, "train", Model(fb.Dense(exchange.start))
    assert view(*told, b"") == view(*told, b"") != view(*told, b"else")


def test_a_nodes_state_goes_forward_while_secrets_are_in_it():
    method = SecureAggregation(fb.LG_FedAvg(**LOCAL))
    forward = ["deal_shares", "keep_shares", "train", "confirm", "reveal_shares"]
    assert not any(method.goes_back(handler) for handler in forward)
    assert method.goes_back("advertise_keys")
    assert method.goes_back("receive")  # by which secrets are forgotten
    assert all(method.inner.goes_back(handler) for handler in ("train", "receive"))


def test_a_server_that_has_a_node_deal_hide_or_reveal_again_from_an_older_state_gets_nothing(tmp_path):
    pytest.importorskip("flwr", reason="Flower is not installed")
    import msgspec
    from flower_grid import MemoryGrid, handler_of
    from flwr.app import Context, Message, RecordDict

    from fewbytes.engines.handlers import Done
    from fewbytes.flower.apps import client_app, serve_run
    from fewbytes.flower.link import Exchange as How
    from fewbytes.flower.messages import read_content, write_content
    from fewbytes.flower.node import Order
    from fewbytes.running.settings import Settings

    method, task = SecureAggregation(FEDAVG), tiny_task(5)
    refused: dict[str, str] = {}

    def fault(message, reply):
        """Each order to client 3 comes again, with a number of its own."""
        if message.metadata.dst_node_id == 1003 and handler_of(message) not in ("", "advertise_keys"):
            text, frame = read_content(message.content)
            order = msgspec.msgpack.decode(text, type=Order)
            job = msgspec.structs.replace(order.job, number=order.job.number + 10**6)
            text = msgspec.msgpack.encode(msgspec.structs.replace(order, job=job, call=77))
            answer = grid.app(Message(write_content(text, bytes(frame)), 1003, "train.handler"), context())
            refused[handler_of(message)] = msgspec.msgpack.decode(read_content(answer.content)[0], type=Done).error
        return [reply]

    def context():
        return Context(1, 1003, {"partition-id": 3}, RecordDict(), {})

    grid = MemoryGrid(client_app(method, task, tmp_path), 5, fault)
    how, policy = Settings(rounds=1, out=tmp_path / "run"), fb.Policy(round_timeout=2, connect_timeout=2)
    serve_run(grid, Run.of(method, task, how, policy), exchange=How(poll=0.001))
    assert refused.keys() == {"deal_shares", "train", "confirm", "reveal_shares"}
    assert all("past the state" in why for why in refused.values())


def test_what_comes_too_late_is_of_no_use(exchange):
    exchange.deal_all()
    exchange.keep(0)
    exchange.train(0)
    exchange.keep(0, 1, 2, 3)
    assert exchange.states[0].secrets.received.clients.tolist() == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", [name for name, method in CASES.items() if not method.promises.sums])
def test_a_method_that_needs_more_than_sums_is_refused_in_one_line(name):
    with pytest.raises(fb.UserError, match=r"^secure aggregation: .*needs more"):
        SecureAggregation(CASES[name])


def test_what_cannot_be_summed_unseen_is_refused(tmp_path):
    method = SecureAggregation(FEDAVG)
    with pytest.raises(fb.UserError, match="secure aggregation is"):
        SecureAggregation(method)
    with pytest.raises(fb.UserError, match=r"range .*above 0"):
        SecureAggregation(FEDAVG, range=0.0)
    with pytest.raises(fb.UserError, match="clusters"):
        Clustered(method)
    with pytest.raises(fb.UserError, match=r"^aggregate median: .*fedavg with secure aggregation"):
        fb.run(method, tiny_task(), rounds=1, out=tmp_path / "run", aggregate="median")
    with pytest.raises(fb.UserError, match=r"^dp of clients"):
        fb.run(method, tiny_task(), rounds=1, out=tmp_path / "run", dp="epsilon=8,delta=1e-5,clip=1")
    with pytest.raises(fb.UserError, match=r"3 a round .*2"):
        fb.run(SecureAggregation(replace(FEDAVG, fraction=0.5)), tiny_task(), rounds=1, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_values_beyond_the_range_are_refused_with_the_remedy():
    with pytest.raises(fb.UserError, match=r"client 0, .*'conv.weight' .*0\.01.*secure_range"):
        fb.run(SecureAggregation(FEDAVG, range=0.01), tiny_task(), rounds=1, workers=1)
    assert fb.run(SecureAggregation(FEDAVG, range=1e6), tiny_task(), rounds=1, workers=1).summary["status"] == "done"


@fb.payload
class Counted:
    """Client to server: numbers of a type that the server does not know."""

    theta: fb.Dense


@fb.payload
class Told:
    """Client to server: more than can be summed."""

    theta: fb.Dense
    loss: float


@dataclass(frozen=True)
class Telling(fb.Method):
    """A method that says it needs no more than sums, and whose replies are none."""

    promises = fb.Promises(sums=True)
    counted: bool = False

    def round(self, state: None, net: fb.Network, t: int) -> None:
        list(net.call(self.count if self.counted else self.tell, to=net.clients))

    def tell(self, state: None, message: None, site: fb.Site) -> Told:
        return Told(fb.Dense({"x": torch.ones(2)}), 0.5)

    def count(self, state: None, message: None, site: fb.Site) -> Counted:
        return Counted(fb.Dense({"x": torch.ones(2, dtype=torch.int64)}))


def test_replies_that_are_no_sums_are_an_error_that_says_what_they_hold():
    with pytest.raises(fb.MethodError, match=r"not Told.loss"):
        fb.run(SecureAggregation(Telling()), tiny_task(), rounds=1, workers=1)
    with pytest.raises(fb.MethodError, match=r"'x' .*torch.int64"):
        fb.run(SecureAggregation(Telling(counted=True)), tiny_task(), rounds=1, workers=1)


def test_it_is_a_setting_of_any_experiment_and_there_is_nothing_to_attack(tmp_path):
    given = {"method": "fedper", "secure_aggregation": True, "secure_range": 8.0, "parameters": {"lr": "0.2"}}
    assert make_experiment(given).build_method() == SecureAggregation(fb.FedPer(lr=0.2), range=8.0)
    with pytest.raises(fb.UserError, match=r"clusters .*each client"):
        make_experiment(given | {"clusters": 2}).build_method()
    result = fb.run(make_experiment(given).build_method(), tiny_task(), rounds=1, out=tmp_path / "run")
    assert result.summary["method"] == "fedper with secure aggregation"
    assert result.summary["score"]["kind"] == "personalised"
    experiment = make_experiment({"method": "fedavg", "dataset": "digits", "clients": 3, "secure_aggregation": True})
    found = find(experiment)
    fb.run(experiment.build_method(), found.task, rounds=1, out=tmp_path / "digits", config=found.experiment.toml())
    with pytest.raises(fb.UserError, match="no fixed tensors"):
        attack(tmp_path / "digits", Attacking(model="lenet"))


def test_samples_may_be_promised_privacy_besides():
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")
    task = fb.Task.on(tiny_data(), Wide)
    result = fb.run(SecureAggregation(FEDAVG), task, rounds=1, workers=1, dp="of=samples,epsilon=8,delta=1e-5,clip=1")
    assert 0 < result.summary["epsilon_spent"] <= 8


def test_all_that_a_method_says_of_itself_is_the_inner_methods():
    says = {name for name, value in vars(fb.Method).items() if inspect.isfunction(value) and name[0] != "_"}
    for around in (SecureAggregation, Clustered):
        own = {name for each in around.__mro__[: around.__mro__.index(fb.Method)] for name in vars(each)}
        assert says - {"promising", "handlers", "roundable"} <= own  # these follow from what others say
    method, inner = SecureAggregation(fb.FedAvg(**LOCAL)), fb.FedAvg(**LOCAL)
    assert method.quick(3) == SecureAggregation(inner.quick(3))
    assert method.changed(lr=0.3) == SecureAggregation(inner.changed(lr=0.3))
    assert method.promises.protects == {"samples"}


# --------------------------------------------------------------------------------------------------- what it is made of


@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.data())
@settings(max_examples=40, deadline=None)
def test_as_many_shares_as_the_threshold_give_a_secret_and_fewer_do_not(secret, needed, data):
    holders = data.draw(st.lists(st.integers(0, 10_000), min_size=needed, max_size=15, unique=True))
    shares = shares_of(secret, holders, needed)
    chosen = data.draw(st.permutations(holders))
    assert secret_of({i: shares[i] for i in chosen[:needed]}) == secret
    if needed > 1:
        assert secret_of({i: shares[i] for i in chosen[: needed - 1]}) != secret
        assert shares_of(secret, holders, needed) != shares


def test_the_field_of_the_shares_is_one():
    assert all(pow(base, masks.PRIME - 1, masks.PRIME) == 1 for base in (2, 3, 5, 7, 11, 13))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_sum_of_contributions_never_overflows_and_is_the_mean_of_the_values(data):
    most = data.draw(st.sampled_from([1.0, 64.0, 1e5, 2.0**24]))
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
    there = data.draw(st.integers(1, len(weights)))
    values = [data.draw(st.lists(st.floats(-most, most), min_size=3, max_size=3)) for _ in weights]
    values[0][0] = most
    whole, part = sum(weights), sum(weights[:there]) / sum(weights)
    pairs = list(zip(values, weights, strict=True))[:there]
    words = [quantised(torch.tensor(v, dtype=torch.float64), most, w / whole) for v, w in pairs]
    assert max(abs(sum(int(word.view(np.int32)[at]) for word in words)) for at in range(3)) < 2**31
    mean = dequantised(np.sum(words, axis=0, dtype=np.uint32), most, part)
    true = torch.tensor([[w * x / sum(weights[:there]) for x in v] for v, w in pairs], dtype=torch.float64).sum(0)
    assert torch.allclose(mean, true, rtol=1e-12, atol=0.51 * there * most / 2**30 / part)


@pytest.mark.parametrize("value", [64.001, -1e30, torch.inf, torch.nan])
def test_values_beyond_the_range_are_no_contribution(value):
    with pytest.raises(ValueError, match="beyond 64"):
        quantised(torch.tensor([0.0, value]), 64.0, 0.5)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2 * masks.BLOCK // 10))
@settings(max_examples=15, deadline=None)
def test_masks_cancel_to_the_bit_whatever_their_number(added, taken, size):
    words = np.arange(size, dtype=np.uint32) * np.uint32(2654435761)
    seeds = [bytes([i]) * 32 for i in range(added + taken)]
    hidden = masked(words, seeds[:added], seeds[added:])
    assert np.array_equal(masked(hidden, seeds[added:], seeds[:added]), words)
    assert added + taken == 0 or size < 4 or not np.array_equal(hidden, words)


def test_what_two_agree_on_is_theirs_and_of_one_purpose():
    raw = [masks.new_key() for _ in range(3)]
    one, other, third = map(masks.private_key, raw)
    both = masks.agreed(one, masks.public_key(raw[1]), "masks")
    assert both == masks.agreed(other, masks.public_key(raw[0]), "masks")
    assert both != masks.agreed(third, masks.public_key(raw[0]), "masks")
    assert both != masks.agreed(one, masks.public_key(raw[1]), "shares")
    assert masks.opened(both, masks.sealed(both, b"text")) == b"text"
    assert masks.opened(raw[2], masks.sealed(both, b"text")) is None
    assert masks.usable(masks.public_key(raw[0]))
    assert not masks.usable(bytes(32))


@given(st.integers(3, 200))
@settings(max_examples=40, deadline=None)
def test_neighbours_are_each_others_and_equally_many(clients):
    for each in (ring(list(range(clients))[::-1], masks.degree(clients)), graph(range(clients))):
        assert all(i in each[j] for i, others in each.items() for j in others)
        assert {len(set(others) - {i}) for i, others in each.items()} == {masks.degree(clients)}
    assert masks.degree(clients) == clients - 1 or clients > 49
    assert 2 * threshold(masks.degree(clients)) > masks.degree(clients)


def test_of_many_clients_each_shares_with_some(tmp_path):
    """Sixty clients, of which nine drop out at some stage."""
    stages = {"advertise_keys": {1, 50}, "deal_shares": {5, 20, 33}, "train": {7, 8, 9}, "reveal_shares": {30}}
    task = fb.Task.on(tiny_data(60), TinyNet)
    with dropping(stages):
        found = server(SecureAggregation(FEDAVG), task, tmp_path / "run", 1)
    plain = Plain(FEDAVG, silent=frozenset({1, 50, 5, 20, 33}), late=frozenset({7, 8, 9}))
    assert found == server(plain, task, tmp_path / "plain", 1)


def test_a_client_whose_numbers_are_not_finite_is_left_out(tmp_path):
    @dataclass(frozen=True)
    class Diverged(fb.FedAvg):
        @functools.wraps(fb.FedAvg.train)
        def train(self, state, message, site):
            reply = super().train(state, message, site)
            if site.me != 1:
                return reply
            return replace(
                reply,
                theta=fb.Dense(
                    {k: v * torch.nan if v.is_floating_point() else v for k, v in reply.theta.state.items()}
                ),
            )

    with pytest.warns(RuntimeWarning, match="not finite"):
        result = fb.run(SecureAggregation(Diverged(**LOCAL)), tiny_task(6), rounds=2, workers=1)
    assert {left["client"] for row in result.rounds for left in row["left_out"]} == {1}
    assert all(value.isfinite().all() for value in result.global_model.state_dict().values())
