"""What runs on the pretended device and on the CPU: every case of the methods, and what else computes with tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CASES, TinyNet, task_of, tiny_data
from runs import configured, fingerprint
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

import fewbytes as fb
from fewbytes import wire
from fewbytes.analysis.attack import attack
from fewbytes.analysis.local import local_accuracies
from fewbytes.analysis.membership import membership
from fewbytes.analysis.poisoning import poison
from fewbytes.analysis.probe import probe
from fewbytes.analysis.settings import Attacking, Inferring, Poisoning, Probing
from fewbytes.core import gallery
from fewbytes.core.network import Network
from fewbytes.core.site import Site
from fewbytes.data import (
    ClientData,
    FederatedData,
    Split,
    Targets,
    Transform,
    crop_flip,
    flip_rotate15_crop,
    rotate20_flip,
    stamp_shapes,
)
from fewbytes.methods.parts.averaging import Model, Trained
from fewbytes.models import build_model
from fewbytes.models.unet import UNet

Case = Callable[[Path, str], Any]
"""Of an empty folder and a device to what must be the same on both devices."""
AVERAGE = fb.FedAvg(epochs=1, lr=0.1, batch=4)
DIGITS = {"rounds": 1, "clients": 2, "partition": "iid", "samples": "30/10"}


class Forgetful(fb.FedAvg):
    """FedAvg that forgets the device: it decays the model by a tensor of the CPU."""

    def train(self, state: Any, message: Model, site: Site) -> Trained:
        model = site.model(message.theta.dense())
        for parameter in model.parameters():
            (parameter * torch.full(parameter.shape, 0.5)).sum()
        return super().train(state, message, site)


class Shows(fb.FedAvg):
    """FedAvg that shows people what lies on the device."""

    def round(self, state: Any, net: Network, t: int) -> None:
        super().round(state, net, t)
        weights = next(self.global_model(state, net.problem).parameters()).flatten(1)
        classes = torch.arange(len(weights), device=weights.device)
        net.show("images", gallery.Images((weights[:, :9].reshape(-1, 1, 3, 3) * 9).byte(), ["a"] * len(weights)))
        net.show("points", gallery.Points({"weights": {"of classes": (weights, classes)}}))
        net.show("shares", gallery.Shares({"server": {"layer": weights.sigmoid()}}))


def left(folder: Path) -> dict[str, Any]:
    """The run's fingerprint, but for the device."""
    found = fingerprint(folder)
    del found["result"]["device"]
    return found


def run_case(
    method: fb.Method, task: fb.Task, folder: Path, device: str, rounds: int = 2, **how: Any
) -> dict[str, Any]:
    task = dataclasses.replace(task, problem=dataclasses.replace(task.problem, device=device))
    fb.run(method, task, rounds=rounds, out=folder, workers=1, **how)
    return left(folder)


def digits(folder: Path, device: str, method: str = "fedavg", model: str = "lenet", **more: Any) -> Path:
    """A run on digits as the command line makes it."""
    parameters = {"batch": 10, **more.pop("parameters", {})}
    return configured(folder, method, device=device, model=model, parameters=parameters, **DIGITS | more)


def set_so(settings: dict[str, Any], folder: Path, device: str) -> dict[str, Any]:
    return left(digits(folder, device, **settings))


def attacked(folder: Path, device: str) -> Any:
    return attack(digits(folder, device), Attacking(images=1, iterations=1, restarts=1, noise=1e-6))


def probed(folder: Path, device: str) -> Any:
    how = Probing(epochs=1, linear_epochs=1, samples=40, batch=20)
    return probe(digits(folder, device, model="resnet8:width=4"), how=how)


def inferred(folder: Path, device: str) -> Any:
    run = digits(folder, device, model="mlp", samples="120/120", parameters={"batch": 60})
    return membership(run, Inferring(shadows=4, samples=100))


def poisoned(folder: Path, device: str) -> Any:
    return poison(digits(folder, device, model="mlp", clients=5), Poisoning(poison="backdoor", aggregate="krum"))


def scored(folder: Path, device: str) -> Any:
    return local_accuracies(digits(folder, device, "ensemble", "mlp", parameters={"epochs": 1}))


def images(n: int, channels: int = 3, side: int = 8) -> Tensor:
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(n))


def transformed(transform: Transform, folder: Path, device: str) -> dict[str, Any]:
    def split(n: int, how: Transform | None = None) -> Split:
        return Split(images(n, side=16), torch.arange(n) % 3, transform=how)

    data = FederatedData(
        tuple(ClientData(split(12 + i, transform), split(4)) for i in range(2)), split(6), ("a", "b", "c")
    )
    return run_case(AVERAGE, fb.Task.on(data, convolution), folder, device)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))


def linear(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, outputs))


class Read(Dataset):
    """Samples that are read one by one."""

    def __init__(self, x: Any, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


class Both(nn.Module):
    """A model of samples of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.age = nn.Linear(3 * 8 * 8, 3), nn.Linear(2, 3)

    def forward(self, image: Tensor, age: Tensor) -> Tensor:
        return self.image(image.flatten(1)) + self.age(age)


def squared_error() -> Any:
    """A metric of a user's own."""
    from torchmetrics import MeanSquaredError

    return MeanSquaredError()


def learnt(
    x: Any,
    y: Tensor,
    model: Callable[[], nn.Module],
    of: Callable[[Any, Tensor], Any] = lambda x, y: (x, y),
    **how: Any,
) -> Case:
    """A run on 24 samples of two clients and of a test set."""

    def rows(start: int) -> Any:
        taken = {k: v[start : start + 8] for k, v in x.items()} if isinstance(x, dict) else x[start : start + 8]
        return of(taken, y[start : start + 8])

    run = {key: how.pop(key) for key in ("dp",) if key in how}

    def case(folder: Path, device: str) -> Any:
        task = fb.Task.of(model, [(rows(0), rows(16)), (rows(8), rows(0))], rows(16), **how)
        return run_case(AVERAGE, task, folder, device, **run)

    return case


def detected(folder: Path, device: str) -> Any:
    """The losses of a detector of rectangles, one an image."""
    side, classes = 64, ("red", "blue")

    def split(n: int, start: int) -> Split:
        x, boxes, objects = (images(n, side=side) * 60).byte(), torch.zeros(n, 2, 5), []
        for i in range(n):
            kind, at = (start + i) % 2, 4 + 2 * i
            x[i, 2 * kind, at : at + 30, at : at + 24] = 250
            boxes[i, 0] = torch.tensor([kind, at + 12, at + 15, 24, 30])
            box = {"bbox": [at, at, 24, 30], "area": 720, "iscrowd": 0, "category_id": kind, "image_id": i}
            objects.append({"id": i + 1, **box})
        truth = {
            "images": [{"id": i, "width": side, "height": side} for i in range(n)],
            "annotations": objects,
            "categories": [{"id": i, "name": name} for i, name in enumerate(classes)],
        }
        return Split(x, boxes[:, 0, 0].long(), learnt=Targets("boxes", boxes, truth))

    data = FederatedData(tuple(ClientData(split(4, i), split(2, i).take([])) for i in range(2)), split(4, 0), classes)
    task = fb.Task.on(data, lambda: build_model("yolox-nano", (3, side, side), 2), seed=1)
    run_case(fb.FedAvg(epochs=1, lr=0.01, batch=2), task, folder, device, rounds=1)
    return [row["loss"]["train"] for row in left(folder)["rounds"]]


@wire.payload
class Parcel:
    """A wire value of every kind."""

    dense: wire.Dense
    bits: wire.Bits
    masked: wire.Masked
    quantised: wire.Quantised
    signs: wire.Signs
    topk: wire.TopK
    images: wire.Images


def packed(_: Path, device: str) -> Any:
    """The frames of tensors that lie on the device, whole, and against a base."""
    state = {"weight": (images(6)[:, 0] - 0.5).to(device)}
    mask = {"weight": state["weight"] > 0}

    def parcel() -> Parcel:
        return Parcel(
            wire.Dense(state),
            wire.Bits(mask),
            wire.Masked.of(state, mask),
            wire.Quantised.of(state, 8),
            wire.Signs.of(state),
            wire.TopK.of(state, {"weight": torch.arange(0, 300, 7, device=device)}),
            wire.Images.of(images(2).to(device)),
        )

    first = wire.pack(parcel())
    base = wire.base_of(first.digest, wire.unpack(Parcel, bytes(first)))
    state["weight"] = state["weight"] * 1.01
    return [bytes(first), bytes(wire.pack(parcel(), base=base))]


class Whole(nn.Module):
    """A network without parts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


def tried(folder: Path, device: str) -> Any:
    """A method that asks a model without parts how much it gives."""
    return run_case(CASES["feddistill"], fb.Task.on(tiny_data(2), Whole), folder, device)


def shown(folder: Path, device: str) -> Any:
    return run_case(Shows(local=AVERAGE.local), fb.Task.on(tiny_data(2), TinyNet), folder, device)


def forgetful(folder: Path, device: str) -> Any:
    return run_case(Forgetful(local=AVERAGE.local), fb.Task.on(tiny_data(2), TinyNet), folder, device)


X, Y = images(24), torch.arange(24) % 3
METHODS: dict[str, Case] = {
    name: lambda folder, device, name=name: run_case(CASES[name], task_of(name), folder, device) for name in CASES
}
TRANSFORMS: dict[str, Case] = {
    one.__name__: functools.partial(transformed, one)
    for one in (crop_flip, flip_rotate15_crop, rotate20_flip, stamp_shapes)
}
OBJECTIVES: dict[str, Case] = {
    "classes": learnt(X, Y, linear(3), weights="balanced", metrics=["accuracy", "f1", "auc"]),
    "weighted": learnt(X, Y, linear(3), weights=[1.0, 2.0, 0.5]),
    "labels": learnt(X, torch.stack([Y == 0, Y == 1], 1), linear(2)),
    "numbers": learnt(X, X.sum((1, 2, 3)), linear(1), metrics=["mae", "r2"]),
    "masks": learnt(X, X[:, 0].mul(2.99).long(), lambda: UNet((3, 8, 8), 3, width=4)),
    "tokens": learnt(
        Y.view(24, 1).expand(24, 6).clone(), Y.view(24, 1).expand(24, 6).clone(), lambda: nn.Embedding(3, 3)
    ),
    "own": learnt(X.flatten(1), X[:, 0, 0], lambda: nn.Linear(192, 8), loss=mse_loss, metrics={"error": squared_error}),
    "items": learnt(X, Y, linear(3), of=Read),
    "tensors": learnt({"image": X, "age": X[:, 0, 0, :2]}, Y, Both),
    "private": learnt(X, Y, linear(3), dp="of=samples,epsilon=8,delta=1e-5,clip=1.0,noise=seeded"),
    "boxes": detected,
    "gallery": shown,
    "frames": packed,
    "tried": tried,
    "fedgen-quirks": lambda folder, device: run_case(
        dataclasses.replace(CASES["fedgen"], release_quirks=True), task_of("fedgen"), folder, device
    ),
}
SETTINGS: dict[str, Case] = {
    "lora": functools.partial(set_so, {"model": "mlp", "lora": "rank=2"}),
    "normalise": functools.partial(set_so, {"normalise": "data"}),
    "kgf": functools.partial(set_so, {"model": "resnet8:width=4", "kgf": 2}),
    "secure": functools.partial(set_so, {"model": "mlp", "clients": 3, "secure_aggregation": True}),
}
ANALYSES: dict[str, Case] = {
    "attack": attacked,
    "probe": probed,
    "membership": inferred,
    "poison": poisoned,
    "local-accuracies": scored,
}
PLACED = METHODS | TRANSFORMS | OBJECTIVES | SETTINGS | ANALYSES
"""By name what is run; both devices must give the same."""
CLOSE = {"boxes"}
"""What rounds differently: autograd lays the gradients of what was written in place out anew, as for other devices."""

FAULTS: dict[str, Case] = {
    "forgetful": forgetful,
    "product": lambda _, device: torch.ones(3) * torch.ones(3, device=device),
    "written": lambda _, device: torch.zeros(()).add_(torch.ones((), device=device)),
    "stacked": lambda _, device: torch.stack([torch.ones(()), torch.ones((), device=device)]),
    "indexed": lambda _, device: torch.ones(3)[torch.arange(2, device=device)],
    "numpy": lambda _, device: torch.ones(3, device=device).numpy(),
    "generator": lambda _, device: torch.rand(3, device=device, generator=torch.Generator()),
}
"""By name what works on the CPU alone."""


def differing(name: str, folder: Path, device: str) -> list[str]:
    """What is not the same on both devices, of what a case leaves."""
    one, other = ((PLACED | FAULTS)[name](folder / where, where) for where in ("cpu", device))
    if name in CLOSE:
        return [] if np.allclose(one, other, rtol=1e-4) else [name]
    one, other = _plain(one), _plain(other)
    if not isinstance(one, dict):
        return [] if one == other else [name]
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _plain(value: Any) -> Any:
    """Values that are equal where they are the same bits."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bytes | str | int | None) else repr(value)
