"""A member that is removed in the middle of a run, and one that has not joined yet: neither is waited for or missed."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fewbytes as fb

pytest.importorskip("flwr", reason="Flower is not installed")

from cases import CASES, TinyNet, task_of, tiny_data
from flower_grid import CLIENTS, MemoryGrid, left_out, rounds_of

from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.link import Exchange
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

NAMES = [f"site-{i}" for i in range(CLIENTS)]
ALL = fb.Policy(min_replies=1.0, round_timeout=600, connect_timeout=600, retries=0)


class Removes(fb.Watcher):
    """Removes site 1 after a round, and lets it back after another."""

    def __init__(self, grid, vacant, after, back=None):
        self.grid, self.vacant, self.after, self.back, self.notes = grid, vacant, after, back, []

    def scored(self, row):
        if row["phase"] == "round" and row["round"] == self.after:
            self.vacant.add("site-1")
            self.grid.present.remove(1)
        if row["phase"] == "round" and row["round"] == self.back:
            self.vacant.remove("site-1")
            self.grid.present.append(1)

    def note(self, text):
        self.notes.append(text)


def go(folder, *, vacant, after=None, back=None, rounds=8, task=None):
    task = task or task_of("fedavg")
    grid = MemoryGrid(client_app(CASES["fedavg"], task, folder / "nodes"), CLIENTS, named=True)
    grid.present = [i for i in grid.present if f"site-{i}" not in vacant]
    watcher = Removes(grid, vacant, after, back)
    settings = Settings(rounds=rounds, out=folder / "run", watcher=watcher)
    result = serve_run(
        grid, Run.of(CASES["fedavg"], task, settings, ALL), NAMES, exchange=Exchange(poll=0.001, vacant=lambda: vacant)
    )
    assert result.summary["status"] == "done"
    return watcher


def test_rounds_go_on_without_a_removed_member_even_if_all_must_answer(tmp_path):
    watcher = go(tmp_path, vacant=set(), after=2)
    assert [row["round"] for row in rounds_of(tmp_path / "run") if row["phase"] == "round"] == list(range(1, 9))
    assert left_out(tmp_path / "run") == [(t, 1, "excluded") for t in range(3, 9)]
    assert rounds_of(tmp_path / "run")[2]["left_out"][0]["why"] == "site-1: it is no longer a member"
    assert not [note for note in watcher.notes if "absent" in note]


def test_a_removed_member_that_is_invited_again_takes_part_again(tmp_path):
    go(tmp_path, vacant=set(), after=2, back=5)
    assert [t for t, client, _ in left_out(tmp_path / "run") if client == 1] == [3, 4, 5]


def test_a_place_that_nobody_has_yet_is_not_missed(tmp_path):
    data = replace(tiny_data(CLIENTS), presence=(*[(1, None)] * 3, (2, None)))  # the last joins from round 2 on
    watcher = go(tmp_path, vacant={"site-3"}, rounds=7, task=fb.Task.on(data, TinyNet))
    assert left_out(tmp_path / "run") == []
    assert not [note for note in watcher.notes if "absent" in note]
