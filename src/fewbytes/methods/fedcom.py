"""FedCOM and FedCOMGATE: Haddadpour, Kamani, Mokhtari, Mahdavi, "Federated Learning with Compression: Unified Analysis
and Sharp Guarantees", AISTATS 2021, Algorithms 1 and 2.

Every client trains the server's model and sends its change D_i = w_i - w, with each tensor rounded to 2^bits evenly
spaced values; the server adds their plain mean, w <- w + gamma mean D_i. With `gate` (FedCOMGATE), clients step along
g - delta_i. After tau steps, delta_i <- delta_i + (mean D - D_i) / (lr tau), which tracks how far the client's gradient
is from the mean gradient. Batch-norm statistics are averaged without rounding.

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
    """A client's state, with `gate`: delta_i, without the mean change of the client's last round."""

    delta: State
    theta: State  # w of that round
    round: int  # its number
    rate: float  # its lr tau

    def settled(self, theta: State, t: int, gamma: float) -> State:
        """delta_i in round t, with the mean change per round since then, from the server's model."""
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
        """All parameters: the rounding is fine."""
        return [name for name, p in model.named_parameters() if p.requires_grad]
