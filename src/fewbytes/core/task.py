"""The task: a problem and its data, from data sets or tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from fewbytes.base.errors import UserError, named
from fewbytes.core.detection import Detection
from fewbytes.core.objectives import objective_for
from fewbytes.core.options import OF_METHOD, OF_TASK, Places, Terms, check_options
from fewbytes.core.outputs import of_output
from fewbytes.core.problem import Id, Problem
from fewbytes.data.clients import FederatedData
from fewbytes.data.named import NamedTensors
from fewbytes.data.split import ClientData, Split, check_finite, classes_in, widest
from fewbytes.data.transforms import with_transforms
from fewbytes.data.validation import hold_out


@dataclass(frozen=True)
class Task:
    """A problem and its data, as far as they are here: a node has only its own client's."""

    problem: Problem
    data: FederatedData

    @classmethod
    def on(cls, data: FederatedData, model: Callable[..., nn.Module], **how: Any) -> Task:
        """A task on data split among clients; `how`: other fields of Problem, such as `seed` and `device`, `objective`
        (default: the usual one for the data).

        Raises UserError for other data, a model that is not a function, or an unknown field.

        >>> import fewbytes as fb
        >>> import torch
        >>> from fewbytes.data import Partition, federate, load_dataset
        >>> data = federate(load_dataset("digits"), Partition(clients=2))
        >>> task = fb.Task.on(data, lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), seed=1)
        >>> task.problem.clients, task.problem.sample.shape
        (range(0, 2), torch.Size([1, 1, 8, 8]))
        """
        if not isinstance(data, FederatedData):
            raise UserError(
                "data are a split data set, federate(load_dataset('digits'), Partition()) of fewbytes.data, "
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

        Each set is an (x, y) pair of tensors or a torch data set of (x, y) items, which is read on use: once for its
        labels, then in every epoch (see `fewbytes.data.split.Items`). x may be several tensors by name, such as
        `input_ids` and `attention_mask`, passed to the model. y decides what is learnt
        (`fewbytes.data.split.learnt_of`): classes (integers, one a sample), numbers (floats), any of several labels
        (bool), a class for every pixel (integers (n, height, width)), the next token (integers shaped as x); other
        targets need a `loss`. A test set may be empty: `(x[:0], y[:0])`.
        uint8 samples are images and divided by 255; other integers, such as token ids, are unchanged. Several tensors
        all keep their types, such as a mask's bool, except images, uint8 (n, 1, 3 or 4, height, width). Parameters of
        the model that do not require gradients stay with each node and never travel. Pass None for a client whose data
        are on its own node. `public`: samples nobody owns, which some servers learn from; labels are optional and
        ignored. `presence`: per client its first and last round (None: to the end); later starters than round 1 are
        newcomers. `how`: see `Terms`. Raises UserError for invalid input.

        >>> import fewbytes as fb
        >>> import torch
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> clients = [((x, y), (x, y)), ((x[:2], y[:2]), (x[:2], y[:2]))]
        >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), clients, test=(x, y), metrics=["f1"])
        >>> task.data.learns, [len(client.train) for client in task.data.clients]
        ('classes', [4, 2])
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
        clients = list(clients)
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
            raise UserError(
                f"all targets must be of one kind, but some are {', others '.join(kinds)}: make them the same"
            )
        learns = kinds[0] if kinds else "classes"
        classes = tuple(map(str, range(classes_in(splits) if learns == "classes" else widest(splits))))
        loss = of_output(how.pop("loss", None), how.pop("output", "logits"))
        weights, positive = how.pop("weights", None), how.pop("positive", None)
        if positive is not None:
            agreed: Any = how.get("agreed", {})
            how["agreed"] = {**agreed, "positive": str(positive)}  # type: ignore[typeddict-unknown-key]
        objective = objective_for(learns, how.pop("metrics", None), loss, weights, len(classes), positive)
        data = FederatedData(
            tuple(ClientData(*pair) for pair in pairs), server, classes, shared,
            None if presence is None else tuple(presence), None if learns == "classes" else ("samples",),
        )  # fmt: skip
        if share := how.pop("validation", 0):
            data = hold_out(data, share, how.get("seed", 0), apart=any(each is None for each in clients))
        data = with_transforms(data, how.pop("transform", None))
        return cls.on(data, model, objective=objective, **how)

    def described(self) -> dict[str, Any]:
        """A model file's description of inputs and outputs, as far as known: `learns`, the samples' shape and storage
        (uint8: models take them divided by 255), each tensor of samples with several and its type, class names,
        meanings of a table's columns."""
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
_OF_OBJECTIVE: Places = {
    "objective=objective_for(data.learns, {}) of fewbytes.core.objectives": ("loss", "metrics", "weights", "positive"),
    "the data, with_transforms(data, …) of fewbytes.data": ("transform",),
    "the data, hold_out(data, …) of fewbytes.data": ("validation",),
}


def _stored(x: Any) -> str:
    """The storage type of samples: uint8, int64 or float32, the nearest."""
    kind = str(x.dtype).removeprefix("torch.")
    return kind if kind == "uint8" else "int64" if "int" in kind else "float32"


def check_builder(model: Any) -> None:
    """Raises UserError for anything but a function that makes models."""
    if not callable(model) or isinstance(model, nn.Module):
        raise UserError(
            "model is a function that makes one, of nothing or of a client's id (lambda: MyModel()), "
            f"not {named(model)}"
        )


def _pair(client: Id, pair: Any) -> tuple[Split, Split]:
    """A client's training and test samples. Raises UserError."""
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise UserError(f"client {client} is {named(pair)}: give (train, test), each a pair (x, y) or a data set")
    try:
        return Split.of(pair[0]), Split.of(pair[1])
    except UserError as error:
        raise UserError(f"client {client}: {error}") from None


def _known(data: FederatedData) -> dict[str, Any]:
    """The fields of a problem that follow from the data."""
    splits = (data.test, *(client.train for client in data.clients))
    some = next((split for split in splits if len(split)), None)
    return {
        "classes": data.classes, "public": data.public,
        "present": data.presence or ((1, None),) * len(data.clients), "sample": None if some is None else some.blank(),
    }  # fmt: skip
