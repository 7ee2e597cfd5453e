"""One line a method: the smallest task that exercises it. The laws run over every line."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import ClassVar

import torch
from costs import Formula
from torch import nn

import fewbytes as fb
from fewbytes.base.streams import seed_all
from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.generators.protocol import check_latents

LOCAL = {"epochs": 1, "lr": 0.1, "batch": 8}
CLUSTERS = {"clusters": 2, "vectors": 2}
SOME = {**LOCAL, "fraction": 0.75}

CASES: dict[str, fb.Method] = {}
"""The smallest settings that exercise each method, by case: one file of this folder a method."""
COSTS: dict[str, Formula] = {}
"""By case what a client sends and receives."""
for file in pkgutil.iter_modules(__path__):
    of = importlib.import_module(f"cases.{file.name}")
    CASES |= of.CASES
    COSTS |= of.COSTS

LEARNING: dict[str, fb.Method | None] = dict.fromkeys(CASES) | {
    name: dataclasses.replace(CASES[name], **changes)
    for name, changes in {
        "fedktl": {"epochs": 4, "mu": 1.0},  # its generator's images are of no use
        "fedktl-ablated": {"epochs": 3},
        "fedktl-conditional": {"epochs": 3, "mu": 0.1},
        "fedktl-linear": {"epochs": 3, "mu": 1.0},
        "fusefl": {"ccvr_samples": 0},  # which would make a good classifier of features that are drawn at random
        "fusefl-moving": {"ccvr_samples": 0},
        "dense": {"epochs": 4, "server_epochs": 5},
        "coboosting": {"epochs": 4, "server_epochs": 5, "server_lr": 0.1},
        "feddafl": {"epochs": 4, "server_steps": 20, "student_steps": 5},
        "fedadi": {"epochs": 4, "server_epochs": 4, "pixel_steps": 5, "server_steps": 5},
        "fedgh": {"epochs": 5, "batch": 20},
        "fedpm": {"epochs": 5},
        "fedpm-sampled": {"epochs": 5},
    }.items()
}
"""Where a case is too short for its method to learn it, the method that can; None: the case itself."""
SCHEDULED = ["fedavg", "fedavg-local-buffers", "fedpurin", "genefl", "fedbn", "scaffold", "fedbuff"]
"""The cases that are also run with clients that come and go."""
PRESENCE = ((1, None), (1, 2), (1, None), (3, None), (3, 3), (2, None))
"""Of six clients: two leave before the last of four rounds, three come, two of them before the same round."""


class Greeting(fb.FedPURIN):
    """FedPURIN that trains a newcomer as soon as it comes, and cannot serve every one of `unwanted`."""

    unwanted: ClassVar[frozenset[int]] = frozenset()

    def join(self, state, net, client):
        for _, reply in net.call(self.train, to=[client]):
            if client in self.unwanted:
                raise fb.Refused(f"a client of {reply.samples} samples is not welcome")


class Choosy(Greeting):
    unwanted = frozenset({3, 4})


COME_AND_GO = {name: CASES[name] for name in SCHEDULED} | {
    "greeting": Greeting(**CASES["fedpurin"].parameters),
    "choosy": Choosy(**CASES["fedpurin"].parameters),
}
"""Methods run with clients that come and go."""


def opened(task: fb.Task, me: int, t: int, what: str) -> fb.Site:
    """A site as an engine opens it for a handler: the global generators are seeded by its name."""
    site = fb.Site(task, me, t, what)
    seed_all(site.seed)
    return site


class TinyGenerator:
    """Images of 6 x 5 whose colours and shades follow the latent vector."""

    latent_dim = 4

    def sample_latents(self, n: int) -> torch.Tensor:
        return torch.randn(n, 4)

    def synthesise(self, latents: torch.Tensor) -> torch.Tensor:
        check_latents(latents, self.latent_dim)
        shade = torch.linspace(-1, 1, 30).view(1, 1, 6, 5)
        return (latents[:, :3, None, None] + latents[:, 3:, None, None] * shade).sigmoid()


class TinyConditional(TinyGenerator):
    """The same with five classes of its own, told by the latent vector's first number."""

    classes = 5

    def class_latents(self, labels: torch.Tensor) -> torch.Tensor:
        latents = self.sample_latents(len(labels))
        return torch.cat([labels[:, None].float(), latents[:, 1:]], 1)


class TinyNet(nn.Module):
    """A convolution, a batch normalisation, dropout (so that randomness matters) and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(4 * 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc(self.drop(x.flatten(1)))

    @property
    def classifier(self) -> nn.Module:
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        return {
            "conv": self.conv,
            "norm": nn.Sequential(self.norm, nn.ReLU()),
            "flat": nn.Sequential(nn.Flatten(), self.drop),
        }


class Chain(nn.Sequential):
    """A convolution and a classifier with nothing to be learnt between them."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * 16, 3))


class Grouped(nn.Sequential):
    """Of three convolutions the last alone can have generated kernels."""

    def __init__(self) -> None:
        layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=2), nn.ReLU(), nn.Conv2d(16, 12, 1)
        super().__init__(*layers, nn.Flatten(), nn.Linear(12 * 16, 10))


class Net3(nn.Module):
    """The network of FedPURIN's golden files, its sizes read from a state."""

    def __init__(self, like: dict[str, torch.Tensor]) -> None:
        super().__init__()
        a, b = like["pre_conv.weight"].shape[:2], like["conv1.weight"].shape[:2]
        self.pre_conv, self.pre_bn = nn.Conv2d(a[1], a[0], 3, padding=1, bias=False), nn.BatchNorm2d(a[0])
        self.conv1, self.bn1 = nn.Conv2d(b[1], b[0], 3, padding=1, bias=False), nn.BatchNorm2d(b[0])
        self.fc = nn.Linear(*like["fc.weight"].shape[::-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.pre_bn(self.pre_conv(x)))
        return self.fc(torch.relu(self.bn1(self.conv1(x))).mean((2, 3)))


class OwnNet(nn.Module):
    """As many features as TinyNet has, by a convolution of any width: a model of its own for every client."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.pool, self.fc = nn.AdaptiveAvgPool1d(64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc(self.pool(x.flatten(1)))

    @property
    def classifier(self) -> nn.Module:
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        convolution = nn.Sequential(self.conv, self.norm, nn.ReLU())
        return {"conv": convolution, "flat": nn.Sequential(nn.Flatten(), self.pool)}


def tiny_data(clients: int = 4, seed: int = 0) -> FederatedData:
    """Three classes that differ by where the light is; clients of 17 to 20 samples, each with its own mixture."""
    g = torch.Generator().manual_seed(seed)

    def split(n: int, shift: int) -> Split:
        y = (torch.arange(n) + shift) % 3
        x = 0.3 * torch.randn(n, 1, 4, 4, generator=g)
        x[torch.arange(n), 0, y] += 1
        return Split(x, y)

    members = tuple(ClientData(split(17 + i, i), split(6, i)) for i in range(clients))
    return FederatedData(members, split(30, 0), ("a", "b", "c"))


def tiny_task(clients: int = 4, seed: int = 0) -> fb.Task:
    return fb.Task.on(tiny_data(clients), TinyNet, seed=seed)


def scheduled_task() -> fb.Task:
    return fb.Task.on(dataclasses.replace(tiny_data(len(PRESENCE)), presence=PRESENCE), TinyNet)


def late_task() -> fb.Task:
    """Two clients from the start, a third from round 2 on."""
    return fb.Task.on(dataclasses.replace(tiny_data(3), presence=((1, None), (1, None), (2, None))), TinyNet)


def task_of(name: str, clients: int = 4) -> fb.Task:
    """The task a case runs on: a different model on every client where the method takes that, or one it needs."""
    if CASES[name].promises.models_differ:
        return fb.Task.on(tiny_data(clients), lambda client: OwnNet(2 + client))
    if isinstance(CASES[name], fb.FedMA):
        return fb.Task.on(tiny_data(clients), Chain)
    return tiny_task(clients)
