"""What all comparisons with independent implementations share: data, first weights, our side's run, scores, intervals.

A peer is a checkout of somebody else's library. It is given our splits and our first weights, runs the same number of
rounds with the same terms, and both sides are scored in two ways:

- `sent`: as PFLlib does, the models as a client has them when the next round begins (what was sent is in them, nothing
  is trained yet), over all clients' test samples together;
- `trained`: as fewbytes does, the models after local training, the mean over clients.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from page import FIGURES
from safetensors.torch import load_file
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.base.state import State, load_state, state_of
from fewbytes.base.streams import seed_all
from fewbytes.core.site import Site
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.data.split import ClientData, Split

CLIENTS, ALPHA, ROUNDS, SEEDS, SAME_ROUNDS = 8, 0.5, 15, (1, 2, 3), 2
BATCH, LR, SAME_LR = 20, 0.2, 0.1
TERMS: dict[str, Any] = {"epochs": 1, "lr": LR, "batch": BATCH, "momentum": 0.0, "last": "dropped"}
"""Local training, on both sides; PFLlib leaves out samples that do not fill a batch."""
SAID = {"clients": CLIENTS, "alpha": ALPHA, "rounds": ROUNDS, "batch": BATCH, "lr": LR, "same_lr": SAME_LR,
        "same_rounds": SAME_ROUNDS}  # fmt: skip


class Net(nn.Module):
    """Two 5x5 convolutions with pooling, a hidden layer of 64, and a classifier `fc`, for images of 8 x 8; `norm`: with
    batch normalisation after each convolution. The names `fc` and `bn` are those by which PFLlib finds them."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 32, 5, padding=2)
        self.bn1, self.bn2 = (nn.BatchNorm2d(n) if norm else nn.Identity() for n in (16, 32))
        self.pool, self.hidden, self.fc = nn.MaxPool2d(2), nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.bn1(self.conv1(x)).relu())
        x = self.pool(self.bn2(self.conv2(x)).relu())
        logits: Tensor = self.fc(self.hidden(x.flatten(1)).relu())
        return logits

    @property
    def classifier(self) -> nn.Module:
        return self.fc

    def units(self) -> dict[str, nn.Module]:
        return {
            "conv1": nn.Sequential(self.conv1, self.bn1, nn.ReLU(), self.pool),
            "conv2": nn.Sequential(self.conv2, self.bn2, nn.ReLU(), self.pool),
            "hidden": nn.Sequential(nn.Flatten(), self.hidden, nn.ReLU()),
        }


@dataclass(frozen=True)
class Row:
    """A method on both sides.

    `ours`: the method, with the terms of both sides. `algorithm`, `options`: the peer's name of it, and its options.
    `sent`: the kind of score that fewbytes records of the models as sent; or a function that names the entries which
    the clients share, whose mean is then put into their models here. `weighted`: that mean, by samples. `norm`: the
    model has batch normalisation. `same`: changes to `ours` and further `options` with which both sides must give the
    same numbers, as far as sums of floats can; None: chance enters (generated samples). `even`: all clients have the
    same number of samples there. `adjust`: replaces parts of the peer there. `begins`: fewbytes scores `sent` when a
    round begins, so that it is the score of one more round.
    """

    ours: fb.Method
    algorithm: str
    options: tuple[str, ...] = ()
    sent: str | Callable[[nn.Module], list[str]] = "personalised"
    weighted: bool = True
    norm: bool = False
    same: tuple[dict[str, Any], tuple[str, ...]] | None = ({}, ())
    even: bool = False
    adjust: Callable[[Any], None] | None = None
    begins: bool = False

    @property
    def changed(self) -> bool:
        """Whether something is changed or replaced so that both sides give the same numbers."""
        return self.adjust is not None or self.even or self.same not in (None, ({}, ()))


@dataclass(frozen=True)
class Outcome:
    """A side's scores, and its models: of each client, and the server's (None: it has none)."""

    sent: float
    trained: float
    clients: list[State]
    server: State | None


def task_of(row: Row, seed: int, same: bool) -> fb.Task:
    """Digits of `CLIENTS` clients with the test samples of their shares. `same`: every client's training samples fill
    whole batches, and their order is that of the data on both sides."""
    data = federate(load_dataset("digits"), Partition(clients=CLIENTS, alpha=ALPHA), seed=seed)
    if same:
        fewest = min(len(client.train) for client in data.clients)
        clients = [whole_batches(client, fewest if row.even else len(client.train)) for client in data.clients]
        data = replace(data, clients=clients)
    return fb.Task.on(data, lambda: Net(row.norm), seed=seed)


def whole_batches(client: ClientData, most: int) -> ClientData:
    return replace(client, train=client.train.take(range(most - most % BATCH)))


def tensors(split: Split) -> tuple[Tensor, Tensor]:
    """A split's samples as fewbytes trains on them, and their labels."""
    x, y = split.load("cpu")
    return x, y


def first_clients(method: fb.Method, task: fb.Task) -> list[tuple[State, Any]]:
    """Each client's first model, and its first state (None: the method keeps none), as fewbytes draws them."""
    found = []
    for client in task.problem.clients:
        site = Site(task, client, 0, "client")
        seed_all(site.seed)
        state = method.client(site)
        found.append((state_of(site.model(getattr(state, "theta", None))), state))
    return found


def run_ours(row: Row, task: fb.Task, rounds: int, **changes: Any) -> Outcome:
    """Our side, in one process."""
    method = row.ours.changed(**changes)
    with tempfile.TemporaryDirectory() as name:
        result = fb.run(method, task, rounds=rounds, workers=1, save_models=True, out=Path(name) / "run")
        saved = sorted((Path(name) / "run" / "models").glob("client-*"), key=lambda path: int(path.stem[7:]))
        order = list(task.problem.first_state())
        clients = [in_order(load_file(path), order) for path in saved]
    kinds = [row["scores"]["accuracy"] for row in result.rounds if row["phase"] == "round" and row["scores"]][-1]
    if isinstance(row.sent, str):
        scored = fb.run(method, task, rounds=rounds + 1, workers=1, save_models=False) if row.begins else result
        pooled_kinds = {**kinds, "personalised": kinds.get("micro")}  # `global`: the server's test set is all clients'
        pooled_kinds |= scored.rounds[-1].get("pooled", {}).get("accuracy", {})
        sent = pooled_kinds[row.sent]
    else:
        sent = pooled([accuracy(task, i, state) for i, state in enumerate(as_sent(row, task, clients))], task)
    trained = kinds["personalised"]
    server = None if result.global_model is None else state_of(result.global_model)
    return Outcome(sent, trained, clients, server)


def in_order(state: State, names: Sequence[str]) -> State:
    """The model's entries, in the order of its layers; of a network of prototypes, its features alone."""
    units = list(Net().units())
    plain = {}
    for name, value in state.items():
        inside = name.removeprefix("embedding.").replace("head.", "fc.")  # FedKTL's projection
        plain[re.sub(r"features\.units\.(\d)\.\d", lambda match: units[int(match[1])], inside)] = value
    return {name: plain[name] for name in names if name in plain}


def pooled(by_client: Sequence[float], task: fb.Task) -> float:
    """The accuracy on all clients' test samples together."""
    tested = [len(client.test) for client in task.data.clients]
    return sum(a * n for a, n in zip(by_client, tested, strict=True)) / sum(tested)


def as_sent(row: Row, task: fb.Task, clients: Sequence[State]) -> list[State]:
    """The clients' trained models, with the mean of the entries that they share."""
    assert callable(row.sent)
    weights = [len(client.train) if row.weighted else 1 for client in task.data.clients]
    mean = {
        name: sum(state[name] * (w / sum(weights)) for state, w in zip(clients, weights, strict=True))
        for name in row.sent(task.problem.first_model())
    }
    return [{**state, **mean} for state in clients]


def accuracy(task: fb.Task, client: int, state: State) -> float:
    model = task.problem.first_model()
    load_state(model, state)
    x, y = tensors(task.data.clients[client].test)
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def apart(ours: Outcome, theirs: Outcome) -> float:
    """The largest distance of the two sides' models, of the server or else of clients: of the values that differ most,
    as a part of the largest value."""
    pairs = list(zip(ours.clients, theirs.clients, strict=True)) if ours.clients else []
    if ours.server is not None and theirs.server is not None:
        pairs.append((ours.server, theirs.server))
    return max(most_apart(list(a.values()), list(b.values())) for a, b in pairs)


def most_apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest difference of two values, as a part of the largest value."""
    pairs = zip(a, b, strict=False)  # of FedProto, our saved networks end before the classifier
    differences = [float((x - y).abs().max()) for x, y in pairs if x.is_floating_point()]
    return max(differences) / max(float(x.abs().max()) for x in a if x.is_floating_point())


def copy_into(module: nn.Module, state: State) -> None:
    """Our values into a peer's module, in place; its entries have the same order but other names."""
    with torch.no_grad():
        for mine, value in zip(module.state_dict().values(), state.values(), strict=True):
            mine.copy_(value)


def record(peer: str, commit: str, name: str, found: Mapping[str, Any], terms: Mapping[str, Any] | None = None) -> None:
    """Write what was found of a method into docs/agreement.json, beside what is there of the same version of the peer
    and the same terms. `terms`: of this peer alone, if they are not those of the others."""
    known = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    if known.get("terms") != SAID:
        known = {"terms": SAID}
    begun = {"commit": commit} | ({"terms": dict(terms)} if terms else {})
    entry = known.setdefault(peer, {})
    if {key: value for key, value in entry.items() if key != "rows"} != begun:
        known[peer] = entry = {**begun, "rows": {}}
    entry["rows"].setdefault(name, {}).update(found)
    temporary = FIGURES.with_suffix(".tmp")
    temporary.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    temporary.rename(FIGURES)
