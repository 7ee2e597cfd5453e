"""bf16 beside float32, what a GPU is told of precision, and devices by number."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import TinyNet, tiny_data, tiny_task
from runs import fingerprint

import fewbytes as fb
from fewbytes.core import devices
from fewbytes.core.devices import prepare_device
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.engines.local import local_engine
from fewbytes.engines.pool import WorkerPool
from fewbytes.engines.terms import Terms
from fewbytes.models.build import ModelBuilder


def digits(precision: str, seed: int = 1) -> fb.Task:
    dataset = load_dataset("digits")
    data = federate(dataset, Partition("dirichlet", 5, alpha=0.5), seed=seed)
    made = ModelBuilder("resnet8:width=8,stem=3x3", dataset.train.shape, len(dataset.classes))
    return fb.Task.on(data, made, seed=seed, precision=precision)


@pytest.mark.filterwarnings("ignore:this processor has no bfloat16")
def test_bf16_learns_as_float32_does_and_is_reproducible(tmp_path: Path) -> None:
    method = fb.FedAvg(epochs=2, lr=0.1, batch=20, momentum=0.9)
    runs = {
        name: fb.run(method, digits(precision), rounds=4, out=tmp_path / name, workers=workers)
        for name, precision, workers in (("float32", "float32", 2), ("one", "bf16", 1), ("two", "bf16", 2))
    }
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    assert runs["float32"].accuracy > 0.8
    assert abs(runs["float32"].accuracy - runs["one"].accuracy) < 0.1
    states = [runs[name].global_model.state_dict() for name in ("float32", "one")]
    assert any(not torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert runs["one"].summary["precision"] == "bf16"


def test_bf16_warns_where_the_processor_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_has_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match="no bfloat16"):
        fb.Task.on(tiny_data(2), TinyNet, precision="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fb.Task.on(tiny_data(2), TinyNet)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cudnn, blas = torch.backends.cudnn, torch.backends.cuda.matmul
    kept = cudnn.allow_tf32, blas.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    yield
    cudnn.allow_tf32, blas.allow_tf32, cudnn.benchmark = kept[:3]
    torch.use_deterministic_algorithms(kept[3])


@pytest.mark.usefixtures("settings")
def test_a_gpu_is_told_to_compute_in_ieee_float32_unless_asked_for_tf32() -> None:
    cudnn, blas = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32
    prepare_device("cpu", "float32")
    assert cudnn.allow_tf32 == before
    for precision, short in (("tf32", True), ("float32", False), ("bf16", False)):
        prepare_device("cuda:0", precision)
        assert (cudnn.allow_tf32, blas.allow_tf32) == (short, short)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # what the user says stays


def test_cpu_0_is_the_cpu(tmp_path: Path) -> None:
    """It has workers, and the same results."""
    task = fb.Task.on(tiny_data(4), TinyNet, seed=0, device="cpu:0")
    with local_engine(Terms(fb.FedAvg(), task, tmp_path), workers=2) as engine:
        assert isinstance(engine.scheduler.dispatcher.transport, WorkerPool)
    one, other = (fb.run(fb.FedAvg(lr=0.1, batch=8), t, rounds=2, workers=2) for t in (task, tiny_task()))
    assert one.summary["device"] == "cpu:0"
    states = [each.global_model.state_dict() for each in (one, other)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
