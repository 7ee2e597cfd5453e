"""What all runs together may take of a node: of its samples' privacy, and of its disk."""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import CASES
from torch import nn

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from flower_grid import MemoryGrid, run
from modules import needs

from fewbytes.engines.handlers import Job
from fewbytes.flower.allowance import Allowed, Allows
from fewbytes.flower.apps import client_app
from fewbytes.flower.node import CLIENTS, DIFFERENT, Node, Order, digest, in_common

needs("dp_accounting")

METHOD = CASES["fedavg"]
PROMISE = "of=samples,epsilon=8,delta=1e-5,clip=1.0"


def task() -> fb.Task:
    random = torch.Generator().manual_seed(0)

    def some(n):
        return torch.randn(n, 6, generator=random), torch.randint(0, 3, (n,), generator=random)

    return fb.Task.of(lambda: nn.Linear(6, 3), [(some(20), some(5)) for _ in range(4)], some(9))


def grid_of(folder, **config):
    dp = PROMISE
    grid = MemoryGrid(client_app(METHOD, METHOD.promising(task(), dp, 4), folder), 4)
    grid.config = config

    def go(name):
        return run("fedavg", folder / "servers" / name, task=task(), grid=grid, dp=dp)

    return grid, go


def test_what_all_runs_spend_is_counted_beside_them_and_a_new_name_begins_nothing_anew(tmp_path):
    _, go = grid_of(tmp_path)
    go("first")
    for name in ("second", "third"):
        with pytest.raises(fb.FewbytesError, match=r"epsilon 8 at delta 1e-05 .*privacy-in-all"):
            go(name)


@pytest.mark.parametrize("removed", [False, True])
def test_a_site_allows_so_much_in_all(removed, tmp_path):
    grid, go = grid_of(tmp_path, **{"privacy-in-all": "epsilon=9,delta=1e-5"})
    go("first")
    if removed:  # by the site's owner, in good faith
        shutil.rmtree(tmp_path / "first")
    with pytest.raises(fb.FewbytesError, match=r"epsilon 9 .*spent"):
        go("second")
    grid.config["privacy-in-all"] = "epsilon=16,delta=1e-5"
    go("third")
    grid.config["privacy-in-all"] = "any"
    go("fourth")
    grid.config["privacy-in-all"] = "epsilon=lots"
    with pytest.raises(fb.FewbytesError, match=r"privacy-in-all .*epsilon=8,delta=1e-5"):
        go("fifth")


def test_a_server_is_told_at_once_what_is_spent_and_that_no_more_is_allowed(tmp_path):
    made = METHOD.promising(METHOD.adapted(task()), PROMISE, 4)
    agreed = digest(in_common(METHOD, made, 0))

    def asked(run, allows):
        allows = allows._replace(holds=0)
        nonce = tmp_path / run / CLIENTS / "nonce"
        named = nonce.read_bytes() if nonce.exists() else run.encode()
        order = Order(run, agreed, Job(1, "", 0, 0, False, 0), 0, 0, True, named)
        return Node(METHOD, made, tmp_path, run, settings="", allows=allows).sample_counts(order, "sizes")

    assert asked("first", Allows()).spent == (0.0, 8.0)
    grid_of(tmp_path)[1]("first")
    done = asked("second", Allows(privacy=Allowed.read("epsilon=100,delta=1e-5")))
    assert done.spent == (pytest.approx(8, rel=1e-3), 100.0)
    assert "have spent 8, and this run would reach 1" in asked("second", Allows()).error
    assert not asked("first", Allows()).error  # which may go on


@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("limit", [None, "epsilon=9,delta=1e-5"])
def test_of_a_node_that_does_not_say_whose_data_it_has_a_server_gets_no_second_budget_by_another_number(
    limit, first, tmp_path
):
    """The same data, dealt out to one client, then to two, of which it is the other."""
    made, answered = METHOD.promising(METHOD.adapted(task()), PROMISE, 4), []
    for name, client, holds in (
        ("a", 0, first),
        ("b", 1, None),
        ("c", 2, None),
        ("d", 3, 3 if first is None else None),
    ):
        node = Node(METHOD, made, tmp_path, name, allows=Allows(privacy=limit and Allowed.read(limit), holds=holds))
        agreed = digest(in_common(METHOD, made, client))
        order = Order(name, agreed, Job(1, "", client, 0, False, 0), 0, 0, True, name.encode())
        if not node.sample_counts(order, "sizes").error:
            answered.append(name)
            for i in range(4):
                node._allowance.trained(client, bytes([client, i]) * 16, made.problem.privacy.spent(20, 1))
    assert answered == ["a"]  # nor is anything forgotten where it begins to say whose they are, or no longer does


def test_without_a_partition_id_that_a_site_may_spend_no_more_is_said(tmp_path):
    grid, go = grid_of(tmp_path, **{"partition-id": None})
    grid.named = True
    with pytest.raises(fb.FewbytesError, match="no partition-id"):
        go("first")  # four clients on one node


def test_a_diary_that_is_damaged_anywhere_is_refused_in_a_line_that_says_what_to_do(tmp_path):
    made = METHOD.promising(METHOD.adapted(task()), PROMISE, 4)
    allowance = Node(
        METHOD, made, tmp_path, "a", allows=Allows(privacy=Allowed.read("epsilon=99,delta=1e-5"), holds=0)
    )._allowance
    for i in range(2):
        allowance.trained(0, bytes([i]) * 32, made.problem.privacy.spent(20, 1))
    path, told = tmp_path / ".privacy" / "0.spent", allowance.spending(20)
    whole = path.read_bytes()
    damaged = [whole[:n] for n in range(len(whole))] + [whole + b"0"]
    for at in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        damaged.append(bytes(flipped))
    for held in damaged:
        path.write_bytes(held)
        with pytest.raises(fb.UserError, match=r"0\.spent, .*damaged"):
            allowance.spending(20)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(fb.UserError, match="is a link"):
        allowance.spending(20)
    path.unlink()
    path.write_bytes(whole)
    assert allowance.spending(20) == told
    secret = tmp_path / "a" / CLIENTS / "secret"
    for held in (b"", secret.read_bytes()[:31]):
        secret.write_bytes(held)
        with pytest.raises(fb.UserError, match=r"secret .*damaged"):
            allowance.trained(0, bytes(32), made.problem.privacy.spent(20, 1))


def test_a_node_makes_so_many_run_folders_and_no_more(tmp_path):
    grid = MemoryGrid(client_app(METHOD, task(), tmp_path), 4)
    grid.config = {"max-runs": 2}
    for name in ("first", "second", "first"):
        run(
            "fedavg", tmp_path / "servers" / name, task=task(), grid=grid, resume=(tmp_path / "servers" / name).exists()
        )
    with pytest.raises(fb.FewbytesError, match="2 run folders"):
        run("fedavg", tmp_path / "servers" / "third", task=task(), grid=grid)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["first", "second", "servers"]


def test_runs_that_are_of_another_task_make_no_more_folders(tmp_path):
    """As of a server that says something else of the model each time, so that nothing is ever done."""
    for number in range(2):
        node = Node(METHOD, task(), tmp_path, f"run-{number}", allows=Allows(run_folders=2))
        done = node.sample_counts(
            Order(f"run-{number}", b"another", Job(0, "train", 0, 1, False, 0), 0, 0, False), "sizes"
        )
        assert done.error.startswith(DIFFERENT)
    with pytest.raises(fb.UserError, match="2 run folders"):
        Node(METHOD, task(), tmp_path, "run-2", allows=Allows(run_folders=2))
