"""A task's first models tried on a few of its samples, before a run begins."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.streams import seeded
from fewbytes.core.detection import Detection
from fewbytes.core.devices import arithmetic
from fewbytes.core.metrics import check_installed
from fewbytes.core.problem import Id, Problem, Task
from fewbytes.data.split import Split, classes_in

SAMPLES, MODELS = 8, 8  # that are tried, at most


def try_models(task: Task) -> None:
    """Raises UserError if a first model, tried on a few samples, cannot learn the data that are here; for metrics that
    need what is not installed.

    Of clients with the same model, and samples of one shape, it is tried on those who have the highest label; of very
    many models or shapes on a few.
    """
    if isinstance(task.problem.objective, Detection):
        return
    check_installed(task.problem.objective.measured)
    problem = replace(task.problem.on_cpu(), remodel=None)
    first = set(problem.clients_in(1))  # a newcomer that does not suit is refused as it comes
    held = [(f"client {i}'s training samples", i, client.train) for i, client in enumerate(task.data.clients)]
    held += [(f"client {i}'s test samples", i, client.test) for i, client in enumerate(task.data.clients)]
    held += [("the server's test samples", 0, task.data.test)]
    for client in islice(problem.architectures(), MODELS):
        alike = [each for each in held if each[2] and problem.architecture(each[1]) == problem.architecture(client)]
        shapes = dict.fromkeys(each[2].shape for each in alike if each[1] in first)
        for shape in islice(shapes, MODELS):
            same = [each for each in alike if each[2].shape == shape]
            _try(problem, *max(same, key=lambda each: classes_in([each[2]])))


def _try(problem: Problem, who: str, client: Id, split: Split) -> None:
    """One forward pass, and the loss. Raises UserError if either cannot be."""
    rows = {int(split.labels.argmax()), *np.linspace(0, len(split) - 1, min(len(split), SAMPLES)).astype(int).tolist()}
    with seeded(problem.seed, "try"):
        x, targets = problem.objective.samples(split.take(sorted(rows)), problem.device)
        model, samples = problem.model(client).eval(), x[:]
        with arithmetic(problem.precision, problem.device):
            try:
                outputs = model(samples)
            except UserError:
                raise
            except Exception as error:  # the user's code
                kind = "numbers" if samples.is_floating_point() else "integers"
                raise UserError(
                    f"{who} are {kind} of shape {tuple(samples.shape[1:])}, which this model does not take: "
                    f"{one_line(error)}"
                ) from None
            try:
                problem.objective.check(model, outputs, targets)
            except UserError as error:
                raise UserError(f"{who}: {error}") from None
