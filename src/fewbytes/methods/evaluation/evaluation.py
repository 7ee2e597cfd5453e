"""Evaluation: every site tests models on its own test samples, and nothing is trained.

The server sends one model after the other. A site replies with each metric and its interval, computed at the site,
and, if its `tell` is `figures` or `labels`, with the confusion matrix and the calibration curve. Models of its own,
which it has kept of a run, are tested without being sent. Where these were trained alone, the site also compares the
shared model with its own, sample by sample. A site whose `tell` is `nothing`, or with fewer test samples than its
`min-count`, reports no figure.

Bytes per client and model, before lossless coding: 4 D down, where D counts the model's values; about 30 up for each
metric, and 8 for each pair of classes. A comparison takes 4 D down and 8,000 up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import nn

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.state import State, state_of
from fewbytes.core.intervals import RESAMPLES
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

Kind = Literal["shared", "own", "alone"]


class Asked(msgspec.Struct):
    """Models to test: their name, the label of their run, and the file of the shared one on the server. Without a file,
    each site's own of the run in the folder `kept`, which the sites have kept; `alone`: from training without
    others."""

    name: str
    run: str
    file: str = ""
    kept: str = ""
    kind: Kind = "shared"


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


@payload
class Own:
    """Server to client: the name of a run, of which the site has kept its own model."""

    run: str


@payload
class Versus(Own):
    """The same, and the shared model that is compared with the site's own."""

    theta: Dense


@payload
class Better:
    """How much better the shared model is than the site's own, by the main metric (None: not reported), and the same of
    each resample, 0 for those that are `undefined` (their places)."""

    value: float | None
    draws: torch.Tensor  # float64 (RESAMPLES,); empty: not reported
    undefined: torch.Tensor  # int64


@dataclass
class Gathered:
    """The server's state: by the models' place in the question and the client, what the site reported, and how much
    better the models are than those trained alone."""

    found: dict[str, dict[int, Tested]] = field(default_factory=dict)
    better: dict[str, dict[int, Better]] = field(default_factory=dict)


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

        alone = next((each for each in self.asked.models if each.kind == "alone"), None)
        for number, each in enumerate(self.asked.models):
            if not each.file:
                own = net.call(self.test_own, to=net.clients, send=Own(each.kept), check=check)
                state.found[str(number)] = dict(own)
                continue
            theta = Dense(read_theta(each, net.problem))
            replies = net.call(self.test, to=net.clients, send=Model(theta), check=check)
            state.found[str(number)] = dict(replies)
            if alone is not None:
                gains = net.call(self.compare, to=net.clients, send=Versus(alone.kept, theta), check=check_better)
                state.better[str(number)] = dict(gains)

    def test(self, state: None, message: Model, site: Site) -> Tested:
        """What the site reports of a model."""
        return self._tested(site, site.model(message.theta.dense())) if _reports(site) else _nothing()

    def test_own(self, state: None, message: Own, site: Site) -> Tested:
        """The same of its own model of a run."""
        model = kept_model(site, message.run) if _reports(site) else None
        return _nothing() if model is None else self._tested(site, model)

    def compare(self, state: None, message: Versus, site: Site) -> Better:
        """How much better a model is than the site's own of a run, on the same samples."""
        own = kept_model(site, message.run) if _reports(site) else None
        if own is None:
            return Better(None, torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
        metric = site.problem.objective.metrics[0]
        one, other = (
            Scored.of(metric, _predictions(site, model), site.problem.seed + site.me)
            for model in (site.model(message.theta.dense()), own)
        )
        sign = 1 if metric.higher else -1
        draws, value = torch.from_numpy(sign * (one.draws - other.draws)), sign * (one.value - other.value)
        undefined = draws.isnan().nonzero()[:, 0]
        return Better(None if value != value else value, draws.nan_to_num(nan=0.0), undefined)

    def _tested(self, site: Site, model: nn.Module) -> Tested:
        terms, problem, samples = terms_at(site), site.problem, len(site.test)
        found, nothing = _predictions(site, model), torch.zeros(0, 0, dtype=torch.int64)
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


def terms_at(site: Site) -> SiteTerms:
    """The terms by which figures leave the site."""
    return site.test.terms if isinstance(site.test, OnTerms) else SiteTerms()


def _reports(site: Site) -> bool:
    """Whether the site reports any figures."""
    return terms_at(site).tell != "nothing" and len(site.test) >= max(1, terms_at(site).min_count)


def _nothing() -> Tested:
    return Tested(None, [], torch.zeros(0, 0, dtype=torch.int64), [], [], [])


def _predictions(site: Site, model: nn.Module) -> Predictions:
    problem = site.problem
    return Predictions.of(model, site.test, problem.objective, problem.device, problem.precision)


def kept_model(site: Site, run: str) -> nn.Module | None:
    """The own model of a run that the site has kept: the best, if it kept that; None if there is none."""
    folder = site.test.folder if isinstance(site.test, OnTerms) else None
    if folder is None or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", run):
        return None
    for place in ("models/best", "models"):
        if (file := folder / run / place / f"client-{site.me}.safetensors").is_file():
            return read_model(file)[0]
    return None


def check_better(client: Id, better: Better) -> None:
    """Raises MethodError for a reply that does not add up."""
    places, n = better.undefined, len(better.draws)
    if n not in (0, RESAMPLES) or len(places) > n or bool(((places < 0) | (places >= n)).any()):
        raise MethodError("its comparison of models does not add up")


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
