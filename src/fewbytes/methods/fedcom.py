"""FedCOM and FedCOMGATE: Haddadpour, Kamani, Mokhtari, Mahdavi, "Federated Learning with Compression: Unified Analysis
and Sharp Guarantees", AISTATS 2021, Algorithms 1 and 2.

Every client trains the server's model and sends its change D_i = w_i - w, each tensor of it rounded to 2^bits evenly
spaced values; the server moves by their plain mean, w <- w + gamma mean D_i. With `gate` (FedCOMGATE) clients take the
steps g - delta_i, where delta_i <- delta_i + (mean D - D_i) / (lr tau) after tau steps tracks how the client's gradient
differs from everybody's. Batch-norm statistics are averaged as they are.

Bytes per client and round, before lossless coding: 4 D down; bits/8 d + 8 for each of its tensors + 4 s up, where the
model's D values are d parameters and s batch-norm statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn

from fewbytes.base.ranges import EXACT, LEARNT, SENT, STATISTICS, Positive, Share
from fewbytes.base.state import State
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import compressed
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.compressed import ServerModel
from fewbytes.wire import Dense, Quantised, payload


@payload
class Rounded:
    """Client to server: D_i, rounded, and the batch-norm statistics."""

    change: Annotated[Quantised, SENT, LEARNT]
    buffers: Annotated[Dense, SENT, STATISTICS, EXACT]


@dataclass
class Tracking:
    """A client's state, with `gate`: delta_i, but for the mean change of the round it last took part in."""

    delta: State
    theta: State  # w of that round
    round: int  # which it was
    rate: float  # its lr tau

    def settled(self, theta: State, t: int, gamma: float) -> State:
        """delta_i in round t: with the mean change a round since then, as the server's model moved."""
        scale = 1 / (gamma * max(t - self.round, 1) * self.rate) if self.delta else 0.0
        return {name: value + (theta[name] - self.theta[name]) * scale for name, value in self.delta.items()}


@dataclass(frozen=True)
class FedCOM(Method):
    """Hyper-parameters of FedCOM."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.01, batch=10)
    bits: Literal[8, 16] = 16  # per value
    gamma: Positive = 1.0  # the server's step size
    gate: bool = False  # FedCOMGATE: clients correct for their gradients' difference from the mean

    promises = Promises(
        sends="its change of the model, 8 or 16 bits a value", aggregates=EVERY_RULE, protects={"clients"}
    )

    def server(self, problem: Problem) -> ServerModel:
        return compressed.first_server_model(problem)

    def client(self, site: Site) -> Tracking | None:
        return Tracking({}, {}, 0, 0.0) if self.gate else None

    def round(self, state: ServerModel, net: Network, t: int) -> None:
        replies = net.call(self.train, to=net.sample(self.fraction), send=compressed.message(state))
        change = compressed.take_means(state, replies, net)
        state.theta = compressed.moved(state.theta, {name: self.gamma * value for name, value in change.items()})

    def train(self, state: Tracking | None, message: Model, site: Site) -> Rounded:
        theta, steps = message.theta.dense(), 0
        delta = {} if state is None else state.settled(theta, site.round, self.gamma)

        def correct(model: nn.Module) -> None:
            nonlocal steps
            steps += 1
            for name, p in model.named_parameters():
                if name in delta and p.grad is not None:
                    p.grad.sub_(delta[name].to(p.device))

        change, buffers = compressed.trained_change(message, site, self.local, correct)
        sent = Quantised.of(change, self.bits)
        rate = self.local.lr_in(site.round) * steps
        if state is not None and rate > 0:
            state.theta, state.round, state.rate = {name: theta[name] for name in change}, site.round, rate
            state.delta = {name: delta.get(name, 0) - value / rate for name, value in sent.dense().items()}
        return Rounded(sent, buffers)

    def global_model(self, state: ServerModel, problem: Problem) -> nn.Module:
        return compressed.whole(state, problem)

    def observed(self, model: nn.Module) -> list[str]:
        """All of them: they are rounded, but finely."""
        return [name for name, p in model.named_parameters() if p.requires_grad]
