"""A real deployment behind links that fail: it ends as one behind links that do not."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
from runs import fingerprint

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from proxied import Snapshots, deploy
from proxy import Faults

import fewbytes as fb
from fewbytes.experiments.settings import make_experiment, make_method
from fewbytes.experiments.tasks import find

OWN = {"epochs": 1, "lr": 0.1, "batch": 20}
SETTINGS = {
    "method": "fedavg", "clients": 2, "rounds": 1, "save_models": False,
    "engine": "flower-deployment", "min_replies": 1, "round_timeout": 60, "parameters": OWN,
}  # fmt: skip


class Cutting(Snapshots):
    """Resets every connection when the first reply is in, while the other is being made."""

    cut = 0

    def replied(self, client: int) -> None:
        if not self.cut:
            self.cut = sum(proxy.cut() for proxy in self.proxies)


@pytest.mark.parametrize("node", ["resident", "stock"])
def test_a_deployment_over_links_that_fail_ends_as_one_over_links_that_do_not(node, tmp_path):
    experiment = make_experiment(SETTINGS)
    up = Faults(delay=0.02, reset=100_000, flip=150_000, half_close=150_000)
    seen = deploy(experiment, tmp_path, up, watched_by=Cutting, node=node)
    struck = sum((proxy.up.struck for proxy in seen.proxies), Counter[str]())
    assert struck.total() > 0
    assert seen.cut > 0
    fb.run(make_method("fedavg", OWN), find(experiment).task, rounds=1, out=tmp_path / "here", save_models=False)
    there, here = fingerprint(tmp_path / "run"), fingerprint(tmp_path / "here")
    assert {name: there[name] == here[name] for name in ("server", "states")} == {"server": True, "states": True}
    tables = (pq.read_table(tmp_path / run / "ledger.parquet") for run in ("run", "here"))
    ledger, plain = (table.drop_columns("time").to_pylist() for table in tables)
    answered = [row for row in ledger if row["outcome"] == "answered"]
    assert sorted(answered, key=str) == sorted(plain, key=str)
    lost = {"late"} if node == "stock" else set()  # what a link loses on its way to a node
    assert {row["outcome"] for row in ledger} <= {"answered"} | lost
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"
