"""What methods share whose clients keep models of their own, of any architecture, and exchange something smaller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fewbytes.errors import MethodError
from fewbytes.method import Id, Method, Site
from fewbytes.state import State, state_of
from fewbytes.training import Order
from fewbytes.wire import Dense, payload


@payload
class ClassVectors:
    """One vector a class, either way: the rows (n, d) of `vectors`, and whose they are."""

    vectors: Dense
    classes: list[int]

    @classmethod
    def of(cls, rows: Tensor, classes: list[int]) -> Self:
        return cls(Dense({"": rows.detach().cpu().contiguous()}), classes)

    @property
    def rows(self) -> Tensor:
        return self.vectors.state[""]


@dataclass
class Own:
    """A client's state."""

    theta: State  # its model


@dataclass(frozen=True)
class Heterogeneous(Method):
    """Hyper-parameters of local training: FedKTL's, which its paper uses for every method it compares with."""

    fraction: float = 1.0  # rho
    epochs: int = 1
    lr: float = 0.01
    batch: int = 10
    order: Order = "stored"  # of samples, as the authors' code takes them; shuffled: anew each epoch

    headline: ClassVar[str] = "personalised"

    def client(self, site: Site) -> Any:
        return Own(state_of(site.model(fresh=True)))

    def train_on(self, site: Site, model: nn.Module, **how: Any) -> None:
        """Local training; `how` as in `Site.fit`."""
        site.fit(model, epochs=self.epochs, lr=self.lr, batch=self.batch, order=self.order, **how)

    def local_model(self, state: Any, site: Site) -> nn.Module | None:
        return site.model(state.theta)


class ClassSums:
    """Rows (n, d) summed by class, batch by batch while a model trains."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, int] = {}

    def add(self, values: Tensor, labels: Tensor) -> None:
        """Add rows (n, d) of classes `labels` (n,)."""
        values = values.detach().float()
        for c in labels.unique().tolist():
            rows = values[labels == c]
            self._sums[c] = self._sums[c] + rows.sum(0) if c in self._sums else rows.sum(0)
            self._counts[c] = self._counts.get(c, 0) + len(rows)

    def means(self) -> ClassVectors:
        """The mean of every class that was added."""
        classes = sorted(self._sums)
        rows = [self._sums[c] / self._counts[c] for c in classes]
        return ClassVectors.of(torch.stack(rows) if rows else torch.empty(0, 0), classes)


def class_means(rows: Tensor, labels: Tensor) -> ClassVectors:
    """The mean of the rows (n, d) of every class in `labels` (n,)."""
    classes = [int(c) for c in labels.unique()]
    return ClassVectors.of(torch.stack([rows[labels == c].mean(0) for c in classes]), classes)


def gathered(uploads: Iterable[tuple[Id, ClassVectors]], classes: int) -> tuple[Tensor, Tensor]:
    """All clients' rows one after another, (n, d), and their classes, (n,); n is 0 if nobody sent any.

    Raises MethodError for a client whose rows are not one a class, of classes there are, as long as the others'.
    """
    rows, labels = [torch.empty(0, 0)], list[int]()
    for client, upload in uploads:
        sent, known = upload.rows, upload.classes
        fits = sent.dim() == 2 and len(sent) == len(set(known)) == len(known) and set(known) <= set(range(classes))
        if not fits or (labels and known and sent.shape[1] != rows[-1].shape[1]):
            raise MethodError(
                f"client {client} sent vectors of shape {tuple(sent.shape)} for {len(known)} classes of {classes}, "
                "which do not go with the other clients' or the task's"
            )
        if known:
            rows.append(sent)
            labels += known
    return torch.cat(rows[1:] or rows), torch.tensor(labels, dtype=torch.int64)
