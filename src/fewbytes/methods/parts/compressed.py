"""What methods share whose clients send their change of the model, compressed; batch-norm statistics go as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from fewbytes.base.state import Mean, State, state_of
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Task
from fewbytes.core.ranges import BelowOne, Count, NotNegative, Positive, Share, Whole
from fewbytes.core.site import Site
from fewbytes.core.training import annealed
from fewbytes.methods.fedavg import Model
from fewbytes.wire import Dense


@dataclass
class Global:
    """The server's state."""

    theta: State  # the model's parameters
    buffers: State  # its batch-norm statistics


@dataclass
class Residual:
    """A client's state, for error feedback."""

    error: State  # what it could not send yet, e_i; nothing at first

    def added(self, change: State) -> State:
        """Delta_i + e_i."""
        return {name: value + self.error[name] if name in self.error else value for name, value in change.items()}

    def keep(self, wanted: State, sent: State) -> None:
        """e_i is what was wanted and not sent."""
        self.error = {name: value - sent[name] for name, value in wanted.items()}


@dataclass(frozen=True)
class Compressed(Method):
    """Hyper-parameters of local training."""

    fraction: Share = 1.0
    epochs: Count = 1
    lr: Positive = 0.01
    batch: Count = 10
    momentum: BelowOne = 0.0
    weight_decay: NotNegative = 0.0
    lr_rounds: Whole = 0  # lr falls to 0 by a cosine over so many rounds; 0: it stays

    headline: ClassVar[str] = "global"

    def server(self, task: Task) -> Global:
        first, learnt = task.first_state(), dict(task.first_model().named_parameters(remove_duplicate=False))
        return Global(
            {name: value for name, value in first.items() if name in learnt},
            {name: value for name, value in first.items() if name not in learnt},
        )

    def round(self, state: Global, net: Network, t: int) -> None:
        mean = Mean()
        message = Model(Dense(state.theta | state.buffers))
        for _, reply in net.call(self.train, to=net.sample(self.fraction), send=message):
            mean.add(reply.change.dense() | reply.buffers.dense())
        received = mean()
        state.buffers = {name: received[name] for name in state.buffers}
        self.move(state, {name: value for name, value in received.items() if name in state.theta})

    def move(self, state: Any, change: State) -> None:
        """Apply the mean of the clients' changes to the model."""
        state.theta = state.theta | {name: state.theta[name] + value for name, value in change.items()}

    @abstractmethod
    def train(self, state: Any, message: Model, site: Site) -> Any:
        """Train, and reply with a payload of `change`, a wire value, and `buffers`, Dense."""

    def fitted(
        self, message: Model, site: Site, momentum: float, before_step: Callable[[nn.Module], None] | None = None
    ) -> tuple[State, Dense]:
        """Train the model: Delta_i of every parameter that learns, and the batch-norm statistics.

        `before_step` is called with the model when a batch's gradients are there.
        """
        theta = message.theta.dense()
        model = site.model(theta)
        site.fit(
            model, epochs=self.epochs, lr=annealed(self.lr, site.round, self.lr_rounds), batch=self.batch,
            momentum=momentum, weight_decay=self.weight_decay,
            before_step=None if before_step is None else lambda: before_step(model),
        )  # fmt: skip
        site.score("personalised", model)
        after, parameters = state_of(model), dict(model.named_parameters(remove_duplicate=False))
        change = {name: after[name] - theta[name] for name, p in parameters.items() if p.requires_grad}
        return change, Dense({name: value for name, value in after.items() if name not in parameters})

    def global_model(self, state: Global, task: Task) -> nn.Module:
        return task.first_model(state.theta | state.buffers)

    def observed(self, model: nn.Module) -> None:
        """What is sent is compressed, and holds what earlier rounds left over: not this round's gradient."""
