"""What a run's models are compared with: the same training at each site alone, on pooled data, or without a site."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from fewbytes.base.errors import UserError, listed, suggestion
from fewbytes.core.method import TERMS, Method
from fewbytes.core.policy import Policy
from fewbytes.core.task import Task
from fewbytes.data import ClientData, FederatedData
from fewbytes.data.joined import joined
from fewbytes.experiments.display import Display
from fewbytes.experiments.run import run_with
from fewbytes.experiments.run_folders import finished
from fewbytes.experiments.settings import Experiment, make_method
from fewbytes.experiments.tasks import Found
from fewbytes.methods import method_class
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

ALONE = "separate"  # the method that sends nothing


def train_alone(found: Found, rounds: int, out: Path) -> Path:
    """A run in which every site trains alone: the run's local training, as many rounds. Returns its folder, which is
    reused. Raises UserError for a method without local training."""
    return _trained("training alone", alone(found.experiment), _plain(found.task), found, rounds, out)


def train_pooled(found: Found, rounds: int, out: Path) -> Path:
    """A run on the pooled training samples of all sites, as `train_alone`; its model is that of client 0."""
    data = found.task.data
    clients = [each for each in data.clients if len(each.train)]
    pooled = ClientData(joined([each.train for each in clients]), joined([each.test for each in clients]))
    task = _plain(found.task).with_data(FederatedData((pooled,), data.test, data.classes, schema=data.schema))
    _check_same_models(found.task, "pooled data")
    return _trained("pooled data", alone(found.experiment), task, found, rounds, out)


def train_without(found: Found, site: str, out: Path) -> Path:
    """The run without a site, whose number the later sites take; as `train_alone`. Raises UserError for an unknown
    site, and for models that differ between sites."""
    data = found.task.data
    names = [data.name_of(i) for i in range(len(data.clients))]
    check_without(site, names, data.presence is not None)
    _check_same_models(found.task, f"--without {site}")
    kept = [i for i, name in enumerate(names) if name != site]
    rest = dataclasses.replace(data, clients=tuple(data.clients[i] for i in kept), names=tuple(names[i] for i in kept))
    task, settings = found.task.with_data(rest), found.experiment.run
    changed = dataclasses.replace(settings, engine="local", resume=False, from_round=None, config=None)
    return _run(f"without {site}", found.experiment.build_method(), task, changed, found, out)


def check_without(site: str, names: Sequence[str], joined: bool) -> None:
    """Raises UserError for a site that is none of a run's, and for a run without several sites, or that some `joined`
    late."""
    if site not in names:
        raise UserError(f"--without {site}: there is no such site{suggestion(site, names)}; there are {listed(names)}")
    if len(names) == 1 or joined:
        raise UserError("--without needs several sites that take part in all rounds")


def _trained(what: str, method: Method, task: Task, found: Found, rounds: int, out: Path) -> Path:
    run = found.experiment.run  # as often scored as it, so that the best model is chosen alike
    settings = Settings(rounds=rounds, evaluate_every=min(rounds, run.evaluate_every), workers=run.workers)
    return _run(what, method, task, settings, found, out)


def _run(what: str, method: Method, task: Task, settings: Settings, found: Found, out: Path) -> Path:
    """Run in a folder, unless that holds the finished run."""
    if finished(out):
        return out
    shutil.rmtree(out, ignore_errors=True)
    display = Display(what, out, "", method.promises.headline)
    own = dataclasses.replace(settings, out=out, about=found.about(), watcher=display, durable=False)
    with display:
        run_with(Run.of(method, task, own, Policy()))
    return out


def alone(experiment: Experiment) -> Method:
    """The method that sends nothing, with the local training of the run's method. Raises UserError for one without."""
    parameters = make_method(experiment.method, experiment.parameters).parameters
    if "epochs" not in parameters:
        raise UserError(f"{experiment.method} has no local training that a site could do alone")
    known = method_class(ALONE).defaults()
    return make_method(ALONE, {key: parameters[key] for key in TERMS if key in parameters and key in known})


def _plain(task: Task) -> Task:
    """The task without a promise of privacy, which is the run's method's."""
    agreed = {key: value for key, value in task.problem.agreed.items() if key != "dp"}
    return dataclasses.replace(task, problem=dataclasses.replace(task.problem, privacy=None, agreed=agreed))


def _check_same_models(task: Task, what: str) -> None:
    if len(list(task.problem.architectures())) > 1:
        raise UserError(f"{what} needs the same model at every site, and they differ here: leave it out")
