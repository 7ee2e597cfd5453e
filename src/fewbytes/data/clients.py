"""Datasets, before and after they are split among clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed
from fewbytes.base.streams import stream
from fewbytes.data.schema import Schema
from fewbytes.data.settings import FOLDERS
from fewbytes.data.split import ClientData, Kind, Split

Values = NDArray[np.str_]
"""A text for each sample; empty if it is missing."""
Columns = Callable[[str], tuple[Values, Values]]
"""A column's values in the arrays of the training and of the test samples. Raises UserError if there is none."""


@dataclass(frozen=True)
class Dataset:
    """A data set as published: its training and test samples and its class names, in label order.

    If the task is not to learn one of several classes, `classes` names the models' outputs (labels, columns of numbers,
    tokens), and `groups` the labels, used only to split the samples. `schema`: the meaning of a table's columns.
    `notes`: what happened to the files, in lines.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    schema: Schema | None = None
    notes: tuple[str, ...] = ()
    """Findings of reading the data, for people, a line each."""
    listed: bool = False
    """Whether its labels come from a table beside images, whose columns are named by settings."""
    columns: Columns | None = field(default=None, repr=False, compare=False)

    @property
    def learns(self) -> Kind:
        """The kind of its targets."""
        return self.train.learns

    def values(self, column: str) -> tuple[Values, Values]:
        """A column's values of the training and of the test samples, also of a column that is not a feature; FOLDERS:
        the names of their folders. Raises UserError if there is no such column."""
        if self.columns is None:
            what = "folders" if column == FOLDERS else f"column {column!r}"
            raise UserError(f"{self.name} has no {what} to partition by: use another partition")
        train, test = self.columns(column)
        mine, own = self.train.rows, self.test.rows
        return train if mine is None else train[mine], test if own is None else test[own]

    def part(self, share: float, seed: int) -> Dataset:
        """Random subsets of the training and test samples, reproducible by `seed`; at least one sample each."""
        rng = stream(seed, "part")
        train, test = (
            split.take(np.sort(rng.permutation(len(split))[: max(1, round(share * len(split)))]))
            for split in (self.train, self.test)
        )
        return replace(self, train=train, test=test)

    def numbered(self, classes: Sequence[str]) -> Dataset:
        """The same samples with labels numbered as in `classes`. Raises UserError for a class that is not in it."""
        if tuple(classes) == self.classes:
            return self
        if self.learns != "classes":
            raise UserError(
                f"{self.name} has {listed(self.classes)}, the run {listed(classes)}: use the same names "
                "everywhere, in the same order (the run uses the server's)",
                public="its data have other classes than the run: use the same names everywhere, in the same order",
            )
        unknown = [name for name in self.classes if name not in classes]
        if unknown:
            remedy = f"the run {listed(classes)}: use the same names everywhere (the server's are the run's)"
            have = "classes that the run lacks"
            raise UserError(
                f"{self.name} has {have}: {listed(unknown)}; it has {listed(self.classes)}, {remedy}",
                # a column of classes may contain anything, such as a name if a row is misaligned
                public=f"its data have {have}, {len(unknown)} of {len(self.classes)}; its log names them; {remedy}",
            )
        number = torch.tensor([list(classes).index(name) for name in self.classes])
        train, test = (Split(s.x, number[s.y], s.rows, s.transform) for s in (self.train, self.test))
        return replace(self, train=train, test=test, classes=tuple(classes))


@dataclass(frozen=True)
class FederatedData:
    """A data set over clients: each client's own samples, the server's test set, the class names, and the names of the
    labels if they are not the classes (see `Dataset`).

    >>> import torch
    >>> from fewbytes.data import ClientData, FederatedData, Split
    >>> x, y = torch.eye(2), torch.arange(2)
    >>> here = Split.of((x, y))
    >>> data = FederatedData((ClientData(here, here), ClientData(here.take([1]), here)), here, ("cat", "dog"))
    >>> data.label_counts()["train"]
    [[1, 1], [0, 1]]
    """

    clients: tuple[ClientData, ...]
    test: Split
    classes: tuple[str, ...]
    public: Split | None = None
    """Samples that no client owns, for servers that train; their labels are meaningless."""
    presence: tuple[tuple[int, int | None], ...] | None = None
    """Per client the first and last round of its presence, inclusive (None: to the end); None: always all clients."""
    groups: tuple[str, ...] | None = None
    schema: Schema | None = None
    """The meaning of a table's columns."""
    names: tuple[str, ...] = ()
    """The clients' names, such as those of their folders; empty: they only have numbers."""
    validation: Split | None = None
    """The samples by which the server chooses models; None: no data are held out (`fewbytes.data.hold_out`)."""

    @property
    def learns(self) -> Kind:
        """The kind of the targets."""
        splits = [self.test, *(split for client in self.clients for split in (client.train, client.test))]
        return next((split.learns for split in splits if len(split)), self.test.learns)

    def __post_init__(self) -> None:
        """Raises UserError for an invalid presence, and names that are not one for each client."""
        if self.names and len(self.names) != len(self.clients):
            raise UserError(f"names are given for {len(self.names)} of {len(self.clients)} clients: give all")
        if self.presence is None:
            return
        if len(self.presence) != len(self.clients):
            raise UserError(f"presence is given for {len(self.presence)} of {len(self.clients)} clients: give all")
        for i, span in enumerate(self.presence):
            if not (isinstance(span, tuple | list) and len(span) == 2):
                raise UserError(
                    f"presence of client {i} must be its first and last round, like (1, None), not {span!r}"
                )
            first, last = span
            if first < 1 or (last is not None and last < first):
                raise UserError(
                    f"client {i} cannot be present from round {first} to {last}: rounds count upwards from 1"
                )

    def name_of(self, client: int) -> str:
        """A client's name; `client 3` if it has only its number.

        >>> import torch
        >>> from fewbytes.data import ClientData, FederatedData, Split
        >>> here = Split.of((torch.eye(2), torch.arange(2)))
        >>> FederatedData((ClientData(here, here),), here, ("cat", "dog"), names=("north",)).name_of(0)
        'north'
        """
        return self.names[client] if self.names else f"client {client}"

    def present(self, t: int) -> list[int]:
        """The clients present in round t, in ascending order."""
        spans = self.presence or [(1, None)] * len(self.clients)
        return [i for i, (first, last) in enumerate(spans) if first <= t and (last is None or t <= last)]

    def label_counts(self) -> dict[str, Any]:
        """`{"classes": [name], "train": [[samples per class] per client], "test": likewise}`, plain ints for JSON; with
        groups in place of classes if there are some."""
        train, test = self._counted
        return {
            "classes": list(self.classes if self.groups is None else self.groups),
            "train": list(train),
            "test": list(test),
        }

    @cached_property
    def _counted(self) -> tuple[list[list[int]], list[list[int]]]:
        """Per client the numbers of training and of test samples by class (or group)."""
        classes = len(self.classes if self.groups is None else self.groups)

        def count(split: Split) -> list[int]:
            counted: list[int] = torch.bincount(split.labels, minlength=classes).tolist()
            return counted

        return [count(client.train) for client in self.clients], [count(client.test) for client in self.clients]


def split_off_test(whole: Split, groups: Sequence[object] | None = None) -> tuple[Split, Split]:
    """Split off a fixed fifth of every class for testing: (training, test). `groups` has one entry for each sample of
    this view; each group is entirely in one of both."""
    in_test = rows_for_testing(whole.labels.numpy(), groups)
    return whole.take(np.flatnonzero(~in_test)), whole.take(np.flatnonzero(in_test))


def rows_for_testing(labels: NDArray[Any], groups: Sequence[object] | None = None) -> NDArray[np.bool_]:
    """A mask of a fixed fifth of every class, or of every class's groups. A group's class is that of most of its
    samples; at least one of two or more groups is chosen."""
    rng = np.random.RandomState(0)
    if groups is None:
        in_test = np.zeros(len(labels), dtype=bool)
        for c in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == c))
            in_test[members[: round(len(members) / 5)]] = True
        return in_test
    names, group = np.unique(np.array([str(each) for each in groups]), return_inverse=True)
    classes, label = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(names), len(classes)), dtype=np.int64)
    np.add.at(counts, (group, label), 1)
    chosen = np.zeros(len(names), dtype=bool)
    for c in range(len(classes)):
        members = rng.permutation(np.flatnonzero(counts.argmax(axis=1) == c))
        if len(members) > 1:
            chosen[members[: max(1, round(len(members) / 5))]] = True
    tested: NDArray[np.bool_] = chosen[group]
    return tested
