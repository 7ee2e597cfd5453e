"""FedSA-LoRA: Guo, Zeng, Wang, Wang, Wang, Qu, "Selective Aggregation for Low-Rank Adaptation in Federated Learning",
ICLR 2025: as FedBN leaves batch normalisation with each client, so here the matrices B of the adapters B A; only the A
are averaged.

Bytes per client and round, before lossless coding: 4 D_A down and 4 D_A up, where D_A counts the values of the A.
"""

from __future__ import annotations

from dataclasses import dataclass

import fewbytes as fb
from fewbytes.methods.parts import averaging
from fewbytes.methods.parts.averaging import GlobalModel, Model, Own, Trained


@dataclass(frozen=True)
class FedSA(fb.Method):
    """Hyper-parameters of local training."""

    local: fb.Local = fb.Local(epochs=1, lr=0.01, batch=10)

    promises = fb.Promises(headline="personalised")

    def server(self, problem: fb.Problem) -> GlobalModel:
        names = [name for name in problem.first_state() if "lora_B" not in name]
        if len(names) == len(problem.first_state()):
            raise fb.UserError("FedSA is for models with LoRA adapters: give it some (--lora rank=8)")
        return averaging.first_shared(problem, names)

    def client(self, site: fb.Site) -> Own:
        return Own({})

    def round(self, state: GlobalModel, net: fb.Network, t: int) -> None:
        replies = net.call(self.train, to=net.clients, send=Model(fb.Dense(state.theta)))
        state.theta = averaging.means_over(state.theta, replies, net)

    def train(self, state: Own, message: Model, site: fb.Site) -> Trained:
        return averaging.train_shared(state, message, site, self.local)

    def local_model(self, state: Own, site: fb.Site):
        return averaging.own_model(state, site)
