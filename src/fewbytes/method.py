"""What a federated method is: one object whose server half calls its client half by name. Read this first."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from blake3 import blake3
from safetensors.torch import save
from torch import Tensor, nn

from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.data.split import Items, LazySamples
from fewbytes.errors import MethodError, UserError
from fewbytes.models.build import takes_argument
from fewbytes.ranges import wrong
from fewbytes.records import Records
from fewbytes.state import State, copied, in_training, load_state, mark_trained, state_of
from fewbytes.streams import seeded, stream, stream_seed, untouched
from fewbytes.training import (
    FINDS_NO_OBJECTS,
    Loss,
    Optimiser,
    Order,
    Precision,
    evaluate,
    fit,
    outputs,
    prepared,
    ready,
)
from fewbytes.wire import Layout

if TYPE_CHECKING:
    from fewbytes.net import Network

Id = int
"""A client: 0, 1, 2, …"""


class Method(ABC):
    """A federated method: a frozen dataclass of hyper-parameters. All that lasts is the server's and clients' state.

    A client handler is any method `(self, state, message, site) -> reply`; its type hints say what is packed: a
    payload, or None for nothing. The server half reaches it with `net.call(self.handler, to=..., send=...)`.
    """

    headline: ClassVar[str] = "global"
    """The accuracy the method's paper reports: `global`, `personalised`, or a name its handlers score."""
    scored_after_finish: ClassVar[bool] = False
    """Whether `finish` changes the models the paper scores, so that they are scored once more after it."""

    def __new__(cls, *args: Any, **parameters: Any) -> Self:
        """Raises MethodError for a class that is no frozen dataclass, or adds hyper-parameters without being one."""
        for each in (c for c in cls.__mro__ if issubclass(c, Method) and c is not Method):
            made = vars(each).get("__dataclass_params__")
            added = any("ClassVar" not in str(kind) for kind in inspect.get_annotations(each).values())
            must = added or made is not None or (each is cls and not dataclasses.is_dataclass(cls))
            if must and not (made and made.frozen):
                raise MethodError(
                    f"{each.__name__} is no frozen dataclass: write @dataclass(frozen=True) above class {each.__name__}"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check hyper-parameters by their types, which may say ranges (`fewbytes.ranges`). Raises UserError."""
        hints = typing.get_type_hints(type(self), include_extras=True)
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if must := wrong(hints[f.name], value):
                raise UserError(f"{f.name} {must}, not {value!r}")

    def remodel(self, model: nn.Module, seed: int) -> nn.Module:
        """What the method trains in place of a client's model, made of it; `seed` is the task's. Default: itself."""
        return model

    def adapted(self, task: Task) -> Task:
        """The task with the models this method trains; engines begin with it. Twice is the same as once."""
        if type(self).remodel is Method.remodel or task.remodel == self.remodel:
            return task
        return dataclasses.replace(task, remodel=self.remodel)

    def server(self, task: Task) -> Any:
        """The server's state before the first round: a dataclass of packable fields, or None."""
        return None

    def client(self, site: Site) -> Any:
        """A client's state, made on the client when it is first asked; stays there. A dataclass, or None."""
        return None

    def planned_rounds(self, asked: int) -> int:
        """How many rounds a run of `asked` takes: as many, but for one-shot and staged methods with a number of
        their own."""
        return asked

    @property
    def own_rounds(self) -> bool:
        """Whether a run takes a number of rounds of its own, whatever is asked."""
        return self.planned_rounds(1) == self.planned_rounds(2)

    def start(self, state: Any, net: Network) -> None:
        """Before round 1: handshakes, clustering."""

    @abstractmethod
    def round(self, state: Any, net: Network, t: int) -> None:
        """Round t = 1, 2, …: as many exchanges as the paper has; changes `state` in place."""

    def finish(self, state: Any, net: Network) -> None:
        """After the last round: a last exchange, a calibration."""

    def join(self, state: Any, net: Network, client: Id) -> None:
        """A client the run did not know, between rounds; those that left are no longer in `net.clients`.

        Raises Refused (of `fewbytes.net`), before it changes the state, for one the method cannot serve.
        """

    def global_model(self, state: Any, task: Task) -> nn.Module | None:
        """The model scored on the server's test set, if the method has one."""
        return None

    def local_model(self, state: Any, site: Site) -> nn.Module | None:
        """A client's own model, scored on its test split, if the method has one."""
        return None

    def observed(self, model: nn.Module) -> list[str] | None:
        """Names of the parameters whose change a server sees in an upload, were `model` the clients' model.

        None: none as such, so that `fewbytes attack` does not apply.
        """
        return None


@dataclass(frozen=True)
class Task:
    """What is learned, by whom: the model, the clients' data, the seed. Both ends of the wire hold the same task.

    `build`: makes a model; called with a client's id if it takes an argument (models may differ), else with nothing.
    If it has a method `architecture(client)`, clients for which that is equal start from the same weights. `remodel`:
    what a method makes of each model, given the seed (`Method.remodel`). `agreed`: what else both ends must have in
    common, in words for people, by what it is.
    """

    build: Callable[..., nn.Module]
    data: FederatedData
    seed: int = 0
    precision: Precision = "float32"
    device: str = "cpu"
    remodel: Callable[[nn.Module, int], nn.Module] | None = None
    agreed: Mapping[str, str] = field(default_factory=dict, hash=False)
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        model: Callable[..., nn.Module],
        clients: Iterable[tuple[Any, Any] | None],
        test: Any = None,
        *,
        public: Any = None,
        presence: Sequence[tuple[int, int | None]] | None = None,
        seed: int = 0,
    ) -> Task:
        """A task from your own module and data: `clients` are (train, test) pairs, `test` is the server's.

        Each set is an (x, y) pair of tensors or a torch data set of (x, y) items, which is read as it is used: once for
        its labels, then in every epoch (see `fewbytes.data.split.Items`). A test set may be empty: `(x[:0], y[:0])`.
        uint8 samples are images and divided by 255; other integers, such as token ids, stay as they are. Parameters of
        the model that do not require gradients stay with each node and never travel. None stands for a client whose
        data lie elsewhere, on its own node. `public`: samples nobody owns, which some servers learn from; labels are
        optional and ignored. `presence`: per client the first and the last round it is there (None: to the end); who
        comes after round 1 is a newcomer. Raises UserError for other sets without labels.
        """
        if not callable(model) or isinstance(model, nn.Module):
            raise UserError(
                "model is a function that makes one, of nothing or of a client's id (lambda: MyModel()), "
                f"not a {type(model).__name__}"
            )
        nothing = Split(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
        pairs = [(nothing, nothing) if pair is None else (Split.of(pair[0]), Split.of(pair[1])) for pair in clients]
        data = tuple(ClientData(*pair) for pair in pairs)
        if not data or not all(len(train) or train is nothing for train, _ in pairs):
            raise UserError("a task needs at least one client, and every client at least one training sample")
        server = nothing if test is None else Split.of(test)
        highest = max((int(s.labels.max()) for pair in pairs for s in (*pair, server) if len(s)), default=-1)
        if isinstance(public, Tensor | np.ndarray):
            public = (public, np.zeros(len(public), np.int64))
        shared = None if public is None else Split.of(public)
        classes, spans = tuple(map(str, range(highest + 1))), None if presence is None else tuple(presence)
        return cls(model, FederatedData(data, server, classes, shared, spans), seed)

    @property
    def clients(self) -> list[Id]:
        """All clients the task has data for."""
        return list(range(len(self.data.clients)))

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample, from whatever data the task has here. Raises UserError if it has none."""
        return self._some_split().shape

    def blank(self) -> Tensor:
        """A sample of zeros (1, …) as models take samples. Raises UserError if the task has no data here."""
        with untouched():
            return self._some_split().take([0]).load(self.device)[0].zero_()

    def _some_split(self) -> Split:
        for split in (self.data.test, *(client.train for client in self.data.clients)):
            if len(split):
                return split
        raise UserError("the samples' shape cannot be known here: give the task a test set")

    def architecture(self, client: Id) -> Any:
        """A key that is equal for clients with the same model."""
        if not takes_argument(self.build):
            return 0
        of = getattr(self.build, "architecture", None)
        return client if of is None else of(client)

    def model(self, client: Id, draw: str = "first model") -> nn.Module:
        """A new model of the client's architecture, with the weights that all clients of it share by that draw."""
        with seeded(self.seed, draw, self.architecture(client)):
            return self.drawn(client).to(self.device)

    def drawn(self, client: Id) -> nn.Module:
        """A new model of the client's architecture, its weights drawn from torch's generator as it stands."""
        model = self.build(client) if takes_argument(self.build) else self.build()
        if not isinstance(model, nn.Module):
            raise UserError(f"the model must be a torch.nn.Module, {self.build!r} made a {type(model).__name__}")
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"a {type(model).__name__} has no parameter to train: let some require gradients")
        model = model if self.remodel is None else self.remodel(model, self.seed)
        mark_trained(model)
        return model

    def first_model(self, state: State | None = None) -> nn.Module:
        """A new model with the first weights (the same at every node), or with `state`'s where it has them."""
        model = self.model(0)
        if state is not None:
            load_state(model, state)
        return model

    def first_state(self, client: Id = 0, draw: str = "first model") -> State:
        """The first weights of the client's architecture that are trained, or of another draw. Shared: do not change
        them."""
        key = (draw, self.architecture(client))
        if key not in self._kept:
            self._kept[key] = state_of(self.model(client, draw))
        first: State = self._kept[key]
        return first

    def frozen(self, client: Id) -> str:
        """A digest of what of the client's model is not trained, and so must be the same wherever it is made; empty if
        all of it is trained."""
        key = ("frozen", self.architecture(client))
        if key not in self._kept:
            entries, trained = self.model(client).state_dict(), self.first_state(client)
            still = {name: copied(value) for name, value in entries.items() if name not in trained}
            self._kept[key] = blake3(save(still)).hexdigest()[:32] if still else ""
        digest: str = self._kept[key]
        return digest

    def layout(self, client: Id) -> Layout:
        """The entries of the client's model, as both ends of the wire know them."""
        key = ("layout", self.architecture(client))
        if key not in self._kept:
            self._kept[key] = Layout.of(self.first_state(client))
        layout: Layout = self._kept[key]
        return layout


class Site:
    """What a handler sees of its client: its data, its randomness, a model to work with, the training loop."""

    def __init__(
        self, task: Task, me: Id, t: int, what: str, models: dict[Any, nn.Module] | None = None, scored: bool = True
    ) -> None:
        self.task, self.me, self.round = task, me, t
        self.device = task.device
        self.train: Split = task.data.clients[me].train
        self.test: Split = task.data.clients[me].test
        self.rng = stream(task.seed, "client", me, t, what)
        """Named randomness of this handler (numpy)."""
        self.seed = stream_seed(task.seed, "client", me, t, what)
        """By which the engine seeds the global generators before the handler runs: torch's, and, for transforms of
        users' own data sets, Python's and numpy's."""
        self.records = Records()
        self._models = {} if models is None else models
        self._taken = 0
        self._scored = scored
        self._loaded: dict[int, tuple[Tensor, Tensor]] = {}

    def model(self, state: State | None = None, fresh: bool = False, of: Id | None = None) -> nn.Module:
        """A model of this client's architecture with `state`'s entries; the others as in the task's first model.

        `fresh`: weights drawn anew by this client instead of the first model's. `of`: another client's architecture.
        Valid until the handler returns (the module object is used again by other clients); calling again gives a
        second module.
        """
        owner = self.me if of is None else of
        key = (self.task.architecture(owner), self._taken)
        self._taken += 1
        if key not in self._models:
            self._models[key] = prepared(self.task.model(owner))
        model = self._models[key]
        for p in model.parameters():
            p.requires_grad_(p.trained)  # type: ignore[attr-defined]
            p.grad = None
        first = self._own_draw() if fresh else self.task.first_state(owner)
        given = state or {}
        load_state(model, {name: value for name, value in first.items() if name not in given} | given)
        return in_training(model)

    def _own_draw(self) -> State:
        with seeded(self.task.seed, "client", self.me, "model"):
            return state_of(self.task.drawn(self.me))

    def tensors(self, data: Split) -> tuple[Tensor, Tensor]:
        """All samples of `train` or `test` as (x, y) on the device: untransformed, images channels-last.

        Raises UserError if what is learnt of them are boxes, which only `fit` knows how to use.
        """
        if data.boxes is not None:
            raise UserError(FINDS_NO_OBJECTS)
        if id(data) not in self._loaded:
            x, y = data.load(self.device)
            self._loaded[id(data)] = (ready(x), y)
        return self._loaded[id(data)]

    def samples(self, data: Split) -> tuple[Tensor | LazySamples, Tensor]:
        """As `tensors`, but those of a data set of one's own are read as they are indexed."""
        return data.lazy(self.device) if isinstance(data.x, Items) else self.tensors(data)

    def fit(
        self,
        model: nn.Module,
        *,
        epochs: int,
        lr: float,
        batch: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        loss: Loss | None = None,
        extra: Callable[[nn.Module], Tensor] | None = None,
        frozen: nn.Module | None = None,
        optimiser: Optimiser = "sgd",
        order: Order = "shuffled",
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
        more: tuple[Tensor, Tensor] | None = None,
    ) -> float:
        """Train on this client's training samples, each batch transformed if `train` has a transform (see
        `fewbytes.training.fit`); records the loss as `train`. `more`: further samples (x, y), after its own."""
        x: Tensor | LazySamples
        x, y = self.samples(self.train) if self.train.boxes is None else self.train.lazy(self.device)
        if more is not None:
            x, y = torch.cat([x[:], ready(more[0].to(x.device))]), torch.cat([y, more[1].to(y.device)])
        try:
            value = fit(
                model, x, y, epochs=epochs, lr=lr, batch=batch, momentum=momentum, weight_decay=weight_decay,
                loss=loss, extra=extra, frozen=frozen, optimiser=optimiser, order=order,
                before_step=before_step, after_step=after_step, precision=self.task.precision,
                transform=self.train.transform,
            )  # fmt: skip
        except RuntimeError as error:
            if not x[:1].is_floating_point() and "type" in str(error):
                raise UserError(
                    f"client {self.me}'s samples are integers, which this model does not take: give floats ({error})"
                ) from None
            raise
        except ValueError as error:
            if len(y) > 1 and batch > 1:
                raise
            raise UserError(
                f"client {self.me} trains on single samples, too few for batch normalisation: {error}"
            ) from None
        if order == "shuffled" or len(y) > 1:
            self.records.losses["train"] = value
        return value

    def outputs(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """What the model gives for this client's training samples (n, …), in eval mode, and their labels.

        The samples are transformed, once, if `train` has a transform.
        """
        x, y = self.samples(self.train)
        if self.train.transform is not None:
            x = self.train.transform(x[:], y)
        return outputs(model, x, self.task.precision), y

    def accuracy(self, model: nn.Module, kind: str) -> float | None:
        """In [0, 1], on this client's test split, for a method that goes by it; None if that is empty. Recorded as an
        accuracy of that kind, in every round."""
        if not len(self.test):
            return None
        x, y = self.samples(self.test)
        correct = evaluate(model, x, y, self.task.precision)[0]
        self.records.scores[kind] = correct, len(y)
        return correct / len(y)

    def score(self, kind: str, model: nn.Module) -> None:
        """Record the accuracy, and the loss, of the model on this client's test split, in rounds that are scored."""
        if self._scored and len(self.test):
            x, y = self.samples(self.test)
            correct, loss = evaluate(model, x, y, self.task.precision)
            self.records.scores[kind] = correct, len(y)
            self.records.losses[kind] = loss / len(y)

    def measure(self, name: str, value: float) -> None:
        """Record a measurement for people: it travels beside the payload, uncounted, and steers nothing."""
        self.records.measures[name] = float(value)
