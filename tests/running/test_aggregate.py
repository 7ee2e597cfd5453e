"""What a run says of the rule its server puts replies together by, on either engine, resumed or in clusters."""

from __future__ import annotations

import json
import logging

import pytest
from cases import CASES, LOCAL, task_of, tiny_task
from runs import fingerprint

import fewbytes as fb
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.report import read_runs
from fewbytes.report.table import badges

METHOD = fb.FedAvg(**LOCAL)


class StopAfterOne(fb.Watcher):
    def scored(self, row):
        raise KeyboardInterrupt


def test_the_mean_is_what_a_run_takes_unless_it_says_otherwise(tmp_path, uninterrupted):
    fb.run(CASES["fedavg"], task_of("fedavg"), rounds=4, out=tmp_path / "run", workers=1, aggregate="mean")
    assert fingerprint(tmp_path / "run") == uninterrupted("fedavg")
    assert "aggregate" not in json.loads((tmp_path / "run" / "result.json").read_text())


def test_a_rule_is_named_where_the_result_is(tmp_path):
    result = fb.run(METHOD, tiny_task(5), rounds=1, out=tmp_path / "run", workers=1, aggregate="krum")
    assert result.summary["aggregate"] == "krum=1"
    assert [badges(run) for run in read_runs([tmp_path])] == [["krum=1"]]


def test_a_resumed_run_keeps_its_rule_and_its_results(tmp_path):
    settings = {"task": tiny_task(5), "rounds": 3, "workers": 1, "aggregate": "trimmed-mean"}
    fb.run(METHOD, out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, out=tmp_path / "halted", watcher=StopAfterOne(), **settings)
    with pytest.raises(fb.UserError, match="of another configuration"):
        fb.run(METHOD, out=tmp_path / "halted", resume=True, **settings | {"aggregate": "median"})
    fb.run(METHOD, out=tmp_path / "halted", resume=True, **settings | {"aggregate": "trimmed-mean=0.2"})
    assert fingerprint(tmp_path / "halted") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("rule", ["geometric-median", "multi-krum=0"])
def test_on_flower_it_is_the_same_in_whatever_order_replies_come(rule, tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import run

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    run("fedavg", tmp_path / "flower", aggregate=rule)  # replies land in the reverse order of asking
    fb.run(CASES["fedavg"], task_of("fedavg"), rounds=4, out=tmp_path / "local", workers=2, aggregate=rule)
    assert fingerprint(tmp_path / "flower") == fingerprint(tmp_path / "local")


def test_in_clusters_a_rule_is_of_each_cluster(tmp_path):
    method, task = Clustered(METHOD, clusters=2, vectors=2), tiny_task(6)
    assert fb.run(method, task, rounds=1, workers=1, aggregate="median").summary["aggregate"] == "median"
    with pytest.raises(fb.FewbytesError, match=r"krum=1 needs 5 replies, and \d"):
        fb.run(method, task, rounds=1, workers=1, aggregate="krum")


def test_clients_too_few_for_krum_are_told_before_anything_is_written(tmp_path):
    with pytest.raises(fb.UserError, match=r"krum=2 needs 7 clients, .*4"):
        fb.run(METHOD, tiny_task(), out=tmp_path / "run", aggregate="krum=2")
    assert not (tmp_path / "run").exists()
