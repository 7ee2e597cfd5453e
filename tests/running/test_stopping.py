"""Early stopping: a score that is reached, or no better one for so many rounds, ends a run, resumed or not."""

from __future__ import annotations

import math
import re

import pytest
import torch
from cases import LOCAL, TinyNet, tiny_data, tiny_task
from runs import fingerprint
from torch import nn

import fewbytes as fb
from fewbytes.core import gallery
from fewbytes.core.metrics import Metric
from fewbytes.core.objectives import Classification, MultiLabel
from fewbytes.running.stopping import StopWhen

TERMS = LOCAL | {"lr": 0.02, "last": "kept"}
METHOD = fb.FedAvg(**TERMS)
ROUNDS = 6


class StopAfter(fb.Watcher):
    """Interrupts a run when a round is done; remembers how it was told to end."""

    def __init__(self, t: int = 0) -> None:
        self.t, self.why, self.notes = t, "", list[str]()

    def scored(self, row):
        if row["round"] == self.t:
            raise KeyboardInterrupt

    def stopped(self, t, why):
        self.why = why

    def note(self, text):
        self.notes.append(text)


def numbers_task() -> fb.Task:
    """Three clients learn the sum of four numbers; less of the mean absolute error is better."""

    def split(n: int, seed: int):
        x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
        return x, x.sum(1)

    return fb.Task.of(lambda: nn.Linear(4, 1), [(split(20, i), split(8, 10 + i)) for i in range(3)], test=split(30, 20))


def rows_of(*values: float, kind: str = "global", metric: str = "f1") -> list[dict]:
    return [{"round": t, "phase": "round", "scores": {metric: {kind: v}}} for t, v in enumerate(values, 1)]


@pytest.fixture(scope="module")
def whole() -> fb.Result:
    return fb.run(METHOD, tiny_task(), rounds=ROUNDS, workers=1)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("global>=0.9", StopWhen(kind="global", value=0.9)),
        (" global  >= 90e-2", StopWhen(kind="global", value=0.9)),
        ("f1/personalised<=0.8", StopWhen(metric="f1", kind="personalised", at_least=False, value=0.8)),
        ("patience = 5", StopWhen(patience=5)),
    ],
)
def test_a_condition_is_read_and_written(text, means):
    assert StopWhen.read(text) == means == StopWhen.read(str(means))


@pytest.mark.parametrize(
    "text", ["", "global", "global>0.9", "global=0.9", ">=1", "a/b/c>=1", "global>=nan", "global>=high", "patience=0"]
)
def test_what_is_no_condition_is_refused_before_anything_is_written(text, tmp_path):
    with pytest.raises(fb.UserError, match=r"stop_when is .* not ") as error:
        fb.run(METHOD, tiny_task(), rounds=1, out=tmp_path / "run", stop_when=text)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f1/global>=0.5", "accuracy"),
        ("global>=85", "0.85, not 85"),
        ("global<=0.5", "accuracy .*>="),
    ],
)
def test_what_can_never_be_is_refused(text, says):
    with pytest.raises(fb.UserError, match=says):
        fb.run(METHOD, tiny_task(), rounds=1, stop_when=text)


@pytest.mark.parametrize(
    ("values", "higher", "ends"),
    [
        ((0.1, 0.2, 0.3), True, False),
        ((0.3, 0.2, 0.1), True, True),
        ((0.3, 0.2, 0.4, 0.4), True, False),  # as good is not better
        ((0.3, 0.2, 0.4, 0.4, 0.4), True, True),
        ((0.3, 0.2, 0.1), False, False),
        ((0.1, 0.2, 0.3), False, True),
        ((), True, False),
    ],
)
def test_patience_waits_for_a_better_score(values, higher, ends):
    metric = Metric("f1", lambda predictions: None, higher)
    assert bool(StopWhen(patience=2).why(rows_of(*values), [metric], "global")) == ends
    own = rows_of(*values, kind="micro")  # the paper's kind is not scored: the first that is
    assert bool(StopWhen(patience=2).why(own, [metric], "global")) == ends


def test_only_scored_rounds_count():
    metrics = MultiLabel().metrics
    silent = {"phase": "round", "scores": {}}
    rows = [row for scored in rows_of(0.5, 0.4) for row in (scored, silent, silent)]
    assert not StopWhen(patience=2).why(rows, metrics, "global")
    assert not StopWhen(patience=1).why([*rows[:1], {**rows[3], "phase": "finish"}], metrics, "global")
    assert StopWhen(patience=1).why(rows, metrics, "global")


def test_a_run_ends_with_the_round_that_reaches_a_score(whole):
    told = StopAfter()
    curve = [row["scores"]["accuracy"]["global"] for row in whole.rounds]
    assert curve[0] < curve[1]
    last, stop = 2, f"global>={curve[1]}"
    cut = fb.run(METHOD, tiny_task(), rounds=ROUNDS, workers=1, stop_when=stop, watcher=told)
    assert [row["scores"] for row in cut.rounds] == [row["scores"] for row in whole.rounds[:last]]
    assert {key: cut.summary[key] for key in ("rounds", "status", "stop_when", "ended_by")} == {
        "rounds": last, "status": "done", "stop_when": stop, "ended_by": "stop_when",
    }  # fmt: skip
    assert told.why.endswith("holds")
    assert told.notes == []


def test_a_condition_that_never_holds_changes_nothing(whole):
    told = StopAfter()
    run = fb.run(METHOD, tiny_task(), rounds=ROUNDS, workers=1, stop_when="sparse>=0.5", watcher=told)
    assert [row["scores"] for row in run.rounds] == [row["scores"] for row in whole.rounds]
    assert run.summary["ended_by"] is None
    (note,) = told.notes
    assert re.search("^stop_when sparse>=0.5: .*personalised, global", note)


def test_less_of_an_error_is_better():
    whole = fb.run(METHOD, numbers_task(), rounds=8, workers=1)
    curve = [row["scores"]["mae"]["global"] for row in whole.rounds]
    assert curve[0] > curve[3]
    reached = fb.run(METHOD, numbers_task(), rounds=8, workers=1, stop_when=f"mae/global<={curve[3]}")
    assert reached.summary["rounds"] == 4
    far = fb.FedAvg(**LOCAL | {"lr": 0.9})  # diverges: its first round is its best
    patient = fb.run(far, numbers_task(), rounds=8, workers=1, stop_when="patience=2")
    curve = [row["scores"]["mae"]["global"] for row in patient.rounds]
    assert (len(curve), min(curve), patient.summary["ended_by"]) == (3, curve[0], "stop_when")
    assert math.isfinite(curve[-1])


@pytest.mark.parametrize("stop", [1, 2])
@pytest.mark.parametrize("method", [METHOD, fb.FedPURIN(**TERMS, beta=1)], ids=["fedavg", "fedpurin"])
def test_resuming_finds_the_same_end(method, stop, tmp_path):
    run = {"rounds": ROUNDS, "stop_when": "patience=2", "workers": 1}
    through = fb.run(method, tiny_task(), out=tmp_path / "through", **run)
    assert stop < through.summary["rounds"] < ROUNDS
    with pytest.raises(KeyboardInterrupt):
        fb.run(method, tiny_task(), out=tmp_path / "run", watcher=StopAfter(stop), **run)
    for _ in range(2):  # the second time there is nothing left to do
        told = StopAfter()
        fb.run(method, tiny_task(), out=tmp_path / "run", resume=True, watcher=told, **run)
        assert told.why
        assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "through")
    with pytest.raises(fb.UserError, match="has ended"):
        fb.run(method, tiny_task(), out=tmp_path / "run", resume=True, **run | {"stop_when": "patience=3"})


class Pictured(Classification):
    """Classes of which the last round's predictions are shown."""

    def score(self, model, test, device, precision, show):
        if show is not None:
            show("predictions", gallery.Images(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), ["one"]))
        return super().score(model, test, device, precision, show)


class Showing(fb.FedAvg):
    """FedAvg that shows something each round."""

    def round(self, state, net, t):
        super().round(state, net, t)
        net.show("round", gallery.Images(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), ["one"]))


@pytest.mark.parametrize(("stop", "last"), [("global>=0", 1), ("patience=1", 2), ("patience=9", 3)])
def test_predictions_are_shown_of_the_last_round_alone(stop, last, tmp_path):
    task = fb.Task.on(tiny_data(), TinyNet, objective=Pictured())
    fb.run(Showing(**LOCAL), task, rounds=3, out=tmp_path, stop_when=stop, workers=1)
    shown = {path.name for path in (tmp_path / "gallery").iterdir()}
    assert shown == {f"{t}-round.png" for t in range(1, last + 1)} | {f"{last}-predictions.png"}


def test_a_method_with_rounds_of_its_own_runs_whole():
    method = fb.FuseFL(blocks=3, ccvr_samples=0, **(LOCAL | {"epochs": 4}))
    result = fb.run(method, tiny_task(), rounds=1, stop_when="global>=0", workers=1)
    assert (result.summary["rounds"], result.summary["ended_by"]) == (3, None)
