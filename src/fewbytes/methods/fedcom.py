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
from typing import ClassVar, Literal

from torch import nn

from fewbytes.method import Method, Site, Task
from fewbytes.methods.fedavg import Model
from fewbytes.net import Network
from fewbytes.state import Mean, State, state_of
from fewbytes.training import annealed
from fewbytes.wire import Dense, Quantised, payload


@payload
class Change:
    """Client to server: D_i, rounded, and the batch-norm statistics."""

    change: Quantised
    buffers: Dense


@dataclass
class Global:
    """The server's state."""

    theta: State  # w
    buffers: State  # batch-norm statistics


@dataclass
class Tracking:
    """A client's state, with `gate`: delta_i, but for the mean change of the round it last took part in."""

    delta: State
    theta: State  # w of that round
    round: int  # which it was
    rate: float  # its lr tau


@dataclass(frozen=True)
class FedCOM(Method):
    """Hyper-parameters of FedCOM."""

    bits: Literal[8, 16] = 16  # of a value
    gamma: float = 1.0  # the server's step
    gate: bool = False  # FedCOMGATE: clients track how their gradients differ from the mean
    fraction: float = 1.0
    epochs: int = 1
    lr: float = 0.01  # eta
    batch: int = 10
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_rounds: int = 0  # lr falls to 0 by a cosine over so many rounds; 0: it stays

    headline: ClassVar[str] = "global"

    def server(self, task: Task) -> Global:
        learnt = dict(task.first_model().named_parameters(remove_duplicate=False))
        first = task.first_state()
        return Global(
            {name: value for name, value in first.items() if name in learnt},
            {name: value for name, value in first.items() if name not in learnt},
        )

    def client(self, site: Site) -> Tracking | None:
        return Tracking({}, {}, 0, 0.0) if self.gate else None

    def round(self, state: Global, net: Network, t: int) -> None:
        mean = Mean()
        message = Model(Dense(state.theta | state.buffers))
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=message):
            mean.add(reply.change.dense() | reply.buffers.dense())
        moved = mean()
        state.theta = {name: value.add(moved[name], alpha=self.gamma) for name, value in state.theta.items()}
        state.buffers = {name: moved[name] for name in state.buffers}

    def train(self, state: Tracking | None, message: Model, site: Site) -> Change:
        theta = message.theta.dense()
        model = site.model(theta)
        lr, steps = annealed(self.lr, site.round, self.lr_rounds), 0
        delta = {} if state is None else tracked(state, theta, site.round, self.gamma)
        tracks = [(p, delta[name].to(p.device)) for name, p in model.named_parameters() if name in delta]

        def correct() -> None:
            nonlocal steps
            steps += 1
            for p, difference in tracks:
                if p.grad is not None:
                    p.grad.sub_(difference)

        site.fit(
            model, epochs=self.epochs, lr=lr, batch=self.batch, momentum=self.momentum,
            weight_decay=self.weight_decay, before_step=correct,
        )  # fmt: skip
        site.score("personalised", model)
        learnt = dict(model.named_parameters(remove_duplicate=False))
        after = state_of(model)
        change = Quantised.of({name: after[name] - theta[name] for name in learnt}, self.bits)
        if state is not None and lr * steps > 0:
            state.theta, state.round, state.rate = {name: theta[name] for name in learnt}, site.round, lr * steps
            state.delta = {name: delta.get(name, 0) - value / state.rate for name, value in change.dense().items()}
        return Change(change, Dense({name: value for name, value in after.items() if name not in learnt}))

    def global_model(self, state: Global, task: Task) -> nn.Module:
        return task.first_model(state.theta | state.buffers)

    def observed(self, model: nn.Module) -> list[str]:
        """All of them: they are rounded, but finely."""
        return [name for name, p in model.named_parameters() if p.requires_grad]


def tracked(state: Tracking, theta: State, t: int, gamma: float) -> State:
    """delta_i in round t: with the mean change a round since the client last took part, as the server's model moved."""
    rounds = gamma * (t - state.round) * state.rate
    return {name: value + (theta[name] - state.theta[name]) / rounds for name, value in state.delta.items()}
