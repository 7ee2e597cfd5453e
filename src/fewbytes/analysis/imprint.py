"""Measures what a server could read of clients' images with a manipulated first layer, in clear and in a sum.

Fowl, Geiping, Czaja, Goldblum, Goldstein, "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with
Modified Models", ICLR 2022. Every unit of the first Linear measures an image's brightness, is active above its own
threshold, and has the same output weights. The changes of neighbouring units differ only by the images between their
thresholds: for a single image, the difference of weight changes over that of bias changes is the image.

The round is the run's own except for its first model. In clear the server has each client's update; in a sum, as with
secure aggregation, only their total. An image counts as rebuilt at a PSNR of 25 dB. The control is one step of a single
client on all its images at once, for which the attack is designed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from fewbytes.analysis.attack import psnr
from fewbytes.analysis.settings import Imprinting
from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.base.named import only_allowed
from fewbytes.base.state import State, state_of
from fewbytes.core.method import Method
from fewbytes.core.policy import Excluded, Policy
from fewbytes.core.problem import Id
from fewbytes.core.rules import Rule
from fewbytes.core.task import Task
from fewbytes.core.trust import drift
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import Experiment, experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.methods.parts.secure import SecureAggregation
from fewbytes.models.pretrained import Pretrained
from fewbytes.report.leaks import RECOGNISED
from fewbytes.report.table import figures_table
from fewbytes.running.run import Run
from fewbytes.running.watcher import Watcher

Progress = Callable[[int, int, str], None]
"""Called with progress: (rounds done, total rounds, text)."""


class Quiet(Watcher):
    """A watcher for rounds from which clients are excluded on purpose."""

    def note(self, text: str) -> None:
        """Nothing."""


def imprint(run: Path, how: Imprinting | None = None, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Attack the training images of a run's clients; writes RUN/imprint.json, which it returns.

    Raises UserError for a folder that is not a run's, data without images, a method without a global model, and a model
    that does not start with a Linear.
    """
    how = how or Imprinting()
    experiment = experiment_of(run)
    with only_allowed():  # imports only what is allowed
        method, task = experiment.build_method(), find(experiment).task
    plain = method.inner if isinstance(method, SecureAggregation) else method
    if len(task.problem.sample_shape) != 3:
        raise UserError(f"only images can be rebuilt, and samples are of shape {task.problem.sample_shape}")
    first, measured = imprinted_model(task)
    clients = list(task.problem.clients)[: how.clients]
    images = {i: task.data.clients[i].train.load("cpu")[0] for i in clients}
    of_each: dict[Id, int] = {}
    for done, client in enumerate(clients):
        progress(done, len(clients) + 2, f"client {client} in clear")
        change = changed(experiment, plain, measured, first, [client])
        of_each[client] = rebuilt(change, first, images[client])
    progress(len(clients), len(clients) + 2, "their sum")
    together = rebuilt(changed(experiment, plain, measured, first, clients), first, torch.cat(list(images.values())))
    progress(len(clients) + 1, len(clients) + 2, "control")
    size = len(images[clients[0]])
    alone = changed(experiment, plain.changed(epochs=1, batch=size), measured, first, clients[:1])
    result = {
        "method": experiment.method, "clients": len(clients), "images": sum(map(len, images.values())),
        "in_clear": sum(of_each.values()), "in_a_sum": together,
        "control": rebuilt(alone, first, images[clients[0]]), "control_images": size,
        "first_layer_drift": drift(task.problem, 0, first),
    }  # fmt: skip
    with replacing(run / "imprint.json") as file:
        file.write(json.dumps(result, indent=2).encode())
    return result


def imprint_table(result: dict[str, Any]) -> Table:
    """The result of `imprint` as a table for the terminal."""
    caption = (
        f"rebuilt to {RECOGNISED:.0f} dB; a unit of the first layer has turned by {result['first_layer_drift']:.3g} "
    )
    caption += "from the agreed one's (max-drift in a node's configuration refuses it)"
    table = figures_table(caption, [], ["what the server has", "images", "rebuilt"])
    for what, images, found in (
        ("each client's update", result["images"], result["in_clear"]),
        ("the sum of all", result["images"], result["in_a_sum"]),
        ("control: one step of one client", result["control_images"], result["control"]),
    ):
        table.add_row(what, str(images), str(found))
    return table


def first_layer(model: nn.Module) -> tuple[str, str]:
    """The names of the weights of a model's first layer and of its next. Raises UserError unless both are Linear."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if len(layers) < 2 or not all(isinstance(layer, nn.Linear) and layer.bias is not None for _, layer in layers[:2]):
        raise UserError("this attack needs a model that starts with two Linear layers with biases, such as mlp")
    return f"{layers[0][0]}.", f"{layers[1][0]}."


def imprinted_model(task: Task) -> tuple[State, Task]:
    """A first model whose units measure the brightness of images, and the task that starts with it."""
    model, state = task.problem.on_cpu().model(0), task.problem.first_state(0)
    one, two = first_layer(model)
    weights = state[f"{one}weight"]
    brightness = task.data.test.load("cpu")[0].flatten(1).mean(1) if len(task.data.test) else torch.rand(1000)
    bins = brightness.double().quantile(torch.linspace(0, 1, len(weights) + 2).double()[1:-1])
    imprinted = dict(state)
    imprinted[f"{one}weight"] = torch.full_like(weights, 1 / weights.shape[1])
    imprinted[f"{one}bias"] = -bins.to(weights.dtype)
    imprinted[f"{two}weight"] = state[f"{two}weight"].mean(1, keepdim=True).expand_as(state[f"{two}weight"]).clone()
    problem = dataclasses.replace(task.problem, pretrained=Pretrained("imprint", imprinted, "imprint"))
    return imprinted, Task(problem, task.data)


def changed(experiment: Experiment, method: Method, task: Task, first: State, clients: Sequence[Id]) -> State:
    """The change of the global model in a round of only these clients. Raises UserError if there is no global model."""
    others = Excluded(i for i in task.problem.clients if i not in clients)
    policy = Policy(exclude=others, min_replies=1 / (10 * len(task.problem.clients)))
    settings = dataclasses.replace(
        experiment.run, rounds=1, dp=None, aggregate=Rule(), budget=None, stop_when=None, speeds=None, engine="local",
        workers=1, save_models=False, watcher=Quiet(),
    )  # fmt: skip
    result = run_with(Run.of(method.changed(fraction=1.0), task, settings, policy))
    if result.global_model is None:
        raise UserError(f"{method.method_name} has no global model to attack")
    return {name: value - first[name] for name, value in state_of(result.global_model).items()}


def rebuilt(change: State, first: State, images: Tensor) -> int:
    """The number of images (n, …) that the changes of neighbouring units rebuild to RECOGNISED dB."""
    name = next(name for name, value in first.items() if value.ndim == 2).removesuffix("weight")
    weights, biases = change[f"{name}weight"].double(), change[f"{name}bias"].double()
    weights, biases = -(weights.diff(dim=0)), -(biases.diff(dim=0))
    weights = torch.cat([weights, change[f"{name}weight"].double()[-1:]])
    biases = torch.cat([biases, change[f"{name}bias"].double()[-1:]])
    candidates = weights[biases.abs() > 0] / biases[biases.abs() > 0, None]
    flat, found = images.double().flatten(1), set[int]()
    for each in candidates:
        nearest = int((flat - each).square().sum(1).argmin())
        if psnr(flat[nearest], each) >= RECOGNISED:
            found.add(nearest)
    return len(found)
