"""Deployments whose rounds are carried as files, from the command line: all members by files, or one beside others."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from commands import fewbytes
from runs import PATIENCE, lines
from safetensors.torch import load_file
from started import started

pytest.importorskip("flwr", reason="flwr is not installed: no deployment to test", exc_type=ImportError)

NAMES = ("north", "south", "west")
RUN = ("fedavg", "--dataset", "digits", "--clients", "3", "--set", "batch=40")


def done(*arguments: str | Path, cwd: Path) -> str:
    """What a command prints; it succeeds."""
    ended = fewbytes(*arguments, cwd=cwd)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def consortium(tmp_path):
    """A federation of three members, their nodes' folders, and a free address of the server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    done("federation", "init", "--address", address, cwd=tmp_path)
    for name in NAMES:
        (tmp_path / "invitation").write_text(done("federation", "invite", name, cwd=tmp_path))
        (tmp_path / "request").write_text(done("node", "init", name, "--invitation", "invitation", cwd=tmp_path))
        done("federation", "join", "request", cwd=tmp_path)
    return tmp_path


def deployed(there: Path, stack: ExitStack, rounds: int, *how: str):
    command = [sys.executable, "-m", "fewbytes", "deploy", *RUN, "--rounds", str(rounds), "--federation", "federation"]
    return started([*command, "--mailbox", "box", *how], there / "server.log", stack, cwd=there)


def work(there: Path, name: str) -> str:
    """A job of a site, whose medium carries its two folders of the mailbox, if it has orders."""
    box = there / "box" / name
    if not list((box / "inbox").glob("*.order")):
        return ""
    return done("node", "--once", box / "inbox", box / "outbox", cwd=there / name)


def assert_as_on_one_machine(there: Path, rounds: int) -> None:
    done("run", *RUN, "--rounds", str(rounds), "--out", "local", cwd=there)
    one, other = (load_file(next(there.glob(f"{out}/*/models/global.safetensors"))) for out in ("runs", "local"))
    assert other
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_three_sites_by_files_alone_and_a_server_that_is_interrupted(consortium):
    with ExitStack() as stack:
        server, resumed = deployed(consortium, stack, 2), False
        inspected, deadline = "", time.monotonic() + PATIENCE
        while server.poll() is None and time.monotonic() < deadline:
            if not resumed and lines(consortium / "runs"):
                server.terminate()
                assert server.wait(PATIENCE) == 130, (consortium / "server.log").read_text()
                [run] = (consortium / "runs").glob("[!.]*")
                again = [sys.executable, "-m", "fewbytes", "deploy", "--resume", str(run)]
                server, resumed = started(again, consortium / "server.log", stack, cwd=consortium), True
            for name in NAMES:
                if name == "north" and (orders := list(consortium.glob("box/north/inbox/*.000004.order"))):
                    inspected = inspected or done("inspect", orders[0], "--node", "north/node.toml", cwd=consortium)
                work(consortium, name)
            time.sleep(0.2)
        assert server.returncode == 0, (consortium / "server.log").read_text()
    assert resumed
    assert "order    round 1, train" in inspected
    assert_as_on_one_machine(consortium, 2)
    assert not list(consortium.glob("box/*/*/*"))
    assert "has no orders" in done("node", "--once", "../box/north/inbox", "out", cwd=consortium / "north")
    assert list(consortium.glob("runs/*/report.html"))
    assert "The record is whole" in done("audit", "north/runs", cwd=consortium)


def test_two_online_sites_and_one_by_files_that_are_lost_doubled_changed_and_old(consortium):
    """Five rounds; files reach `west`, and one of each kind of fault happens to them."""
    inbox, old, said = consortium / "box" / "west" / "inbox", consortium / "old.order", list[str]()
    with ExitStack() as stack:
        for name in NAMES[:2]:
            started(["sh", str(consortium / name / "start.sh")], consortium / f"{name}.log", stack, cwd="/")
        server = deployed(consortium, stack, 5, "--by-mailbox", "west")
        deadline, seen = time.monotonic() + PATIENCE, list[str]()
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            for order in (each for each in inbox.glob("*.0*.order") if each.name not in seen[:2] + seen[3:]):
                again = order.name in seen
                seen += [] if again else [order.name]
                match len(seen):
                    case 2:  # doubled, and kept for a week
                        shutil.copy(order, inbox / "double.order")
                        shutil.copy(order, old)
                    case 3 if not again:  # lost on its way: the server sends it again after a minute
                        order.unlink()
                        continue
                    case 3:  # its answer is lost, too
                        done("node", "--once", inbox, consortium / "lost", cwd=consortium / "west")
                    case 4:  # changed on its way; the carrier then brings the right one
                        right = order.read_bytes()
                        order.write_bytes(right[:-9] + bytes([right[-9] ^ 1]) + right[-8:])
                        said.append(work(consortium, "west"))
                        order.write_bytes(right)
                    case 5:
                        shutil.copy(old, inbox / "week-old.order")
                said.append(work(consortium, "west"))
                (inbox / "week-old.order").unlink(missing_ok=True)
        assert server.returncode == 0, (consortium / "server.log").read_text()
    assert "is refused: it is not signed with the key of server, or was changed" in "".join(said)
    assert "week-old.order is refused: number 2" in "".join(said)
    assert [path.name for path in (consortium / "box").iterdir()] == ["west"]
    assert_as_on_one_machine(consortium, 5)
