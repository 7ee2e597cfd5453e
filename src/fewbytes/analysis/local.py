"""Measures the accuracy of clients' local models on their own training samples, and on the server's test set.

FuseFL (Tang et al., NeurIPS 2024), Table 6, where some clients' images carry a backdoor: their models fit the stamps as
well as others fit their images, and are worse on clean ones.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.base.named import only_allowed
from fewbytes.base.streams import seeded
from fewbytes.core.training import outputs, ready
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.models.files import load_model
from fewbytes.report.records import Local


def local_accuracies(run: Path) -> list[Local]:
    """The accuracy of every client's own model, or its member of an ensemble; writes and returns RUN/local.json.

    Training samples are transformed once, as in training, so those of a backdoored client are stamped. Raises UserError
    for a folder that is not a run's or was made from Python, data without classes, and a client without its own model.
    """
    experiment = experiment_of(run)
    with only_allowed():  # imports only what is allowed
        task = find(experiment).task
        if task.data.learns != "classes":
            raise UserError(f"local models are scored by class; here {task.data.learns} are learnt")
        device, test = task.problem.device, task.data.test.load(task.problem.device)
        found: list[Local] = []
        for i in task.problem.clients:
            model, train = load_model(run, i), task.data.clients[i].train
            x, y = train.load()
            if train.transform is not None:
                with seeded(task.problem.seed, "local accuracy", i):
                    x = train.transform(x, y)
            own = _accuracy(model, x.to(device), y.to(device))
            found.append({"client": i, "own": own, "test": _accuracy(model, *test)})
    with replacing(run / "local.json") as file:
        file.write(json.dumps(found, indent=2).encode())
    return found


def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float | None:
    return float((outputs(model, ready(x)).argmax(1) == y).double().mean()) if len(y) else None
