"""What runs on the pretended device and on the CPU: every case of the methods, and what else computes with tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import CASES, LOCAL, TinyNet, task_of, tiny_data
from runs import configured, fingerprint

import fewbytes as fb
from fewbytes.analysis.attack import attack
from fewbytes.analysis.local import local_accuracies
from fewbytes.analysis.membership import membership
from fewbytes.analysis.poisoning import poison
from fewbytes.analysis.probe import probe
from fewbytes.analysis.settings import Attacking, Inferring, Poisoning, Probing
from fewbytes.core.site import Site
from fewbytes.methods.parts.averaging import Model, Trained

ROUNDS = 2
DIGITS = {"rounds": 1, "clients": 2, "partition": "iid", "samples": "30/10"}


class Forgetful(fb.FedAvg):
    """FedAvg that forgets the device: it decays the model by a tensor of the CPU."""

    def train(self, state: Any, message: Model, site: Site) -> Trained:
        model = site.model(message.theta.dense())
        for parameter in model.parameters():
            (parameter * torch.full(parameter.shape, 0.5)).sum()
        return super().train(state, message, site)


def left(folder: Path) -> dict[str, Any]:
    """The run's fingerprint, but for the device."""
    found = fingerprint(folder)
    del found["result"]["device"]
    return found


def run_case(method: fb.Method, task: fb.Task, folder: Path, device: str, **how: Any) -> dict[str, Any]:
    task = dataclasses.replace(task, problem=dataclasses.replace(task.problem, device=device))
    fb.run(method, task, rounds=ROUNDS, out=folder, workers=1, **how)
    return left(folder)


def digits(folder: Path, device: str, method: str = "fedavg", model: str = "lenet", **more: Any) -> Path:
    """A run on digits as the command line makes it."""
    parameters = {"batch": 10, **more.pop("parameters", {})}
    return configured(folder, method, device=device, model=model, parameters=parameters, **DIGITS | more)


def transformed(name: str, folder: Path, device: str) -> dict[str, Any]:
    return left(digits(folder, device, model="mlp", **{name: 1 if name == "backdoor" else True}))


def attacked(folder: Path, device: str) -> Any:
    return attack(digits(folder, device), Attacking(images=1, iterations=3, restarts=1, noise=1e-6))


def probed(folder: Path, device: str) -> Any:
    how = Probing(epochs=1, linear_epochs=1, samples=40, batch=20)
    return probe(digits(folder, device, model="resnet8:width=4"), how=how)


def inferred(folder: Path, device: str) -> Any:
    run = digits(folder, device, model="mlp", samples="120/120")
    return membership(run, Inferring(shadows=4, samples=100))


def poisoned(folder: Path, device: str) -> Any:
    return poison(digits(folder, device, model="mlp", clients=5), Poisoning(poison="backdoor", aggregate="krum"))


def scored(folder: Path, device: str) -> Any:
    return [dataclasses.asdict(row) for row in local_accuracies(digits(folder, device, "ensemble", "mlp"))]


def forgetful(folder: Path, device: str) -> Any:
    return run_case(Forgetful(local=fb.FedAvg(**LOCAL).local), fb.Task.on(tiny_data(2), TinyNet), folder, device)


PLACED: dict[str, Callable[[Path, str], Any]] = {
    name: lambda folder, device, name=name: run_case(CASES[name], task_of(name), folder, device) for name in CASES
}
PLACED |= {
    "attack": attacked,
    "probe": probed,
    "membership": inferred,
    "poison": poisoned,
    "local accuracies": scored,
}
"""By name what is run; both devices must give the same."""
FORGETFUL = "forgetful"


def differing(name: str, folder: Path, device: str) -> list[str]:
    """What is not the same on both devices, of what a case leaves."""
    runs = PLACED | {FORGETFUL: forgetful}
    one, other = (_plain(runs[name](folder / where, where)) for where in ("cpu", device))
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [name]
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _plain(value: Any) -> Any:
    """Values that are equal where they are the same bits."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bytes | str | int | None) else repr(value)
