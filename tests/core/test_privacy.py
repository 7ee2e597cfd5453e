"""The noise is what it is said to be, nothing is longer than the clip, and what is counted is what is spent."""

from __future__ import annotations

import math
import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset as TorchDataset

import fewbytes as fb
from fewbytes.base.streams import seed_all
from fewbytes.core.client_privacy import ClientPrivacy, PrivateMean, clipped
from fewbytes.core.privacy import PrivateSteps, SamplePrivacy, clipped_sum, gaussian, random_bytes, uniform
from fewbytes.core.promise import Privacy
from fewbytes.core.training import Local, fit
from fewbytes.data.split import LazySamples, Split
from fewbytes.data.transforms import crop_flip

DRAWS = 1_000_000
PROMISE = Privacy.read("epsilon=8,delta=1e-5,clip=1.5,noise=seeded")


@pytest.fixture
def accounting():
    return pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")


def mean_of(states, around, asked, promise=PROMISE, rounds=4, t=1):
    central = ClientPrivacy(promise, rounds, 0)
    mean = PrivateMean(central, around, lambda: (asked, central.random(t)))
    for state in states:
        mean.add(state, weight=7)
    return mean, central


def is_normal(noise):
    """Of mean 0 and deviation 1."""
    from scipy.stats import kstest

    return bool(kstest(noise, "norm").pvalue > 0.01)


@pytest.mark.parametrize("key", [b"a secret of 32 bytes is as random", b"0"])
def test_noise_is_normal(key):
    noise = gaussian(DRAWS, random_bytes(key, "noise")).numpy()
    assert noise.std() == pytest.approx(1, rel=0.01)
    assert is_normal(noise)


def test_uniform_numbers_are_inside_0_and_1_at_the_ends_of_what_bytes_can_be():
    ends = uniform(2, lambda length: b"\0" * 8 + b"\xff" * 8)
    assert 0 < float(ends[0]) < float(ends[1]) < 1
    assert torch.isfinite(gaussian(2, lambda length: b"\0" * 8 + b"\xff" * 8)).all()


def test_bytes_are_of_their_names_and_never_the_same_twice():
    first = random_bytes(b"key", "server", 1)
    assert (a := first(32)) != first(32)
    assert a == random_bytes(b"key", "server", 1)(32)
    assert len({random_bytes(b"key", "server", 11)(8), random_bytes(b"key", "server1", 1)(8), a[:8]}) == 3


def test_the_mean_bears_noise_of_the_deviation_that_is_counted(accounting):
    mean, central = mean_of([{"w": torch.zeros(DRAWS)}], {"w": torch.zeros(DRAWS)}, asked=10)
    noise = mean()["w"].double().numpy() / (central.multiplier * 1.5 / 10)
    assert noise.std() == pytest.approx(1, rel=0.01)
    assert is_normal(noise)


@settings(max_examples=1_000, deadline=None)
@given(
    st.lists(st.floats(-1e38, 1e38), min_size=1, max_size=8),
    st.lists(st.floats(-1e38, 1e38), min_size=0, max_size=3),
    st.floats(1e-6, 1e6),
)
def test_what_is_clipped_is_no_longer_than_the_clip(weights, biases, norm):
    change = {"w": torch.tensor(weights).double(), "b": torch.tensor(biases).double()}
    made = clipped(change, norm)
    assert math.sqrt(sum(float(v.square().sum()) for v in made.values())) <= norm * (1 + 1e-6)
    if math.sqrt(sum(float(v.square().sum()) for v in change.values())) <= norm:
        assert all(torch.equal(made[name], change[name]) for name in change)


def test_with_or_without_a_client_the_mean_differs_by_the_clip_over_who_was_asked(accounting):
    around = {"w": torch.ones(3), "counter": torch.tensor(5)}
    honest = [{"w": torch.ones(3) + 0.1 * i, "counter": torch.tensor(9)} for i in range(3)]
    loud = {"w": torch.full((3,), 1e30), "counter": torch.tensor(1 << 60)}
    (without, _), (with_it, _) = mean_of(honest, around, 10), mean_of([*honest, loud], around, 10)
    a, b = without(), with_it()
    assert float((a["w"].double() - b["w"].double()).norm()) <= 1.5 / 10 * (1 + 1e-5)
    assert a["counter"] == b["counter"] == 5


def test_of_many_updates_it_is_their_mean(accounting):
    around, update = {"w": torch.arange(4.0)}, torch.tensor([0.5, -0.25, 0.0, 1.0])
    quiet = Privacy.read("epsilon=1e9,delta=1e-5,clip=2,noise=seeded")
    mean, _ = mean_of([{"w": around["w"] + update}] * 4, around, 4, quiet)
    assert torch.allclose(mean()["w"], around["w"] + update, atol=1e-2)
    mean, _ = mean_of([{"w": update}] * 4, None, 4, quiet)
    assert torch.allclose(mean.over({"w": torch.zeros(4), "own": torch.ones(1)})["w"], update, atol=1e-2)


def test_epsilon_is_what_dp_accounting_counts(accounting):
    central = ClientPrivacy(PROMISE, 20, 0)
    for means in (1, 7, 20):
        sigma = central.multiplier / math.sqrt(means)
        assert central.epsilon(means) == pytest.approx(accounting.get_epsilon_gaussian(sigma, 1e-5), abs=1e-6)
    by_losses = _pld()
    by_losses.compose(accounting.SelfComposedDpEvent(accounting.GaussianDpEvent(central.multiplier), 20))
    assert central.epsilon(20) == pytest.approx(by_losses.get_epsilon(1e-5), abs=1e-6)  # counted in quite another way
    assert central.epsilon(0) == 0


def _pld():
    from dp_accounting.pld import PLDAccountant

    return PLDAccountant()


def test_epsilon_of_sampled_steps_is_what_dp_accounting_counts(accounting):
    terms = SamplePrivacy(PROMISE, 10, 2, 20)
    part, steps = terms.sampled(110)
    assert (part, steps) == (20 / 110, 12)
    assert SamplePrivacy(PROMISE, 10, 2, 20, steps=5).sampled(110) == (part, 5)
    accountant = accounting.rdp.RdpAccountant(range(2, 200))
    event = accounting.PoissonSampledDpEvent(part, accounting.GaussianDpEvent(terms.multiplier(110)))
    accountant.compose(accounting.SelfComposedDpEvent(event, steps * 10))
    assert terms.epsilon(110, 10) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-6)
    losses = _pld()
    losses.compose(accounting.SelfComposedDpEvent(event, steps * 10))
    assert losses.get_epsilon(1e-5) <= terms.epsilon(110, 10)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.05, 50), st.floats(1e-9, 1e-2), st.integers(1, 2000))
def test_all_rounds_together_never_spend_more_than_epsilon(epsilon, delta, rounds):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")
    central = ClientPrivacy(Privacy(epsilon, delta, 1.0), rounds, 0)
    assert 0.999 * epsilon < central.epsilon(rounds) <= epsilon


@settings(max_examples=25, deadline=None)
@given(st.floats(0.2, 20), st.integers(1, 50), st.integers(1, 5), st.integers(1, 40), st.integers(1, 400))
def test_all_rounds_of_a_client_never_spend_more_than_epsilon(epsilon, rounds, epochs, batch, samples):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")
    terms = SamplePrivacy(Privacy(epsilon, 1e-5, 1.0, "samples"), rounds, epochs, batch)
    spent = [terms.epsilon(samples, t) for t in (0, 1, rounds)]
    assert spent[0] == 0
    assert spent == sorted(spent)
    assert spent[-1] <= epsilon


@pytest.mark.parametrize("norm", [1e-3, 0.7, 1e6])
def test_each_samples_gradient_is_clipped_by_itself(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(5, 1, 4, 4), torch.tensor([0, 1, 2, 1, 0])
    wanted = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for one in range(5):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[one : one + 1]), y[one : one + 1]).backward()
        gradient = {name: p.grad.double() for name, p in model.named_parameters()}
        length = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        for name, g in gradient.items():
            wanted[name] += g * min(1, norm / length)
        alone = clipped_sum(
            model, dict(model.named_parameters()), nn.functional.cross_entropy, x[one : one + 1], y[one : one + 1], norm
        )
        assert math.sqrt(sum(float(g.square().sum()) for g in alone.values())) <= norm * (1 + 1e-6)
    total = clipped_sum(model, dict(model.named_parameters()), nn.functional.cross_entropy, x, y, norm)
    assert all(torch.allclose(total[name], wanted[name], rtol=1e-4, atol=1e-7 * norm) for name in wanted)


KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WEIGHTS = st.sampled_from([0.0, 1.0, -3.0, 1e-30, 1e4, 6e4, 1e20, 3e38, 1e200, math.inf, -math.inf, math.nan])


def dense(kind: torch.dtype, weights: list[float]) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).to(kind)
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(torch.tensor(w, dtype=torch.float64).to(kind))
    return model


@given(
    st.sampled_from(KINDS), st.lists(WEIGHTS, min_size=4, max_size=4), WEIGHTS, st.integers(0, 3),
    st.sampled_from([1e-3, 1.0, 1e6]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_no_model_and_no_sample_move_the_sum_by_more_than_the_clip(kind, weights, sample, others, norm):
    model = dense(kind, weights)
    x = torch.full((others + 1, 2), 1.0, dtype=kind)
    x[-1] = torch.tensor(sample, dtype=torch.float64).to(kind)  # one that is there or not
    y = torch.tensor([0, 1, 1, 0])[: others + 1]
    how = model, dict(model.named_parameters()), nn.functional.cross_entropy
    with_it = clipped_sum(*how, x, y, norm)
    without = (
        clipped_sum(*how, x[:-1], y[:-1], norm) if others else {n: torch.zeros_like(v) for n, v in with_it.items()}
    )
    moved = [(with_it[name] - without[name]).square().sum() for name in with_it]
    assert math.sqrt(sum(map(float, moved))) <= norm * (1 + 1e-9)  # NaN is not


@pytest.mark.parametrize("kind", KINDS[::2], ids=str)
@pytest.mark.parametrize("weights", [[3e38, 0, 3e38, 0], [math.inf, 0, 1, 0], [6e4, 6e4, 6e4, 6e4], [1, 0, 1, 0]])
def test_a_crafted_model_tells_no_more_of_a_sample_than_epsilon_allows(weights, kind, accounting):
    """Of two data sets that differ by a sample, whatever the answers fall into falls out as often, but for e^epsilon
    and delta: beyond thresholds along the sample's own gradient, and not finite at all."""
    terms = SamplePrivacy(Privacy(1, 1e-3, 1.0, "samples"), 1, 1, 1)
    model, loss = dense(kind, weights), nn.functional.cross_entropy
    answers = []
    for x in (torch.ones(1, 2, dtype=kind), torch.ones(0, 2, dtype=kind)):
        private = PrivateSteps(terms, 1, random_bytes(b"0", len(x)))
        told = []
        for _ in range(400):
            private.gradients(model, loss, x, torch.zeros(len(x), dtype=torch.int64))
            told.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        answers.append(torch.stack(told))
    towards = answers[0].nan_to_num().mean(0) - answers[1].nan_to_num().mean(0)
    towards = torch.ones_like(towards) if not bool(towards.isfinite().all()) else towards
    along = [told.nan_to_num() @ towards for told in answers]
    events = [[(~told.isfinite()).any(1) for told in answers]]
    events += [[one > t for one in along] for t in torch.cat(along).quantile(torch.linspace(0.05, 0.95, 7).double())]
    for here, gone in events + [[~a, ~b] for a, b in events]:
        for one, other in ((here, gone), (gone, here)):
            slack = 4 * math.sqrt(0.25 / len(one)) * (1 + math.e)
            assert float(one.double().mean()) <= math.e * float(other.double().mean()) + 1e-3 + slack


class Mixing(TorchDataset):
    """Samples of one's own, turned over at random as they are read."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        flip = random.random() < 0.5
        return (self.x[i].flip(2) if flip else self.x[i]) + 0.1 * torch.randn(self.x[i].shape), int(self.y[i])


def mixed_up(x, labels):
    """Each sample with another of its batch."""
    weights = torch.rand(len(x), 1, 1, 1)
    return weights * x + (1 - weights) * x[torch.randperm(len(x))]


def drawing(kind: str, x, y):
    """Samples, a transform and a model of which something draws at random."""
    middle = nn.Dropout(0.5) if kind == "dropout" else nn.Identity()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), middle, nn.Linear(16, 3))
    transform = {"crop-flip": crop_flip, "mixup": mixed_up}.get(kind)
    data = Split.of(Mixing(x, y))
    return LazySamples(data, torch.device("cpu")) if kind == "data set" else x, transform, model


@pytest.mark.parametrize("kind", ["dropout", "crop-flip", "mixup", "data set"])
def test_whatever_is_drawn_for_samples_one_of_them_moves_the_sum_by_the_clip(kind, accounting):
    """What is drawn of samples is theirs alone: of the same seeds for all others, with or without a sample the sum
    differs by a clip, though the server knows the seed of the global generators."""
    generator = torch.Generator().manual_seed(0)
    n, gone = 24, 3
    x, y = torch.rand(n, 1, 8, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    terms = SamplePrivacy(Privacy(8, 1e-5, 1.0, "samples"), 1, 1, n)
    sums, each = [], [np.random.default_rng(i).bytes(8) for i in range(2 * n + 1)]
    for rows in (list(range(n)), [i for i in range(n) if i != gone]):
        read = [] if kind == "dropout" else [each[i] for i in rows]
        taken = iter([*read, each[n], *(each[n + 1 + i] for i in rows)])  # one is for all at once
        drawn = lambda length, taken=taken: next(taken) if length == 8 else b"\1" * length  # noqa: E731
        private = PrivateSteps(terms, len(rows), drawn)
        seed_all(7)
        samples, transform, model = drawing(kind, x[rows], y[rows])
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        fit(model, samples, y[rows], Local(batch=n, lr=1), transform=transform, private=private)
        changed = torch.cat([(start[name] - p.detach()).flatten() for name, p in model.named_parameters()])
        sums.append(changed.double() * len(rows) - private.multiplier * gaussian(1, lambda k: b"\1" * k))
    assert float(sums[0].norm()) > 2
    assert float((sums[0] - sums[1]).norm()) <= 1 + 1e-4


@pytest.mark.parametrize("kind", ["dropout", "crop-flip", "data set"])
def test_what_is_drawn_for_samples_follows_from_the_clients_secret_alone(kind, accounting):
    terms = SamplePrivacy(Privacy(1e9, 1e-5, 1.0, "samples"), 1, 1, 20)
    x, y = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3

    def trained(secret, seed):
        seed_all(3)
        samples, transform, model = drawing(kind, x, y)
        private = PrivateSteps(terms, 20, random_bytes(secret))
        seed_all(seed)
        fit(model, samples, y, Local(batch=20, lr=1), transform=transform, private=private)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), float(torch.rand(()))

    (first, after), (again, _) = trained(b"a", 0), trained(b"a", 1)
    assert torch.equal(first, again)
    assert float((first - trained(b"b", 0)[0]).norm()) > 1e-2
    seed_all(0)
    assert after == float(torch.rand(()))  # what a method draws then says nothing of how much was drawn here


def test_a_clients_update_that_is_not_finite_is_none(accounting):
    around = {"w": torch.zeros(3)}
    mean, _ = mean_of([{"w": torch.full((3,), torch.inf)}, {"w": torch.full((3,), torch.nan)}], around, 4)
    still, _ = mean_of([{"w": torch.zeros(3)}], around, 4)
    assert torch.equal(mean()["w"], still()["w"])
    half, _ = mean_of([{"w": torch.zeros(3, dtype=torch.float16)}], {"w": torch.full((3,), 65504.0).half()}, 1)
    assert bool(half()["w"].isfinite().all())


def test_batches_hold_every_sample_by_chance(accounting):
    terms = SamplePrivacy(Privacy(8, 1e-5, 1.0, "samples"), 1, 2000, 10)
    sizes, counts = [], np.zeros(40)
    private = PrivateSteps(terms, 40, random_bytes(b"0"))
    for rows in islice(private.batches(torch.device("cpu")), 2000):
        sizes.append(len(rows))
        counts[rows.numpy()] += 1
    assert np.mean(sizes) == pytest.approx(10, rel=0.03)
    assert np.var(sizes) == pytest.approx(40 * 0.25 * 0.75, rel=0.1)  # of a binomial distribution
    assert counts.min() > 400


def test_what_is_promised_is_read_in_any_order_and_written_in_one():
    text = "clip=1.0, delta=1e-5,epsilon=8"
    assert str(Privacy.read(text)) == "epsilon=8,delta=1e-05,clip=1"
    assert Privacy.read(str(Privacy.read(text))) == Privacy.read(text) == Privacy(8, 1e-5, 1)
    assert str(Privacy.read(text + ",noise=seeded,of=samples")) == (
        "of=samples,epsilon=8,delta=1e-05,clip=1,noise=seeded"
    )


@pytest.mark.parametrize(
    "text",
    ["", "8", "epsilon=8", "epsilon=0,delta=1e-5,clip=1", "epsilon=8,delta=1,clip=1", "epsilon=inf,delta=1e-5,clip=1",
     "epsilon=8,delta=1e-5,clip=nan", "epsilon=8,delta=1e-5,clip=1,of=all", "epsilon=8,delta=1e-5,clip=1,noise=none",
     "epsilon=8,epsilon=9,delta=1e-5,clip=1", "epsilon=8,delta=1e-5,clip=1,x=2", "epsilon=8,delta=1e-5,clip"],
)  # fmt: skip
def test_what_is_no_promise_is_told(text):
    with pytest.raises(fb.UserError, match=r"^dp .*epsilon=8,delta=1e-5,clip=1\.0"):
        Privacy.read(text)
