"""Runs an experiment in its own folder, or resumes it there, with a live line and a report."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.files import lock, make_durable, make_folder
from fewbytes.base.settings import in_file
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.experiments.display import Display
from fewbytes.experiments.groups import DECLARED
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import Experiment, make_experiment, read_experiment
from fewbytes.experiments.tasks import Found, find
from fewbytes.methods import method_class
from fewbytes.models.hugging_face import PREFIX, other_tokenizer
from fewbytes.models.kgf import generated, left_alone
from fewbytes.report import read_runs, write_report
from fewbytes.running.checkpoint import Checkpoints, read_checkpoint
from fewbytes.running.run import Run
from fewbytes.running.settings import ROUNDING
from fewbytes.running.watcher import Watcher, together


class PreparedRun:
    """A checked experiment: its settings, method and task. Raises UserError for all mistakes in the settings.

    `task`: the task, if its data are loaded already. `here`: as in `find`.
    """

    def __init__(self, settings: dict[str, Any], task: Task | None = None, here: Sequence[Id] | None = None) -> None:
        experiment = make_experiment(settings)
        self.found = find(experiment, here) if task is None else Found(experiment, task)
        self.experiment, self.task = self.found.experiment, self.found.task
        self.method = self.experiment.made()
        picked = ", ".join(_picked(settings, self.experiment))
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
        if page:
            write_report(read_runs([folder]), folder / "report.html")
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
    for name, why in left_alone(model, base).items() if (base := generated(model)) else ():
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


def finished(folder: Path) -> bool:
    """Whether the run in a folder is done. Raises UserError if its result.json is damaged."""
    try:
        return bool(json.loads((folder / "result.json").read_text())["status"] == "done")
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'result.json'} is damaged: remove that run's folder to start it again") from None


def begun(folder: Path) -> bool:
    """Whether a folder holds a run to resume; a run without a finished round is removed. Raises UserError if another
    process runs in it."""
    if Checkpoints(folder).rounds():
        return True
    if (folder / "config.toml").exists():
        if not (folder / "checkpoint").is_dir():
            raise UserError(f"{folder} has lost its checkpoint: remove that folder to start the run again")
        held = lock(folder / "checkpoint" / "lock")
        if held is None:
            raise UserError(f"another process is running in {folder}: wait for it, or name another --out")
        with held:
            shutil.rmtree(folder)
    return False


def resumed(folder: Path, given: dict[str, Any], from_round: int | None = None) -> dict[str, Any]:
    """The settings to resume a run folder with: its own, and those `given` now that may change (`resumable`).

    Raises UserError for others that differ.
    """
    if not (folder / "config.toml").exists() and (runs := sorted(folder.glob("*/config.toml"))):
        raise UserError(
            f"{folder} holds runs: resume one of them, such as {runs[-1].parent}, or a comparison by `fewbytes compare "
            "--resume`"
        )
    read_checkpoint(folder, from_round)  # refuses other folders, and runs that cannot be resumed
    settings = read_experiment(folder / "config.toml")
    if "dataset" not in settings:
        raise UserError(f"{folder} was made from Python: resume it with fewbytes.run(..., out=..., resume=True)")
    parameters = settings.get("parameters", {}) | given.get("parameters", {})
    made = make_experiment(settings).settings()
    for keys in ROUNDING.values():  # of one way, one takes the place of another
        if given.keys() & set(keys):
            settings = {key: value for key, value in settings.items() if key not in keys}
    new = make_experiment(settings | given | {"method": made["method"], "parameters": parameters}).settings()
    new["method"] = given.get("method", made["method"])
    free = {key for key in given if key in DECLARED and DECLARED[key].about.resumable}
    for key in given.keys() - free:
        default: Any = in_file(DECLARED[key].default) if key in DECLARED else None
        was, now = made.get(key, default), new.get(key, default)
        if was != now and key == "parameters":
            key = next(each for each in was if was[each] != now[each])
            was, now = was[key], now[key]
        if was != now:
            raise UserError(
                f"{folder} was made with another {key} ({was!r}, not {now!r}): resume it without changing {key}"
            )
    return settings | {key: given[key] for key in free}


def again_from(asked: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that has not started yet: those in its file, updated with those given now."""
    there = read_experiment(asked)
    return there | given | {"parameters": there.get("parameters", {}) | given.get("parameters", {})}


@contextlib.contextmanager
def unless_refused(run: Path, made: Path | None) -> Iterator[None]:
    """Remove the folder made for a run if the run is refused before it starts."""
    try:
        yield
    except UserError:
        if made is not None and not (run / "config.toml").exists():
            shutil.rmtree(made)
        raise


def new_folder(out: Path, name: str) -> Path:
    """A new folder in `out`, named by the time and `name`. Raises UserError if it cannot be made."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with contextlib.suppress(OSError):
        make_folder(out)
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = out / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir()
            make_durable(out)
        except FileExistsError:
            continue
        except OSError:
            break
        return folder
    raise UserError(f"no new run folder can be made in {out}")
