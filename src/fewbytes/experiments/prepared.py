"""Runs an experiment in its own folder, or resumes it there, with a live line and a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fewbytes.core.known_metrics import check_installed
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.experiments.display import Display
from fewbytes.experiments.evaluate import evaluate_here
from fewbytes.experiments.pages import write_page
from fewbytes.experiments.run import check_engine, run_with
from fewbytes.experiments.settings import Experiment, make_experiment
from fewbytes.experiments.tasks import Found, find
from fewbytes.methods import method_class
from fewbytes.models.hugging_face import PREFIX, other_tokenizer
from fewbytes.models.kgf import generated, not_generated
from fewbytes.running.run import Run, check_settings
from fewbytes.running.watcher import Watcher, together


def check_alone(settings: dict[str, Any]) -> None:
    """Raises UserError for mistakes in the settings of a run that can be found before its data are loaded."""
    experiment = make_experiment(settings)
    run, clients = experiment.run, experiment.partition.clients + experiment.partition.newcomers
    if experiment.partition.column is None:  # else their number is known once the data are
        check_settings(experiment.build_method(), run, experiment.policy, clients)
    if run.engine == "local":
        run.check_in_process()
    check_engine(run.engine)


class PreparedRun:
    """A checked experiment: its settings, method and task. Raises UserError for all mistakes in the settings.

    `task`: the task, if its data are loaded already. `here`: as in `find`.
    """

    def __init__(self, settings: dict[str, Any], task: Task | None = None, here: Sequence[Id] | None = None) -> None:
        experiment = make_experiment(settings)
        self.found = find(experiment, here) if task is None else Found(experiment, task)
        self.experiment, self.task = self.found.experiment, self.found.task
        if task is None:
            check_installed(self.task.problem.objective.measured)  # once for all methods of a comparison
        self.method = self.experiment.build_method()
        chosen = () if self.method.promises.describes else _picked(settings, self.experiment)
        picked = ", ".join(chosen)
        text = f"{self.method.method_name} uses {picked} by default; change it with --model or --set"
        self._picked = [text] if picked else []

    @property
    def notes(self) -> list[str]:
        """Notes for the user: chosen defaults, findings in the data, and parts of models that differ from the request.
        Raises UserError for a model that does not suit the method."""
        task = self.method.adapted(self.task)
        return [
            *self._picked,
            *self.found.notes,
            *_left_alone(task),
            *_left_drawn(task),
            *_other_tokenizers(self.experiment),
        ]

    def check(self) -> None:
        """Raises UserError for anything a run cannot start with, before it starts."""
        Run.of(self.method, self.task, self.experiment.run, self.experiment.policy)

    def execute(
        self,
        folder: Path,
        resume: bool,
        page: bool = True,
        display: Display | None = None,
        watchers: Sequence[Watcher] = (),
        from_round: int | None = None,
    ) -> dict[str, Any]:
        """Run in a folder with a live line, `watchers` and, if `page`, a report; returns the content of result.json.

        `resume`, `from_round`: as in `Settings`.
        """
        e, method = self.experiment, self.method
        display = display or Display(method.method_name, folder, e.resuming("run"), method.promises.headline)
        run, notes = self.found.run(folder, resume, together([display, *watchers]), from_round), self.notes
        with display:
            for text in notes:
                display.note(text)
            result = run_with(run)
            if page and e.partition.partition == "local":
                evaluate_here(folder, self.found, display.note)
        if page:
            write_page(e, folder)
        return result.summary


def _picked(settings: dict[str, Any], experiment: Experiment) -> Iterator[str]:
    """Values that come neither from the settings nor from the method's defaults."""
    if settings.get("model") is None:
        yield f"model {experiment.model.model}"
    if not settings.get("parameters"):
        usual = method_class(experiment.method).defaults()
        yield from (f"{key} {value} (instead of {usual[key]})" for key, value in experiment.parameters.items())


def _left_alone(task: Task) -> Iterator[str]:
    """Which convolutions keep their own kernels where others are generated, by reason."""
    model = task.problem.on_cpu().first_model()
    names: dict[str, list[str]] = {}
    for name, why in not_generated(model, base).items() if (base := generated(model)) else ():
        names.setdefault(why, []).append(name)
    for why, these in names.items():
        more = f" and {len(these) - 3} more" if len(these) > 3 else ""
        yield f"kernels are not generated in {', '.join(these[:3])}{more} ({why})"


def _left_drawn(task: Task) -> Iterator[str]:
    """Which tensors start from random values although pretrained weights are given."""
    if (pretrained := task.problem.pretrained) is not None:
        for client in task.problem.architectures():
            yield from pretrained.left(task.problem.on_cpu().model(client))


def _other_tokenizers(experiment: Experiment) -> Iterator[str]:
    """Notes on tokenizers that differ from the model's own."""
    place = experiment.data.tokenizer
    for name in dict.fromkeys((experiment.model.model or "").split("+")):
        if place is not None and name.startswith(PREFIX) and (text := other_tokenizer(name, place)):
            yield text
