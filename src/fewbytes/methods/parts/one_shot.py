"""What one-shot methods share: clients train once and upload once; the server may then distil what it got."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from fewbytes.base.cores import all_cores
from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.state import State, in_training, load_state, state_of
from fewbytes.base.streams import seed_all, untouched
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Task
from fewbytes.core.ranges import BelowOne, Count, Positive
from fewbytes.core.site import Site
from fewbytes.core.training import FINDS_NO_OBJECTS, prepared
from fewbytes.models import LogitMean
from fewbytes.wire import Dense, payload


@payload
class Trained:
    """Client to server: the trained model, batch-norm statistics included."""

    theta: Dense


@dataclass
class Uploads:
    """The server's state."""

    models: dict[Id, State] = field(default_factory=dict)  # theta_m of the clients that answered; gone once distilled
    student: State | None = None  # the model they are distilled into


@dataclass(frozen=True)
class OneShot(Method):
    """Hyper-parameters of the local training; FuseFL's values."""

    epochs: Count = 200  # E
    lr: Positive = 0.01
    batch: Count = 128
    momentum: BelowOne = 0.9

    headline: ClassVar[str] = "global"

    def server(self, task: Task) -> Uploads:
        if task.data.test.boxes is not None:  # these methods average logits
            raise UserError(FINDS_NO_OBJECTS)
        return Uploads()

    def planned_rounds(self, asked: int) -> int:
        return 1

    def round(self, state: Uploads, net: Network, t: int) -> None:
        state.models = {m: reply.theta.dense() for m, reply in net.call(self.train, to=net.clients)}

    def train(self, state: None, message: None, site: Site) -> Trained:
        model = site.model()
        site.fit(model, epochs=self.epochs, lr=self.lr, batch=self.batch, momentum=self.momentum)
        site.score("personalised", model)
        return Trained(Dense(state_of(model)))


@dataclass(frozen=True)
class Distilled(OneShot):
    """A one-shot method whose server distils the ensemble of the uploads into one student, after the round."""

    scored_after_finish: ClassVar[bool] = True

    def finish(self, state: Uploads, net: Network) -> None:
        with untouched(), all_cores():
            seed_all(int(net.rng.integers(1 << 62)))
            student = prepared(net.task.first_model(state.student))
            teacher = prepared(ensemble(state.models, net.task)).requires_grad_(False)
            self.distil(in_training(student), teacher, net.task)
        state.student, state.models = state_of(student), {}

    @abstractmethod
    def distil(self, student: nn.Module, teacher: LogitMean, task: Task) -> None:
        """Train the student in place; the teacher is in eval mode and has no gradients."""

    def global_model(self, state: Uploads, task: Task) -> nn.Module | None:
        return None if state.student is None else task.first_model(state.student)


@dataclass(frozen=True)
class DataFree(Distilled):
    """A method whose server makes the images it distils on."""

    def server(self, task: Task) -> Uploads:
        shape = task.sample_shape
        if len(shape) != 3:
            name = type(self).__name__
            raise UserError(f"{name} makes images (channels, height, width), but samples have shape {shape}; try FedDF")
        return super().server(task)


def ensemble(models: dict[Id, State], task: Task) -> LogitMean:
    """The clients' models as one that averages their logits, in eval mode. Raises MethodError if there is none."""
    if not models:
        raise MethodError("an ensemble of nothing: no client replied")
    members = [task.model(m) for m in models]
    for member, theta in zip(members, models.values(), strict=True):
        load_state(member, theta)
    mean = LogitMean(members)
    mean.recipe = {"kind": "ensemble", "clients": list(models)}
    return mean.eval()
