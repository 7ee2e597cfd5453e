"""Local training that is saved as it goes: a process killed at random moments continues inside it, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from cases import tiny_data
from runs import PATIENCE, fingerprint
from torch import nn

import fewbytes as fb
from fewbytes.base.state import state_of
from fewbytes.base.streams import seed_all
from fewbytes.core.site import Given
from fewbytes.engines.handlers import Job, Part
from fewbytes.engines.saving import SUFFIX, FileSaves
from fewbytes.methods.parts.averaging import Model
from fewbytes.wire import Dense, pack

pytest.importorskip("flwr", reason="Flower is not installed")

from fewbytes.flower.node import Node, Order, digest, in_common

KILLS, EVERY = 10, 0.02
TRAININGS = {
    "sgd": {"momentum": 0.9, "epochs": 60},
    "adam": {"optimiser": "adam", "lr": 0.003, "epochs": 60},
    "steps over shuffles": {"steps": 211, "momentum": 0.5},
    "stored, dropping the rest": {"order": "stored", "last": "dropped", "epochs": 60, "weight_decay": 0.01},
}


def noisy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A transform that draws from Python's, numpy's and torch's generators, and takes its time."""
    time.sleep(0.002)
    return x + 0.1 * torch.randn_like(x) * random.random()


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
    )


def task() -> fb.Task:
    data = tiny_data()
    for client in data.clients:
        client.train.transform = noisy
    return fb.Task.on(data, build)


def trained(name: str, folder: Path, every: float) -> dict[str, torch.Tensor]:
    """A client's model after a training of that name, saved in a folder (`every` 0: not saved)."""
    torch.set_num_threads(1)
    site = fb.Site(task(), 0, 3, "train")
    site.given = Given(saves=FileSaves(folder, "0-3-train", every) if every else None)
    seed_all(site.seed)
    model = site.model()
    site.fit(model, fb.Local(**{"lr": 0.05, "batch": 5} | TRAININGS[name]))
    again = site.model()  # a handler's second training has a file of its own
    site.fit(again, fb.Local(lr=0.05, batch=5, epochs=3))
    return state_of(model) | {f"again {name}": value for name, value in state_of(again).items()} | left()


def left() -> dict[str, torch.Tensor]:
    """What the generators draw afterwards."""
    return {"torch": torch.rand(3), "python": torch.tensor(random.random())}


def kept(name: str, folder: Path) -> None:
    """Train in a process of its own, and keep the model."""
    torch.save(trained(name, folder, EVERY), folder / "model.pt")


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_killed_at_random_moments_ends_the_same(name, tmp_path):
    expected, chance, lives, inside = trained(name, tmp_path, 0), random.Random(name), 0, 0
    while True:
        process = get_context("fork").Process(target=kept, args=(name, tmp_path))
        process.start()
        process.join(chance.uniform(0.05, 0.3) if lives < KILLS else PATIENCE)
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        lives += 1
        inside += bool(list(tmp_path.glob(f"*{SUFFIX}")))
    assert process.exitcode == 0
    assert lives > 2
    assert inside > 1
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_a_saved_training_is_continued_and_not_begun_again(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(sys.modules[__name__], "noisy", lambda x, y: (calls.append(len(y)), x)[1])
    whole = trained("sgd", tmp_path / "none", 0)
    every, calls[:] = len(calls), []

    class Stop(Exception):
        pass

    def stopping(x, y):
        calls.append(len(y))
        if len(calls) == 100:
            raise Stop
        return x

    monkeypatch.setattr(sys.modules[__name__], "noisy", stopping)
    (tmp_path / "saved").mkdir()
    with pytest.raises(Stop):
        trained("sgd", tmp_path / "saved", 1e-9)
    monkeypatch.setattr(sys.modules[__name__], "noisy", lambda x, y: (calls.append(len(y)), x)[1])
    resumed = trained("sgd", tmp_path / "saved", 1e-9)
    assert len(calls) == every + 1  # only the batch that was interrupted was read twice
    for key, value in whole.items():
        assert torch.equal(resumed[key], value), key
    # what another training has saved, or is damaged, is not continued
    for file in (tmp_path / "saved").glob(f"*{SUFFIX}"):
        file.write_bytes(file.read_bytes()[:-7])
    calls.clear()
    assert torch.equal(trained("sgd", tmp_path / "saved", 60)["0.weight"], whole["0.weight"])
    assert len(calls) == every
    calls.clear()
    assert not torch.equal(trained("adam", tmp_path / "saved", 60)["0.weight"], whole["0.weight"])
    assert len(calls) > 60 * 3


def answered(folder: Path, every: float) -> None:
    """What a node answers to an order to train, in a file."""
    method, made = fb.FedAvg(epochs=60, lr=0.05, batch=5, momentum=0.5), task()
    node = Node(method, made, folder, "run")
    layout = made.problem.layout(0)
    frame = bytes(pack(Model(Dense(made.problem.first_state())), layout=layout))
    job = Job(1, "train", 0, 1, False, 0, message=Part("train", 1, "", len(frame)), save_every=every)
    done, reply = node.answer(Order("run", digest(in_common(method, made, 0)), job, 1, 0, True), [memoryview(frame)])
    assert not done.error, done.error
    (folder / "reply").write_bytes(reply)


def test_a_killed_node_continues_inside_its_training(tmp_path):
    chance, lives, inside = random.Random(1), 0, 0
    for name, every in (("whole", 0.0), ("run", 0.02)):
        folder = tmp_path / name
        folder.mkdir()
        while True:
            process = get_context("fork").Process(target=answered, args=(folder, every))
            process.start()
            process.join(chance.uniform(0.1, 0.4) if every and lives < KILLS else PATIENCE)
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            lives += 1
            inside += bool(list(folder.rglob(f"*{SUFFIX}")))
        assert process.exitcode == 0
    assert lives > 1
    assert inside
    assert (tmp_path / "run" / "reply").read_bytes() == (tmp_path / "whole" / "reply").read_bytes() != b""
    assert not list(tmp_path.rglob(f"*{SUFFIX}"))


def run(folder: Path, **settings) -> None:
    """A run, or its resumption."""
    method = fb.FedNova(epochs=40, lr=0.05, batch=5, momentum=0.5)
    resume = (folder / "config.toml").exists() and bool(list(folder.glob("checkpoint/round-*")))
    fb.run(method, task(), rounds=2, out=folder, workers=2, resume=resume, **settings)


def apart(folder: Path) -> None:
    """A run that saves, in a process group of its own."""
    os.setpgrp()
    run(folder, save_every="0.02s")


def test_a_killed_run_resumes_inside_its_clients_training(tmp_path):
    run(tmp_path / "whole")
    folder, chance, lives, inside = tmp_path / "run", random.Random(0), 0, 0
    while True:
        process = get_context("fork").Process(target=apart, args=(folder,))
        process.start()
        process.join(chance.uniform(0.3, 0.9) if lives < KILLS else PATIENCE)
        if process.exitcode is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.join()
        lives += 1
        inside += bool(list(folder.rglob(f"*{SUFFIX}")))
    assert process.exitcode == 0
    assert lives > 1
    assert inside
    assert fingerprint(folder) == fingerprint(tmp_path / "whole")
    assert not list(folder.rglob(f"*{SUFFIX}"))
