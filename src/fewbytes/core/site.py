"""A handler's view of its client: data, randomness, a model to work with, local training, measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from fewbytes.base.errors import MethodError, UserError, suggestion
from fewbytes.base.state import State, in_training, load_state, state_of
from fewbytes.base.streams import seeded, stream_seed, untouched
from fewbytes.core.graphs import Recordings
from fewbytes.core.metrics import Scores, values
from fewbytes.core.privacy import Diary, PrivateSteps, gaussian, random_bytes
from fewbytes.core.problem import Id, Posed
from fewbytes.core.recalibration import recalibrate
from fewbytes.core.records import Records
from fewbytes.core.reused import Reused, undone
from fewbytes.core.training import Hooks, Local, Saves, Saving, fit, outputs, prepared, ready, steps_of
from fewbytes.data.named import NamedTensors, one_tensor
from fewbytes.data.split import LazySamples, Split

PIECE = 256  # samples compared at a time


def handler_stream(seed: int, client: Id, t: int, what: str) -> np.random.Generator:
    """The initial `Site.rng` of a handler, for a server that checks a client's draws."""
    return np.random.default_rng(stream_seed(seed, "client", client, t, what))


@dataclass
class Shared:
    """Shared state of the sites in a process: `models` to reuse, `recordings` of their steps on a GPU, and the `diary`
    of clients' privacy spending, if the problem gives privacy to samples."""

    diary: Diary | None = None
    models: dict[Any, Reused] = field(default_factory=dict)
    recordings: Recordings = field(default_factory=dict)


@dataclass(frozen=True)
class Given:
    """What a run gives a client for a handler. `steps`: the number of local steps; 0: the method's own; None: a run
    without a round time, in which steps are not reported. `saves`: where local training is saved as it goes (None: it
    is not). `validates`: whether the model is scored on validation data before its training, as the server has none."""

    steps: int | None = None
    saves: Saves | None = None
    validates: bool = False


class Site:
    """A handler's view of its client: its data, its randomness, a model to work with, the training loop.

    `me`: the client's number; `round`; `train`, `test`: its samples, with `len`; `device`; `problem`.

    Made by the engine for the handler `what` in round `t`. `scored`: whether this round has scores.

    >>> from dataclasses import dataclass
    >>> import fewbytes as fb
    >>> import torch
    >>> @dataclass(frozen=True)
    ... class Looking(fb.Method):
    ...     def round(self, state, net, t):
    ...         net.tell(self.look)
    ...
    ...     def look(self, state: None, message: None, site: fb.Site) -> None:
    ...         site.measure("classes", len(site.train.labels.unique()))
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> clients = [((x, y), (x, y)), ((x[:2], y[:2]), (x, y))]
    >>> fb.run(Looking(), fb.Task.of(lambda: torch.nn.Linear(4, 4), clients), rounds=1).rounds[-1]["measured"]
    {'classes': 3.0}
    """

    def __init__(
        self, task: Posed, me: Id, t: int, what: str, shared: Shared | None = None, scored: bool = True
    ) -> None:
        self.problem, self.me, self.round = task.problem, me, t
        self.device = task.problem.device
        self.train: Split = task.data.clients[me].train
        self.test: Split = task.data.clients[me].test
        self.validation: Split = task.data.clients[me].validation or self.test.take([])
        self.seed = stream_seed(self.problem.seed, "client", me, t, what)
        """The engine's seed for the global generators before the handler runs: torch's and, for transforms of users'
        data sets, Python's and numpy's."""
        self.records = Records()
        self.given = Given()
        self._what, self._scored, self._shared = what, scored, shared or Shared()
        self._taken, self._fitted = 0, False  # models, with privacy of samples
        self.received: Scores = {}  # of the first model before its training, on validation data
        self._loaded: dict[int, tuple[Tensor | NamedTensors | LazySamples, Tensor]] = {}

    @cached_property
    def rng(self) -> np.random.Generator:
        """Named randomness of this handler."""
        return np.random.default_rng(self.seed)

    def model(self, state: State | None = None, fresh: bool = False, of: Id | None = None) -> nn.Module:
        """A model of this client's architecture with `state`'s entries, others as in the task's first model.

        `fresh`: with new random weights of this client instead of the first model's. `of`: another client's
        architecture. Valid until the handler returns: other clients reuse the module object, and its state outside the
        state dict, such as a counter in Python, is reset. Calling again gives a second module.
        """
        owner = self.me if of is None else of
        key = (self.problem.architecture(owner), self._taken)
        self._taken += 1
        models = self._shared.models
        model = models[key].again() if key in models else None
        if model is None:
            model = prepared(self.problem.model(owner))
            models[key] = Reused(model)
        for p in model.parameters():
            p.requires_grad_(p.trained)  # type: ignore[attr-defined]
            p.grad = None
        first = self._own_draw() if fresh else self.problem.first_state(owner)
        given = state or {}
        load_state(model, {name: value for name, value in first.items() if name not in given} | given)
        return in_training(model)

    def _own_draw(self) -> State:
        with seeded(self.problem.seed, "client", self.me, "model"):
            return state_of(self.problem.drawn(self.me))

    def tensors(self, data: Split) -> tuple[Tensor, Tensor]:
        """All samples of `train` or `test` as (x, y) on the device: untransformed, images channels-last.

        Raises UserError for an objective whose samples only `fit` can use, and for samples of several tensors.
        """
        x, y = self.samples(data)
        return (x, y) if isinstance(x, Tensor) else self.problem.objective.tensors(data, self.device)

    def samples(self, data: Split) -> tuple[Tensor | NamedTensors | LazySamples, Tensor]:
        """Like `tensors`, but samples of users' data sets are read on access, and samples may have several tensors;
        loaded once per handler."""
        if id(data) not in self._loaded:
            self._loaded[id(data)] = self.problem.objective.samples(data, self.device)
        return self._loaded[id(data)]

    def fit(
        self, model: nn.Module, local: Local, more: tuple[Tensor, Tensor] | None = None, **hooks: Unpack[Hooks]
    ) -> float:
        """Train on this client's training samples, transforming batches if `train` has a transform; records the loss as
        `train`. `more`: further samples (x, y), after its own. `hooks`: additions to the training, see `Hooks`."""
        if unknown := [name for name in hooks if name not in Hooks.__annotations__]:
            raise TypeError(f"fit has no argument {unknown[0]!r}{suggestion(unknown[0], Hooks.__annotations__)}")
        if self.given.validates and not self.received:
            self.received = self.validated(model)
        x, y = self.samples(self.train)
        if more is not None:
            x, y = torch.cat([one_tensor(x[:]), ready(more[0].to(x.device))]), torch.cat([y, more[1].to(y.device)])
        hooks["loss"] = self.problem.objective.loss(model, hooks.get("loss"), y)
        precision, transform = self.problem.precision, self.train.transform
        if self.problem.privacy and hooks.get("memory") is not None:
            raise MethodError("dp of samples does not cover training that continues an optimiser's state")
        private = self._private(model, local, more is not None, x, y) if self.problem.privacy else None
        if self.given.steps is not None:
            self.records.steps += steps_of(local, len(y))
        shared = self._shared
        again = shared.recordings if any(model is each.model for each in shared.models.values()) else None
        try:
            value = fit(
                model, x, y, local, self.round,
                precision=precision, transform=transform, private=private, recordings=again,
                saving=None if private else self._saving(model, local, y, hooks), **hooks,
            )  # fmt: skip
        except RuntimeError as error:
            if not x[:1].is_floating_point() and "type" in str(error):
                raise UserError(f"client {self.me}'s samples are integers; this model takes floats: {error}") from None
            raise
        except ValueError as error:
            if len(y) > 1 and local.batch > 1:
                raise
            raise UserError(f"client {self.me} has single samples, too few for batch normalisation: {error}") from None
        if private is not None and not _is_finite(model):
            raise UserError("training under dp ended in numbers that are not finite: is lr too high?")
        if private is None and (local.order == "shuffled" or len(y) > 1):
            self.records.losses["train"] = value
        return value

    def _saving(self, model: nn.Module, local: Local, y: Tensor, hooks: Hooks) -> Saving | None:
        """Where a training is saved; None if it is not. Additions may have a state of their own: then it is not."""
        saves, memory = self.given.saves, hooks.get("memory") or {}
        if saves is None or any(hooks.get(name) is not None for name in ("extra", "before_step", "after_step")):
            return None
        start = [*state_of(model).values(), *memory.values(), y]
        return saves.next(start, f"{local} {self.problem.precision}")

    def lasting(self, local: Local) -> Local:
        """The terms of local training with the number of steps that the run gives this client (`--round-time`), if it
        does; for methods that promise `normalises_steps`."""
        return replace(local, steps=self.given.steps) if self.given.steps else local

    def steps(self, local: Local) -> int:
        """The number of steps of a training with these terms."""
        return steps_of(local, len(self.train))

    def _private(
        self, model: nn.Module, local: Local, more: bool, x: Tensor | NamedTensors | LazySamples, y: Tensor
    ) -> PrivateSteps:
        """Local training with privacy of samples; records its spending. Raises MethodError for training that the
        accounting does not cover.

        The noise depends on the training's inputs: model, terms and samples. Asked again with the same, a client gives
        the same answer and reveals nothing more. With any others, it draws other noise and counts again. The same noise
        on two answers would cancel in their difference.
        """
        terms, diary, samples = self.problem.privacy, self._shared.diary, len(self.train)
        if terms is None or diary is None:
            raise MethodError("a handler of a run that promises privacy to samples needs a diary")
        if not _is_finite(model):
            raise MethodError("dp of samples: it was sent a model with numbers that are not finite")
        names = ("client", self.me, self.round, self._what)
        sent = random_bytes(_digest(state_of(model).values()), *names)(32)
        begin = random_bytes(_digest(_pieces(x, y)), sent, f"{terms} {local}")(32)
        _, steps = replace(terms, epochs=local.epochs, steps=local.steps).sampled(samples)
        more = more or self._fitted or local.batch != terms.batch or steps > terms.sampled(samples)[1]
        trainings = 0 if more else diary.trained(self.me, begin, terms.spent(samples, 1))
        if more or trainings > terms.rounds:
            raise MethodError(
                f"dp of samples is of {terms.rounds} rounds of one training of {terms.length} in batches of "
                f"{terms.batch}, and this would be more"
            )
        self._fitted = True
        self.measure("epsilon", terms.epsilon(samples, trainings))
        if terms.privacy.noise == "seeded":
            return PrivateSteps(terms, samples, random_bytes(str(self.problem.seed).encode(), *names, sent))
        return PrivateSteps(terms, samples, random_bytes(diary.secret(), *names, begin))

    def noisy(self, sums: Tensor, norm: float) -> tuple[Tensor, float]:
        """(sums over this client's samples with the noise that the run promises to samples, float64; the noise's
        standard deviation), for sums (n,) that one sample changes by at most `norm`, a Euclidean norm.

        Records its spending, as `fit` does: the same sums get the same noise. Raises MethodError for a run without
        such a promise, and for more releases than it covers.
        """
        terms, diary, samples = self.problem.privacy, self._shared.diary, len(self.train)
        if terms is None or diary is None:
            raise MethodError("noise needs a run that promises privacy to samples, and a diary")
        names = ("client", self.me, self.round, self._what)
        begin = random_bytes(_digest([sums]), *names, f"{terms} {norm}")(32)
        if self._fitted or diary.trained(self.me, begin, terms.spent(samples, 1)) > terms.rounds:
            raise MethodError(f"dp of samples is of {terms.rounds} releases, and this would be more")
        self._fitted = True
        seeded = terms.privacy.noise == "seeded"
        key = str(self.problem.seed).encode() if seeded else diary.secret()
        deviation = terms.multiplier(samples) * norm
        return sums.double() + deviation * gaussian(len(sums), random_bytes(key, *names, begin)), deviation

    def outputs(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """The model's outputs for this client's training samples (n, …), in eval mode, and their labels.

        The samples are transformed once, if `train` has a transform.
        """
        x, y = self.samples(self.train)
        if self.train.transform is not None:
            x = self.train.transform(one_tensor(x[:]), y)
        return outputs(model, x, self.problem.precision), y

    def accuracy(self, model: nn.Module, kind: str) -> float | None:
        """The accuracy in [0, 1] on this client's test split, for methods that use it; None if that is empty. Recorded
        as an accuracy of that kind, in every round."""
        if not len(self.test):
            return None
        self.records.scores[kind] = self.scores(model)
        return values(self.records.scores[kind])["accuracy"]

    def score(self, kind: str, model: nn.Module) -> None:
        """Record the objective's metrics, and the loss, of the model on this client's test split, in rounds with
        scores."""
        if self._scored and len(self.test):
            self.records.scores[kind], loss = self._evaluated(model)
            self.records.losses[kind] = loss / len(self.test)

    def scores(self, model: nn.Module) -> Scores:
        """The objective's metrics of the model on this client's test split."""
        return self._evaluated(model)[0]

    def validated(self, model: nn.Module) -> Scores:
        """As `scores`, on the client's validation data; empty without any."""
        return self._evaluated(model, self.validation)[0] if len(self.validation) else {}

    def _evaluated(self, model: nn.Module, data: Split | None = None) -> tuple[Scores, float]:
        x, y = self.samples(self.test if data is None else data)
        with undone(model), untouched():
            return self.problem.objective.evaluate(model, x, y, self.problem.precision)

    def finished(self, model: nn.Module) -> nn.Module:
        """The client's own model for scoring and saving: recalibrated, if the task requires it."""
        if not self.problem.recalibrate:
            return model
        x, _ = self.samples(self.train)
        return recalibrate(model.to(self.device), x, self.problem.precision)

    def measure(self, name: str, value: float) -> None:
        """Record a measurement for people: it travels beside the payload, uncounted, and does not affect training."""
        self.records.measures[name] = float(value)


def _pieces(x: Tensor | NamedTensors | LazySamples, y: Tensor) -> Iterator[Tensor]:
    """Samples and targets, in pieces."""
    for start in range(0, len(y), PIECE):
        rows = slice(start, start + PIECE)
        piece = x[rows]
        yield from piece.tensors.values() if isinstance(piece, NamedTensors) else [piece]
        yield y[rows]


def _digest(tensors: Iterable[Tensor]) -> bytes:
    digest = blake3()
    for value in tensors:
        digest.update(value.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()


def _is_finite(model: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in state_of(model).values() if value.is_floating_point())
