"""Stopped, killed and resumed is uninterrupted, with any number of workers."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest
from cases import CASES, task_of, tiny_task
from runs import ROUNDS, StopAfter, fingerprint

import fewbytes as fb


@pytest.mark.parametrize("name", CASES)
def test_stopped_after_every_round_and_resumed_by_other_workers_it_is_the_same(name, uninterrupted, tmp_path):
    method, task, folder = CASES[name], task_of(name), tmp_path / "run"
    for t in range(1, method.planned_rounds(ROUNDS) + 1):
        with pytest.raises(KeyboardInterrupt):
            fb.run(
                method, task, rounds=ROUNDS, out=folder, workers=3 if t == 1 else 1, watcher=StopAfter(t), resume=t > 1
            )
        assert json.loads((folder / "result.json").read_text())["status"] == "interrupted"
    fb.run(method, task, rounds=ROUNDS, out=folder, workers=1, resume=True)
    assert fingerprint(folder) == uninterrupted(name)


def test_a_worker_killed_in_the_middle_of_a_handler_is_replaced(uninterrupted, tmp_path, monkeypatch):
    """Every worker kills itself in its first handler of round 2, after training and before replying."""
    marker = tmp_path / "killed"
    train = fb.FedPURIN.train

    @functools.wraps(train)
    def deadly(self, state, message, site):
        reply = train(self, state, message, site)
        if site.round == 2 and len(list(tmp_path.glob("killed*"))) < 2:
            marker.with_name(f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    monkeypatch.setattr(fb.FedPURIN, "train", deadly)
    fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=2)
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_workers_killed_from_outside_again_and_again(uninterrupted, tmp_path):
    class Kill(fb.Watcher):
        replies, killed = 0, 0

        def replied(self, client):
            self.replies += 1
            mothers = children(os.getpid())  # which fork the workers
            workers = [worker for mother in mothers for worker in children(mother)]
            chosen = (mothers if self.killed % 2 else workers)[:1]
            if self.replies % 4 == 2 and chosen:  # a client is tried again, but not for ever
                os.kill(chosen[0], signal.SIGKILL)
                self.killed += 1

    kill = Kill()
    fb.run(CASES["fedpurin"], tiny_task(), rounds=ROUNDS, out=tmp_path / "run", workers=2, watcher=kill)
    assert kill.killed >= 3
    assert fingerprint(tmp_path / "run") == uninterrupted("fedpurin")
