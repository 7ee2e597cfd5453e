"""Checkpoints get onto the disk while the next round goes on: a loss of power costs one round more, never the run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from cases import CASES, task_of
from runs import ROUNDS, StopAfter, fingerprint, until

import fewbytes as fb
from fewbytes.base import files
from fewbytes.running.checkpoint import Checkpoints, read_checkpoint

KEPT = ["fedpurin", "fedkd", "fedavg"]  # states, messages that wait, neither


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoint").glob("round-*")}


class Copies(fb.Watcher):
    """Copies a run's folder as it is when a round is over, which is what a process that is killed then leaves."""

    def __init__(self, to):
        self.to, self.folder = to, None

    def started(self, folder, rounds, done):
        self.folder = folder

    def scored(self, row):
        shutil.copytree(self.folder, self.to / str(row["round"]))


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> dict[str, Path]:
    """By case, copies of its run's folder after each round."""
    made = {}
    for name in KEPT:
        made[name] = tmp_path_factory.mktemp(name)
        fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=made[name] / "run", workers=1, watcher=Copies(made[name]))
    return made


@pytest.fixture
def synced(monkeypatch):
    """What is synced, by name, and whether by the loop itself; `synced.before` is called before."""

    class Synced(list):
        def before(self, path):
            pass

    heard, plain = Synced(), files._sync

    def sync(path):
        heard.before(path)
        heard.append((path.name, threading.current_thread() is threading.main_thread()))
        plain(path)

    monkeypatch.setattr(files, "_sync", sync)
    return heard


@pytest.mark.parametrize("name", KEPT)
def test_only_the_last_checkpoint_is_on_its_way_and_older_ones_go_when_it_is_there(name, copies):
    for t in range(1, ROUNDS + 1):
        kept = {f"round-{before}.state" for before in range(max(0, t - 2), t)}
        assert names(copies[name] / str(t)) == {f"round-{t}.unsynced"} | kept
    assert names(copies[name] / "run") == {f"round-{t}.state" for t in (ROUNDS - 1, ROUNDS)}


@pytest.mark.parametrize("name", KEPT)
def test_a_killed_process_loses_no_round(name, copies, uninterrupted, tmp_path):
    run = Path(shutil.copytree(copies[name] / "2", tmp_path / "run"))
    assert read_checkpoint(run).round == 2
    heard = StopAfter(9)
    heard.started = lambda folder, rounds, done: setattr(heard, "done", done)
    fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=run, workers=1, resume=True, watcher=heard)
    assert heard.done == 2
    assert fingerprint(run) == uninterrupted(name)


GROWING = (Path("checkpoint", "ledger"), Path("checkpoint", "rows"))


def lost(before: Path, after: Path) -> list[Path]:
    """What a loss of power may take of what a round wrote: files that are new, and what others grew by."""
    there, old = ({path.relative_to(at) for path in at.rglob("*") if path.is_file()} for at in (before, after)[::-1])
    new = {path for path in there - old if path.suffix in (".state", ".unsynced")} - {Path("checkpoint/round-2.state")}
    return [*GROWING, *sorted(new)]


@pytest.mark.parametrize("name", KEPT)
def test_whatever_a_loss_of_power_takes_the_run_goes_on_from_the_round_before(name, copies, uninterrupted, tmp_path):
    before, after = copies[name] / "2", copies[name] / "3"
    taken = lost(before, after)
    assert {"ledger", "rows", "round-3.unsynced"} <= {path.name for path in taken}
    assert (name == "fedavg") == (len(taken) == 3)
    for i, path in enumerate(taken):
        least = (before / path).stat().st_size if path in GROWING else 0  # what was safe of it stays
        for size in (None, least, (after / path).stat().st_size - 3):
            run = Path(shutil.copytree(after, tmp_path / f"{i}-{size}"))
            if size is not None:
                os.truncate(run / path, size)
            elif path not in GROWING:
                (run / path).unlink()
            else:
                continue
            assert read_checkpoint(run).round == 2, (path, size)
        with pytest.warns(RuntimeWarning, match=r"round-3\.unsynced is damaged: the run resumes after round 2"):
            fb.run(CASES[name], task_of(name), rounds=ROUNDS, out=run, workers=1, resume=True)
        assert fingerprint(run) == uninterrupted(name)
        assert not any(left.endswith("unsynced") for left in names(run))


def test_the_next_round_goes_on_meanwhile(synced, tmp_path):
    replies, waited = [], []

    class Replied(fb.Watcher):
        def replied(self, client):
            replies.append(client)

    def before(path):
        if path.name in ("round-1.unsynced", "round-2.unsynced"):
            there = len(replies)
            waited.append(until(lambda: len(replies) > there, seconds=60, every=0.01))

    synced.before = before
    fb.run(CASES["fedavg"], task_of("fedavg"), rounds=3, out=tmp_path / "run", workers=1, watcher=Replied())
    assert waited == [True, True]
    assert names(tmp_path / "run") == {"round-2.state", "round-3.state"}


def test_workers_that_are_forked_meanwhile_work(synced, uninterrupted, tmp_path):
    """All processes of the pool are killed while a checkpoint is on its way, so that new ones are forked."""
    replies, waited = [], []

    class Kill(fb.Watcher):
        def replied(self, client):
            replies.append(client)

        def scored(self, row):
            if row["round"] == 2:
                os.kill(mother(), signal.SIGKILL)  # its workers end with it

    def before(path):
        if path.name == "round-2.unsynced":
            there = len(replies)
            waited.append(until(lambda: len(replies) > there, seconds=60, every=0.01))

    def mother():
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return max(map(int, set(children) - set(others)))

    others = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    synced.before = before
    fb.run(CASES["fedpurin"], task_of("fedpurin"), rounds=ROUNDS, out=tmp_path / "run", workers=2, watcher=Kill())
    assert waited == [True]
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")


def test_of_clients_without_states_four_places_are_synced_a_round(synced, tmp_path):
    fb.run(CASES["fedavg"], task_of("fedavg"), rounds=3, out=tmp_path / "run", workers=1)
    behind = [name for name, in_loop in synced if not in_loop and name not in ("config.toml", "partition.json", "run")]
    grown = dict.fromkeys(("ledger", "rows", "checkpoint"), 5)  # the start, three rounds, the finish
    assert Counter(behind) == grown | {"round-0.unsynced": 1, "round-1.unsynced": 1, "round-2.unsynced": 1} | {
        "round-3.unsynced": 2
    }


@pytest.mark.parametrize("t", [1, ROUNDS])
def test_a_disk_that_fails_ends_the_run_at_the_next_round_and_it_goes_on_from_what_is_there(
    t, synced, uninterrupted, tmp_path
):
    rounds = []

    class Rounds(fb.Watcher):
        def scored(self, row):
            rounds.append(row["round"])

        def note(self, text): ...

    def full(path):
        if path.name == f"round-{t}.unsynced":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    how = {"rounds": ROUNDS, "out": tmp_path / "run", "workers": 1, "watcher": Rounds()}
    synced.before = full
    with pytest.raises(OSError, match=rf"No space left on device: .*round-{t}\.unsynced"):
        fb.run(CASES["fedpurin"], task_of("fedpurin"), **how)
    assert max(rounds) <= t + 1
    assert Checkpoints(tmp_path / "run").rounds()[-1] == t
    synced.before = lambda path: None
    fb.run(CASES["fedpurin"], task_of("fedpurin"), resume=True, **how)
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")


def test_a_run_that_is_interrupted_waits_for_its_last_checkpoint(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fb.run(CASES["fedavg"], task_of("fedavg"), rounds=ROUNDS, out=tmp_path / "run", workers=1, watcher=StopAfter(2))
    assert names(tmp_path / "run") == {"round-1.state", "round-2.state"}


def test_a_noisy_mean_is_safe_before_anybody_hears_of_it(tmp_path):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'fewbytes[dp]'")
    from test_dp import CLIENTS, METHOD, task

    class Names(fb.Watcher):
        heard: list[set[str]] = []  # noqa: RUF012

        def scored(self, row):
            self.heard.append(names(tmp_path / "run"))

    fb.run(METHOD, task(), rounds=2, out=tmp_path / "run", workers=1, dp=CLIENTS, watcher=(watcher := Names()))
    assert watcher.heard == [{"round-0.state", "round-1.state"}, {"round-1.state", "round-2.state"}]
