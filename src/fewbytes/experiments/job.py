"""An experiment run into a folder of its own, or gone on with there, with a live line and a report."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.files import lock
from fewbytes.base.units import parse_bytes
from fewbytes.core.problem import Id, Task
from fewbytes.experiments.display import Display
from fewbytes.experiments.settings import CLASS_LISTS, UNSAID, make_experiment, make_method, read_experiment
from fewbytes.models.kgf import generated, left_alone
from fewbytes.report import read_runs, write_report
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.running.loop import run

FREE = ("workers", "rounds", "min_replies", "round_timeout", "over_selection", "connect_timeout")
"""The settings that may be given anew when a run is resumed: no result depends on them while all clients answer."""


class Job:
    """A checked experiment: its settings, method and task. Everything the user can get wrong is told here.

    `here`: as in `Experiment.task`.
    """

    def __init__(self, settings: dict[str, Any], task: Task | None = None, here: Sequence[Id] | None = None) -> None:
        self.experiment = make_experiment(settings)
        self.experiment.policy()
        self.method = make_method(self.experiment.method, self.experiment.parameters)
        self.task = self.experiment.task(here) if task is None else task

    def execute(self, folder: Path, resume: bool, page: bool = True, display: Display | None = None) -> dict[str, Any]:
        """Run into a folder with a live line and, if `page`, a report; returns what result.json says."""
        e = self.experiment
        if e.engine == "flower-deployment":
            raise UserError("a deployment is started, and gone on with, by `fewbytes deploy`")
        notes = list(_left_alone(self.method.adapted(self.task)))  # a model that does not suit the method is told here
        with display or Display(e.method, folder) as display:
            for note in notes:
                display.note(note)
            result = run(
                self.method, self.task, rounds=e.rounds, budget=e.budget, out=folder, engine=e.engine,
                workers=e.workers, policy=e.policy(), resume=resume, coded=e.coding, evaluate_every=e.evaluate_every,
                keep_frames=e.keep_frames, save_models=e.save_models, config=e.toml(), about=e.about(self.task),
                watcher=display,
            )  # fmt: skip
        if page:
            write_report(read_runs([folder]), folder / "report.html")
        return result.summary


def _left_alone(task: Task) -> Iterator[str]:
    """Which convolutions keep all their kernels where others' are generated, by the reason."""
    model = task.problem.first_model()
    names: dict[str, list[str]] = {}
    for name, why in left_alone(model, base).items() if (base := generated(model)) else ():
        names.setdefault(why, []).append(name)
    for why, these in names.items():
        more = f" and {len(these) - 3} more" if len(these) > 3 else ""
        yield f"kernels are not generated in {', '.join(these[:3])}{more} ({why})"


def finished(folder: Path) -> bool:
    """Whether the run in a folder is done. Raises UserError if its result.json is damaged."""
    try:
        return bool(json.loads((folder / "result.json").read_text())["status"] == "done")
    except OSError:
        return False
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'result.json'} is damaged; remove that run's folder, and it begins anew") from None


def begun(folder: Path) -> bool:
    """Whether a folder holds a run to go on with; one in which no round was finished is removed. Raises UserError if
    another process runs in it."""
    if (folder / "checkpoint" / "run.state").exists():
        return True
    if (folder / "config.toml").exists():
        if not (folder / "checkpoint").is_dir():
            raise UserError(f"{folder} has lost its checkpoint: remove that folder, and the run begins anew")
        held = lock(folder / "checkpoint" / "lock")
        if held is None:
            raise UserError(f"another process is running in {folder}: wait for it, or name another --out")
        with held:
            shutil.rmtree(folder)
    return False


def resumed(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The settings a run folder was made with, to go on with it. Raises UserError for others than FREE given anew."""
    if not (folder / "config.toml").exists() and list(folder.glob("*/config.toml")):
        raise UserError(
            f"{folder} holds several runs: resume one of them, or a comparison by `fewbytes compare --resume`"
        )
    read_checkpoint(folder)  # tells if it is no run folder, or cannot be gone on from
    settings = read_experiment(folder / "config.toml")
    if "dataset" not in settings:
        raise UserError(f"{folder} was made from Python: go on with fewbytes.run(..., out=..., resume=True)")
    for key, value in given.items():
        made = settings.get("parameters", {}).get(key) if key == "fraction" else settings.get(key, UNSAID.get(key))
        if key == "samples":
            made = "/".join(map(str, made or []))
        if key == "budget":
            value = parse_bytes(value)
        if key in CLASS_LISTS:
            made = ",".join(map(str, made or []))
        if key == "parameters":
            value, made = {k: str(v) for k, v in value.items()}, {k: str((made or {}).get(k)) for k in value}
        if key not in FREE and made != value:
            raise UserError(f"{folder} was made with another {key} ({made!r}, not {value!r}): resume it as it was made")
    return settings | {key: value for key, value in given.items() if key in FREE}


@contextlib.contextmanager
def unless_refused(run: Path, made: Path | None) -> Iterator[None]:
    """Remove the folder that was made for a run, if the run was refused before it began."""
    try:
        yield
    except UserError:
        if made is not None and not (run / "config.toml").exists():
            shutil.rmtree(made)
        raise


def new_folder(out: Path, name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = out / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break
        return folder
    raise UserError(f"no new run folder can be made in {out}")
