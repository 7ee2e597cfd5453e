"""One client, clients without test samples, another seed: what does not break a run, and what makes another one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import CASES, task_of, tiny_task
from runs import ROUNDS, fingerprint

import fewbytes as fb
from fewbytes.methods.parts.clustered import Clustered


@pytest.mark.parametrize("name", CASES)
def test_one_client_alone(name):
    method = CASES[name]
    if isinstance(method, Clustered | fb.GeneFL):
        method = replace(method, clusters=1)
    result = fb.run(method, task_of(name, clients=1), rounds=2)
    assert result.summary["rounds"] == method.planned_rounds(2)
    assert result.summary["status"] == "done"


@pytest.mark.parametrize("name", CASES)
def test_clients_without_test_samples_are_not_scored(name):
    task = task_of(name)
    clients = tuple(replace(client, test=client.test.take([])) for client in task.data.clients)
    result = fb.run(CASES[name], task.with_data(replace(task.data, clients=clients)), rounds=2, workers=1)
    assert {kind for row in result.rounds for kind in row["scores"].get("accuracy", {})} <= {"global"}


def test_another_seed_gives_another_run(uninterrupted, tmp_path):
    fb.run(CASES["fedavg"], tiny_task(seed=1), rounds=ROUNDS, out=tmp_path / "run")
    assert fingerprint(tmp_path / "run")["models"] != uninterrupted("fedavg")["models"]
