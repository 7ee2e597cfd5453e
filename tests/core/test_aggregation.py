"""The rules that bear some liars: what each guarantees, and that it is its paper's formula."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fewbytes as fb
from fewbytes.core.aggregation import (
    RobustMean,
    evenly_clipped,
    geometric_median,
    krum,
    krum_scores,
    median,
    multi_krum,
    norm_clipped,
    trimmed_mean,
    update_norm,
    vote,
    weighted_mean,
)
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.rules import EVERY_RULE, NUMBERS, Rule

FLOATS = st.floats(-1e3, 1e3, width=32)
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False)


def states_of(rows: np.ndarray) -> list[dict[str, torch.Tensor]]:
    """A state a row of float32, in two entries of different shapes."""
    return [{"w": torch.from_numpy(row[:2].copy()).view(2, 1), "b": torch.from_numpy(row[2:].copy())} for row in rows]


def flat(state: dict[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([state["w"].flatten(), state["b"]]).numpy()


def rows(least: int = 1, most: int = 9, elements=FLOATS) -> st.SearchStrategy[np.ndarray]:
    return st.integers(least, most).flatmap(lambda n: arrays(np.float32, (n, 4), elements=elements))


@st.composite
def with_liars(draw) -> tuple[np.ndarray, np.ndarray]:
    """Rows of clients, and which of them, fewer than half, say anything at all."""
    honest = draw(rows(1, 8))
    lies = draw(arrays(np.float32, (draw(st.integers(0, len(honest) - 1)), 4), elements=ANY))
    n = len(honest) + len(lies)
    order = draw(st.permutations(range(n)))
    return np.concatenate([honest, lies])[order], np.array(order) >= len(honest)


@given(with_liars())
@settings(deadline=None)
def test_with_fewer_than_half_lying_the_median_is_between_honest_values(clients):
    values, lying = clients
    got, honest = flat(median(states_of(values))), values[~lying]
    assert (honest.min(0) <= got).all()
    assert (got <= honest.max(0)).all()


@given(with_liars())
@settings(deadline=None)
def test_trimmed_of_as_many_as_lie_a_mean_is_between_honest_values(clients):
    values, lying = clients
    part = lying.sum() / len(lying)
    got, honest = flat(trimmed_mean(states_of(values), part)), values[~lying]
    assert (honest.min(0) <= got).all()
    assert (got <= honest.max(0)).all()


@given(rows(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_clients_does_not_matter(values, random):
    shuffled = list(range(len(values)))
    random.shuffle(shuffled)
    weights = np.arange(1.0, len(values) + 1)
    for rule in (median, lambda s: trimmed_mean(s, 0.2)):
        assert (flat(rule(states_of(values))) == flat(rule(states_of(values[shuffled])))).all()  # to the bit
    for rule in (weighted_mean, geometric_median):
        one, other = rule(states_of(values), weights), rule(states_of(values[shuffled]), weights[shuffled])
        assert np.allclose(flat(one), flat(other), rtol=1e-4, atol=1e-2)


@given(st.integers(0, 3), st.integers(0, 1000), st.floats(50, 1e30))
@settings(deadline=None)
def test_krum_takes_an_honest_state_where_liars_are_far(liars, seed, far):
    g, n = np.random.default_rng(seed), 2 * liars + 3
    lying = g.permutation(n) < liars
    values = g.standard_normal((n, 4))
    values[lying] = far * np.sign(g.standard_normal(4))  # all at one place
    states = states_of(values.astype(np.float32))
    honest = [flat(state).tolist() for state, lies in zip(states, lying, strict=True) if not lies]
    assert flat(krum(states, liars)).tolist() in honest
    assert np.allclose(flat(multi_krum(states, liars)), np.mean(honest, 0), atol=1e-5)


@given(rows(3), st.integers(0, 3))
@settings(deadline=None)
def test_krums_score_is_the_papers(values, liars):
    n = len(values)
    liars = min(liars, (n - 3) // 2)
    values = values.astype(np.float64)
    expected = [
        sum(sorted(((x - y) ** 2).sum() for j, y in enumerate(values) if j != i)[: n - liars - 2])
        for i, x in enumerate(values)
    ]
    got = krum_scores(states_of(values.astype(np.float32)), liars)
    assert np.allclose(got, expected, rtol=1e-9, atol=1e-6)


@given(rows(), st.integers(0, 4))
@settings(deadline=None)
def test_median_and_trimmed_mean_are_numpys_and_scipys(values, cut):
    from scipy.stats import trim_mean

    assert np.allclose(flat(median(states_of(values))), np.median(values.astype(float), 0), rtol=1e-6, atol=1e-6)
    n = len(values)
    cut = min(cut, (n - 1) // 2)
    expected = trim_mean(values.astype(float), (cut + 0.5) / n, 0)
    assert np.allclose(flat(trimmed_mean(states_of(values), cut / n)), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("part", "n", "mean"), [(0.2, 5, 2.0), (0.01, 5, 2.0), (0.2, 6, 2.5), (0.4, 2, 5.0), (0.4, 1, 0)]
)
def test_what_is_trimmed_is_rounded_up_and_one_value_stays(part, n, mean):
    values = [{"x": torch.tensor(float(i if i < n - 1 or n < 2 else 10))} for i in range(n)]
    assert float(trimmed_mean(values, part)["x"]) == mean


@given(st.integers(0, 1000), st.integers(3, 9))
@settings(deadline=None, max_examples=30)
def test_no_point_is_nearer_to_all_than_the_geometric_median(seed, n):
    from scipy.optimize import minimize

    g = np.random.default_rng(seed)
    values, weights = g.standard_normal((n, 4)), g.integers(1, 50, n)

    def away(point):
        return weights @ np.linalg.norm(values - point, axis=1)

    got = flat(geometric_median(states_of(values.astype(np.float32)), weights))
    found = minimize(
        away, values.mean(0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 4000}
    )
    assert away(got) <= found.fun * 1.01  # steps are small near a client with about half of the weight


@pytest.mark.parametrize("far", [1e2, 1e10, 3e38])
@pytest.mark.parametrize("turned", [1, -1])
def test_however_far_liars_are_the_geometric_median_is_among_the_honest(far, turned):
    honest = np.random.default_rng(0).uniform(-1, 1, (5, 4))
    values = np.concatenate([honest[:2], far * np.array([[1, 1, 1, 1], [1, turned, turned, 1]]), honest[2:]])
    got = flat(geometric_median(states_of(values.astype(np.float32)), [1, 1, 2, 1, 1, 1, 1]))
    assert np.linalg.norm(got - honest.mean(0)) < 1.5


@given(rows(2), arrays(np.float32, 4, elements=FLOATS), st.one_of(st.none(), st.floats(0.125, 100)))
@settings(deadline=None)
def test_no_clipped_update_is_longer_than_allowed_or_turned(values, start, largest):
    around = states_of(start[None])[0]
    clipped = norm_clipped(states_of(values), around, largest)
    norms = [update_norm(state, around) for state in states_of(values)]
    most = np.median(norms) if largest is None else largest
    for before, after, norm in zip(values.astype(float), map(flat, clipped), norms, strict=True):
        if norm <= most:
            assert (after == before).all()
        else:
            assert np.allclose(after - start, (before - start) * (most / norm), atol=2e-3)


@pytest.mark.parametrize("clip", [norm_clipped, evenly_clipped])
def test_running_statistics_hide_no_long_update_and_are_none_themselves(clip):
    def told(weights: float, statistics: float) -> dict[str, torch.Tensor]:
        return {"w": torch.full((4,), weights), "bn.running_var": torch.full((4,), statistics)}

    honest = [told(0.01, 0.5), told(-0.01, 0.5), told(0.01, 0.5)]
    got = clip([*honest, told(0.3, 0.5), told(0.01, 15.0)], {})  # 30 times the weights; 30 times the statistics
    assert all(after is before for after, before in zip(got, honest, strict=False))
    for after in got[3:]:
        assert torch.allclose(after["w"], torch.full((4,), 0.01))
        assert torch.allclose(after["bn.running_var"], torch.full((4,), 0.5))


@pytest.mark.parametrize("clip", [norm_clipped, evenly_clipped])
def test_who_sends_no_statistics_says_nothing_of_how_long_others_may_be(clip):
    without = [{"w": torch.ones(2)} for _ in range(3)]
    with_some = {
        "w": torch.ones(2),
        "bn.running_mean": torch.full((2,), 3.0),
        "bn.num_batches_tracked": torch.tensor(7),
    }
    assert clip([*without, with_some], {})[3] is with_some


PARTS = st.sampled_from([None, 0.1, 0.2, 0.4])


@st.composite
def masked(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (n, 4) of clients, and which of them each sent."""
    values = draw(rows())
    return torch.from_numpy(values), torch.from_numpy(draw(arrays(np.bool_, values.shape)))


@given(masked(), PARTS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_vote_is_the_rule_of_those_who_sent_a_value_in_any_order(clients, part, random):
    values, sent = clients
    order = list(range(len(values)))
    random.shuffle(order)
    got = vote(values, sent, part)
    assert torch.allclose(got, vote(values[order], sent[order], part), rtol=1e-12, atol=1e-9)
    for at in range(values.shape[1]):
        states = [{"x": value.double()} for value in values[:, at][sent[:, at]]]
        rule = median if part is None else lambda s: trimmed_mean(s, part)
        wanted = rule(states)["x"] if states else torch.zeros(()).double()
        assert torch.allclose(got[at], wanted, rtol=1e-12, atol=1e-9)


@given(masked(), PARTS)
@settings(deadline=None)
def test_where_all_agree_a_vote_is_the_mean(clients, part):
    values, sent = clients
    same = values[:1].expand_as(values)
    wanted = torch.where(sent.any(0), values[0].double(), 0.0)
    assert torch.allclose(vote(same, sent, part), wanted, rtol=1e-12)


@given(masked(), PARTS, st.floats(width=32, allow_nan=False), st.integers(0, 8))
@settings(deadline=None)
def test_one_of_three_or_more_moves_a_vote_no_further_than_to_another_ones_value(clients, part, lie, liar):
    values, sent = clients
    liar %= len(values)
    got = vote(values.index_fill(0, torch.tensor(liar), lie), sent, part)
    for at in range(values.shape[1]):
        others = [float(v) for i, v in enumerate(values[:, at]) if i != liar and sent[i, at]]
        if len(others) >= 2 or not sent[liar, at]:
            assert min(others, default=0) - 1e-9 <= float(got[at]) <= max(others, default=0) + 1e-9


@given(st.lists(st.tuples(st.integers(1, 4), FLOATS), min_size=1, max_size=9), st.booleans())
@settings(deadline=None)
def test_of_parts_no_update_is_longer_for_its_size_than_most_are_and_short_ones_stay(parts, started):
    states = [{str(n): torch.full((n,), value)} for n, value in parts]
    around = {str(n): torch.ones(n) for n in range(1, 5)} if started else {}
    start = float(started)
    lengths = [abs(value - start) for _, value in parts]
    most = np.median(lengths)
    for (n, value), length, state in zip(parts, lengths, evenly_clipped(states, around), strict=True):
        if length <= most:
            assert torch.equal(state[str(n)], torch.full((n,), value))
        got = (state[str(n)] - start).abs().double()
        assert torch.allclose(got, torch.tensor(min(length, most)).double(), atol=1e-3)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "norm-clip"])
def test_who_alone_sends_an_entry_moves_it_no_further_than_the_others_move_theirs(rule):
    mean = RobustMean(Rule.read(rule), {name: torch.zeros(2) for name in "abc"}, few=True)
    for name, value in (("a", 1.0), ("b", 1e6), ("c", -1.0)):
        mean.add({name: torch.full((2,), value)})
    got = mean.over({name: torch.zeros(2) for name in "abc"})
    assert {name: value.tolist() for name, value in got.items()} == {"a": [1, 1], "b": [1, 1], "c": [-1, -1]}


@pytest.mark.parametrize("rule", sorted(EVERY_RULE))
def test_equal_replies_are_what_comes_out(rule):
    like = {"w": torch.tensor([0.1, -3e7]), "count": torch.tensor(7), "half": torch.ones(2, dtype=torch.float16)}
    mean = RobustMean(Rule.read(rule), {"w": torch.tensor([5.0, 0.0])})
    for weight in (1, 2, 3, 4, 5):
        mean.add({name: value.clone() for name, value in like.items()}, weight)
    got = mean()
    assert all(torch.equal(got[name], like[name]) and got[name].dtype == like[name].dtype for name in like)


@pytest.mark.parametrize("rule", sorted(EVERY_RULE))
def test_a_counter_moves_neither_distances_nor_norms_and_is_no_outliers(rule):
    mean = RobustMean(Rule.read(rule))
    for i, (x, count) in enumerate([(1.0, 10), (1.1, 11), (0.9, 10**15), (1.2, 9), (1.05, 10)]):
        mean.add({"x": torch.tensor([x, -x]), "count": torch.tensor(count)}, i + 1)
    got = mean()
    assert 0.9 <= float(got["x"][0]) <= 1.2
    assert 9 <= int(got["count"]) <= 11


def test_weights_are_of_the_mean_of_clipped_updates_and_of_the_geometric_median_alone():
    for rule in EVERY_RULE:
        totals = []
        for weights in ([1, 1, 1, 1, 1], [1, 1, 1, 1, 40]):
            mean = RobustMean(Rule.read(rule))
            for i, weight in enumerate(weights):
                mean.add({"x": torch.tensor([float(i), 1.0])}, weight)
            totals.append(mean()["x"].tolist())
        assert (totals[0] != totals[1]) == (rule in ("norm-clip", "geometric-median")), rule


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "norm-clip"])
def test_an_entry_is_of_those_who_sent_it(rule):
    mean = RobustMean(Rule.read(rule))
    for value in (1.0, 1.0, 1.0, 9.0, 1.0):
        mean.add({"a": torch.tensor([value])})
    mean.add({"b": torch.tensor([1.0])})
    old = {name: torch.tensor([5.0]) for name in "abc"}
    assert {name: value.tolist() for name, value in mean.over(old).items()} == {"a": [1], "b": [1], "c": [5]}
    with pytest.raises(fb.MethodError, match=": a, b"):
        mean.over({"c": torch.ones(1)})


@pytest.mark.parametrize("rule", sorted(EVERY_RULE))
def test_what_cannot_be_put_together_is_refused(rule):
    mean = RobustMean(Rule.read(rule))
    with pytest.raises(fb.MethodError, match="nothing"):
        mean()
    mean.add({"a": torch.ones(2)})
    with pytest.raises(fb.MethodError, match="above 0"):
        mean.add({"a": torch.ones(2)}, weight=0)
    mean.add({"a": torch.ones(1)})  # would broadcast
    with pytest.raises(fb.MethodError, match="differ: a"):
        mean()


@pytest.mark.parametrize("rule", ["krum=2", "multi-krum=2"])
def test_krum_says_how_many_replies_it_needs(rule):
    mean = RobustMean(Rule.read(rule))
    for _ in range(6):
        mean.add({"a": torch.ones(2)})
    with pytest.raises(TooFewReplies, match=f"{rule} needs 7 replies, and 6"):
        mean()
    mean.add({"a": torch.ones(2)})
    mean()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_rule_is_read_as_it_is_written(name):
    rule = Rule.read(f" {name} ")
    assert rule == Rule(name, NUMBERS[name]) == Rule.read(str(rule))


@pytest.mark.parametrize(("text", "number"), [("trimmed-mean = 0.45", 0.45), ("krum=0", 0), ("norm-clip=1e-3", 0.001)])
def test_a_rule_may_have_a_number(text, number):
    assert Rule.read(text).number == number


WRONG = [
    *("", "avg", "mean=1", "median=2", "geometric-median=3"),
    *(f"{name}={number}" for name, number in itertools.product(["krum", "multi-krum"], ["", "-1", "1.5", "x"])),
    *(f"trimmed-mean={number}" for number in ("", "0", "0.5", "1", "nan", "0.1.1", ".")),
    *(f"norm-clip={number}" for number in ("", "0", "-1", "nan", "inf", "1e999", "x")),
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_rule_is_told(text):
    with pytest.raises(fb.UserError, match=r"aggregate .*mean, median"):
        Rule.read(text)
