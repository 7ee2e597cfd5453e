"""Repeats a run with malicious clients, with the mean and with other aggregation rules.

Malicious clients multiply their update by a factor (`scale`), also reversed (`flip`), send a random one of the same
norm (`noise`), or learn from wrong labels (`labels`) or a trigger, after Bagdasaryan, Veit, Hua, Estrin, Shmatikov,
"How To Backdoor Federated Learning", AISTATS 2020 (`backdoor`): half of their images have a bright square in the corner
and the target's label, and the update is scaled so that their model replaces the mean (model replacement).

The run is repeated with malicious clients, with the mean (the control) and with other rules. If the control's attack
fails, the result is void: the attack is too weak to test a rule.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from rich.table import Table
from torch import Tensor, nn

from fewbytes.analysis.settings import Poisoning
from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.base.named import only_allowed
from fewbytes.base.streams import stream
from fewbytes.core.method import Method, handlers_of
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.core.rules import Rule
from fewbytes.core.site import Site
from fewbytes.core.task import Task
from fewbytes.core.training import outputs, ready
from fewbytes.data import Split
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import Found, find
from fewbytes.models.files import load_model
from fewbytes.report.leaks import poison_words, poisoned_bytes
from fewbytes.report.records import Poison
from fewbytes.report.table import figures_table, percent
from fewbytes.running.run import Run
from fewbytes.running.watcher import Watcher
from fewbytes.wire import Dense, Masked
from fewbytes.wire.schema import schema_of
from fewbytes.wire.value import entries_of

FACTOR = 100.0
MODEL = "theta"  # the field of replies with a model's values

Progress = Callable[[int, int, str], None]
"""Called with progress: (rounds done, total rounds, text)."""


def with_malicious(method: Method, clients: Collection[Id], how: Poisoning) -> Method:
    """The method with malicious clients, which falsify every reply with a model: a `theta` that is Dense or Masked.

    An update is relative to the received entries of the same name; others start from 0. Raises UserError for a method
    without such replies.
    """
    cls = type(method)
    handlers = {name: _malicious(function, clients, how) for name, function in _handlers(cls).items()}
    if not handlers:
        raise UserError(f"{method.method_name} sends no models that malicious clients could change")
    values = {f.name: getattr(method, f.name) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    malicious: type[Method] = type(cls.__name__, (cls,), {"__module__": cls.__module__, **handlers})
    return malicious(**values)


def _handlers(cls: type[Method]) -> dict[str, Callable[..., Any]]:
    """The class's handlers whose replies have a model, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for each in handlers_of(cls):
        fields = schema_of(each.reply).fields if each.reply else ()
        if any(field.name == MODEL and field.kind.of in (Dense, Masked) for field in fields):
            found[each.name] = getattr(cls, each.name)
    return found


def _malicious(function: Callable[..., Any], clients: Collection[Id], how: Poisoning) -> Callable[..., Any]:
    learnt = how.poison in ("labels", "backdoor")

    @functools.wraps(function)
    def handler(self: Method, state: Any, message: Any, site: Site) -> Any:
        if site.me not in clients:
            return function(self, state, message, site)
        if learnt:
            site.train = poisoned(site.train, how, len(site.problem.classes))
        reply = function(self, state, message, site)
        factor = how.factor or (len(site.problem.clients) / len(clients) if learnt else FACTOR)
        value = _poisoned_value(getattr(reply, MODEL), entries_of(getattr(message, MODEL, None)), how, factor)
        return dataclasses.replace(reply, **{MODEL: value})

    return handler


def _poisoned_value(value: Dense | Masked, sent: Mapping[str, Tensor], how: Poisoning, factor: float) -> Dense | Masked:
    """A malicious client's replacement for a value; counters stay unchanged."""
    honest = value.dense()
    start = {name: sent.get(name, torch.zeros(())).double() for name, v in honest.items() if v.is_floating_point()}
    update = {name: honest[name].double() - at for name, at in start.items()}
    if how.poison == "noise":
        noise = {name: torch.randn_like(u) for name, u in update.items()}
        factor *= _norm(update) / max(_norm(noise), 1e-12)
        update = noise
    sign = -1 if how.poison == "flip" else 1
    state = honest | {name: (at + sign * factor * update[name]).to(honest[name].dtype) for name, at in start.items()}
    return Masked.of(state, value.mask) if isinstance(value, Masked) else Dense(state)


def _norm(state: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in state.values()))


def poisoned(split: Split, how: Poisoning, classes: int) -> Split:
    """A malicious client's samples, in equal number: with every label moved to the next class, or with the trigger and
    the target's label on every second image."""
    x, y = split.load()
    if how.poison == "labels":
        return Split(x, (y + 1) % classes, None, split.transform)
    second = (torch.arange(len(y)) % 2 == 0).nonzero()[:, 0]
    x[second], y[second] = stamped(x[second]), how.target
    return Split(x, y, None, split.transform)


def stamped(x: Tensor) -> Tensor:
    """Images (n, channels, height, width) with the trigger: a bright square in the lower right corner."""
    side = max(2, min(x.shape[-2:]) // 8)
    x = x.clone()
    x[..., -side:, -side:] = 1
    return x


class _Rounds(Watcher):
    """Passes on the rounds of several runs."""

    def __init__(self, progress: Progress, done: int, steps: int, text: str) -> None:
        self.progress, self.done, self.steps, self.text = progress, done, steps, text

    def scored(self, row: dict[str, Any]) -> None:
        self.progress(min(self.done + row["round"], self.steps), self.steps, self.text)

    def note(self, text: str) -> None:
        """Ignore notes: values that are not finite are expected here."""


def poison(run: Path, how: Poisoning | None = None, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Repeat a run with malicious clients, by the mean and `how.aggregate`'s rules; writes and returns RUN/poison.json.

    A row's accuracy is the global model's on the server's test set or, for a method scored by clients' own models, the
    honest clients' mean on their own; None if the run diverged. `success`: the share of these samples, except the
    target's own, that are classified as the target with the trigger. `refused`: the number of malicious replies that
    the run refused, as with any rule (--max-norm, --strikes). The same seed gives the same file; an attack stopped
    early writes nothing. Raises UserError for a folder that is not a run's or has no models; data without classes or,
    for a backdoor, images; a method whose replies cannot be poisoned, or that does not take a rule.
    """
    how = how or Poisoning()
    experiment = experiment_of(run)
    with only_allowed():  # imports only what is allowed
        found = find(experiment)
        method, task = experiment.build_method(), found.task
        clients, shape = len(task.problem.clients), task.data.test.shape
        if task.data.learns != "classes":
            raise UserError(f"poisoning needs a task with classes, and here {task.data.learns} are learnt")
        if how.poison == "backdoor" and not (len(shape) == 3 and shape[0] in (1, 3)):
            raise UserError(
                f"a trigger is drawn on images, and samples of {experiment.data.dataset} have shape {shape}"
            )
        if how.target >= len(task.data.classes):
            raise UserError(f"there is no class {how.target}: the run has {len(task.data.classes)}")
        number = max(1, round(how.share * clients))
        if number >= clients:
            raise UserError(f"{number} of {clients} clients would be malicious: lower share, so that one is honest")
        malicious_clients = sorted(stream(how.seed, "poison", "liars").choice(clients, number, replace=False).tolist())
        malicious = with_malicious(method, malicious_clients, how)
        rules = [Rule(), *how.aggregate]
        if experiment.run.dp is not None and len(rules) > 1:
            raise UserError("the run uses a noisy mean (dp), which no rule can replace: leave --aggregate out")
        for rule in rules:
            rule.check(method.method_name, method.promises.aggregates, clients)
        honest = [i for i in task.problem.clients if i not in malicious_clients]
        clean = figures(run, method, task, honest, how)
        rounds = method.planned_rounds(experiment.run.rounds)
        rows = []
        for i, rule in enumerate(rules):
            watcher = _Rounds(progress, i * rounds, len(rules) * rounds, f"{number} of {clients} malicious, {rule}")
            rows.append({"rule": str(rule)} | _repeated(malicious, found, rule, watcher, honest, how))
    progress(1, 1, "done")
    moved = _moved(json.loads((run / "result.json").read_bytes()))
    result = {
        "method": experiment.method,
        **{f.name: getattr(how, f.name) for f in dataclasses.fields(how)},
        **how.in_text(),
        "malicious": malicious_clients,
        "clients": clients,
        "chance": 1 / len(task.data.classes),
        "clean": {"rule": str(experiment.run.aggregate), **clean, **moved, "refused": 0},
        "poisoned": rows,
    }
    with replacing(run / "poison.json") as file:
        file.write(json.dumps(result, indent=2).encode())
    return result


def poison_table(result: dict[str, Any]) -> Table:
    """The result of `poison` as a table for the terminal: a row per run."""
    caption = "\n".join(poison_words(cast(Poison, result)))
    backdoor = result["poison"] == "backdoor"
    figures = ["accuracy", *(["attack success"] if backdoor else []), "MB up", "MB down", "MB both"]
    table = figures_table(caption, ["clients", "aggregate"], figures)
    malicious = f"{len(result['malicious'])} of {result['clients']} clients malicious"
    for who, row in [("honest", result["clean"]), *((malicious, row) for row in result["poisoned"])]:
        accuracy = "diverges" if row["accuracy"] is None else percent(row["accuracy"])
        success = [percent(row["success"])] if backdoor else []
        table.add_row(who, row["rule"], accuracy, *success, *poisoned_bytes(row))
    return table


def _repeated(
    malicious: Method, found: Found, rule: Rule, watcher: Watcher, honest: list[Id], how: Poisoning
) -> dict[str, Any]:
    """Repeat the run with malicious clients and a rule."""
    task, experiment = found.task, found.experiment
    settings = dataclasses.replace(
        experiment.run, engine="local", aggregate=rule, budget=None, stop_when=None, keep_frames=False,
        save_models=True, evaluate_every=experiment.run.rounds, watcher=watcher, about=found.about(),
    )  # fmt: skip
    try:
        result = run_with(Run.of(malicious, task, settings, experiment.policy))
    except TooFewReplies:  # no client's values are finite any more
        return {"accuracy": None, "success": None, "uplink_bytes": None, "downlink_bytes": None, "refused": 0}
    refused = sum(each["client"] not in honest for row in result.rounds for each in row.get("left_out", ()))
    return figures(result.folder, malicious, task, honest, how) | _moved(result.summary) | {"refused": refused}


def _moved(summary: dict[str, Any]) -> dict[str, Any]:
    """A run's bytes up and down."""
    return {key: summary[key] for key in ("uplink_bytes", "downlink_bytes")}


def figures(run: Path, method: Method, task: Task, honest: list[Id], how: Poisoning) -> dict[str, float | None]:
    """Accuracy and, for a backdoor, success of the models in a folder; None if their outputs are not finite."""
    judged: list[tuple[nn.Module, Split]] = []
    if method.promises.headline != "global" and (run / "models" / f"client-{honest[0]}.safetensors").is_file():
        judged += [(load_model(run, i), task.data.clients[i].test) for i in honest]
    else:
        judged.append((load_model(run), task.data.test))
    accuracies, successes = [], []
    for model, split in judged:
        x, y = split.load(task.problem.device)
        logits = outputs(model, ready(x))
        if not logits.isfinite().all():
            return {"accuracy": None, "success": None}
        accuracies += [float((logits.argmax(1) == y).double().mean())] if len(y) else []
        others = x[y != how.target]
        if how.poison == "backdoor" and len(others):
            taken = outputs(model, ready(stamped(others))).argmax(1) == how.target
            successes.append(float(taken.double().mean()))
    if not accuracies:
        raise UserError("the run has no test samples to measure the attack on")
    success = sum(successes) / len(successes) if successes else None
    return {"accuracy": sum(accuracies) / len(accuracies), "success": success}
