"""The network's rules, the state store, named randomness, the mean and the training loop."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from cases import LOCAL, TinyNet, late_task, tiny_data, tiny_task
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta
from torch import nn

import fewbytes as fb
from fewbytes.base.files import ScratchFolder
from fewbytes.base.ranges import Positive, Share
from fewbytes.base.state import EntryMeans
from fewbytes.base.streams import stream
from fewbytes.core.ledger import OUTCOMES
from fewbytes.core.objectives import objective_for
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.records import Gathered, Records
from fewbytes.core.training import batches, fit
from fewbytes.engines.local import local_engine
from fewbytes.engines.store import ClientStore
from fewbytes.engines.terms import Terms
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.wire import unpack


@fb.payload
class Question:
    number: int


@fb.payload
class Answer:
    number: int
    noise: float


@fb.payload
class Weights:
    theta: fb.Dense


@dataclass
class Count:
    asked: int


@dataclass(frozen=True)
class Probe(fb.Method):
    """A method that asks and does what a test wants in between."""

    def client(self, site: fb.Site) -> Count:
        return Count(0)

    def round(self, state: None, net: fb.Network, t: int) -> None: ...

    def ask(self, state: Count, message: Question, site: fb.Site) -> Answer:
        state.asked += 1
        return Answer(message.number * 100 + site.me * 10 + state.asked, float(site.rng.random()))

    def told(self, state: Count, message: Question | None, site: fb.Site) -> None:
        state.asked += 10

    def fails(self, state: Count, message: None, site: fb.Site) -> None:
        if site.me == 2:
            raise ValueError("no such thing")

    def lies(self, state: Count, message: None, site: fb.Site) -> Answer:
        return Question(1)

    def scribbles(self, state: Count, message: Weights, site: fb.Site) -> Weights:
        message.theta.dense()["w"].add_(1)
        return Weights(fb.Dense({"w": torch.ones(3)}))

    def echoes(self, state: Count, message: Weights, site: fb.Site) -> Weights:
        return message

    def vague(self, state, message, site):
        return None


@pytest.fixture(params=[1, 3])
def net(request, tmp_path):
    with local_engine(Terms(Probe(), tiny_task(clients=6), tmp_path), workers=request.param) as engine:
        engine.begin(1)
        yield engine


def test_replies_come_in_the_order_asked(net):
    order = [4, 0, 5, 2, 1, 3]
    replies = list(net.network.call(net.method.ask, to=order, send=Question(7)))
    assert [(i, r.number) for i, r in replies] == [(i, 701 + 10 * i) for i in order]


def test_each_client_may_get_its_own_message_and_keeps_its_state(net):
    asked = {i: Question(i) for i in (3, 1)}
    assert [r.number for _, r in net.network.call(net.method.ask, to=asked)] == [331, 111]
    net.network.tell(net.method.told, to=[3], send=Question(0))
    net.network.tell(net.method.told, to=[3])
    assert [r.number for _, r in net.network.call(net.method.ask, to=asked)] == [330 + 22, 112]


def test_randomness_is_named_not_sequenced(net):
    once = {i: r.noise for i, r in net.network.call(net.method.ask, to=net.roster.clients, send=Question(0))}
    again = {i: r.noise for i, r in net.network.call(net.method.ask, to=reversed(net.roster.clients), send=Question(0))}
    assert once == again
    assert len(set(once.values())) == len(once)
    net.begin(2)
    assert {r.noise for _, r in net.network.call(net.method.ask, to=net.roster.clients, send=Question(0))} != set(
        once.values()
    )


def test_one_call_at_a_time(net):
    calls = net.network.call(net.method.ask, to=[0, 1], send=Question(0))
    next(calls)
    with pytest.raises(fb.MethodError, match="not read"):
        list(net.network.call(net.method.ask, to=[2], send=Question(0)))
    with pytest.raises(fb.MethodError, match="not read"):
        net.scheduler.idle()


@pytest.mark.parametrize("to", [[0, 1], []])
def test_a_call_that_is_never_read_is_told(net, to):
    net.network.call(net.method.ask, to=to, send=Question(0))  # its iterator is gone at once
    with pytest.raises(fb.MethodError, match="'ask' was not read"):
        net.scheduler.idle()
    with pytest.raises(fb.MethodError, match="'ask' was not read"):
        net.network.call(net.method.ask, to=[2], send=Question(0))
    assert len(net.ledger) == 0


def test_a_call_may_be_handed_on_before_it_is_read(net):
    replies = net.network.call(net.method.ask, to=[0, 1], send=Question(1))
    numbers = (reply.number for _, reply in replies)
    assert list(numbers) == [101, 111]
    net.scheduler.idle()


@pytest.mark.parametrize("phase", ["start", "join", "round", "finish"])
def test_a_run_whose_method_forgets_to_read_a_call_ends_in_an_error(phase):
    class Forgets(Probe):
        pass

    def forget(self, state, net, *_):
        net.call(self.ask, to=net.clients, send=Question(0))

    setattr(Forgets, phase, forget)
    with pytest.raises(fb.MethodError, match="'ask' was not read"):
        fb.run(Forgets(), late_task(), rounds=2)


def test_what_a_handler_raises_names_client_round_and_handler(net):
    with pytest.raises(fb.MethodError, match=r"client 2, round 1, .*'fails': ValueError: no such thing"):
        net.network.tell(net.method.fails, to=net.roster.clients)


def test_of_a_call_that_too_few_answer_the_others_did_nothing(tmp_path):
    class Doubtful(Probe):
        def doubts(self, state: Count, message: None, site: fb.Site) -> Answer:
            state.asked += 1
            return Answer(state.asked, float("nan") if site.me < 2 else 0.0)

    terms = Terms(Doubtful(), tiny_task(clients=6), tmp_path, policy=fb.Policy(min_replies=0.8))
    for workers in (1, 3):
        with local_engine(terms, workers=workers) as engine:
            engine.begin(1)
            with pytest.raises(TooFewReplies, match=r"only 4 of 6 .* 5 must"):
                list(engine.network.call(engine.method.doubts, to=engine.roster.clients))
            assert engine.ledger.columns()["client"].tolist() == [0, 1]
            assert engine.roster.versions == {}
            replies = engine.network.call(engine.method.ask, to=[5, 2], send=Question(7))
            assert [reply.number for _, reply in replies] == [751, 721]  # the first that these were asked


def test_wrong_use_is_told(net):
    method = net.method
    for wrong, text in (
        (lambda: net.network.call(method.ask, to=[0, 0], send=Question(1)), "asked twice"),
        (lambda: net.network.call(method.ask, to=[99], send=Question(1)), "unknown clients"),
        (lambda: net.network.call(Probe().ask, to=[0], send=Question(1)), "not a handler of the method that runs"),
        (lambda: net.network.call(method.vague, to=[0]), "must be typed"),
        (lambda: net.network.tell(method.ask, to=[0], send=Answer(1, 0.0)), "takes a Question"),
        (lambda: list(net.network.call(method.lies, to=[0])), "must reply an Answer"),
        (lambda: net.network.sample(0), "fraction"),
    ):
        net.scheduler._open = None
        with pytest.raises(fb.MethodError, match=text):
            wrong()


@dataclass
class Unpackable:
    seen: set[int]


class ServerKeepsASet(Probe):
    def server(self, problem: fb.Problem) -> Unpackable:
        return Unpackable(set())


class ClientKeepsASet(Probe):
    def client(self, site: fb.Site) -> Unpackable:
        return Unpackable(set())


class RepliesASet(Probe):
    def round(self, state: None, net: fb.Network, t: int) -> None:
        list(net.call(self.train, to=net.roster.clients))

    def train(self, state: Count, message: None, site: fb.Site) -> Unpackable:
        return Unpackable(set())


@pytest.mark.parametrize("method", [ServerKeepsASet(), ClientKeepsASet(), RepliesASet()])
def test_a_state_or_reply_that_cannot_be_packed_is_told_before_it_is_made(method, tmp_path):
    with pytest.raises(fb.MethodError, match=r"Unpackable\.seen: set\[int\]"):
        fb.run(method, tiny_task(), rounds=1, out=tmp_path / "run")
    assert isinstance(method, RepliesASet) or not (tmp_path / "run").exists()


def test_a_message_changed_in_place_is_told_at_either_end(net):
    message = Weights(fb.Dense({"w": torch.zeros(3)}))
    with pytest.raises(fb.MethodError, match=r"'w' .*in place"):
        list(net.network.call(net.method.scribbles, to=[0], send=message))
    net.scheduler._open = None
    replies = net.network.call(net.method.echoes, to=[0, 1], send=message)
    next(replies)
    message.theta.dense()["w"].add_(1)
    with pytest.raises(fb.MethodError, match=r"'w' .*in place"):
        next(replies)


def test_what_forks_workers_may_be_killed_and_then_the_workers_of_the_next(tmp_path):
    import os
    import signal

    with local_engine(Terms(Probe(), tiny_task(clients=6), tmp_path), workers=2) as engine:
        engine.begin(1)
        for _ in range(2):
            pool = engine.scheduler.dispatcher.transport
            for pids in ([pool._forks.pid], None):
                for pid in pids or pool.pids():
                    os.kill(pid, signal.SIGKILL)
                replies = engine.network.call(engine.method.ask, to=range(6), send=Question(7))
                assert [i for i, _ in replies] == list(range(6))


def test_a_handler_that_keeps_killing_its_worker_is_an_error(tmp_path):
    import os
    import signal

    class Deadly(Probe):
        def told(self, state: Count, message: Question | None, site: fb.Site) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    method = Deadly()
    with local_engine(Terms(method, tiny_task(), tmp_path), workers=2) as engine:
        engine.begin(1)
        with pytest.raises(fb.MethodError, match=r"client \d, round 1, .*'told'.* died 3 times"):
            engine.network.tell(method.told, to=engine.roster.clients)


def test_samples_of_clients_are_seeded_ascending_and_of_the_right_size(tmp_path):
    with local_engine(Terms(Probe(), tiny_task(clients=10), tmp_path), workers=1) as engine:
        cohorts = []
        for t in range(20):
            engine.begin(t)
            cohorts.append(engine.network.sample(0.3))
        assert all(len(c) == 3 and c == sorted(set(c)) for c in cohorts)
        assert len({tuple(c) for c in cohorts}) > 5
        engine.begin(7)
        assert engine.network.sample(0.3) == cohorts[7]
        assert engine.network.sample(1.0) == engine.roster.clients
        assert len(engine.network.sample(0.001)) == 1


def test_the_store_keeps_versions_until_told(tmp_path):
    store = ClientStore(tmp_path)
    for version in (1, 2):
        store.save(Count(version * 5), 3, version)
    assert unpack(Count, store.parsed(3, 1), limit=100).asked == 5
    (tmp_path / ".3-9.state.77.tmp").write_bytes(b"half")
    store.keep_only({3: 2})
    assert [p.name for p in tmp_path.iterdir()] == ["3-2.state"]
    (tmp_path / "3-2.state").write_bytes((tmp_path / "3-2.state").read_bytes()[:-3])
    with pytest.raises(fb.FrameError):
        store.parsed(3, 2)


def test_scratch_folders_go_with_their_process(tmp_path):
    code = "import sys, os; from pathlib import Path; from fewbytes.base.files import ScratchFolder\n"
    code += "ScratchFolder('test', Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    mine = ScratchFolder("test", tmp_path)
    assert not left.exists()
    other = ScratchFolder("test", tmp_path)
    assert mine.path.exists()  # still held
    mine.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_named_streams():
    assert stream(1, "a", 2).random() == stream(1, "a", 2).random()
    assert len({float(stream(s, n).random()) for s in (1, 2) for n in ("a", "b", 12)}) == 6


@given(
    weights=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=30)
def test_mean_is_the_weighted_mean(weights, seed):
    g = np.random.default_rng(seed)
    arrays = g.standard_normal((len(weights), 3, 2)).astype(np.float32)
    counters = g.integers(0, 100, len(weights))
    mean = fb.Mean()
    for array, counter, weight in zip(arrays, counters, weights, strict=True):
        mean.add({"w": torch.from_numpy(array), "n": torch.tensor(int(counter))}, weight)
    got = mean()
    assert np.allclose(got["w"], np.average(arrays, axis=0, weights=weights), rtol=1e-4, atol=1e-5)
    assert got["n"].dtype == torch.int64
    assert abs(int(got["n"]) - np.average(counters, weights=weights)) <= 0.5 + 1e-9


@given(values=st.lists(st.integers(-1000, 1000), min_size=1, max_size=9), seed=st.integers(0, 9))
@settings(deadline=None)
def test_a_mean_of_counters_and_flags_does_not_depend_on_the_order(values, seed):
    order = np.random.default_rng(seed).permutation(len(values))
    means = []
    for some in (values, [values[i] for i in order]):
        mean = fb.Mean()
        for value in some:
            mean.add({"n": torch.tensor(value), "flag": torch.tensor(value > 0)})
        means.append(mean())
    assert means[0]["n"] == means[1]["n"] == round(sum(values) / len(values))
    assert means[0]["flag"] == means[1]["flag"] == bool(round(sum(v > 0 for v in values) / len(values)))


def test_mean_refuses_states_that_differ():
    mean = fb.Mean()
    with pytest.raises(fb.MethodError, match="nothing"):
        mean()
    mean.add({"a": torch.ones(2)})
    with pytest.raises(fb.MethodError, match="b"):
        mean.add({"a": torch.ones(2), "b": torch.ones(1)})
    with pytest.raises(fb.MethodError, match="a"):
        mean.add({"a": torch.ones(1)})  # would broadcast
    with pytest.raises(fb.MethodError, match="above 0"):
        mean.add({"a": torch.ones(2)}, weight=0)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@given(
    kind=st.sampled_from([*FLOATS, torch.int64, torch.uint8, torch.bool]),
    weights=st.lists(st.integers(1, 100_000), min_size=1, max_size=300),
    seed=st.integers(0, 100),
)
@settings(deadline=None, max_examples=60)
def test_the_mean_of_equal_states_is_that_state_whatever_their_type_and_number(kind, weights, seed):
    g = torch.Generator().manual_seed(seed)
    value = (100 * torch.randn(20, generator=g)).abs().to(kind)
    if kind in FLOATS:
        value = torch.cat([value, torch.tensor([-0.0, torch.finfo(kind).max, -math.inf], dtype=kind)])
    mean, entries = fb.Mean(), EntryMeans()
    for weight in weights:
        mean.add({"w": value}, weight)
        entries.add({"w": value}, weight)
    for got in (mean()["w"], entries.over({"w": torch.zeros_like(value)})["w"]):
        assert got.dtype == kind
        assert got.view(torch.uint8).equal(value.view(torch.uint8))


def test_clients_with_many_samples_do_not_overflow_a_mean_of_float16():
    mean = fb.Mean()
    for value in (1.0, 1.5, 2.0):
        mean.add({"gain": torch.tensor(value, dtype=torch.float16)}, 24_000)
    assert mean()["gain"] == torch.tensor(1.5, dtype=torch.float16)


@given(samples=st.integers(1, 200), size=st.integers(1, 50))
def test_batches_cover_everything_and_none_is_under_half_a_batch(samples, size):
    bounds = batches(samples, size)
    assert [i for a, b in bounds for i in range(a, b)] == list(range(samples))
    assert all(2 * (b - a) >= size and 2 * (b - a) <= 3 * size for a, b in bounds if samples > size)


@given(samples=st.integers(1, 200), size=st.integers(1, 50))
def test_a_short_last_batch_may_be_kept_but_for_a_single_sample_or_dropped(samples, size):
    kept, dropped = batches(samples, size, "kept"), batches(samples, size, "dropped")
    assert [i for a, b in kept for i in range(a, b)] == list(range(samples))
    if samples > size > 1:
        assert [b - a for a, b in kept[:-1]] == [size] * (len(kept) - 1)
        assert 1 < kept[-1][1] - kept[-1][0] <= size + 1
        assert [b - a for a, b in dropped] == [size] * (samples // size)
    assert dropped or samples == 1


@pytest.mark.parametrize(
    ("terms", "reference"),
    [
        ({"momentum": 0.9}, lambda p, **rest: torch.optim.SGD(p, momentum=0.9, **rest)),
        (
            {"momentum": 0.9, "optimiser": "nesterov"},
            lambda p, **rest: torch.optim.SGD(p, momentum=0.9, nesterov=True, **rest),
        ),
        ({"optimiser": "adam"}, torch.optim.Adam),
        ({"optimiser": "adamw"}, torch.optim.AdamW),
    ],
)
def test_fit_is_the_optimiser_it_names_and_leaves_the_last_gradient(terms, reference):
    torch.manual_seed(3)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    torch.manual_seed(5)
    fit(ours, x, y, fb.Local(epochs=3, lr=0.1, batch=4, weight_decay=0.01, **terms))
    torch.manual_seed(5)
    optimiser = reference(theirs.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(3):
        for chosen in torch.randperm(10).split(4):
            optimiser.zero_grad()
            nn.functional.cross_entropy(theirs(x[chosen]), y[chosen]).backward()
            gradient = theirs.weight.grad.clone()
            optimiser.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-6)
    assert torch.allclose(ours.weight.grad, gradient, atol=1e-6)


@pytest.mark.parametrize(
    ("terms", "rates"),
    [
        ({}, [0.8] * 6),
        ({"lr_rounds": 4}, [0.8, 0.4 + 0.2 * 2**0.5, 0.4, 0.4 - 0.2 * 2**0.5, 0, 0]),
        ({"lr_rounds": 4, "lr_schedule": "linear"}, [0.8, 0.6, 0.4, 0.2, 0, 0]),
        ({"lr_rounds": 2, "lr_schedule": "step", "lr_factor": 0.5}, [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]),
        ({"lr_warmup": 4}, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
        ({"lr_rounds": 2, "lr_schedule": "linear", "lr_warmup": 2}, [0.4, 0.8, 0.8, 0.4, 0, 0]),
    ],
)
def test_the_learning_rate_of_a_round(terms, rates):
    local = fb.Local(lr=0.8, **terms)
    assert [local.lr_in(t) for t in range(1, 7)] == pytest.approx(rates)


STEPPED = {"lr": 0.1, "batch": 4, "momentum": 0.9}


def after(x: torch.Tensor, y: torch.Tensor, t: int = 1, **terms) -> torch.Tensor:
    """The weight that a layer has when it is trained by these terms."""
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    torch.manual_seed(5)
    fit(model, x, y, fb.Local(**STEPPED | terms), t)
    return model.weight.detach()


def test_so_many_steps_are_the_first_of_as_many_epochs_as_they_take():
    torch.manual_seed(7)
    x, y = torch.randn(10, 4), torch.arange(10) % 3  # three batches an epoch
    for order in ("shuffled", "stored"):
        for last, whole in (("merged", 3), ("dropped", 2)):
            how = {"order": order, "last": last}
            assert torch.equal(after(x, y, epochs=7, steps=2 * whole, **how), after(x, y, epochs=2, **how))
    torch.manual_seed(3)
    model = nn.Linear(4, 3)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    for chosen in [*torch.randperm(10).split(4), *torch.randperm(10).split(4)][:4]:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimiser.step()
    assert torch.allclose(after(x, y, steps=4), model.weight, atol=1e-6)


def test_the_loss_of_steps_is_that_of_the_last_epochs():
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    model, losses = nn.Linear(4, 3), []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses.append(nn.functional.cross_entropy(outputs, targets))
        return losses[-1]

    assert fit(model, x, y, fb.Local(batch=3, steps=3), loss=loss) == pytest.approx(losses[-1].item())
    assert len(losses) == 3
    assert fit(model, x[:0], y[:0], fb.Local(steps=3)) == 0


def test_steps_over_what_is_stored_go_on_from_round_to_round():
    x, y = torch.randn(9, 4), torch.arange(9) % 3  # two batches, the second of five
    how = {"order": "stored", "steps": 1}
    first, second, third = (after(x, y, t, **how) for t in (1, 2, 3))
    assert torch.equal(first, after(x[:4], y[:4], **how))
    assert torch.equal(second, after(x[4:], y[4:], **how))
    assert torch.equal(third, first)


def test_no_stored_sample_is_left_out_for_good():
    """Without the incomplete last batch, each epoch begins with what the last one left out."""
    x, y, met = torch.arange(10.0).reshape(10, 1), torch.arange(10) % 3, []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        met.append(targets.tolist())
        return nn.functional.cross_entropy(outputs, targets)

    for t in (1, 2):
        fit(nn.Linear(1, 3), x, y, fb.Local(epochs=2, batch=4, order="stored", last="dropped"), t, loss=loss)
    rows = [i % 10 for i in range(32)]
    assert met == [[row % 3 for row in rows[start : start + 4]] for start in range(0, 32, 4)]


def test_what_is_frozen_gives_the_same_kept_and_not(monkeypatch):
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    found = []
    for kept in (1 << 30, 0):
        monkeypatch.setattr("fewbytes.core.training.KEPT_BYTES", kept)
        torch.manual_seed(3)
        frozen, model = nn.Linear(4, 4), nn.Linear(4, 3)
        fit(model, x, y, fb.Local(**STEPPED, steps=5), frozen=frozen)
        found.append(model.weight.detach())
    assert torch.allclose(*found, atol=1e-6)


def test_a_step_may_go_by_gradients_made_anew_elsewhere():
    torch.manual_seed(3)
    model, above = nn.Linear(4, 3), nn.Linear(4, 3)
    above.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    nn.functional.cross_entropy(above(x), y).backward()
    wanted = model.weight.detach() - 0.1 * above.weight.grad

    @torch.no_grad()
    def move(by: float) -> None:
        for p in model.parameters():
            p += by

    def before_step(again):
        move(0.5)
        again()
        move(-0.5)

    fit(model, x, y, fb.Local(lr=0.1, batch=6, order="stored"), before_step=before_step)
    assert torch.allclose(model.weight, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ({"los": nn.functional.cross_entropy}, r"fit has no argument 'los' \(did you mean 'loss'\?\)"),
        ({"loss": lambda outputs, labels: None}, "the loss of a batch is None, not one number"),
        ({"loss": lambda outputs, labels: outputs.square()}, "the loss of a batch is a Tensor, not one number"),
        ({"extra": lambda model: torch.ones(2)}, "the loss of a batch is a Tensor, not one number"),
    ],
)
def test_misspelt_additions_to_training_and_losses_that_are_no_number_are_refused(hooks, says):
    site = fb.Site(tiny_task(), 0, 1, "train")
    with pytest.raises(TypeError, match=says):
        site.fit(site.model(), fb.Local(batch=8), **hooks)


def test_evaluate_counts_and_restores_the_mode():
    model = TinyNet()
    x, y = tiny_data().test.load()
    model.train()
    scores, loss = objective_for("classes").evaluate(model, x, y)
    assert 0 <= scores["accuracy"][0] <= len(y) == scores["accuracy"][1]
    assert loss > 0
    assert model.training


@dataclass(frozen=True)
class Poisoned(fb.FedAvg):
    """FedAvg of which some clients' models are not finite in round 2."""

    bad: tuple[int, ...] = (2,)

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        reply = super().train(state, message, site)
        if site.me in self.bad and site.round == 2:
            reply.theta.dense()["fc.bias"][0] = float("nan")
        return reply


def test_a_reply_that_is_not_finite_is_left_out_and_told():
    with pytest.warns(RuntimeWarning, match=r"round 2.*train.*client 2 .*'fc\.bias'"):
        result = fb.run(Poisoned(**LOCAL), tiny_task(), rounds=3)
    (left,) = result.rounds[1]["left_out"]
    assert (left["client"], left["outcome"]) == (2, "rejected")
    assert result.rounds[1]["not_finite"] == result.summary["not_finite"] == ["reply.train"]
    assert result.summary["left_out"] == 1
    assert all(torch.isfinite(value).all() for value in result.global_model.state_dict().values())
    assert list(result.ledger.columns()["outcome"]).count(OUTCOMES.index("rejected")) == 1


def test_a_run_of_which_too_many_replies_are_not_finite_stops():
    method = Poisoned(**LOCAL, bad=(1, 2, 3))
    with pytest.raises(fb.FewbytesError, match=r"round 2.*'train'.* 1 of 4 .*client 1 .*finite"):
        fb.run(method, tiny_task(), rounds=3)
    with pytest.warns(RuntimeWarning, match="client 3 rejected"):
        assert fb.run(method, tiny_task(), rounds=3, policy=fb.Policy(min_replies=0.25)).summary["left_out"] == 3


@dataclass(frozen=True)
class PoisonedNewcomer(fb.FedAvg):
    """FedAvg whose newcomers greet with a number that is none."""

    def join(self, state: object, net: fb.Network, client: int) -> None:
        dict(net.call(self.greet, to=[client]))

    def greet(self, state: None, message: None, site: fb.Site) -> Answer:
        return Answer(1, float("nan"))


def test_a_newcomer_whose_reply_is_not_finite_is_told_with_the_round():
    result = fb.run(PoisonedNewcomer(**LOCAL), late_task(), rounds=3)
    told = [[(left["client"], left["handler"]) for left in row.get("left_out", [])] for row in result.rounds]
    assert told == [[], [(2, "greet")], [(2, "greet")]]
    assert result.summary["left_out"] == 2


def test_a_score_that_cannot_be_is_passed_over():
    gathered = Gathered(objective_for("classes").metrics)
    for client, scores in enumerate([{"own": (1, 2)}, {"own": (0, 0)}, {"own": (3, 2)}, {"own": (-1, 2)}]):
        gathered.add(client, Records({kind: {"accuracy": pair, "strange": (1.0, 1)} for kind, pair in scores.items()}))
    assert gathered.means() == gathered.pooled() == {"accuracy": {"own": 0.5}}


@pytest.mark.parametrize("pair", [(51.0, 2), (math.nan, 1), (math.inf, 1), (1.0, 2**48), (1.0, -1), (-0.5, 1)])
def test_a_share_that_is_none_is_passed_over(pair):
    """A score is its value times a number of samples, and that number: the first would be 2,550 %."""
    gathered = Gathered(objective_for("classes").metrics)
    gathered.add(0, Records({"own": {"accuracy": pair}}))
    assert gathered.means() == {}


def test_only_plain_names_and_so_many_are_gathered():
    names = {"<b>": 1.0, "\x1b[2J": 1.0, "": 1.0, "x" * 65: 1.0, "x" * 64: 1.0, "loss (train) @5": 1.0, "größe": 1e300}
    gathered = Gathered(objective_for("classes").metrics)
    gathered.add(0, Records({}, names, {str(i): 1.0 for i in range(1000)}))
    assert set(gathered.losses) == {"x" * 64, "loss (train) @5"}
    assert len(gathered.measures) == 64


def test_training_that_diverges_is_told_though_nothing_is_sent():
    with pytest.warns(RuntimeWarning, match=r"round \d.*train.* lr .*client 0"):
        fb.run(fb.Separate(epochs=1, batch=8, lr=1e30), tiny_task(), rounds=2)


def test_models_may_differ_per_client():
    widths = (2, 3, 4, 5)

    def build(client: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, widths[client]), nn.ReLU(), nn.Linear(widths[client], 3))

    task = fb.Task.on(tiny_data(), build)
    result = fb.run(fb.Separate(**LOCAL), task, rounds=2)
    saved = [fb.load_model(result.folder, client=i, build=lambda i=i: build(i)) for i in range(4)]
    assert [m[1].out_features for m in saved] == list(widths)
    with pytest.raises(fb.UserError, match="same one"):
        fb.run(fb.FedAvg(**LOCAL), fb.Task.on(tiny_data(), lambda i: build(i)), rounds=1)


def test_a_model_is_loaded_by_one_call(tmp_path):
    result = fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=2, out=tmp_path / "run")
    model = fb.load_model(tmp_path / "run", build=TinyNet)
    want = result.global_model.state_dict()
    assert all(torch.equal(v, want[k]) for k, v in model.state_dict().items())
    with pytest.raises(fb.UserError, match="client-0"):
        fb.load_model(tmp_path / "run", client=0, build=TinyNet)
    with pytest.raises(fb.UserError, match="build"):
        fb.load_model(tmp_path / "run")
    with pytest.raises(fb.UserError, match="does not fit"):
        fb.load_model(tmp_path / "run", build=lambda: nn.Linear(2, 2))


class Bare(fb.Method):
    def round(self, state: None, net: fb.Network, t: int) -> None: ...


class WithParameters(Bare):
    tau: float = 0.5


@dataclass
class Thawed(Bare):
    tau: float = 0.5


class Later(fb.FedAvg):
    epochs: int = 7  # would be 1 all the same
    promises = fb.Promises(headline="global")


@dataclass(frozen=True)
class Last(Later):
    rate: float = 0.5


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Bare, "Bare"), (WithParameters, "WithParameters"), (Thawed, "Thawed"), (Later, "Later"), (Last, "Later")],
)
def test_a_method_that_is_no_frozen_dataclass_is_refused_with_what_to_write(kind, name):
    with pytest.raises(fb.MethodError, match=rf"^{name} .*@dataclass\(frozen=True\)"):
        fb.run(kind(), tiny_task(), rounds=1)
    with pytest.raises(fb.MethodError, match=name):
        kind(tau=0.3)


def test_a_method_may_be_changed_by_a_class_without_parameters_of_its_own():
    class Quiet(fb.FedAvg):
        promises = fb.Promises(headline="quiet")

    @dataclass(frozen=True)
    class Made(Bare):
        tau: float = 0.5

    assert Quiet(epochs=3).local.epochs == 3
    assert Made(tau=0.3).tau == 0.3


@dataclass(frozen=True)
class Own(Bare):
    """Names that methods of the package have, with other ranges."""

    alpha: float = 5.0
    threshold: float = 3.0
    noise: float = 0.1
    beta: int = 0
    fraction: Share = 0.5
    steps: Annotated[int, Meta(ge=2, le=9)] = 3
    patience: Positive | None = None
    kind: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    name: str = ""


def test_hyper_parameters_of_a_users_own_method_are_what_their_types_say():
    assert Own(alpha=-7.5, patience=0.5, names=("x",)).alpha == -7.5
    assert Own(fraction=np.float64(0.25), alpha=2).fraction == 0.25


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("alpha", "5", "number, not '5'"), ("alpha", float("nan"), "finite, not nan"),
        ("threshold", float("inf"), "finite, not inf"), ("threshold", 10**400, "finite"),
        ("beta", 1.0, "whole number, not 1.0"), ("beta", True, "whole number, not True"),
        ("fraction", 0, r"in \(0, 1\], not 0"), ("fraction", float("nan"), "finite"),
        ("steps", 10, r"in \[2, 9\], not 10"), ("steps", 2.5, r"whole number in \[2, 9\], not 2.5"),
        ("name", 3, "text, not 3"), ("patience", 0.0, "above 0, not 0.0"),
        ("kind", "c", "a, b, not 'c'"),
    ],
)  # fmt: skip
def test_a_hyper_parameter_out_of_its_types_range_is_refused(name, value, text):
    with pytest.raises(fb.UserError, match=f"^{name} .*{text}"):
        Own(**{name: value})


@pytest.mark.parametrize("method", fb.METHODS.values(), ids=list(fb.METHODS))
def test_every_number_of_our_methods_says_its_range(method):
    plain, whole = get_type_hints(method), get_type_hints(method, include_extras=True)
    numbers = [f.name for f in fields(method) if plain[f.name] in (int, float)]
    assert numbers == [name for name in numbers if get_origin(whole[name]) is Annotated]
    for name in numbers:
        with pytest.raises(fb.UserError, match=f"^{name} "):
            method(**{name: -1 if plain[name] is int else float("nan")})


@pytest.mark.parametrize(
    ("mistaken", "says"),
    [
        (lambda: fb.FedAvg(local=3), "local .*Local, not 3"),
        (lambda: fb.Task.on("digits", TinyNet), "data .* not 'digits'.*Task.of"),
        (lambda: fb.Task.on(tiny_task().data, "mlp"), "model .* not 'mlp'"),
        (lambda: fb.Task.on(tiny_task().data, TinyNet()), "model .* not a TinyNet"),
        (lambda: fb.Task.of("mlp", []), "model .* not 'mlp'"),
        (lambda: fb.run(fb.FedAvg(), 3), "Task.of.* not 3"),
        (lambda: fb.run(fb.FedAvg(), tiny_task().data), "Task.of.* not a FederatedData"),
        (lambda: fb.run(fb.FedAvg(), tiny_task(), resume=True), "resume .*folder"),
    ],
)
def test_mistakes_in_python_are_told_in_one_line(mistaken, says):
    with pytest.raises(fb.UserError, match=says) as told:
        mistaken()
    assert "\n" not in str(told.value)


def test_lines_that_resume_can_run_again(tmp_path):
    first, again = (
        fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=1, out=tmp_path / "run", resume=True) for _ in range(2)
    )
    assert again.accuracy == first.accuracy
    assert len(again.rounds) == len(first.rounds) == 1


def test_run_refuses_what_cannot_be(tmp_path):
    fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=1, out=tmp_path / "run")
    with pytest.raises(fb.UserError, match="already holds a run"):
        fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=1, out=tmp_path / "run")
    with pytest.raises(fb.UserError, match="another configuration"):
        fb.run(fb.FedAvg(**LOCAL, momentum=0.5), tiny_task(), rounds=1, out=tmp_path / "run", resume=True)
    again = fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=1, out=tmp_path / "run", resume=True)  # nothing left to do
    assert again.summary["rounds"] == 1
    with pytest.raises(fb.UserError, match="has ended"):
        fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=2, out=tmp_path / "run", resume=True)
    with pytest.raises(fb.UserError, match="a file is in the way"):
        fb.run(fb.FedAvg(**LOCAL), tiny_task(), rounds=1, out=tmp_path / "run" / "config.toml")
    with pytest.raises(fb.UserError, match="at least one client"):
        fb.Task.of(TinyNet, [])
