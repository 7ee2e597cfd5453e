"""A loss of power, kill -9 and a full disk lose no run: `benchmarks/hardening/durability.py`, briefly."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import fewbytes
from runs import ROUNDS

import fewbytes as fb

WHERE = Path(__file__).parents[2] / "benchmarks" / "hardening"
sys.path.insert(0, str(WHERE))
durability = importlib.import_module("durability")
WHY = durability.can_mount()
MOUNTS = pytest.mark.skipif(bool(WHY), reason=WHY)


def figure(function: str, count: int) -> str:
    """What the function measures of so many cases."""
    command = [sys.executable, WHERE, "--measure", f"durability.{function}", str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((_, said, _, met),) = json.loads(done.stdout.splitlines()[-1])
    assert met, (said, done.stderr)
    return said


def test_runs_killed_at_any_moment_end_the_same():
    assert "4 of 4; 0 reported rounds lost" in figure("kills", 4)


@MOUNTS
def test_a_loss_of_power_or_a_full_disk_loses_no_run():
    assert figure("power_loss", 5) == "5 of 5"
    assert figure("full_disk", 4) == "4 of 4"


@MOUNTS
def test_what_a_deployment_needs_to_go_on_its_disk_holds_before_it_begins(tmp_path):
    image = durability.made_disk(tmp_path / "image")
    with durability.mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:
        done = fewbytes("deploy", "fedavg", "--clients", "2", "--print", "--out", disk / "runs")
        assert done.returncode == 0, done.stderr
        (written,) = (disk / "runs").iterdir()
        shutil.rmtree(written / "deployment" / "nodes")  # written for each start of a node
        there = {str(path.relative_to(disk)) for path in written.rglob("*") if path.name != "lock"}
        durability.copied_disk(image, tmp_path / "copy")
    with durability.mounted(tmp_path / "disk", "-o", "loop", str(tmp_path / "copy")) as disk:
        assert there <= {
            str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_dir() or path.stat().st_size
        }


@MOUNTS
def test_what_a_node_has_answered_its_disk_holds(tmp_path):
    """Of each answer, at once, a copy of the disk as a loss of power would leave it."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    from cases import CASES, tiny_task
    from flower_grid import CLIENTS, MemoryGrid, handler_of, run
    from msgspec import msgpack

    from fewbytes.flower.apps import client_app
    from fewbytes.flower.messages import read_content
    from fewbytes.flower.node import Node, Order, StoredReply

    copies = []
    image = durability.made_disk(tmp_path / "image")
    with durability.mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk:

        def answered(message, reply):
            if handler_of(message):
                copies.append((tmp_path / f"copy-{len(copies)}", message, reply))
                durability.copied_disk(image, copies[-1][0])
            return [reply]

        app = client_app(CASES["fedpurin"], tiny_task(), disk)
        grid = MemoryGrid(app, CLIENTS, answered)
        run("fedpurin", tmp_path / "run", grid=grid, policy=fb.Policy(round_timeout=60))
    assert len(copies) >= ROUNDS * CLIENTS
    for copy, message, reply in copies:
        order = msgpack.decode(read_content(message.content)[0], type=Order)
        with durability.mounted(tmp_path / "disk", "-o", "loop", str(copy)) as disk:
            clients = disk / "run" / "checkpoint" / "clients"
            kept = msgpack.decode((clients / f"{order.job.client}.reply").read_bytes(), type=StoredReply)
            assert kept.number == order.job.number
            assert kept.frame == bytes(read_content(reply.content)[1])
            if kept.done.version:
                node = Node(CASES["fedpurin"], tiny_task(), disk, "run")
                node.store.check(order.job.client, kept.done.version)
