"""A site's policy: whatever servers ask for, in any order, no more leaves than its rules allow."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbytes as fb
from fewbytes.core.site_policy import KEYS, History, Hours, Request, SitePolicy, refusal, withheld

POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "methods": st.sampled_from(["fedavg", "fedavg,fedprox", "fedpurin"]),
        "min-samples": st.integers(0, 40),
        "max-bytes-a-round": st.integers(0, 400),
        "max-bytes-in-all": st.integers(0, 1500),
        "max-rounds": st.integers(0, 5),
        "require": st.sampled_from(["secure-aggregation", "dp-samples<=8", "dp-samples <= 2.5, secure-aggregation"]),
        "evaluate-only": st.booleans(),
        "ask": st.booleans(),
        "hours": st.sampled_from(["20:00-6:00", "8-17", "0-24"]),
    },
)
REQUESTS = st.builds(
    Request,
    run=st.sampled_from(["a", "b"]),
    round=st.integers(0, 6),
    handler=st.sampled_from(["train", "shares", ":data", ":score"]),
    order=st.text("xyz", min_size=1, max_size=2),
    methods=st.sets(st.sampled_from(["fedavg", "fedprox", "fedpurin", "clustered"]), min_size=1).map(frozenset),
    samples=st.integers(0, 60),
    replies=st.booleans(),
    hidden=st.booleans(),
    privacy=st.none() | st.tuples(st.sampled_from([1.0, 2.5, 8.0, 9.0, math.nan]), st.sampled_from([0.0, 0.01, 0.9])),
    approved=st.booleans(),
    minute=st.integers(0, 24 * 60 - 1),
)


@settings(max_examples=600, deadline=None)
@given(POLICIES, st.lists(st.tuples(REQUESTS, st.integers(0, 500)), max_size=30))
def test_whatever_is_asked_no_more_leaves_than_the_rules_allow(config, asked):
    policy, history, left = SitePolicy.read(config), History(), []
    for request, nbytes in asked:
        if refusal(policy, request, history) is None and withheld(policy, request, nbytes, history) is None:
            history.add(request, nbytes)
            left.append((request, nbytes))
    for request, _ in left:
        assert request.methods <= set(config.get("methods", ",".join(request.methods)).split(","))
        assert request.samples >= config.get("min-samples", 0)
        assert not (config.get("evaluate-only") and request.replies)
        assert request.approved or not config.get("ask")
        needed = config.get("require", "")
        assert request.hidden or "secure-aggregation" not in needed
        if "dp" in needed:
            epsilon, delta = request.privacy
            assert epsilon <= (2.5 if "2.5" in needed else 8)
            assert delta * request.samples <= 1
        hour = request.minute / 60
        assert {"20:00-6:00": hour >= 20 or hour < 6, "8-17": 8 <= hour < 17}.get(config.get("hours"), True)
    sums = Counter()
    for request, nbytes in left:
        sums[request.run, request.round] += nbytes
    assert max(sums.values(), default=0) <= config.get("max-bytes-a-round", math.inf)
    assert sum(sums.values()) <= config.get("max-bytes-in-all", math.inf)
    answered = [request for request, _ in left if request.replies]
    most = config.get("max-rounds", math.inf)
    assert len({(request.run, request.round) for request in answered}) <= most
    for handler in ("train", "shares"):  # also if all are said to be of one round
        assert len({(each.run, each.order) for each in answered if each.handler == handler}) <= most


@settings(max_examples=300, deadline=None)
@given(POLICIES, st.lists(st.tuples(REQUESTS, st.integers(0, 500)), max_size=20))
def test_the_order_of_refusals_hides_none(config, asked):
    """What a policy of one of the rules refuses, all of them together do."""
    policy, history = SitePolicy.read(config), History()
    for request, nbytes in asked:
        alone = [withheld(SitePolicy.read({key: value}), request, nbytes, history) for key, value in config.items()]
        assert (withheld(policy, request, nbytes, history) is None) == (not any(alone))
        history.add(request, nbytes)


def test_every_rule_is_said_in_a_sentence():
    config = {
        "methods": "fedavg", "min-samples": 20, "max-bytes-a-round": "2MB", "max-bytes-in-all": "1GB", "max-rounds": 40,
        "require": "secure-aggregation,dp-samples<=8", "evaluate-only": True, "ask": True, "hours": "20-6",
    }  # fmt: skip
    assert config.keys() == KEYS
    policy = SitePolicy.read(config)
    assert len(policy.rules()) == 10  # require has two
    assert "At most 2,000,000 bytes leave in a round." in policy.rules()
    assert SitePolicy.read({}).rules() == []
    assert policy.hours == Hours(20 * 60, 6 * 60)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max-byte-a-round", 5), ("max_rounds", 3), ("method", "fedavg"), ("askk", True),
        ("max-rounds", -1), ("max-rounds", True), ("max-rounds", 2.5), ("max-rounds", "many"), ("max-rounds", math.nan),
        ("min-samples", "x"), ("min-samples", math.inf),
        ("max-bytes-a-round", "2 lots"), ("max-bytes-a-round", -5), ("max-bytes-in-all", math.nan),
        ("max-bytes-in-all", True),
        ("methods", ""), ("methods", 5), ("methods", " , "),
        ("require", ""), ("require", "secure"), ("require", "dp-samples<=0"), ("require", "dp-samples<=1.2.3"),
        ("require", "dp-samples<=inf"), ("require", "dp-clients<=8"),
        ("evaluate-only", "yes"), ("ask", 1), ("hours", "20"), ("hours", "20-20"), ("hours", "25-3"),
        ("hours", "8-24:30"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_and_turns_nothing_off(key, value):
    with pytest.raises(fb.FewbytesError, match=key):
        SitePolicy.read({key: value})


def test_keys_of_another_application_are_its_own_but_no_misspelt_rule():
    assert SitePolicy.read({"scanner": "B7"}, others=True) == SitePolicy()
    with pytest.raises(fb.FewbytesError, match="did you mean 'max-rounds'"):
        SitePolicy.read({"max-round": 3}, others=True)
    with pytest.raises(fb.FewbytesError, match="the rules are ask, evaluate-only"):
        SitePolicy.read({"scanner": "B7"})


def test_the_pages_example_is_a_policy():
    text = (Path(__file__).parents[2] / "docs" / "site-policy.md").read_text()
    config = tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])["config"]
    assert len(SitePolicy.read(config).rules()) == 8
    assert {key for key in KEYS if f"| `{key}` |" in text} == KEYS
