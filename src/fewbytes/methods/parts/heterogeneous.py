"""Base of methods whose clients keep their own models, of any architecture, and exchange something smaller."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.ranges import LEARNT, PRESENT, Samples
from fewbytes.base.state import State, load_state, state_of
from fewbytes.core.admission import check_like
from fewbytes.core.aggregation import VOTERS
from fewbytes.core.network import Vote
from fewbytes.core.problem import Id, Problem
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.models.blocks import check_trains, features_of, has_units, head_of, head_sizes
from fewbytes.wire import Dense, payload


@payload
class ClassVectors:
    """One vector per class, in either direction: the rows (n, d) of `vectors`, and their classes."""

    vectors: Dense
    classes: Annotated[list[int], PRESENT]

    @classmethod
    def of(cls, rows: Tensor, classes: list[int]) -> Self:
        return cls(Dense({"": rows.detach().cpu().contiguous()}), classes)

    @property
    def rows(self) -> Tensor:
        return self.vectors.state[""]


@payload
class Head:
    """Server to client: a classifier's weight and bias."""

    theta: Dense


@payload
class TrainedHead:
    """Client to server: its classifier, and the number of training samples."""

    theta: Annotated[Dense, LEARNT]
    samples: Samples


@dataclass
class AuxiliaryMean:
    """The server's state if all clients share a small model besides their own."""

    auxiliary: State  # empty before the first mean


@dataclass
class Own:
    """A client's state."""

    theta: State  # its model after its last training
    received: State = field(default_factory=dict)  # the server's classifier, with which its next training begins


STORED = Local(epochs=1, lr=0.01, batch=10, order="stored", last="dropped")
"""FedKTL's local training, used in its paper for all compared methods; the sample order is the authors' code's."""


def own_draw(site: Site) -> Own:
    """A client's first model, with weights that the client draws."""
    return Own(state_of(site.model(fresh=True)))


def number_of_classes(problem: Problem) -> int:
    """C, from the clients' models. Raises UserError if they differ."""
    classes = {_outputs(model, problem) for model in _models(problem)}
    if len(classes) > 1:
        raise UserError(f"the clients' models must have the same number of classes, not {_listed(classes)}")
    return classes.pop()


def feature_sizes(problem: Problem) -> set[int]:
    """All K' of the clients' models. Raises UserError if one gives no features."""
    return {head_sizes(model)[0] for model in _models(problem)}


def feature_size(problem: Problem) -> int:
    """K', from the clients' models. Raises UserError if they differ, or one gives no features."""
    sizes = feature_sizes(problem)
    if len(sizes) > 1:
        raise UserError(
            f"the clients' models must have features of one size, not {_listed(sizes)}: name them with @512"
        )
    return sizes.pop()


def shared_head(problem: Problem) -> nn.Linear:
    """The classifier of client 0's first model. Raises UserError unless all clients have a classifier like it."""
    feature_size(problem), number_of_classes(problem)
    for model in _models(problem):
        head = head_of(model)
        if not isinstance(head, nn.Linear) or head.bias is None:
            raise UserError(
                f"the classifiers of all clients must be one Linear with bias to be shared, a {type(model).__name__} "
                "has another; fedktl, fml, fedkd, feddistill and fedproto take any"
            )
        check_trains(head, model)
    return head_of(problem.first_model())  # type: ignore[return-value]


def _outputs(model: nn.Module, problem: Problem) -> int:
    """A model's number of logits: from its head or, if it has none, from a sample of zeros."""
    if has_units(model):
        return head_sizes(model)[1]
    with torch.no_grad():
        logits = model.eval()(problem.blank())
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UserError(f"a {type(model).__name__} must give logits (n, classes)")
    return logits.shape[1]


def _models(problem: Problem) -> Iterable[nn.Module]:
    """A model of each architecture."""
    return (problem.model(client) for client in problem.architectures())


def _listed(numbers: set[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def receive_head(state: Own, head: State, site: Site) -> None:
    """Keep the server's classifier for the next training, and score the client's model with it as `combined`."""
    state.received = head
    site.score("combined", begin_training(state, site))


def begin_training(state: Own, site: Site) -> nn.Module:
    """The client's model with the classifier that it received."""
    model = site.model(state.theta)
    if state.received:
        load_state(head_of(model), state.received)
    return model


def end_training(state: Own, model: nn.Module) -> None:
    """Keep the trained model."""
    state.theta, state.received = state_of(model), {}


class WithFeatures(nn.Module):
    """Returns a model's features (n, K') with its logits (n, C); parameters and buffers are the model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._parts = features_of(model), head_of(model)  # a tuple, so that they are not registered twice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features, head = self._parts
        values = features(x)
        return values, head(values)


class ClassSums:
    """Sums rows (n, d) by class, batch by batch during training."""

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
        """The mean of every class with rows."""
        classes = sorted(self._sums)
        rows = [self._sums[c] / self._counts[c] for c in classes]
        return ClassVectors.of(torch.stack(rows) if rows else torch.empty(0, 0), classes)


def class_means(rows: Tensor, labels: Tensor) -> ClassVectors:
    """The mean of the rows (n, d) of every class in `labels` (n,)."""
    classes = [int(c) for c in labels.unique()]
    return ClassVectors.of(torch.stack([rows[labels == c].mean(0) for c in classes]), classes)


def with_means(known: ClassVectors | None, rows: Tensor, labels: Tensor) -> ClassVectors | None:
    """The mean of the rows (n, d) of every class in `labels` (n,); classes without a row keep what is `known`."""
    if not len(labels):
        return known
    new = class_means(rows, labels)
    vectors = dict(zip(known.classes, known.rows, strict=True)) if known is not None else {}
    vectors |= dict(zip(new.classes, new.rows, strict=True))
    classes = sorted(vectors)
    return ClassVectors.of(torch.stack([vectors[c] for c in classes]), classes)


def class_distance(values: Tensor, labels: Tensor, vectors: ClassVectors | None) -> Tensor:
    """The mean squared distance of values (n, d) to the vectors of their classes; 0 for classes without a vector.

    The mean is over all n d components, including those of such classes.
    """
    values = values.float()
    if vectors is None:
        return values.new_zeros(())
    rows, classes = vectors.rows.to(values.device), torch.tensor(vectors.classes, device=values.device)
    at = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    known = (classes[at] == labels)[:, None]
    return F.mse_loss(values, torch.where(known, rows[at], values.detach()))


def one_each(classes: int, size: int, longest: float = math.inf) -> Callable[[Id, ClassVectors], None]:
    """A check for `Network.call`: one vector (size,) of norm at most `longest` per class that a client names, out of
    `classes`."""

    def check(client: Id, reply: ClassVectors) -> None:
        known = reply.classes
        if known and known[-1] >= classes:
            raise MethodError(f"it sent a vector of class {known[-1]} of {classes}")
        check_like(reply.vectors.state, {"": torch.empty(len(known), size if known else 0)})
        if known and (norm := float(reply.rows.norm(dim=1).max())) > longest:
            raise MethodError(f"it sent a vector of norm {norm:.3g}, more than {longest:g}")

    return check


def gathered(uploads: Iterable[tuple[Id, ClassVectors]]) -> tuple[Tensor, Tensor]:
    """All clients' rows concatenated, (n, d), and their classes, (n,); n is 0 if no client sent any."""
    rows, labels = [torch.empty(0, 0)], list[int]()
    for _, upload in uploads:
        if upload.classes:
            rows.append(upload.rows)
            labels += upload.classes
    return torch.cat(rows[1:] or rows), torch.tensor(labels, dtype=torch.int64)


def elected(rows: Tensor, labels: Tensor, vote: Vote) -> Tensor:
    """Clients' rows (n, d) of classes `labels` (n,), clipped to the median norm. If at least three clients sent a
    class, each of its rows becomes their vote, so that the class keeps its weight."""
    norms = rows.norm(dim=1, keepdim=True)
    most = norms.quantile(0.5) if len(rows) else norms.sum()
    rows = torch.where(norms > most, rows * (most / norms), rows)
    for c in labels.unique():
        own = (labels == c).nonzero()[:, 0]
        if len(own) >= VOTERS:
            rows[own] = vote(rows[own], torch.ones_like(rows[own], dtype=torch.bool)).to(rows.dtype)
    return rows
