"""Evaluation: every site tests models on its own test samples, and nothing is trained.

The server sends one model after the other. A site replies with each metric and its interval, computed at the site,
and, if its `tell` is `figures` or `labels`, with the confusion matrix and the calibration curve. Models of its own,
which it has kept of a run, are tested without being sent. It compares models with those of training alone, and with
the shared model of a run without one site, sample by sample. If its `tell` is `figures`, it also reports on subgroups
of its samples. A site whose `tell` is `nothing`, or with fewer test samples than its `min-count`, reports no figure.

Bytes per client and model, before lossless coding: 4 D down, where D counts the model's values; about 30 up for each
metric and each subgroup, and 8 for each pair of classes. A comparison takes 4 D down for each model that is sent, and
8,000 up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
from fewbytes.core.tested import Predictions, Scored, defined
from fewbytes.data.surveyed import OnTerms, terms_of
from fewbytes.methods.evaluation.subgroups import Subgroup, check_subgroups, subgroups_at
from fewbytes.methods.parts.averaging import Model
from fewbytes.models.files import read_model
from fewbytes.wire import payload
from fewbytes.wire.dense import Dense

Kind = Literal["shared", "own", "alone", "without"]


class Asked(msgspec.Struct):
    """Models to test: their name, the label of their run, that run's folder on the server, and the file of the shared
    one in it. Without a file, each site's own of the run, which the sites have kept. `kind`: `alone` are from training
    without others, `without` from the run without a site."""

    name: str
    run: str
    folder: str = ""
    file: str = ""
    kind: Kind = "shared"

    @property
    def kept(self) -> str:
        """The name of the run of which sites have kept their own models; empty for a model that is sent."""
        return "" if self.file else Path(self.folder).name


class Question(msgspec.Struct):
    """What is asked: models, the names of the runs they are of, the names of the sites that took part in the training,
    and the column of subgroups, as `By` reads it."""

    models: list[Asked] = []
    runs: list[str] = []
    trained: list[str] = []
    by: str = ""

    def pairs(self) -> Iterator[tuple[int, int]]:
        """The places of models to compare: models of federated training over those of training alone, and the shared
        model over that of its run without a site."""
        for i, each in enumerate(self.models):
            for j, other in enumerate(self.models):
                over_alone = each.kind in ("shared", "own") and other.kind == "alone"
                if over_alone or (each.kind == "shared" and other.kind == "without" and each.run == other.run):
                    yield i, j


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
    predicted class (empty: not reported), the calibration curve: predicted, observed and number of samples by bin; and
    subgroups by the main metric, or why there are none (one of `subgroups.REASONS`)."""

    samples: int | None
    figures: list[MetricFigure]
    confusion: torch.Tensor  # int64 (classes, classes)
    predicted: list[float]
    observed: list[float]
    counts: list[int]
    groups: list[Subgroup]
    ungrouped: str


@payload
class Own:
    """Server to client: the name of a run, of which the site has kept its own model."""

    run: str


@payload
class Pair:
    """Server to client: two models to compare, each the site's own of a run, or, without the run's name, the next of
    those that are sent."""

    runs: list[str]
    sent: list[Dense]


@payload
class Better:
    """How much better the first model of a pair is than the second, by the main metric (None: not reported), and the
    same of each resample, 0 for those that are `undefined` (their places)."""

    value: float | None
    draws: torch.Tensor  # float64 (RESAMPLES,); empty: not reported
    undefined: torch.Tensor  # int64


@dataclass
class Gathered:
    """The server's state: by the models' place in the question and the client, what the site reported; by two places,
    `0 1`, and the client, how much better the first models are than the second."""

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

        models = self.asked.models
        for number, each in enumerate(models):
            if each.file:
                sent = Model(Dense(read_theta(each, net.problem)))
                replies = net.call(self.test, to=net.clients, send=sent, check=check)
            else:
                replies = net.call(self.test_own, to=net.clients, send=Own(each.kept), check=check)
            state.found[str(number)] = dict(replies)
        for i, j in self.asked.pairs():
            both = models[i], models[j]
            thetas = [Dense(read_theta(each, net.problem)) for each in both if each.file]
            pair = Pair([each.kept for each in both], thetas)
            state.better[f"{i} {j}"] = dict(net.call(self.compare, to=net.clients, send=pair, check=check_better))

    def test(self, state: None, message: Model, site: Site) -> Tested:
        """What the site reports of a model."""
        return self._tested(site, site.model(message.theta.dense())) if _reports(site) else _nothing()

    def test_own(self, state: None, message: Own, site: Site) -> Tested:
        """The same of its own model of a run."""
        model = kept_model(site, message.run) if _reports(site) else None
        return _nothing() if model is None else self._tested(site, model)

    def compare(self, state: None, message: Pair, site: Site) -> Better:
        """How much better the first of two models is than the second, on the same samples."""
        metric, found, sent = site.problem.objective.metrics[0], list[Scored](), iter(message.sent)
        for run in message.runs if _reports(site) else ():
            theta = None if run else next(sent, None)
            model = kept_model(site, run) if theta is None else site.model(theta.dense())
            if model is not None:
                found.append(Scored.of(metric, _predictions(site, model), site.problem.seed + site.me))
        if len(found) != 2:
            return Better(None, torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
        one, other = found
        sign = 1 if metric.higher else -1
        draws, value = torch.from_numpy(sign * (one.draws - other.draws)), sign * (one.value - other.value)
        undefined = draws.isnan().nonzero()[:, 0]
        return Better(None if value != value else value, draws.nan_to_num(nan=0.0), undefined)

    def _tested(self, site: Site, model: nn.Module) -> Tested:
        terms, problem, samples = terms_of(site.test), site.problem, len(site.test)
        found, nothing = _predictions(site, model), torch.zeros(0, 0, dtype=torch.int64)
        figures = [
            MetricFigure(metric.name, *defined(Scored.of(metric, found, problem.seed + site.me).figure))
            for metric in problem.objective.metrics
        ]
        groups, why = subgroups_at(site, found, self.asked.by)
        if site.test.learns != "classes" or terms.tell == "sizes":
            return Tested(samples, figures, nothing, [], [], [], groups, why)
        matrix = torch.tensor(found.confusion(), dtype=torch.int64)
        matrix[matrix.sum(1) < terms.min_count] = 0
        predicted, observed, counts = zip(*found.calibration(positive_of(problem), terms.min_count), strict=True)
        return Tested(samples, figures, matrix, list(predicted), list(observed), list(counts), groups, why)


def _reports(site: Site) -> bool:
    """Whether the site reports any figures."""
    return terms_of(site.test).tell != "nothing" and len(site.test) >= max(1, terms_of(site.test).min_count)


def _nothing() -> Tested:
    return Tested(None, [], torch.zeros(0, 0, dtype=torch.int64), [], [], [], [], "")


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


def read_theta(asked: Asked, problem: Problem) -> State:
    """The entries of a model's file. Raises UserError for a file of another model than the problem's."""
    path = Path(asked.folder) / asked.file
    model, about = read_model(path)
    theta, first = state_of(model), problem.first_state()
    if "recipe" in about or {k: v.shape for k, v in theta.items()} != {k: v.shape for k, v in first.items()}:
        raise UserError(
            f"{path} is not the model that the sites build: evaluate it alone, or at a site "
            "(fewbytes evaluate FILE --sites FOLDER)"
        )
    return theta


def check_tested(tested: Tested, metrics: Sequence[str]) -> None:
    """Raises MethodError for a reply that does not add up."""
    shape, n = tuple(tested.confusion.shape), tested.samples or 0
    sound = [each.name for each in tested.figures] == (list(metrics) if tested.samples is not None else [])
    sound &= n >= 0 and len(shape) == 2 and shape[0] == shape[1] and int(tested.confusion.sum()) <= n
    sound &= len(tested.predicted) == len(tested.observed) == len(tested.counts) and sum(tested.counts) <= n
    sound &= check_subgroups(tested.groups, tested.ungrouped, n)
    if not sound or bool((tested.confusion < 0).any()) or min(tested.counts, default=0) < 0:
        raise MethodError("its figures of a model do not add up")
