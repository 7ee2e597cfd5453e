"""Several methods, or all there are, on the same clients."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fewbytes.display import Display, console
from fewbytes.errors import UserError, suggestion
from fewbytes.experiment import make_method
from fewbytes.files import replacing
from fewbytes.job import Job, begun, finished, new_folder, unless_refused
from fewbytes.methods import METHODS
from fewbytes.report import choices, read_runs, write_report

TERMS: dict[str, Any] = {"model": "resnet8:width=8,stem=3x3", "rounds": 6, "public": 100}
"""Settings of the experiment where all methods are compared, unless they are given: a model that every method can
train, samples for the servers that distil, which no client then has."""
TRAINING: dict[str, Any] = {"fraction": 1.0, "epochs": 2, "lr": 0.1, "batch": 20, "momentum": 0.9}
"""Hyper-parameters of local training, for the methods that have them."""
ASKED = "comparison.json"  # what a comparison was asked to do, in its folder
SERVERS: dict[str, dict[str, Any]] = {
    "fusefl": {"ccvr_samples": 500},
    "feddf": {"server_steps": 300, "server_batch": 50},
    "dense": {"server_epochs": 10, "generator_steps": 3, "server_batch": 32, "latent": 32},
    "feddafl": {"server_steps": 60, "student_steps": 2, "server_batch": 32, "latent": 32},
    "fedadi": {"server_epochs": 2, "pixel_steps": 20, "server_steps": 60, "server_batch": 32},
    "fedktl": {"server_epochs": 10},
}
"""Hyper-parameters of servers whose papers let them work for hours."""


def equal_parameters(name: str, rounds: int) -> dict[str, Any]:
    """The parameters of a method on these terms; who trains but once trains as many epochs as the others in all."""
    cls = METHODS[name]
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    parameters = {key: value for key, value in TRAINING.items() if key in fields} | SERVERS.get(name, {})
    if cls().own_rounds and "epochs" in fields:
        parameters["epochs"] *= rounds
    return parameters


def _told(rounds: int) -> str:
    """The terms in words."""
    listed = ", ".join(f"{key} {value:g}" for key, value in TRAINING.items())
    return (
        f"all methods train alike: {listed}, {rounds} rounds (one-shot methods: {TRAINING['epochs'] * rounds} epochs), "
        "and servers that generate or distil work less than in their papers; those that need samples of their own get "
        f"{TERMS['public']} that no client then has; --rounds, --set and --public change that"
    )


def compare(
    names: list[str], settings: dict[str, Any], out: Path, resume: Path | None = None
) -> tuple[Path, list[dict[str, Any]]]:
    """Run some methods, or ["all"], into a new folder below `out`; the folder, and each one's result.json.

    `resume`: the folder of an interrupted comparison (then nothing else is heeded), to go on with.
    """
    if resume is not None:
        names, settings = _asked(resume)
    asked = {"methods": names, "settings": copy.deepcopy(settings)}
    results: list[dict[str, Any]]
    if names == ["all"]:
        folder, results = _compare_all(settings, asked, out, resume)
    else:
        folder, results = _compare_some(names, settings, asked, out, resume)
    runs = read_runs([folder])
    write_report(runs, folder / "report.html")
    found = choices(runs)
    return folder, [r | {"recommended": {c.kind: str(c) for c in found if c.label == r["method"]}} for r in results]


def _asked(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """What the comparison in a folder was asked to do. Raises UserError if there is none."""
    try:
        asked = json.loads((folder / ASKED).read_text())
    except (OSError, ValueError):
        raise UserError(f"{folder} holds no comparison to go on with") from None
    return asked["methods"], asked["settings"]


def _folder(asked: dict[str, Any], out: Path, resume: Path | None) -> Path:
    if resume is not None:
        return resume
    folder = new_folder(out, "compare")
    with replacing(folder / ASKED) as file:
        file.write(json.dumps(asked, indent=2).encode())
    return folder


def _result(job: Job, folder: Path) -> dict[str, Any]:
    """One method's result.json, from what there is of its run in the comparison's folder on."""
    name = job.experiment.method
    run = folder / name
    if finished(run):
        return json.loads((run / "result.json").read_text())  # type: ignore[no-any-return]
    return job.execute(run, begun(run), page=False, display=Display(name, folder, "compare"))


def _compare_some(
    names: list[str], settings: dict[str, Any], asked: dict[str, Any], out: Path, resume: Path | None
) -> tuple[Path, list[dict[str, Any]]]:
    """Methods with their own defaults and the parameters given."""
    own = _per_method(names, settings.pop("parameters", {}))
    first = Job({**settings, "method": names[0], "parameters": own[names[0]]})
    settings["model"] = first.experiment.model
    jobs = [first, *(Job({**settings, "method": n, "parameters": own[n]}, first.task) for n in names[1:])]
    _note_unequal_training(jobs)
    folder = _folder(asked, out, resume)
    with unless_refused(folder / names[0], folder if resume is None else None):
        return folder, [_result(job, folder) for job in jobs]


def _compare_all(
    settings: dict[str, Any], asked: dict[str, Any], out: Path, resume: Path | None
) -> tuple[Path, list[dict[str, Any]]]:
    """Every method on equal terms. One that cannot run on the task, or fails, is told and does not end the rest."""
    settings = TERMS | settings
    names, given = list(METHODS), settings.pop("parameters", {})
    given |= {"fraction": settings.pop("fraction")} if "fraction" in settings else {}
    own = _per_method(names, given)
    first = Job({**settings, "method": names[0], "parameters": own[names[0]]})  # what is wrong for all is told here
    settings["model"], rounds = first.experiment.model, first.experiment.rounds
    console.print(f"[yellow]note:[/] {_told(rounds)}", soft_wrap=True)
    folder = _folder(asked, out, resume)
    results: list[dict[str, Any]] = []
    for name in names:
        parameters = equal_parameters(name, rounds) | own[name]
        try:
            job = Job({**settings, "method": name, "parameters": parameters}, first.task)
            results.append(_result(job, folder))
        except OSError:
            raise
        except Exception as error:
            begun = (folder / name / "config.toml").exists()
            status, why = "failed" if begun else "left out", str(error) or type(error).__name__
            results.append({"method": name, "status": status, "why": why})
            console.print(f"[yellow]note:[/] {name} {'has failed' if begun else 'is left out'}: {why}", soft_wrap=True)
    if not any((folder / name / "config.toml").exists() for name in names):
        shutil.rmtree(folder)
        raise UserError(f"no method can run here; {names[0]}: {results[0]['why']}")
    return folder, results


def _per_method(names: list[str], parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters of each method: METHOD.KEY for one, KEY for all that have it. Raises UserError if none has."""

    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    fields = {name: {f.name for f in dataclasses.fields(make_method(name, {}))} for name in names}  # type: ignore[arg-type]
    for key, value in parameters.items():
        name, dot, rest = key.rpartition(".")
        if dot and name not in names:
            raise UserError(f"--set {key}: {name!r} is not among the methods compared: {', '.join(names)}")
        takers = [name] if dot else [n for n in names if rest in fields[n]]
        if not takers:
            known = sorted(set.union(*fields.values()))
            raise UserError(f"--set {key}: no method compared has a parameter {rest!r}{suggestion(rest, known)}")
        for taker in takers:
            own[taker][rest] = value
    return own


def _note_unequal_training(jobs: Sequence[Job]) -> None:
    """Say which settings of local training differ between the methods compared."""
    for key in ("epochs", "lr", "batch", "momentum", "fraction"):
        values = {job.experiment.method: getattr(job.method, key) for job in jobs if hasattr(job.method, key)}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            console.print(f"[yellow]note:[/] {key} differs: {listed} (--set {key}=VALUE makes it equal)")
