"""Models tested by sites: figures as computed here, as far as each site's terms allow; replies that do not add up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import fewbytes as fb
from fewbytes.base.errors import MethodError, UserError
from fewbytes.core.site_policy import History, Request, SitePolicy, refusal
from fewbytes.core.tested import Predictions, Scored
from fewbytes.data.surveyed import OnTerms, SiteTerms
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.methods.evaluation.evaluation import Asked, Evaluation, Gathered, Question, check_tested
from fewbytes.methods.evaluation.evaluation import Tested as Reported
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.settings import Watcher
from fewbytes.wire import unpack_state

TELL = ("figures", "sizes", "nothing", "labels")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, fb.Task]:
    """A run, and its task, whose sites tell more or less."""
    settings = {"method": "fedavg", "dataset": "digits", "part": 0.4, "clients": len(TELL), "rounds": 1, "workers": 1}
    found, out = find(make_experiment({**settings, "model": "mlp"})), tmp_path_factory.mktemp("evaluation") / "run"
    run_with(found.run(out, False, Watcher()))
    clients = tuple(
        dataclasses.replace(client, test=OnTerms(client.test, SiteTerms(tell, 8)))  # type: ignore[arg-type]
        for client, tell in zip(found.task.data.clients, TELL, strict=True)
    )
    return out, found.task.with_data(dataclasses.replace(found.task.data, clients=clients))


@pytest.fixture(scope="module")
def task(trained) -> fb.Task:
    return trained[1]


@pytest.fixture(scope="module")
def found(trained, task) -> tuple[nn.Module, dict[int, Reported]]:
    folder = trained[0]
    question = Question([Asked("shared model", "fedavg", file=str(folder / "models" / "global.safetensors"))])
    method = Evaluation(question=msgspec.json.encode(question).decode())
    result = fb.run(method, task, rounds=3, workers=1, out=folder.parent / "asked")
    assert result.summary["rounds"] == 1
    return fb.load_model(folder), unpack_state(Gathered, read_checkpoint(result.folder).server).found["0"]


def test_figures_are_those_computed_here(task, found):
    model, reported = found
    for client in (0, 1, 3):
        here = Predictions.of(model, task.data.clients[client].test, task.problem.objective)
        (figure,) = reported[client].figures
        expected = Scored.of(task.problem.objective.metrics[0], here, task.problem.seed + client).figure
        assert (figure.value, figure.low, figure.high) == expected
        assert reported[client].samples == len(here)


def test_sites_report_as_far_as_they_tell(task, found):
    model, reported = found
    whole = torch.tensor(Predictions.of(model, task.data.clients[0].test, task.problem.objective).confusion())
    few = whole.sum(1) < 8
    assert few.any()
    assert torch.equal(reported[0].confusion, whole * ~few[:, None])
    assert min(reported[0].counts) >= 8
    assert not len(reported[1].confusion) + len(reported[1].counts)  # sizes
    assert (reported[2].samples, reported[2].figures, reported[2].counts) == (None, [], [])
    assert len(reported[3].confusion) == 10


def test_a_site_that_only_evaluates_takes_part_in_this_alone():
    policy = SitePolicy.read({"evaluate-only": True, "max-rounds": 1})
    asked = Request("run", 1, "test", "a", frozenset({"evaluation"}), 100, True, evaluates=True)
    history = History()
    assert refusal(policy, asked, history) is None
    assert "only evaluates" in str(refusal(policy, dataclasses.replace(asked, evaluates=False), history))
    history.add(asked, 10)
    assert "max-rounds" in str(refusal(policy, dataclasses.replace(asked, order="b"), history))


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 3}, {"figures": []}, {"confusion": torch.zeros(2, 3, dtype=torch.int64)},
        {"confusion": torch.full((10, 10), -1)}, {"counts": [1, 1]}, {"samples": None},
    ],
    ids=str,
)  # fmt: skip
def test_replies_that_do_not_add_up_are_refused(found, wrong):
    _, reported = found
    check_tested(reported[0], ["accuracy"])
    with pytest.raises(MethodError, match="do not add up"):
        check_tested(dataclasses.replace(reported[0], **wrong), ["accuracy"])


def test_a_question_that_cannot_be_read_is_one_line():
    with pytest.raises(UserError, match="the question of an evaluation cannot be read"):
        assert Evaluation(question="[]").asked
    assert Evaluation().asked == Question()
