"""A promise of one's own is one class in the list: loop, other promises and checkpoint know nothing of it."""

from __future__ import annotations

import json

import pytest
from cases import LOCAL, tiny_task
from runs import StopAfter, fingerprint, timeless

import fewbytes as fb
from fewbytes.running import drive
from fewbytes.running.promises.promise import Limit

METHOD = fb.FedAvg(**LOCAL)
ROUNDS = 6


class Exchanges(Limit):
    """Ends a run once so many exchanges are behind it, and counts them on each line."""

    name, known = "exchanges", "sent"

    def __init__(self, most):
        self.most, self.so_far, self.heard = most, 0, []
        self.terms = f", exchanges {most}"

    def recall(self, rows):
        self.heard.append(("recall", len(rows)))
        self.so_far = rows[-1]["exchanges"] if rows else 0

    def begin(self, engine):
        self.heard.append(("begin", engine.step.t))

    def before_round(self, opening):
        self.heard.append(("before", opening.t))

    def after_phase(self, phase):
        self.so_far += phase.cohort

    def row(self, phase):
        return {"exchanges": self.so_far}

    def kept(self, phase):
        self.heard.append(("kept", phase.round, phase.phase))

    def notes(self, phase):
        if phase.row and self.so_far > self.most / 2:
            yield f"round {phase.round}: more than half of {self.most} exchanges"

    def why(self, rows):
        return "no exchange is left" if self.so_far >= self.most else ""

    def result_entries(self):
        return {"exchanges": self.most}


@pytest.fixture
def promised(monkeypatch):
    """Has runs keep a promise more; the last of them that was made."""
    made = []

    def promises_of(*run, plain=drive.promises_of):
        made.append(Exchanges(10))
        return [*plain(*run), made[-1]]

    monkeypatch.setattr(drive, "promises_of", promises_of)
    return made


def test_it_is_asked_in_its_turn_and_has_its_part_of_lines_result_and_notes(promised, tmp_path):
    whole = fb.run(METHOD, tiny_task(), rounds=ROUNDS, workers=1, out=tmp_path / "run", watcher=(notes := Notes()))
    (mine,) = promised
    assert [row["exchanges"] for row in whole.rounds] == [4, 8, 12]
    assert {key: whole.summary[key] for key in ("rounds", "exchanges", "ended_by")} == {
        "rounds": 3, "exchanges": 10, "ended_by": "exchanges",
    }  # fmt: skip
    assert whole.rounds[-1]["scores"]
    rounds = [heard for t in (1, 2, 3) for heard in (("before", t), ("kept", t, "round"))]
    assert mine.heard == [("begin", 0), ("kept", 0, "start"), *rounds, ("kept", 4, "finish")]
    assert notes.heard == [f"round {t}: more than half of 10 exchanges" for t in (2, 3)]
    assert notes.why == "no exchange is left"


def test_nothing_else_of_a_run_changes(promised, monkeypatch, tmp_path):
    fb.run(METHOD, tiny_task(), rounds=3, workers=1, out=tmp_path / "mine", watcher=Notes())
    monkeypatch.undo()
    fb.run(METHOD, tiny_task(), rounds=3, workers=1, out=tmp_path / "plain")
    mine, plain = (timeless(fingerprint(tmp_path / name)) for name in ("mine", "plain"))
    for line in mine["rounds"]:
        del line["exchanges"]
    del mine["result"]["exchanges"], mine["result"]["ended_by"]
    assert mine == plain
    assert json.dumps(mine["rounds"]) == json.dumps(plain["rounds"])  # in the same order


def test_a_run_that_goes_on_recalls_it_and_goes_on_under_its_terms_alone(promised, monkeypatch, tmp_path):
    run = {"rounds": ROUNDS, "workers": 1}
    fb.run(METHOD, tiny_task(), out=tmp_path / "whole", watcher=Notes(), **run)
    with pytest.raises(KeyboardInterrupt):
        fb.run(METHOD, tiny_task(), out=tmp_path / "run", watcher=StopAfter(1), **run)
    fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, watcher=Notes(), **run)
    assert promised[-1].heard[:2] == [("recall", 1), ("begin", 0)]
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    again = fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, watcher=Notes(), **run)  # it has ended
    assert [row["exchanges"] for row in again.rounds] == [4, 8, 12]
    monkeypatch.undo()
    with pytest.raises(fb.UserError, match="of another configuration"):
        fb.run(METHOD, tiny_task(), out=tmp_path / "run", resume=True, rounds=3, workers=1)


class Notes(fb.Watcher):
    """Hears notes, and why a run ended."""

    def __init__(self):
        self.heard, self.why = [], ""

    def note(self, text):
        self.heard.append(text)

    def stopped(self, t, why):
        self.why = why
