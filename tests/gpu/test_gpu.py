"""On a GPU: runs learn as on the CPU, and are the same each time, with any number of workers, killed and resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, task_of, tiny_task
from runs import PATIENCE, ROUNDS, StopAfter, fingerprint

import fewbytes as fb
from fewbytes.base.streams import seed_torch
from fewbytes.core import training
from fewbytes.core.devices import prepare_device
from fewbytes.models import build_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that PyTorch can use")
SYSTEMS = ("fedavg", "fedkgf", "fedktl", "fedpurin", "fusefl", "genefl")
DIGITS = ("--dataset=digits", "--model=resnet8:width=16", "--clients=4", "--partition=iid", "--rounds=5")
TERMS = ("--set=lr=0.05", "--set=momentum=0.9")  # with which another order of adding changes little on the CPU, too


def ran(folder: Path, *arguments: str) -> Path:
    """The folder of a run of the command line, which has ended well."""
    command = [sys.executable, "-m", "fewbytes", "run", *arguments, f"--out={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.iterdir())


def accuracy(folder: Path) -> float:
    return json.loads((folder / "result.json").read_text())["score"]["final"]


def on_gpu(task: fb.Task) -> fb.Task:
    return dataclasses.replace(task, problem=dataclasses.replace(task.problem, device="cuda"))


@pytest.mark.parametrize("method", SYSTEMS)
def test_a_system_learns_as_on_the_cpu_and_the_same_with_more_workers(method, tmp_path):
    how = DIGITS if method in ("fusefl", "fedktl") else (*DIGITS, *TERMS)
    one = ran(tmp_path / "one", method, *how, "--device=cuda", "--workers=1")
    many = ran(tmp_path / "many", method, *how, "--device=cuda", "--workers=3")
    cpu = ran(tmp_path / "cpu", method, *how, "--workers=1")
    assert fingerprint(one) == fingerprint(many)
    assert accuracy(one) == pytest.approx(accuracy(cpu), abs=0.1)


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_shorter_floats_learn_as_well(precision, tmp_path):
    whole = ran(tmp_path / "whole", "fedavg", *DIGITS, *TERMS, "--device=cuda")
    short = ran(tmp_path / "short", "fedavg", *DIGITS, *TERMS, "--device=cuda", f"--precision={precision}")
    assert fingerprint(short)["models"] != fingerprint(whole)["models"]
    assert accuracy(short) == pytest.approx(accuracy(whole), abs=0.1)


@pytest.mark.parametrize("name", CASES)
def test_each_method_is_the_same_again_and_resumed(name, tmp_path):
    method, task = CASES[name], on_gpu(task_of(name))
    fb.run(method, task, rounds=ROUNDS, out=tmp_path / "whole", workers=1)
    several = method.planned_rounds(ROUNDS) > 1
    if several:
        with pytest.raises(KeyboardInterrupt):
            fb.run(method, task, rounds=ROUNDS, out=tmp_path / "again", workers=1, watcher=StopAfter(1))
    fb.run(method, task, rounds=ROUNDS, out=tmp_path / "again", workers=1, resume=several)
    assert fingerprint(tmp_path / "again") == fingerprint(tmp_path / "whole")


MODELS: dict[str, tuple[torch.nn.Module, dict[str, torch.Tensor]]] = {}


def built(model: str) -> torch.nn.Module:
    """A model on the GPU, the same object and values each time."""
    if model not in MODELS:
        seed_torch(1)
        layers = torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.Dropout(), torch.nn.Linear(32, 10)
        made = torch.nn.Sequential(*layers) if model == "dropout" else build_model(model, (3, 32, 32), 10)
        net = training.prepared(made).cuda()
        MODELS[model] = net, {name: value.clone() for name, value in net.state_dict().items()}
    net, values = MODELS[model]
    net.load_state_dict(values)
    return net


@pytest.mark.parametrize("model", ["mlp", "lenet", "cnn4", "resnet8", "resnet18", "dropout"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    "local",
    [fb.Local(3, 0.1, 8, 0.9), fb.Local(3, 0.1, 8, clip=1.0), fb.Local(2, 0.1, 7, 0.9, 1e-3, "nesterov")],
    ids=["momentum", "clipped", "nesterov"],
)
def test_a_recorded_step_is_the_step_to_the_bit(model, precision, local):
    prepare_device("cuda", precision)
    net, kept = built(model), {}
    for seed in range(3):  # the later ones replay what the first has recorded
        first = {name: value.clone() for name, value in net.state_dict().items()}
        one, other = (trained(net, first, seed, local, precision, recordings) for recordings in (None, kept))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(kept) == 1
    assert any(next(iter(kept.values())).by_shape.values())


def trained(net, first, seed, local, precision, recordings) -> list[torch.Tensor]:
    """The loss, the values and the gradients that a training leaves."""
    net.load_state_dict(first)
    seed_torch(seed)
    x, y = training.ready(torch.randn(45, 3, 32, 32)).cuda(), torch.randint(10, (45,)).cuda()
    loss = training.fit(net, x, y, local, precision=precision, recordings=recordings)
    left = [*net.state_dict().values(), *(p.grad for p in net.parameters())]
    return [torch.tensor(loss), *(value.clone() for value in left)]


class Waits(torch.nn.Module):
    """Reads a value of the GPU in each pass, which no recording can."""

    __module__ = "torch.nn.waits"

    def forward(self, x):
        return x * float(x.sum().isfinite())


def test_a_step_that_cannot_be_recorded_is_taken_as_it_is():
    prepare_device("cuda", "float32")
    layers = torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.Dropout(), Waits(), torch.nn.Linear(32, 10)
    net, local, kept = torch.nn.Sequential(*layers).cuda(), fb.Local(3, 0.1, 8, 0.9), {}
    first = {name: value.clone() for name, value in net.state_dict().items()}
    one, *others = (trained(net, first, 1, local, "float32", recordings) for recordings in (None, kept, kept))
    assert next(iter(kept.values())).refused
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    test_a_recorded_step_is_the_step_to_the_bit("lenet", "float32", local)  # what was refused leaves no trace


def killed(who: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "gpu.killed", str(folder), who],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_workers_killed_and_what_forks_them(tmp_path):
    task = on_gpu(tiny_task())
    fb.run(CASES["fedpurin"], task, rounds=ROUNDS, out=tmp_path / "whole", workers=1)
    assert int(killed("workers", tmp_path).stdout) >= 3
    assert fingerprint(tmp_path / "workers") == fingerprint(tmp_path / "whole")
    done = killed("mother", tmp_path)
    assert done.stdout.strip() == "1"
    assert "the run can be resumed" in done.stderr
    fb.run(CASES["fedpurin"], task, rounds=ROUNDS, out=tmp_path / "mother", workers=1, resume=True)
    assert fingerprint(tmp_path / "mother") == fingerprint(tmp_path / "whole")


def test_a_process_that_has_asked_for_the_gpu_may_run_on_it(tmp_path):
    """torch.cuda.is_available, asked before fewbytes is imported, keeps what is forked from opening the GPU."""
    code = (
        "import torch; torch.cuda.is_available(); import sys; sys.path.insert(0, '.'); import fewbytes as fb; "
        "from cases import CASES, tiny_task; from gpu.test_gpu import on_gpu; "
        f"fb.run(CASES['fedavg'], on_gpu(tiny_task()), rounds=1, out={str(tmp_path / 'run')!r}, workers=2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no workers" in done.stderr
