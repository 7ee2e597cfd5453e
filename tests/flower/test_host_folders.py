"""The folders of nodes on other hosts, written and written again, without any process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from fewbytes.experiments.deploy import Deployment, Nodes, places
from fewbytes.experiments.settings import make_experiment

SMALL = {"method": "fedavg", "dataset": "digits", "clients": 2, "rounds": 1, "engine": "flower-deployment"}


def prepared(folder: Path, resume: bool = False) -> Path:
    """The folder of a deployment to two hosts."""
    experiment = make_experiment(SMALL)
    nodes = Nodes(places(experiment, "north,south"), "server.example:9092")
    deployment = Deployment(experiment, folder / "run", nodes, resume)
    deployment.prepare()
    return deployment.folder


def test_private_keys_that_hosts_have_may_be_deleted_here(tmp_path):
    folder = prepared(tmp_path)
    copies = [folder / "keys" / "north", folder / "nodes" / "north" / "keys" / "north"]
    before = (folder / "keys" / "north.pub").read_bytes()
    assert copies[0].read_bytes() == copies[1].read_bytes()
    for path in copies:
        path.unlink()
    assert prepared(tmp_path, resume=True) == folder
    assert not any(path.exists() for path in copies)
    assert (folder / "keys" / "north.pub").read_bytes() == before
    assert (folder / "nodes" / "south" / "keys" / "south").exists()
