"""Evaluation: every site tests models on its own test samples, and nothing is trained.

The server sends one model after the other. A site replies with each metric and its interval, computed at the site,
and, if its `tell` is `figures` or `labels`, with the confusion matrix and the calibration curve. A site whose `tell` is
`nothing`, or with fewer test samples than its `min-count`, reports no figure.

Bytes per client and model, before lossless coding: 4 D down, where D counts the model's values; about 30 up for each
metric, and 8 for each pair of classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.state import State, state_of
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.tested import Figure, Predictions, Scored
from fewbytes.data.surveyed import OnTerms, SiteTerms
from fewbytes.methods.parts.averaging import Model
from fewbytes.models.files import read_model
from fewbytes.wire import payload
from fewbytes.wire.dense import Dense


class Asked(msgspec.Struct):
    """A model to test: its file on the server, its name, and the label of its run."""

    file: str
    name: str
    run: str


class Question(msgspec.Struct):
    """What is asked: models, the names of the runs they are of, and of the sites that took part in the training."""

    models: list[Asked] = []
    runs: list[str] = []
    trained: list[str] = []


@payload
class MetricFigure:
    """A metric at a site, with its interval; None where undefined."""

    name: str
    value: float | None
    low: float | None
    high: float | None


@payload
class Tested:
    """What a site reports of a model: its number of test samples (None: not reported), each metric, samples by true and
    predicted class (empty: not reported), and the calibration curve: predicted, observed and number of samples by
    bin."""

    samples: int | None
    figures: list[MetricFigure]
    confusion: torch.Tensor  # int64 (classes, classes)
    predicted: list[float]
    observed: list[float]
    counts: list[int]


@dataclass
class Gathered:
    """The server's state: by the model's place in the question and the client, what the site reported."""

    found: dict[str, dict[int, Tested]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation(Method):
    """Settings of an evaluation."""

    question: str = "{}"  # a `Question`, as JSON

    promises = Promises(sends="figures of models on its test samples", evaluates=True)

    @property
    def asked(self) -> Question:
        """The question. Raises UserError for a text that is none."""
        try:
            return msgspec.json.decode(self.question, type=Question)
        except msgspec.MsgspecError as error:
            raise UserError(f"the question of an evaluation cannot be read: {error}") from None

    def planned_rounds(self, asked: int) -> int:
        return 1

    def server(self, problem: Problem) -> Gathered:
        return Gathered()

    def round(self, state: Gathered, net: Network, t: int) -> None:
        names = [metric.name for metric in net.problem.objective.metrics]

        def check(client: Id, tested: Tested) -> None:
            check_tested(tested, names)

        for number, each in enumerate(self.asked.models):
            theta = read_theta(each, net.problem)
            replies = net.call(self.test, to=net.clients, send=Model(Dense(theta)), check=check)
            state.found[str(number)] = dict(replies)

    def test(self, state: None, message: Model, site: Site) -> Tested:
        """What the site reports of a model."""
        terms = site.test.terms if isinstance(site.test, OnTerms) else SiteTerms()
        samples, nothing = len(site.test), torch.zeros(0, 0, dtype=torch.int64)
        if terms.tell == "nothing" or samples < max(1, terms.min_count):
            return Tested(None, [], nothing, [], [], [])
        problem, model = site.problem, site.model(message.theta.dense())
        found = Predictions.of(model, site.test, problem.objective, problem.device, problem.precision)
        figures = [
            MetricFigure(metric.name, *defined(Scored.of(metric, found, problem.seed + site.me).figure))
            for metric in problem.objective.metrics
        ]
        if site.test.learns != "classes" or terms.tell == "sizes":
            return Tested(samples, figures, nothing, [], [], [])
        matrix = torch.tensor(found.confusion(), dtype=torch.int64)
        matrix[matrix.sum(1) < terms.min_count] = 0
        predicted, observed, counts = zip(*found.calibration(positive_of(problem), terms.min_count), strict=True)
        return Tested(samples, figures, matrix, list(predicted), list(observed), list(counts))


def positive_of(problem: Problem) -> int | None:
    """The number of the positive class, if the run has one."""
    name = problem.agreed.get("positive")
    return list(problem.classes).index(name) if name in problem.classes else None


def defined(figure: Figure) -> tuple[float | None, float | None, float | None]:
    """A figure with None in place of NaN."""
    value, low, high = (None if each != each else each for each in figure)
    return value, low, high


def read_theta(asked: Asked, problem: Problem) -> State:
    """The entries of a model's file. Raises UserError for a file of another model than the problem's."""
    model, about = read_model(Path(asked.file))
    theta, first = state_of(model), problem.first_state()
    if "recipe" in about or {k: v.shape for k, v in theta.items()} != {k: v.shape for k, v in first.items()}:
        raise UserError(
            f"{asked.file} is not the model that the sites build: evaluate it alone, or at a site "
            "(fewbytes evaluate FILE --sites FOLDER)"
        )
    return theta


def check_tested(tested: Tested, metrics: Sequence[str]) -> None:
    """Raises MethodError for a reply that does not add up."""
    shape, n = tuple(tested.confusion.shape), tested.samples or 0
    sound = [each.name for each in tested.figures] == (list(metrics) if tested.samples is not None else [])
    sound &= n >= 0 and len(shape) == 2 and shape[0] == shape[1] and int(tested.confusion.sum()) <= n
    sound &= len(tested.predicted) == len(tested.observed) == len(tested.counts) and sum(tested.counts) <= n
    if not sound or bool((tested.confusion < 0).any()) or min(tested.counts, default=0) < 0:
        raise MethodError("its figures of a model do not add up")
