"""What is scored is what is kept: a client's own model, as saved at a run's end, has the score that the run reports."""

from __future__ import annotations

import dataclasses

import pytest
from cases import CASES, task_of
from runs import ROUNDS

import fewbytes as fb


def with_many_tests(task: fb.Task) -> fb.Task:
    """The task, each of whose clients has all test samples of the server."""
    clients = tuple(dataclasses.replace(client, test=task.data.test) for client in task.data.clients)
    return dataclasses.replace(task, data=dataclasses.replace(task.data, clients=clients))


@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_of_a_client_has_its_reported_score(name, tmp_path):
    method, task = CASES[name], with_many_tests(task_of(name))
    result = fb.run(method, task, rounds=ROUNDS, workers=1, out=tmp_path)
    rows = [row["by_client"]["accuracy"] for row in result.rounds if "by_client" in row]
    reported = [row["personalised"] for row in rows if "personalised" in row]
    saved = {path.stem.removeprefix("client-") for path in (tmp_path / "models").glob("client-*.safetensors")}
    for client in saved:
        model = fb.load_model(tmp_path, int(client), build=method.adapted(task).problem.model)
        scores = task.problem.objective.score(model, task.data.test, "cpu", "float32", None)
        assert scores["accuracy"] == pytest.approx(reported[-1][client], abs=1e-6)
