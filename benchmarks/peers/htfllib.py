"""Compares fewbytes with HtFLlib (https://github.com/TsingZ0/HtFLlib): methods of clients that keep their own models.

    git clone https://github.com/TsingZ0/HtFLlib
    python benchmarks/peers/htfllib.py --htfllib HtFLlib          # all methods; writes docs/agreement.json
    python benchmarks/peers/htfllib.py --htfllib HtFLlib fedgh    # these methods alone
    python benchmarks/peers/page.py                               # then: the tables of docs/agreement.md and the pages

It needs what PFLlib needs. HtFLlib never shuffles, and leaves the last incomplete batch out for ever: with
`order="stored"`, fewbytes does not shuffle either, but goes on where it stopped.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.nn.functional as F
from common import LR, ROUNDS, SAME_LR, TERMS, Row, copy_into
from compare import Peer, main
from torch import nn
from tsingz0 import Watch

import fewbytes as fb

STORED: dict[str, Any] = {**TERMS, "order": "stored"}
MODELS = ("-m", "HtFE-img-2", "-fd", "64")
"""Their family of a CNN and torchvision's ResNet-18, both of which are our model here, with 64 features."""


class Store(dict[tuple[str, str], Any]):
    """In memory what HtFLlib writes to disk and reads again: copies, by owner and name."""

    def save(self, item: Any, role: str, name: str, folder: str | None = None) -> None:
        self[role, name] = copy.deepcopy(item)

    def load(self, role: str, name: str, folder: str | None = None) -> Any:
        return copy.deepcopy(self.get((role, name)))


STORE = Store()


class StoredWatch(Watch):
    """HtFLlib's server and clients have their models in the store."""

    def give(self, client: Any, state: Any, extra: Any) -> None:
        for name, value in (("model", state), ("W_h", getattr(extra, "w", None))):
            if (client.role, name) in STORE:
                copy_into(STORE[client.role, name], value)

        if (client.role, "global_model") in STORE:
            copy_into(STORE[client.role, "global_model"], self.task.problem.first_state())

    def give_server(self, server: Any) -> None:
        if (server.role, "global_model") in STORE:
            copy_into(STORE[server.role, "global_model"], self.task.problem.first_state())
        if (server.role, "head") in STORE:
            STORE[server.role, "head"] = STORE.load(server.clients[0].role, "model").head

    def model_of(self, client: Any) -> nn.Module:
        model: nn.Module = STORE[client.role, "model"]
        return model


def first_send_left_out(server: Any) -> None:
    """fewbytes sends nothing in round 1: all begin with their own classifier."""
    send = server.send_parameters

    def left_out() -> None:
        server.send_parameters = send

    server.send_parameters = left_out


def distance_of_logits(server: Any) -> None:
    """The mean squared distance to the mean logits, where HtFLlib takes these logits as cross-entropy's targets."""
    for client in server.clients:
        client.loss = lambda z, y: F.mse_loss(z, y) if y.is_floating_point() else F.cross_entropy(z, y)


def one_batch(server: Any) -> None:
    """One batch of all means, whose order is drawn."""
    server.batch_size = MEANS


MEANS = 1000  # at most, of classes at clients
METHODS = {
    "separate": Row(fb.Separate(**STORED), "Local"),
    "fedproto": Row(fb.FedProto(**STORED, lambda_proto=1.0), "FedProto", ("-lam", "1"), sent="combined"),
    "feddistill": Row(fb.FedDistill(**STORED, gamma=1.0), "FD", ("-lam", "1"), adjust=distance_of_logits),
    "lg_fedavg": Row(fb.LG_FedAvg(**STORED), "LG-FedAvg", sent="combined", adjust=first_send_left_out),
    "fml": Row(fb.FML(**STORED, alpha=0.5, beta=0.5), "FML", ("-al", "0.5", "-bt", "0.5")),
    "fedkd": Row(
        fb.FedKD(**STORED, energy_rounds=ROUNDS),
        "FedKD",
        ("-mlr", str(LR)),
        same=({"energy_start": 0.5, "energy_end": 0.5}, ("-mlr", str(SAME_LR), "-Ts", "0.5", "-Te", "0.5")),
    ),
    "fedgen": Row(
        fb.FedGen(**STORED, release_quirks=True),
        "FedGen",
        ("-nd", "32", "-se", "100", "-glr", "0.1"),
        sent="combined",
        same=None,
    ),
    "fedgh": Row(
        fb.FedGH(**STORED),
        "FedGH",
        ("-slr", "0.01", "-se", "1"),
        sent="combined",
        same=({"server_batch": MEANS}, ()),
        adjust=one_batch,
    ),
}


def patches(watch: Watch) -> Iterator[Any]:
    """Items stay in memory, and our model takes the place of both of the family's."""
    STORE.clear()
    for name in ("clients.clientbase", "servers.serverbase"):
        module: Any = importlib.import_module(f"flcore.{name}")
        module.save_item, module.load_item = STORE.save, STORE.load  # for good: the other modules import them by name
    models = importlib.import_module("flcore.trainmodel.models")

    def build(**kinds: Any) -> nn.Module:
        model: nn.Module = models.FedAvgCNN()  # by now ours
        return model

    yield mock.patch.object(models.torchvision.models, "resnet18", build)


if __name__ == "__main__":
    main(Peer("htfllib", METHODS, patches, StoredWatch, MODELS), __doc__)
