"""For models that people bring: half precision works in every method or is refused, and every engine gives the same."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from cases import CASES, TinyNet, task_of, tiny_data
from runs import fingerprint
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.calls import takes_argument


class InTurn(TinyNet):
    """Heads used in turn by a counter in Python, a scale by a buffer that is not persistent, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.calls, self.batches = nn.Linear(64, 3), 0, 0.0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.batches += self.training
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return (self.other if self.calls % 3 == 0 else self.fc)(self.drop(x)) / (1 + 0.1 * self.seen)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.batches)

    def set_extra_state(self, state: Tensor) -> None:
        self.batches = float(state)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fedpurin"])
def test_what_modules_keep_besides_their_state_is_the_same_in_every_engine(name, tmp_path):
    task = fb.Task.on(tiny_data(), InTurn)
    for workers in (1, 2):
        fb.run(CASES[name], task, rounds=3, workers=workers, out=tmp_path / str(workers))
    assert fingerprint(tmp_path / "2") == fingerprint(tmp_path / "1")
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flower_grid import run

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    run(name, tmp_path / "flower", task=task, rounds=3)
    assert fingerprint(tmp_path / "flower") == fingerprint(tmp_path / "1")


def narrow(task: fb.Task, kind: torch.dtype) -> fb.Task:
    """The task with models of another type, which take samples as they are."""
    inner = task.problem.build

    def cast(model: nn.Module) -> nn.Module:
        model.to(kind).register_forward_pre_hook(lambda _, given: (given[0].to(kind), *given[1:]))
        return model

    build = (lambda client: cast(inner(client))) if takes_argument(inner) else (lambda: cast(inner()))
    if hasattr(inner, "architecture"):
        build.architecture = inner.architecture
    return dataclasses.replace(task, problem=dataclasses.replace(task.problem, build=build))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_half_precision_works_or_is_refused_before_the_run(name, kind, tmp_path):
    method, task = CASES[name], narrow(task_of(name), kind)
    adam = method.method_name == "fedpm" or method.parameters.get("optimiser") == "adamw"
    refused = method.promises.float32_only or (kind == torch.float16 and adam)
    if refused:
        with pytest.raises(fb.UserError, match=r"float32|adamw? .*float16"):
            fb.run(method, task, rounds=1, workers=1, out=tmp_path / "run")
        assert not list(tmp_path.iterdir())
        return
    result = fb.run(method, task, rounds=2, workers=1, save_models=False)
    assert result.summary["status"] == "done"
    outcomes = {left["outcome"] for row in result.rounds for left in row.get("left_out", [])}
    assert outcomes <= {"surplus"}  # of a stream, when the run ends
    for model in [result.global_model] if result.global_model is not None else []:
        assert all(value.isfinite().all() for value in model.state_dict().values())
