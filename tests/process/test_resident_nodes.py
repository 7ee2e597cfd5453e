"""Resident nodes that are killed, cut off, stopped, or started before there is anything: the run ends as if nothing had
happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from runs import configured, fingerprint

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from proxied import Snapshots, deploy
from proxy import NONE, Faults

from fewbytes.experiments.deploy import Deployment, places
from fewbytes.experiments.settings import Experiment, make_experiment
from fewbytes.flower.certificates import write_node_key
from fewbytes.flower.processes import Processes, _family

pytestmark = pytest.mark.process
MB = 1_000_000
BIG = """
import torch
def net(shape, classes):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 1850), torch.nn.ReLU(), torch.nn.Linear(1850, 1850), torch.nn.ReLU(),
        torch.nn.Linear(1850, classes),
    )
"""
"""A model of 14 MB."""


@pytest.fixture
def big(tmp_path, monkeypatch) -> Callable[..., dict]:
    """The settings of a run of BIG with so many epochs."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "bignet.py").write_text(BIG)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "code"), os.environ.get("PYTHONPATH", "")]))
    yield lambda rounds, clients, epochs=1: {
        "method": "fedavg", "model": "bignet:net", "dataset": "digits", "clients": clients, "samples": "40/10",
        "rounds": rounds, "evaluate_every": 1000, "save_models": False, "min_replies": 1, "round_timeout": 120,
        "parameters": {"epochs": epochs, "lr": 0.05, "batch": 20}, "engine": "flower-deployment",
    }  # fmt: skip
    sys.modules.pop("bignet", None)


def assert_equal_to_a_local_run(folder: Path, settings: dict) -> None:
    """Bit for bit, and nobody was left out."""
    here = configured(folder.parent / "here", **settings | {"engine": "local"})
    wanted, found = fingerprint(here), fingerprint(folder)
    same = ("server", "states", "ledger")
    assert {name: found[name] == wanted[name] for name in same} == dict.fromkeys(same, True)


def uploaded(folder: Path, client: int) -> int:
    """What the ledger counts of a client's replies."""
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    return sum(row["bytes_up"] for row in rows if row["client"] == client)


def kill(process: subprocess.Popen) -> None:
    for pid, _ in _family({process.pid}):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Killing(Snapshots):
    """Kills client 0 as it trains in the second round, client 1 as it uploads in the third: when so many bytes have
    come down, or gone up, since the round began."""

    def scored(self, row: dict) -> None:
        super().scored(row)
        if row["round"] in (1, 2) and row["phase"] == "round":
            client = row["round"] - 1
            link = (self.proxies[0].down, self.proxies[1].up)[client]
            far = link.bytes + (11.9 * MB, 3 * MB)[client]
            threading.Thread(target=self._kill, args=(f"client-{client}", link, far), daemon=True).start()

    def _kill(self, name: str, link, far: float) -> None:
        while link.bytes < far:
            time.sleep(0.01)
        kill(self.deployed.processes._nodes[name].process)


def test_nodes_that_are_killed_as_they_train_and_upload_go_on_at_once_where_they_were(big, tmp_path):
    settings = big(rounds=3, clients=2, epochs=10)
    seen = deploy(make_experiment(settings), tmp_path, up=Faults(rate=6 * MB), watched_by=Killing)
    assert sum("SIGKILL" in note for note in seen.notes) == 2, seen.notes
    assert not any(row.get("left_out") for row in seen.rows)
    assert max(row["seconds"] for row in seen.rows) < 40  # and not a minute, as Flower refuses a SuperNode
    up = seen.proxies[1].up.bytes
    assert up < uploaded(tmp_path / "run", 1) + 3 * MB, up  # two pieces at most go up twice
    assert_equal_to_a_local_run(tmp_path / "run", settings)


def test_what_is_long_passes_a_link_that_is_reset_after_every_two_megabytes(big, tmp_path):
    settings = big(rounds=1, clients=1)
    link = Faults(reset_at=2 * MB)
    seen = deploy(make_experiment(settings), tmp_path, up=link, down=link)
    (proxy,) = seen.proxies
    (row,) = pq.read_table(tmp_path / "run" / "ledger.parquet").to_pylist()
    print(proxy.up.struck, proxy.down.struck, proxy.snapshot(), row)
    for link, size, passed in zip((proxy.up, proxy.down), (row["bytes_up"], row["bytes_down"]), proxy.snapshot(), strict=True):
        assert size > 6 * MB
        assert passed < 2 * size
        assert link.struck["reset"] >= size // (2 * MB)
    assert row["outcome"] == "answered"
    assert_equal_to_a_local_run(tmp_path / "run", settings)
