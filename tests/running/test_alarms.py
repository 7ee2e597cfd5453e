"""Who lies is named, at once and by number; who is only unlike the others is not."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from cases import CASES, task_of
from hostile import Scaled
from hypothesis import given, settings
from hypothesis import strategies as st

import fewbytes as fb
from fewbytes.core.standing import Comparison, Updates
from fewbytes.data import Partition, federate, federate_partition, load_dataset
from fewbytes.experiments.display import Display
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.models import build_model
from fewbytes.report import read_runs, write_report
from fewbytes.report.table import summary_table
from fewbytes.running.promises.alarms import Alarms, standing_out
from fewbytes.wire import Layout

TERMS = {"epochs": 2, "lr": 0.1, "batch": 20}


class Hears(fb.Watcher):
    """Keeps what people are told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@functools.cache
def digits(alpha: float, seed: int = 1) -> fb.Task:
    data = load_dataset("digits")
    dealt = federate(data, Partition("dirichlet", clients=10, alpha=alpha), seed=seed)
    return fb.Task.on(dealt, lambda: build_model("mlp", data.train.shape, len(data.classes)), seed=seed)


def run(method: fb.Method, task: fb.Task, rounds: int = 6, **more) -> tuple[fb.Result, list[str]]:
    heard = Hears()
    how = {"rounds": rounds, "evaluate_every": rounds, "workers": 1, "save_models": False, "watcher": heard}
    return fb.run(method, task, **how, **more), heard.notes


@pytest.mark.parametrize(
    ("factor", "malicious", "words", "latest"),
    [
        (-1.0, (3,), "points against the others (or has different data)", 4),
        (30.0, (3,), "sends updates far longer than the others'", 1),
        (30.0, (3, 5, 7), "sends updates far longer than the others'", 1),
    ],
)
def test_who_lies_is_named_at_once_live_in_the_result_and_in_the_report(
    factor, malicious, words, latest, tmp_path, capsys
):
    with Display("fedavg", tmp_path / "run") as display:
        how = {"rounds": 6, "evaluate_every": 6, "workers": 1, "save_models": False, "watcher": display}
        fb.run(Scaled(**TERMS, factor=factor, malicious=malicious), digits(1.0), out=tmp_path / "run", **how)
    live = capsys.readouterr().err.replace("\n", " ")
    told = json.loads((tmp_path / "run" / "result.json").read_text())["stands_out"]
    assert told.keys() == {str(one) for one in malicious}
    runs = read_runs([tmp_path / "run"])
    page = write_report(runs, tmp_path / "report.html").read_text()
    for one in malicious:
        assert told[str(one)].startswith(words)
        assert any(f"round {t}: client {one} {words}" in " ".join(live.split()) for t in range(1, latest + 1))
        assert f"client {one} {words}" in str(summary_table(runs).caption)
        assert f"Client {one} {words}".replace("'", "&#39;") in page


@pytest.mark.parametrize("alpha", [0.1, 0.3])
@pytest.mark.parametrize("method", [fb.FedAvg(**TERMS), fb.FedPer(**TERMS), fb.FedPURIN(**TERMS)], ids=str)
def test_of_honest_clients_that_are_unlike_each_other_nobody_is_named(method, alpha):
    result, notes = run(method, digits(alpha), rounds=10)
    assert "stands_out" not in result.summary
    assert notes == []


@pytest.mark.parametrize("name", ["fedpurin", "fedavg", "scaffold", "dgc", "fedcom"])
def test_updates_are_measured_whatever_a_method_sends(name):
    result = fb.run(CASES[name], task_of(name), rounds=3, workers=1)
    measured = [row["updates"] for row in result.rounds if "updates" in row]
    assert measured
    assert all(length >= 0 and -1 <= cosine <= 1 for row in measured for length, cosine in row.values())


def test_a_resumed_run_remembers_who_stood_out(tmp_path):
    class Stop(Hears):
        def scored(self, row):
            if row["round"] == 2:
                raise KeyboardInterrupt

    method = Scaled(**TERMS, factor=-1.0)
    how = {"rounds": 5, "evaluate_every": 5, "workers": 1, "save_models": False}
    whole = fb.run(method, digits(1.0), out=tmp_path / "whole", watcher=Hears(), **how)
    with pytest.raises(KeyboardInterrupt):
        fb.run(method, digits(1.0), out=tmp_path / "run", watcher=Stop(), **how)
    resumed = fb.run(method, digits(1.0), out=tmp_path / "run", watcher=Hears(), resume=True, **how)
    assert resumed.summary["stands_out"] == whole.summary["stands_out"] == {
        "3": "points against the others (or has different data) in 5 of 5 rounds, last in round 5"
    }  # fmt: skip


def test_whoever_brought_a_run_down_is_named_where_it_ends():
    """Its lie within the largest norm lets all others' training fail a round later."""
    heard = Hears()
    with pytest.raises(fb.FewbytesError, match=r"client 3 .* --from-round 0 --exclude 3\)"):
        fb.run(Scaled(**TERMS, factor=1e25), digits(1.0), rounds=6, workers=1, watcher=heard,
               policy=fb.Policy(max_norm=1e38, strikes=99))  # fmt: skip


def test_who_trains_on_more_samples_may_come_farther_and_a_lie_about_them_hides_little():
    updates, layout = Updates(100), Layout.of({"w": torch.zeros(100)})
    directions = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    for client, direction in enumerate(directions):
        times = {0: 25.0, 1: 400.0}.get(client, 1.0)
        updates.add("train", client, layout, None, Model(fb.Dense({"w": times * direction})))
    said = {0: 1000, 1: 1_000_000}
    found = standing_out(updates.comparisons(lambda client: said.get(client, 20)))
    assert found == {0: "", 1: "far too long"} | dict.fromkeys(range(2, 6), "")
    assert standing_out(updates.comparisons())[0] == "far too long"


@pytest.mark.parametrize(("said", "factor"), [(100, 30), (800, 60), (800, 150), (10_000, 40), (1 << 40, 90)])
def test_claiming_samples_hides_no_long_update(said, factor):
    """One of ten says that it has more samples than the others, which weighs more, and sends its update times a
    factor."""
    updates, layout = Updates(1000), Layout.of({"w": torch.zeros(1000)})
    random = torch.Generator().manual_seed(0)
    common = torch.randn(1000, generator=random)
    for client in range(10):
        update = (common + torch.randn(1000, generator=random)) / 2 * (factor if client == 9 else 1)
        updates.add("train", client, layout, None, Trained(fb.Dense({"w": update}), 100))
    alarms, measured = Alarms(), updates.comparisons(lambda client: said if client == 9 else 100)
    for t in range(1, 4):
        alarms.observe(t, measured)
    assert alarms.named.keys() == {9}


@pytest.mark.parametrize("big", [3, 0])
def test_an_honest_site_with_fifty_times_the_samples_is_not_named(big):
    data = load_dataset("digits")
    rows = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(big)).numpy()
    sizes = [1000 if client == big else 20 for client in range(10)]
    parts = np.split(rows[: sum(sizes)], np.cumsum(sizes)[:-1])
    dealt = federate_partition(data, parts)
    task = fb.Task.on(dealt, lambda: build_model("mlp", data.train.shape, len(data.classes)))
    result, notes = run(fb.FedAvg(**TERMS), task, rounds=5)
    assert "stands_out" not in result.summary, notes


def test_what_was_not_sent_counts_from_nothing_and_the_length_is_that_of_the_change():
    updates, layout = Updates(3), Layout.of({"w": torch.zeros(3), "v": torch.zeros(1)})
    for client in range(4):
        start, end = (torch.arange(3.0) + client, torch.arange(3.0) + 2 * client)
        reply = Trained(fb.Dense({"w": end, "v": torch.ones(1)}), 1)
        updates.add("train", client, layout, Model(fb.Dense({"w": start})), reply)
    lengths = [each.length for each in updates.comparisons().values()]
    assert lengths == pytest.approx([(square / 4) ** 0.5 for square in (1, 4, 13, 28)])  # the lower of two medians


@given(st.lists(st.floats(0, 1e6, width=32), min_size=0, max_size=12), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_less_than_half_stand_out_by_their_length_and_nobody_among_few(factors, size):
    updates, layout = Updates(size), Layout.of({"w": torch.zeros(size)})
    for client, factor in enumerate(factors):
        updates.add("train", client, layout, None, Trained(fb.Dense({"w": torch.full((size,), factor)}), 1))
    found = standing_out(updates.comparisons())
    assert sum("long" in kind for kind in found.values()) <= len(factors) / 2
    if len(factors) < 4:
        assert not any(found.values())


def test_one_bad_round_is_not_enough_unless_it_is_very_bad():
    usual = {i: Comparison(1.0, 0.5) for i in range(5)}
    for norm, rounds in ((10.0, 3), (25.0, 1)):
        alarms, named = Alarms(), []
        for t in range(1, 4):
            named += [t] * bool(alarms.observe(t, usual | {2: Comparison(norm, 0.5)}))
        assert named == [rounds]
