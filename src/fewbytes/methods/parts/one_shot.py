"""Base of one-shot methods: clients train and upload once; the server may then distil the uploads."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from torch import nn

from fewbytes.base.cores import all_cores
from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.ranges import WHOLE
from fewbytes.base.state import State, in_training, load_state, state_of
from fewbytes.base.streams import seed_all, untouched
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.training import Local, prepared
from fewbytes.models import LogitMean
from fewbytes.wire import Dense, payload

LONG = Local(epochs=200, lr=0.01, batch=128, momentum=0.9)
"""FuseFL's local training, used in its paper for all compared methods."""


def shorter(local: Local, epochs: int) -> Local:
    """Local training adjusted to learn fast in few epochs."""
    return replace(local, epochs=epochs, steps=0, lr=0.05, batch=16)


def of_stage(local: Local, k: int, stages: int) -> Local:
    """Local training of stage k = 0, 1, …: E/K of the epochs (or steps), integers that sum to E."""
    return local.lasting(local.length * (k + 1) // stages - local.length * k // stages)


def check_stages(local: Local, stages: int, words: str, fewer: str = "") -> None:
    """Raises UserError for fewer epochs (or steps) than stages; `words` names stages, `fewer` how to reduce them."""
    if local.length < stages:
        counted = "steps" if local.steps else "epochs"
        raise UserError(
            f"{counted} {local.length} cannot be divided among {stages} {words}: set {counted}={stages} or more{fewer}"
        )


@payload
class Trained:
    """Client to server: the trained model, batch-norm statistics included."""

    theta: Annotated[Dense, WHOLE]


@dataclass
class Uploads:
    """The server's state."""

    models: dict[Id, State] = field(default_factory=dict)  # theta_m of clients that replied; removed after distillation
    student: State | None = None  # the model they are distilled into


@dataclass(frozen=True)
class OneShot(Method):
    """A method whose clients train once, from the same first model, and upload once; subclasses define the server's
    use of the uploads."""

    local: Local = LONG

    promises = Promises(sends="its whole model, once")
    needs: ClassVar[type[Objective]] = Classification

    def server(self, problem: Problem) -> Uploads:
        return Uploads()

    def planned_rounds(self, asked: int) -> int:
        return 1

    def round(self, state: Uploads, net: Network, t: int) -> None:
        state.models = {m: reply.theta.dense() for m, reply in net.call(self.train, to=net.clients)}

    def train(self, state: None, message: None, site: Site) -> Trained:
        model = site.model()
        site.fit(model, self.local)
        site.score("personalised", model)
        return Trained(Dense(state_of(model)))


@dataclass(frozen=True)
class Distilled(OneShot):
    """A one-shot method whose server distils the ensemble of uploads into one student, which replaces them."""

    promises = replace(OneShot.promises, scored_after_finish=True, finish_exchanges=False)

    def finish(self, state: Uploads, net: Network) -> None:
        with untouched(), all_cores():
            seed_all(int(net.rng.integers(1 << 62)))
            student = prepared(net.problem.first_model(state.student))
            teacher = prepared(ensemble(state.models, net.problem)).requires_grad_(False)
            self.distil(in_training(student), teacher, net.problem)
        state.student, state.models = state_of(student), {}

    @abstractmethod
    def distil(self, student: nn.Module, teacher: LogitMean, problem: Problem) -> None:
        """Train the student in place; the teacher is in eval mode, without gradients."""

    def global_model(self, state: Uploads, problem: Problem) -> nn.Module | None:
        return None if state.student is None else problem.first_model(state.student)


def check_images(problem: Problem, name: str) -> None:
    """Raises UserError if samples are not images, for a method that generates images."""
    shape = problem.sample_shape
    if len(shape) != 3:
        raise UserError(f"{name} generates images (channels, height, width), but samples have shape {shape}; try FedDF")


def ensemble(models: dict[Id, State], problem: Problem) -> LogitMean:
    """The clients' models as one that averages their logits, in eval mode. Raises MethodError if there are none."""
    if not models:
        raise MethodError("no client replied, so there is no ensemble")
    members = [problem.model(m) for m in models]
    for member, theta in zip(members, models.values(), strict=True):
        load_state(member, theta)
    mean = LogitMean(members)
    mean.recipe = {"kind": "ensemble", "clients": list(models)}
    return mean.eval()
