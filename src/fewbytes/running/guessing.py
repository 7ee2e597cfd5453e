"""The scores of guessing: of the best answer that is the same for all samples, by any known metric."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbytes.core.metrics import Metric, value_of
from fewbytes.core.objective import Objective
from fewbytes.core.records import ByMetric
from fewbytes.data.clients import FederatedData
from fewbytes.data.split import IGNORED_PIXEL, Split

FEW_CLASSES = 10  # the most frequent ones are guessed
FEW_CLIENTS = 20  # of more, the mean over the first
ENOUGH = 2000  # samples: of more, a sample with the same frequencies is scored


def guesses(objective: Objective, counts: dict[str, Any], data: FederatedData) -> ByMetric:
    """By metric and kind, the score of the best constant answer: `global` on the server's test set, `personalised` on
    each client's own, averaged. `counts`: the content of partition.json. Without the metrics that are not known by
    name, accuracy of classes (see `majority_class_accuracy`), and kinds of targets for which it is unknown."""
    metrics = [metric for metric in objective.metrics if metric.known]
    if data.learns == "classes":
        metrics = [metric for metric in metrics if metric.name != "accuracy"]
    if not metrics or data.learns not in ("classes", "masks", "labels", "numbers"):
        return {}
    found: ByMetric = {}
    classes = len(data.classes)
    rows = [row for row in zip(counts["train"], counts["test"], strict=True) if all(isinstance(of, list) for of in row)]
    local = [client.test for client in data.clients if len(client.test)][:FEW_CLIENTS]
    if data.learns == "classes" and len(rows) == len(counts["train"]) and classes > 1:
        pooled = torch.tensor([train for train, _ in rows]).sum(0)
        server = _of_counts(metrics, pooled, torch.bincount(data.test.labels, minlength=classes))
        tested = [(torch.tensor(train), torch.tensor(test)) for train, test in rows if sum(test)][:FEW_CLIENTS]
        clients = [_of_counts(metrics, train, test) for train, test in tested]
    elif data.learns == "masks":
        server = _of_counts(metrics, None, _pixels(data.test, classes))
        clients = [_of_counts(metrics, None, _pixels(test, classes)) for test in local]
    elif data.learns in ("labels", "numbers"):
        server, *clients = (_of_targets(metrics, objective, test) for test in (data.test, *local))
    else:
        return {}
    for metric in metrics:
        own = [of[metric.name] for of in clients if metric.name in of]
        kinds = {"personalised": sum(own) / len(own)} if own else {}
        kinds |= {"global": server[metric.name]} if metric.name in server else {}
        found |= {metric.name: kinds} if kinds else {}
    return found


def rarest_class(counts: dict[str, Any], data: FederatedData) -> dict[str, int]:
    """By kind, the number of test samples of the rarest class that occurs, on which its sensitivity is measured."""
    if data.learns != "classes" or not all(isinstance(row, list) for row in counts["test"]):
        return {}
    of = {"global": torch.bincount(data.test.labels), "personalised": torch.tensor(counts["test"]).sum(0)}
    return {kind: int(found[found > 0].min()) for kind, found in of.items() if found.sum()}


def _pixels(test: Split, classes: int) -> Tensor:
    targets = test.targets.long()
    return torch.bincount(targets[targets != IGNORED_PIXEL], minlength=classes)


def _of_counts(metrics: Sequence[Metric], train: Tensor | None, test: Tensor) -> dict[str, float]:
    """By metric, the score of the best constant answer for test samples (classes,) by class: the frequencies in
    training (None: in test), or one class."""
    if not test.sum():
        return {}
    scale = max(1.0, float(test.sum()) / ENOUGH)
    labels = torch.repeat_interleave(torch.arange(len(test)), (test / scale).ceil().long())
    frequencies = (test if train is None or not train.sum() else train).float()
    answers = [frequencies / frequencies.sum()]
    answers += [F.one_hot(c, len(test)).float() for c in frequencies.argsort(descending=True)[:FEW_CLASSES]]
    return _best(metrics, (answer.expand(len(labels), -1) for answer in answers), labels)


def _of_targets(metrics: Sequence[Metric], objective: Objective, test: Split) -> dict[str, float]:
    """By metric, the score of the best constant answer for these targets: their mean or median, or all or no label."""
    if not len(test):
        return {}
    truth = objective.truth(test.targets)
    mean = truth.float().mean(0)
    answers = [mean, truth.float().median(0).values]
    answers += [torch.ones_like(mean), torch.zeros_like(mean)] if test.learns == "labels" else []
    return _best(metrics, (answer.expand(truth.shape).clone() for answer in answers), truth)


def _best(metrics: Sequence[Metric], answers: Iterable[Tensor], targets: Tensor) -> dict[str, float]:
    found: dict[str, float] = {}
    for answer in answers:
        for metric in metrics:
            measure = metric.make(answer)
            with warnings.catch_warnings(action="ignore"):  # of constant answers
                measure.update(answer, targets)
                value = value_of(measure)
            better = max if metric.higher else min
            if "@" in metric.name:  # what random answers reach
                value = max(value, 1 - float(metric.name.partition("=")[2]))
            if math.isfinite(value):
                found[metric.name] = better(found.get(metric.name, value), value)
    return found
