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
from runs import PATIENCE, configured, fingerprint, until

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

from proxied import Snapshots, deploy
from proxy import Faults

from fewbytes.experiments.deploy import Deployment
from fewbytes.experiments.hosts import settled
from fewbytes.experiments.places import Nodes, places
from fewbytes.experiments.settings import make_experiment
from fewbytes.flower.certificates import write_node_key
from fewbytes.flower.children import family_of
from fewbytes.flower.processes import Processes

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
        "rounds": rounds, "evaluate_every": 1000, "save_models": False, "min_replies": 1, "round_timeout": PATIENCE,
        "parameters": {"epochs": epochs, "lr": 0.05, "batch": 20}, "engine": "flower-deployment",
    }  # fmt: skip
    sys.modules.pop("bignet", None)


def assert_equal_to_a_local_run(folder: Path, settings: dict, whole: bool = True) -> None:
    """Bit for bit, and, unless it is not `whole`, nobody was left out."""
    here = configured(folder.parent / "here", **settings | {"engine": "local"})
    wanted, found = fingerprint(here), fingerprint(folder)
    same = ("server", "states", "ledger") if whole else ("server", "states")
    assert {name: found[name] == wanted[name] for name in same} == dict.fromkeys(same, True)


def uploaded(folder: Path, client: int) -> int:
    """What the ledger counts of a client's replies."""
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    return sum(row["bytes_up"] for row in rows if row["client"] == client)


def kill(process: subprocess.Popen) -> None:
    for pid, _ in family_of({process.pid}):
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
            far = link.bytes + (11.9 * MB, 5 * MB)[client]
            threading.Thread(target=self._kill, args=(f"client-{client}", link, far), daemon=True).start()

    def _kill(self, name: str, link, far: float) -> None:
        while link.bytes < far:
            time.sleep(0.01)
        kill(self.deployed.processes._nodes[name].process)


def test_nodes_that_are_killed_as_they_train_and_upload_go_on_at_once_where_they_were(big, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", str(1 << 18))  # so that what goes up twice is little
    settings = big(rounds=3, clients=2, epochs=4)
    seen = deploy(make_experiment(settings), tmp_path, up=Faults(rate=6 * MB), watched_by=Killing)
    assert sum("SIGKILL" in note for note in seen.notes) == 2, seen.notes
    assert not any(row.get("left_out") for row in seen.rows)
    for i in (0, 1):  # taken again at once: not refused for a minute, as Flower refuses a SuperNode
        said = (tmp_path / "run" / "deployment" / "logs" / f"client-{i}.log").read_text()
        _, _, after = said.partition("connected to")
        assert "connected to" in after
        assert "does not accept this node" not in after
    up = seen.proxies[1].up.bytes
    assert up < uploaded(tmp_path / "run", 1) + 2 * MB, up  # and not 5 MB, which had arrived
    assert_equal_to_a_local_run(tmp_path / "run", settings)


def test_what_is_long_passes_a_link_that_is_reset_after_every_two_megabytes(big, tmp_path):
    settings = big(rounds=1, clients=1) | {"coding": False}  # else the first message is nearly nothing
    link = Faults(reset_at=2 * MB)
    seen = deploy(make_experiment(settings), tmp_path, up=link, down=link)
    (proxy,) = seen.proxies
    (row,) = pq.read_table(tmp_path / "run" / "ledger.parquet").to_pylist()
    for link, size in ((proxy.up, row["bytes_up"]), (proxy.down, row["bytes_down"])):
        assert size > 5 * MB
        assert link.bytes < 1.5 * size  # what had begun to come is lost with each reset, and no more
        assert link.struck["reset"] > 1
    assert row["outcome"] == "answered"
    assert_equal_to_a_local_run(tmp_path / "run", settings)


# ----------------------------------------------------------- one process of two nodes, and a SuperLink of theirs

SMALL = {
    "method": "fedavg", "dataset": "digits", "clients": 2, "samples": "40/10", "rounds": 4, "min_replies": 1,
    "engine": "flower-deployment", "parameters": {"epochs": 60, "lr": 0.05, "batch": 20},
}  # fmt: skip


class Place:
    """A deployment done by hand: its processes, and where its two nodes write what they do."""

    def __init__(self, folder: Path) -> None:
        self.run, self.log = folder / "run", folder / "nodes.log"
        self.experiment = make_experiment(SMALL)
        self.made = self.deployment(resume=False)
        folder = self.made.folder  # its SuperLink has a file, as one for other hosts
        self.made.processes = Processes(folder, "127.0.0.1:0", any_app=False, resident=True)
        self.made.prepare()
        self.flower = self.made.processes

    def deployment(self, resume: bool) -> Deployment:
        return Deployment(settled(self.experiment, False), self.run, Nodes(places(self.experiment, None)), resume)

    def start(self) -> subprocess.Popen:
        """Both nodes in one process."""
        files = [self.flower.node_command(f"client-{i}", self.made._node_config(i))[-1] for i in (0, 1)]
        with open(self.log, "ab") as log:
            return subprocess.Popen([sys.executable, "-m", "fewbytes", "node", *files], stdout=log, stderr=log)

    def said(self, what: str) -> bool:
        return all(re.search(rf"client-{i}: .*{what}", self.log.read_text()) for i in (0, 1))

    def forget(self) -> None:
        self.log.write_text("")

    def done(self) -> int:
        """How many rounds."""
        path = self.run / "rounds.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def online(self) -> bool:
        return set(self.flower.node_status().values()) == {"online"}


@contextmanager
def left_to_itself(process: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_nodes_wait_for_everything_and_outlive_their_superlink(tmp_path):
    place = Place(tmp_path)
    flower = place.flower
    with flower:
        process = place.start()
        with left_to_itself(process):
            assert until(lambda: place.said("waiting: the SuperLink .* does not answer"))
            flower.start_superlink()
            assert until(lambda: place.said("waiting: .* does not accept this node yet: this node is not registered"))
            flower.register(["client-0", "client-1"])
            assert until(lambda: place.said("connected to")), place.log.read_text()
            flower.submit(flower.folder / "app")
            assert until(lambda: place.done() >= 2), place.log.read_text()
            place.forget()
            kill(flower._superlink.process)  # as they train
            flower._superlink.process.wait()
            assert until(lambda: place.said("does not answer")), place.log.read_text()
            flower.start_superlink()
            assert until(lambda: place.said("answers again")), place.log.read_text()
            place.deployment(resume=True)._write_app()
            flower.submit(flower.folder / "app")
            assert until(lambda: (place.run / "result.json").exists()), place.log.read_text()
            assert process.poll() is None
            before = time.monotonic()
            process.terminate()  # as they wait
            assert process.wait(PATIENCE) == 0
            assert time.monotonic() - before < 15  # and not when the SuperLink's answer comes, after 20
            assert set(flower.node_status().values()) == {"offline"}
        assert "Traceback" not in place.log.read_text()
    assert_equal_to_a_local_run(place.run, SMALL)


def test_a_node_that_is_asked_to_end_does_so_as_it_trains_and_is_taken_again_at_once(tmp_path):
    place = Place(tmp_path)
    flower = place.flower
    with flower:
        flower.start_superlink()
        flower.register(["client-0", "client-1"])
        for when in ("train", "again"):
            place.forget()
            process = place.start()
            with left_to_itself(process):
                assert until(place.online), place.log.read_text()
                assert "does not accept this node" not in place.log.read_text()  # and not after a minute
                if when == "train":
                    flower.submit(flower.folder / "app")
                    assert until(place.done), place.log.read_text()
                    process.terminate()
                    assert process.wait(PATIENCE) == 0
                else:
                    assert until(lambda: (place.run / "result.json").exists()), place.log.read_text()
    assert_equal_to_a_local_run(place.run, SMALL, whole=False)  # who says that it goes is not waited for


def test_who_is_not_what_it_should_be_is_told_in_one_line(tmp_path):
    """A SuperLink that is another than the certificate says; a node with another's key."""
    others, ours = (Processes(tmp_path / name, "127.0.0.1:0", any_app=False, resident=True) for name in ("b", "a"))
    with others, ours:
        for each in (others, ours):
            each.start_superlink()
        write_node_key(ours.folder / "keys", "client-0")
        ours.start_node("client-0", {"partition-id": 0}, superlink=others.local_address)
        assert until(ours.ended)
        ((name, code, why),) = ours.ended()
        assert (name, code) == ("client-0", 2)
        assert re.search(r"the SuperLink at \S+ does not match ca: ", why)
        assert "Traceback" not in (ours.folder / "logs" / "client-0.log").read_text()
