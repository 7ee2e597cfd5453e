"""Compares fewbytes with PFLlib (https://github.com/TsingZ0/PFLlib): the same data, first weights, terms and rounds.

    git clone https://github.com/TsingZ0/PFLlib
    python benchmarks/peers/pfllib.py --pfllib PFLlib           # all methods, minutes; writes docs/agreement.json
    python benchmarks/peers/pfllib.py --pfllib PFLlib fedavg    # these methods alone
    python benchmarks/peers/page.py                             # then: the tables of docs/agreement.md and the cards

PFLlib needs scikit-learn, h5py and torchvision, beside what fewbytes needs. A method is one row of METHODS.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from common import LR, ROUNDS, SAME_LR, TERMS, Row, copy_into
from compare import Peer, main
from torch import Tensor, nn
from tsingz0 import Watch, read

import fewbytes as fb
from fewbytes.methods.fedbn import without_batch_norm
from fewbytes.methods.fedrep import body


def first_send_left_out(server: Any) -> None:
    """fewbytes sends nothing in round 1: all begin with their own classifier."""
    send = server.send_models

    def left_out() -> None:
        server.send_models = send

    server.send_models = left_out


def distance_of_logits(server: Any) -> None:
    """The mean squared distance to the mean logits, where PFLlib takes these logits as cross-entropy's targets."""
    for client in server.clients:
        client.loss = lambda z, y: F.mse_loss(z, y) if y.is_floating_point() else F.cross_entropy(z, y)


def own_head(server: Any) -> None:
    """A classifier of the server's own, which client 0's training does not change, and one batch of all means."""
    server.head, server.batch_size = copy.deepcopy(server.head), MEANS
    server.opt_h = torch.optim.SGD(server.head.parameters(), lr=server.server_learning_rate)


def kept_apart(server: Any) -> None:
    """A client's personal model of its own, where PFLlib keeps the parameters that then hold the shared one; it is
    tested until the shared one is sent. And no weight decay of 0.001."""
    for client in server.clients:
        client.optimizer.param_groups[0]["mu"], client.model_per = 0.0, copy.deepcopy(client.model)
        client.optimizer.step = partial(_stepped, client, client.optimizer.step)
        client.set_parameters = partial(_sent, client, client.set_parameters)


def _stepped(client: Any, step: Any, *given: Any) -> Any:
    found = step(*given)
    copy_into(client.model_per, client.model.state_dict())
    client.test_metrics_personalized = partial(_tested, client)
    return found


def _tested(client: Any) -> Any:
    client.model, shared = client.model_per, client.model
    found, client.model = client.test_metrics(), shared
    return found


def _sent(client: Any, set_parameters: Any, model: nn.Module) -> None:
    set_parameters(model)
    vars(client).pop("test_metrics_personalized", None)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.reshape(-1) for p in model.parameters()])


class SquaredNorms:
    """torch, where the norm of a difference is squared, as in FedDyn's paper."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def norm(self, x: Tensor, p: int) -> Tensor:
        return torch.linalg.vector_norm(x, p) ** 2


def squared_distance(server: Any) -> None:
    """The distance in a client's loss squared, while it trains."""
    norms = mock.patch.object(importlib.import_module("flcore.clients.clientdyn"), "torch", SquaredNorms())
    for client in server.clients:
        client.train = norms(client.train)


MEANS = 1000  # at most, of classes at clients
METHODS = {
    "separate": Row(fb.Separate(**TERMS), "Local"),
    "fedavg": Row(fb.FedAvg(**TERMS), "FedAvg", sent="global"),
    "fedprox": Row(fb.FedProx(**TERMS, mu=0.1), "FedProx", ("-mu", "0.1"), sent="global"),
    "scaffold": Row(fb.SCAFFOLD(**TERMS), "SCAFFOLD", sent="global"),
    "fedper": Row(fb.FedPer(**TERMS), "FedPer", sent=body),
    "fedrep": Row(fb.FedRep(**TERMS, head_epochs=2), "FedRep", ("-pls", "2"), sent=body, weighted=False, even=True),
    "fedbn": Row(fb.FedBN(**TERMS), "FedBN", sent=without_batch_norm, norm=True),
    "ditto": Row(fb.Ditto(**TERMS, lambda_near=0.5, personal_epochs=2), "Ditto", ("-mu", "0.5", "-pls", "2")),
    "fedproto": Row(fb.FedProto(**TERMS, lambda_proto=1.0), "FedProto", ("-lam", "1"), sent="combined"),
    "feddistill": Row(fb.FedDistill(**TERMS, gamma=1.0), "FD", ("-lam", "1"), adjust=distance_of_logits),
    "lg_fedavg": Row(fb.LG_FedAvg(**TERMS), "LG-FedAvg", sent="combined", adjust=first_send_left_out),
    "fml": Row(fb.FML(**TERMS, alpha=0.5, beta=0.5), "FML", ("-al", "0.5", "-bt", "0.5")),
    "fedkd": Row(fb.FedKD(**TERMS, energy_rounds=ROUNDS), "FedKD", ("-mlr", str(LR)),
                 same=({"energy_start": 0.5, "energy_end": 0.5}, ("-mlr", str(SAME_LR), "-Ts", "0.5", "-Te", "0.5"))),
    "fedgen": Row(fb.FedGen(**TERMS), "FedGen", ("-lf", "True", "-nd", "32", "-se", "100", "-glr", "0.1"),
                  sent="combined", same=None),
    "fedgh": Row(fb.FedGH(**TERMS), "FedGH", ("-slr", "0.01"), sent="combined",
                 same=({"server_batch": MEANS}, ()), adjust=own_head),
    "feddyn": Row(fb.FedDyn(**TERMS, alpha=0.1, weight_decay=0.0, clip=0.0), "FedDyn", ("-al", "0.1"), sent="global",
                  adjust=squared_distance),
    "moon": Row(fb.MOON(**TERMS, weight_decay=0.0), "MOON", ("-mu", "1", "-tau", "0.5"), sent="global"),
    "fedala": Row(fb.FedALA(**TERMS), "FedALA", sent="combined", begins=True,
                  same=({"portion": 1.0}, ("-s", "100"))),
    "pfedme": Row(fb.PFedMe(**TERMS, steps=0, lambda_near=5.0, personal_lr=0.1), "pFedMe",
                  ("-lam", "5", "-lrp", "0.1", "-K", "5", "-bt", "1"), sent="global", even=True, adjust=kept_apart),
}  # fmt: skip


def patches(watch: Watch) -> Iterator[Any]:
    """Results are not written; of what FedALA and FedDyn do on their own: reading data, and views of parameters whose
    layout in memory has none."""
    servers, ala, dyn = (
        importlib.import_module(f"flcore.{name}")
        for name in ("servers.serverbase", "clients.clientala", "clients.clientdyn")
    )
    yield mock.patch.object(servers.Server, "save_global_model", return_value=None)
    yield mock.patch.object(ala, "read_client_data", partial(read, watch))
    yield mock.patch.object(dyn, "model_parameter_vector", flat)


if __name__ == "__main__":
    main(Peer("pfllib", METHODS, patches), __doc__)
