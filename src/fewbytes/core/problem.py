"""What is learned and by whom: the problem, which both ends of the wire hold, and the task, which adds the data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from fewbytes.base.calls import takes_argument
from fewbytes.base.errors import UserError, named
from fewbytes.base.ranges import wrong
from fewbytes.base.state import State, frozen_digest, load_state, mark_trained, state_of, trained_entries
from fewbytes.base.streams import seeded
from fewbytes.core.detection import Detection
from fewbytes.core.devices import Precision, check_device, check_precision
from fewbytes.core.entries import check_entries, unexpand
from fewbytes.core.objective import NextToken, Objective, Weights, objective_for
from fewbytes.core.options import OF_METHOD, Places, check_options
from fewbytes.core.outputs import Output, logits_of, of_output
from fewbytes.core.privacy import SamplePrivacy
from fewbytes.core.training import Loss
from fewbytes.data.clients import ClientData, FederatedData
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import Split, Transform, check_finite, classes_in, widest
from fewbytes.data.transforms import with_transforms
from fewbytes.models.adapters import with_adapters
from fewbytes.models.lora import Lora
from fewbytes.models.pretrained import Pretrained
from fewbytes.wire.layout import Layout

Id = int
"""A client: 0, 1, 2, …"""


@dataclass(frozen=True)
class Problem:
    """What is learned and by whom, without anybody's data: what both ends of the wire must have in common.

    `build`: makes a model; called with a client's id if it takes an argument (models may differ), else with nothing.
    If it has a method `architecture(client)`, clients for which that is equal start from the same weights. `objective`:
    what models learn. `present`: per client the first and the last round it is there (None: to the end). `classes`:
    their names. `sample`: a sample of zeros (1, …) as models take samples, if one is known. `public`: samples that no
    client owns. `lora`: adapters that are trained in place of each model. `remodel`: what a method makes of each model,
    given the seed (`Method.remodel`). `pretrained`: weights that models start from, where they fit, whatever is drawn.
    `agreed`: what else both ends must have in common, in words for people, by what it is. `privacy`: what clients
    promise their samples, if anything. `recalibrate`: whether a client's own model is scored, and saved, with batch
    normalisation's statistics of its own training samples.
    """

    build: Callable[..., nn.Module]
    objective: Objective
    present: tuple[tuple[int, int | None], ...]
    classes: tuple[str, ...] = ()
    sample: Tensor | NamedTensors | None = field(default=None, compare=False)
    public: Split | None = None
    seed: int = 0
    precision: Precision = "float32"
    device: str = "cpu"
    lora: Lora | None = None
    remodel: Callable[[nn.Module, int], nn.Module] | None = None
    pretrained: Pretrained | None = field(default=None, compare=False, repr=False)
    agreed: Mapping[str, str] = field(default_factory=dict, hash=False)
    privacy: SamplePrivacy | None = None
    recalibrate: bool = False
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises UserError for a precision there is not, and a device that is not here."""
        for name, kind in (("precision", Precision), ("seed", int), ("recalibrate", bool)):
            if must := wrong(kind, getattr(self, name)):
                raise UserError(f"{name} {must}, not {getattr(self, name)!r}")
        check_device(self.device)
        check_precision(self.precision, self.device)

    @property
    def clients(self) -> Sequence[Id]:
        """All clients there are, will be or have been."""
        return range(len(self.present))

    @property
    def stays(self) -> bool:
        """Whether every client is there all the time."""
        if "stays" not in self._kept:
            self._kept["stays"] = all(first == 1 and last is None for first, last in self.present)
        return bool(self._kept["stays"])

    def clients_in(self, t: int) -> list[Id]:
        """The clients that are there in round t, in ascending order."""
        if self.stays:
            return list(self.clients)
        return [i for i, (first, last) in enumerate(self.present) if first <= t and (last is None or t <= last)]

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample, of several tensors that of the first. Raises UserError if it is not known."""
        return tuple(self.on_cpu().blank().shape[1:])

    def blank(self) -> Tensor | NamedTensors:
        """A sample of zeros (1, …) as models take samples. Raises UserError if the task has no data here."""
        if self.sample is None:
            raise UserError("the samples' shape cannot be known here: give the task a test set")
        return self.sample.to(self.device)

    def architecture(self, client: Id) -> Any:
        """A key that is equal for clients with the same model."""
        if "alike" not in self._kept:
            self._kept["alike"] = not takes_argument(self.build)
        if self._kept["alike"]:
            return 0
        of = getattr(self.build, "architecture", None)
        return client if of is None else of(client)

    def on_cpu(self) -> Problem:
        """The same for the CPU, to look at models before a run forks its workers: those have no GPU that is open."""
        if self.device == "cpu":
            return self
        return replace(self, device="cpu", precision="float32" if self.precision == "tf32" else self.precision)

    def architectures(self) -> Iterator[Id]:
        """A client of each architecture, the lowest of those that have it."""
        return iter({self.architecture(i): i for i in reversed(self.clients)}.values())

    def model(self, client: Id, draw: str = "first model") -> nn.Module:
        """A new model of the client's architecture, with the weights that all clients of it share by that draw."""
        with seeded(self.seed, draw, self.architecture(client)):
            return self.drawn(client).to(self.device)

    def drawn(self, client: Id) -> nn.Module:
        """A new model of the client's architecture, its weights drawn from torch's generator as it stands, or the
        pretrained ones.

        It takes samples of several tensors by their names, and of outputs that have `logits` it gives those; with a
        loss that takes the whole output it gives that along (`fewbytes.core.outputs`).
        """
        model = self.build(client) if takes_argument(self.build) else self.build()
        if not isinstance(model, nn.Module):
            raise UserError(f"the model must be a torch.nn.Module, {self.build!r} made a {type(model).__name__}")
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError(f"a {type(model).__name__} has no parameter to train: let some require gradients")
        if self.lora is not None:
            if self.pretrained is not None:
                self.pretrained.into(model)  # under adapters, where the names are still those of the file
            model = with_adapters(model, self.lora, head=not isinstance(self.objective, NextToken))
        model = model if self.remodel is None else self.remodel(model, self.seed)
        if self.pretrained is not None and self.lora is None:
            self.pretrained.into(model)
        check_entries(model)
        unexpand(model)
        mark_trained(model)
        try:
            model.register_forward_pre_hook(_by_name, with_kwargs=True)
            model.register_forward_hook(partial(logits_of, whole=self.objective.whole))
        except RuntimeError:  # of a ScriptModule
            raise UserError(
                f"a {type(model).__name__} of torch.jit.script cannot be trained here: give the module it was made of"
            ) from None
        return model

    def first_model(self, state: State | None = None) -> nn.Module:
        """A new model with the first weights (the same at every node), or with `state`'s where it has them."""
        model = self.model(0)
        if state is not None:
            load_state(model, state)
        return model

    def first_state(self, client: Id = 0, draw: str = "first model") -> State:
        """The first weights of the client's architecture that are trained, or of another draw: a copy."""
        key = (draw, self.architecture(client))
        if key not in self._kept:
            self._kept[key] = state_of(self.on_cpu().model(client, draw))
        return {name: value.clone() for name, value in self._kept[key].items()}

    def frozen(self, client: Id) -> str:
        """A digest of what of the client's model is not trained, and so must be the same wherever it is made; empty if
        all of it is trained."""
        key = ("frozen", self.architecture(client))
        if key not in self._kept:
            self._kept[key] = frozen_digest(self.on_cpu().model(client))
        digest: str = self._kept[key]
        return digest

    def layout(self, client: Id) -> Layout:
        """The entries of the client's model, as both ends of the wire know them."""
        key = ("layout", self.architecture(client))
        if key not in self._kept:
            self._kept[key] = Layout.of(self.first_state(client))
        layout: Layout = self._kept[key]
        return layout

    def statistics(self, client: Id) -> frozenset[str]:
        """The entries of the client's model that are no parameters, such as batch normalisation's statistics, by name;
        and by the endings of their names that are no parameter's, which parts of the model know them by."""
        key = ("statistics", self.architecture(client))
        if key not in self._kept:
            entries = trained_entries(self.on_cpu().model(client))
            learnt = {name for name, value in entries.items() if isinstance(value, nn.Parameter)}
            kept = entries.keys() - learnt
            self._kept[key] = frozenset(kept | (_endings(kept) - _endings(learnt)))
        names: frozenset[str] = self._kept[key]
        return names


class Terms(TypedDict, total=False):
    """What may be said of a task of one's own, beside its model and data.

    `loss`: (outputs, targets) to the mean of a batch, in place of the usual one. `metrics`: what models are scored by,
    the first is the score: names (`fewbytes.core.metrics.KNOWN`), or by name metrics of torchmetrics or functions that
    make one. `weights`: of classes, or balanced. `transform`: (x, y) to x, changed at random, of every training batch.
    `output`: what `loss` takes of a model that gives more than its logits (an output of transformers, or a tuple or
    dict of which `logits` or the first is that): the logits, or the whole of it. `seed`: of all randomness.
    `recalibrate`: see `Problem`.
    """

    loss: Loss | None
    metrics: Sequence[str] | Mapping[str, Any] | None
    weights: Weights | None
    transform: Transform | None
    output: Output
    seed: int
    precision: Precision
    device: str
    recalibrate: bool


@dataclass(frozen=True)
class Task:
    """A problem and the data it is learned from, as far as they are here: a node holds its own client's only."""

    problem: Problem
    data: FederatedData

    @classmethod
    def on(cls, data: FederatedData, model: Callable[..., nn.Module], **how: Any) -> Task:
        """A task on data dealt to clients; `how`: other fields of Problem, such as `seed` and `device`, `objective` (by
        default the usual one of what the data hold).

        Raises UserError for other data, a model that is no function, or a field there is not.
        """
        if not isinstance(data, FederatedData):
            raise UserError(
                "data are a data set dealt out, federate(load_dataset('digits'), Partition()) of fewbytes.data, "
                f"not {named(data)}; Task.of takes your own"
            )
        check_options(how, _OF_PROBLEM, {**_OF_OBJECTIVE, **OF_METHOD, **OF_TASK})
        check_builder(model)
        if how.get("recalibrate"):
            how["agreed"] = {**how.get("agreed", {}), "recalibrate": "clients' own models"}
        usual = Detection(classes=data.classes) if data.learns == "boxes" else objective_for(data.learns)
        return cls(Problem(model, **({"objective": usual} | _known(data) | how)), data)

    @classmethod
    def of(
        cls,
        model: Callable[..., nn.Module],
        clients: Iterable[tuple[Any, Any] | None],
        test: Any = None,
        *,
        public: Any = None,
        presence: Sequence[tuple[int, int | None]] | None = None,
        **how: Unpack[Terms],
    ) -> Task:
        """A task from your own module and data: `clients` are (train, test) pairs, `test` is the server's.

        Each set is an (x, y) pair of tensors or a torch data set of (x, y) items, which is read as it is used: once for
        its labels, then in every epoch (see `fewbytes.data.split.Items`). x may be several tensors by name, such as
        `input_ids` and `attention_mask`, which the model is called with. What is learnt follows from y
        (`fewbytes.data.split.learnt_of`): classes (integers, one a sample), numbers (floats), any of several labels
        (bool), a class for every pixel (integers (n, height, width)), the next token (integers shaped as x); of other
        targets, what `loss` makes of them. A test set may be empty: `(x[:0], y[:0])`.
        uint8 samples are images and divided by 255; other integers, such as token ids, stay as they are. Of several
        tensors all keep their types, such as a mask's bool, but for images, uint8 (n, 1, 3 or 4, height, width).
        Parameters of the model that do not require gradients stay with each node and never travel. None stands for a
        client whose data lie elsewhere, on its own node. `public`: samples nobody owns, which some servers learn from;
        labels are optional and ignored. `presence`: per client the first and the last round it is there (None: to the
        end); who comes after round 1 is a newcomer. `how`: see `Terms`. Raises UserError for what cannot be.
        """
        known = Terms.__annotations__.keys() | _OF_PROBLEM - {"objective"}
        check_options(how, known, {"fb.Task.on(…, {})": ("objective",), **OF_METHOD})
        check_builder(model)
        for name in ("loss", "transform"):
            if how.get(name) is not None and not callable(how[name]):
                raise UserError(f"{name} is a function, as `Terms` has it, not {named(how[name])}")
        nothing = Split(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
        if not isinstance(clients, Iterable):
            raise UserError(f"clients are (train, test) pairs, one a client, not {named(clients)}")
        pairs = [(nothing, nothing) if pair is None else _pair(i, pair) for i, pair in enumerate(clients)]
        if not pairs:
            raise UserError("a task needs at least one client")
        if empty := [str(i) for i, (train, _) in enumerate(pairs) if not len(train) and train is not nothing]:
            raise UserError(f"client {', '.join(empty)} has no training sample, and needs at least one: leave it out")
        server = nothing if test is None else Split.of(test)
        if isinstance(public, Tensor | np.ndarray):
            public = (public, np.zeros(len(public), np.int64))
        shared = None if public is None else Split.of(public)
        splits = [split for pair in pairs for split in pair] + [server]
        whose = [f"client {i}'s {part}" for i in range(len(pairs)) for part in ("training", "test")] + ["the server's"]
        for split, who in zip(splits, whose, strict=True):
            check_finite(split, f"{who} samples", how.get("loss") is None)
        kinds = sorted({split.learns for split in splits if len(split)})
        if len(kinds) > 1:
            raise UserError(f"all learn the same, but some targets here are {', others '.join(kinds)}: make them alike")
        learns = kinds[0] if kinds else "classes"
        classes = tuple(map(str, range(classes_in(splits) if learns == "classes" else widest(splits))))
        loss = of_output(how.pop("loss", None), how.pop("output", "logits"))
        objective = objective_for(learns, how.pop("metrics", None), loss, how.pop("weights", None), len(classes))
        data = FederatedData(
            tuple(ClientData(*pair) for pair in pairs), server, classes, shared,
            None if presence is None else tuple(presence), None if learns == "classes" else ("samples",),
        )  # fmt: skip
        data = with_transforms(data, how.pop("transform", None))
        return cls.on(data, model, objective=objective, **how)

    def described(self) -> dict[str, Any]:
        """What a file of a trained model says of what it takes and gives, as far as that is known here: `learns`, the
        samples' shape and how they are stored (uint8: models take them divided by 255), each tensor of samples of
        several and its type, names of classes, what a table's columns mean."""
        splits = [self.data.test, *(client.train for client in self.data.clients)]
        known = next((split for split in splits if len(split)), None)
        about: dict[str, Any] = {"learns": self.data.learns}
        if known is not None:
            about |= {"sample_shape": list(known.shape), "samples": _stored(known.x)}
            if isinstance(blank := known.blank(), NamedTensors):
                about["tensors"] = {
                    name: {"shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
                    for name, value in blank.tensors.items()
                }
        if self.data.learns != "tokens":
            about["class_names"] = list(self.problem.classes)
        if self.data.schema is not None:
            about["schema"] = msgspec.to_builtins(self.data.schema)
        return about

    def with_data(self, data: FederatedData) -> Task:
        """The same problem on other data."""
        return Task(replace(self.problem, **_known(data)), data)


_OF_PROBLEM = {each.name for each in fields(Problem) if each.init} - {"build"}
OF_TASK: Places = {
    "the task, fb.Task.of(…, {})": Terms.__annotations__.keys() | Task.of.__annotations__.keys() - {"clients", "return"}
}
"""Options of a task of one's own."""
_OF_OBJECTIVE: Places = {
    "objective=objective_for(data.learns, {}) of fewbytes.core.objective": ("loss", "metrics", "weights"),
    "the data, with_transforms(data, …) of fewbytes.data": ("transform",),
}


def _stored(x: Any) -> str:
    """How samples are stored: uint8, int64 or float32, the nearest."""
    kind = str(x.dtype).removeprefix("torch.")
    return kind if kind == "uint8" else "int64" if "int" in kind else "float32"


def check_builder(model: Any) -> None:
    """Raises UserError for what makes no models."""
    if not callable(model) or isinstance(model, nn.Module):
        raise UserError(
            "model is a function that makes one, of nothing or of a client's id (lambda: MyModel()), "
            f"not {named(model)}"
        )


def _endings(names: Iterable[str]) -> set[str]:
    """The names, and what is left of each without the modules it begins with: a.b.c, b.c, c."""
    return {".".join(parts[i:]) for parts in (name.split(".") for name in names) for i in range(len(parts))}


def _pair(client: Id, pair: Any) -> tuple[Split, Split]:
    """A client's training and test samples. Raises UserError."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise UserError(f"client {client} is {named(pair)}: give (train, test), each a pair (x, y) or a data set")
    try:
        return Split.of(pair[0]), Split.of(pair[1])
    except UserError as error:
        raise UserError(f"client {client}: {error}") from None


def _by_name(model: nn.Module, args: tuple[Any, ...], others: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), {**others, **args[0].tensors}) if args and isinstance(args[0], NamedTensors) else (args, others)


def _known(data: FederatedData) -> dict[str, Any]:
    """What of a problem follows from the data."""
    splits = (data.test, *(client.train for client in data.clients))
    some = next((split for split in splits if len(split)), None)
    return {
        "classes": data.classes, "public": data.public,
        "present": data.presence or ((1, None),) * len(data.clients), "sample": None if some is None else some.blank(),
    }  # fmt: skip
