"""Trial of a task's first models on a few of its samples, before a run begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.state import in_training, trained_parameters
from fewbytes.base.streams import seeded
from fewbytes.core.detection import Detection
from fewbytes.core.devices import arithmetic
from fewbytes.core.known_metrics import check_installed
from fewbytes.core.method import Method
from fewbytes.core.model_checks import (
    check_apart,
    check_float32,
    check_optimiser,
    check_unchanged,
    entered,
    kept,
    normalised,
)
from fewbytes.core.privacy import clipped_sum
from fewbytes.core.problem import Id, Problem
from fewbytes.core.recalibration import check_recalibrates
from fewbytes.core.task import Task
from fewbytes.data.named import NamedTensors, one_tensor
from fewbytes.data.split import Split, classes_in

SAMPLES, MODELS = 8, 8  # maximum numbers to try


def check_models(method: Method, task: Task) -> None:
    """Raises UserError if a task's function gives clients shared modules, or models that cannot travel, or cannot be
    trained by several clients, or by the method."""
    problem = task.problem.on_cpu()
    for client in islice(problem.architectures(), MODELS):
        model = problem.model(client)
        check_apart(model, problem.model(client))
        if method.promises.float32_only:
            check_float32(model, method.method_name)
        if method.promises.brings_loss:
            problem.objective.loss(model, F.cross_entropy, torch.zeros(0))  # raises for an unsuitable loss
        check_optimiser(model, getattr(method, "local", None))
        if problem.recalibrate:
            check_recalibrates(model, method.method_name, method.has_local_models(problem.own))


def try_models(task: Task) -> list[str]:
    """Notes for people about the first models, after trying them on a few samples, in training and in eval mode. Raises
    UserError if a model cannot learn the data here, or a metric's package is not installed.

    Of clients with the same model and sample shape, the one with the highest label is tried; of very many models or
    shapes, a few.
    """
    if isinstance(task.problem.objective, Detection):
        return []
    check_installed(task.problem.objective.measured)
    problem = replace(task.problem.on_cpu(), remodel=None)
    first = set(problem.clients_in(1))  # unsuitable newcomers are refused when they join
    sets = [(f"client {i}'s training samples", i, client.train) for i, client in enumerate(task.data.clients)]
    sets += [(f"client {i}'s test samples", i, client.test) for i, client in enumerate(task.data.clients)]
    sets += [("the server's test samples", 0, task.data.test)]
    notes: list[str] = []
    for client in islice(problem.architectures(), MODELS):
        alike = [each for each in sets if each[2] and problem.architecture(each[1]) == problem.architecture(client)]
        shapes = dict.fromkeys(each[2].shape for each in alike if each[1] in first)
        for shape in islice(shapes, MODELS):
            same = [each for each in alike if each[2].shape == shape]
            notes += _try(problem, *max(same, key=lambda each: classes_in([each[2]])))
    return list(dict.fromkeys(notes))


def _try(problem: Problem, who: str, client: Id, split: Split) -> Iterator[str]:
    """A pass in eval mode and one in training, with losses. Raises UserError if one of them fails."""
    rows = {int(split.labels.argmax()), *np.linspace(0, len(split) - 1, min(len(split), SAMPLES)).astype(int).tolist()}
    with seeded(problem.seed, "try"):
        x, targets = problem.objective.samples(split.take(sorted(rows)), problem.device)
        model, samples = problem.model(client), x[:]
        before = kept(model)
        _pass(problem, model.eval(), who, samples, targets)
        check_unchanged(model, before)
        if len(targets) < 2:  # batch normalisation has no variance for one sample
            return
        with normalised(in_training(model)) as single:
            _pass(problem, model, f"in training, {who}", samples, targets)
        check_unchanged(model, before)
        if problem.privacy is not None:
            _of_each(problem, model, one_tensor(samples)[:2], targets[:2])
    if single:
        shape = " x ".join(map(str, tuple(samples.shape[1:])))
        yield (
            f"batch normalisation {single[0]!r} sees a single value a channel of each sample of {shape}, so that its "
            "statistics are those of a few values: use larger samples, a model that reduces them less (of ours "
            "resnet8:stem=3x3), or another normalisation"
        )


def _pass(problem: Problem, model: nn.Module, who: str, samples: Tensor | NamedTensors, targets: Tensor) -> None:
    with arithmetic(problem.precision, problem.device), entered(model) as within:
        try:
            outputs: Any = model(samples)
        except UserError:
            raise
        except Exception as error:  # the user's code
            kind = "numbers" if samples.is_floating_point() else "integers"
            where = f" in {within[-1]}" if len(within) > 1 else ""
            raise UserError(
                f"{who} are {kind} of shape {tuple(samples.shape[1:])}, which this model does not take{where}: "
                f"{one_line(error)}{_narrow(model, samples)}"
            ) from None
    try:
        problem.objective.check(model, outputs, targets)
    except UserError as error:
        raise UserError(f"{who}: {error}") from None


def _narrow(model: nn.Module, samples: Tensor | NamedTensors) -> str:
    """The fix for a model of another type of numbers than its samples."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(kinds) != 1 or not isinstance(samples, Tensor) or samples.dtype in kinds or not samples.is_floating_point():
        return ""
    return f": let its forward begin with x = x.to({kinds.pop()}), the type of its parameters"


def _of_each(problem: Problem, model: nn.Module, samples: Tensor, targets: Tensor) -> None:
    """Raises UserError for a model without per-sample gradients, which privacy of samples needs."""
    loss = problem.objective.loss(model, None, targets)
    with entered(model) as within:
        try:
            clipped_sum(model, trained_parameters(model), loss, samples, targets, 1.0)
        except (UserError, RuntimeError, TypeError, ValueError):  # unsupported by torch, or the user's code
            where = within[-1] if within else "the model or its loss"
            raise UserError(
                f"dp of samples needs the gradient of each sample, which {where} does not give, as it decides by "
                "values, changes a buffer, mixes samples or has sparse gradients: replace it"
            ) from None
