"""Several methods, or all there are, on the same clients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.files import replacing
from fewbytes.experiments.display import Display, note
from fewbytes.experiments.prepared import PreparedRun, begun, finished, new_folder
from fewbytes.experiments.settings import make_method
from fewbytes.methods import METHODS, FuseFL
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


def equal_parameters(name: str, rounds: int, training: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a method on these terms; who trains but once trains as many epochs as the others in all."""
    cls = METHODS[name]
    fields = cls.defaults()
    parameters = {key: value for key, value in training.items() if key in fields} | SERVERS.get(name, {})
    if cls().own_rounds and "epochs" in fields:
        parameters["epochs"] *= rounds
    if name == "fusefl":  # an epoch a block
        parameters["blocks"] = min(FuseFL.blocks, parameters["epochs"])
    return parameters


def _training(given: dict[str, Any]) -> dict[str, Any]:
    """TRAINING with what is given, numbers or their text, instead. Raises UserError."""
    method = make_method("fedavg", TRAINING | given)
    return {key: method.parameters[key] for key in TRAINING}


def _terms(rounds: int, training: dict[str, Any]) -> str:
    """The terms in words."""
    listed = ", ".join(f"{key} {value:g}" for key, value in training.items())
    once = training["epochs"] * rounds
    fewer = f"fusefl in {once} block{'s' if once > 1 else ''}, " if once < FuseFL.blocks else ""
    return (
        f"all methods train alike: {listed}, {rounds} rounds (one-shot methods: {once} epochs), "
        f"{fewer}and servers that generate or distil work less than in their papers; those that need samples of their "
        f"own get {TERMS['public']} that no client then has; --rounds, --set and --public change that"
    )


def compare(
    names: list[str], settings: dict[str, Any], out: Path, resume: Path | None = None
) -> tuple[Path, list[dict[str, Any]]]:
    """Run some methods with their own defaults, or ["all"] on equal terms, into a new folder below `out`.

    The folder, and each one's result.json. One that cannot run on the task, or fails, is named and does not end the
    rest. `resume`: the folder of an interrupted comparison (then nothing else is heeded), to go on with.
    """
    if resume is not None:
        names, settings = _asked(resume)
    asked = json.dumps({"methods": names, "settings": settings}, indent=2)
    jobs = _all(settings) if names == ["all"] else _some(names, settings)
    if resume is None:
        folder = new_folder(out, "compare")
        with replacing(folder / ASKED) as file:
            file.write(asked.encode())
    else:
        folder = resume
    try:
        results = [_result(name, job, folder) for name, job in jobs]
    except KeyboardInterrupt:
        if any(finished(folder / name) for name, _ in jobs):
            write_report(read_runs([folder]), folder / "report.html")
        raise
    if not any((folder / name / "config.toml").exists() for name, _ in jobs):
        shutil.rmtree(folder)
        raise UserError(f"no method can run here; {jobs[0][0]}: {results[0]['why']}")
    runs = read_runs([folder])
    write_report(runs, folder / "report.html")
    found = choices(runs)
    return folder, [r | {"recommended": {c.kind: str(c) for c in found if c.label == r["method"]}} for r in results]


class _Asked(msgspec.Struct):
    """What a comparison was asked to do."""

    methods: list[str]
    settings: dict[str, Any]


def _asked(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """What the comparison in a folder was asked to do. Raises UserError if there is none, or it cannot be read."""
    try:
        asked = msgspec.json.decode((folder / ASKED).read_bytes(), type=_Asked)
    except OSError:
        raise UserError(f"{folder} holds no comparison to go on with") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / ASKED} is damaged ({error}): begin the comparison anew") from None
    return asked.methods, asked.settings


def _result(name: str, job: PreparedRun | str, folder: Path) -> dict[str, Any]:
    """One method's result.json, from what there is of its run in the comparison's folder on, or why there is none."""
    run = folder / name
    try:
        if isinstance(job, str):
            raise UserError(job)
        if finished(run):
            return json.loads((run / "result.json").read_text())  # type: ignore[no-any-return]
        return job.execute(run, begun(run), page=False, display=Display(name, folder, "compare"))
    except OSError:
        raise
    except Exception as error:
        has_begun = (run / "config.toml").exists()
        status, why = "failed" if has_begun else "left out", str(error) or type(error).__name__
        note(f"{name} {'has failed' if has_begun else 'is left out'}: {why}")
        return {"method": name, "status": status, "why": why}


def _some(names: list[str], settings: dict[str, Any]) -> list[tuple[str, PreparedRun | str]]:
    """Methods with their own defaults and the parameters given. Raises UserError for what is wrong with any of them."""
    settings = dict(settings)
    own = _per_method(names, settings.pop("parameters", {}))
    first = PreparedRun({**settings, "method": names[0], "parameters": own[names[0]]})
    settings["model"] = first.experiment.model.model
    jobs = [first, *(PreparedRun({**settings, "method": n, "parameters": own[n]}, first.task) for n in names[1:])]
    _note_unequal_training(jobs)
    return list(zip(names, jobs, strict=True))


def _all(settings: dict[str, Any]) -> list[tuple[str, PreparedRun | str]]:
    """Every method on equal terms, or why there is no job for it. Raises UserError for what is wrong for all."""
    dealt = settings.get("partition") != "local"  # else nothing can be held out for servers that distil
    settings = {key: value for key, value in TERMS.items() if dealt or key != "public"} | settings
    names, given = list(METHODS), dict(settings.pop("parameters", {}))
    given |= {"fraction": settings.pop("fraction")} if "fraction" in settings else {}
    training = _training({key: given.pop(key) for key in TRAINING if key in given})
    own = _per_method(names, given)
    first = PreparedRun({**settings, "method": names[0], "parameters": own[names[0]]})
    settings["model"], rounds = first.experiment.model.model, first.experiment.run.rounds
    note(_terms(rounds, training))
    jobs: list[tuple[str, PreparedRun | str]] = []
    for name in names:
        parameters = equal_parameters(name, rounds, training) | own[name]
        try:
            jobs.append((name, PreparedRun({**settings, "method": name, "parameters": parameters}, first.task)))
        except UserError as error:
            jobs.append((name, str(error)))
    return jobs


def _per_method(names: list[str], parameters: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters of each method: METHOD.KEY for one, KEY for all that have it. Raises UserError if none has."""
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    fields = {name: set(make_method(name, {}).parameters) for name in names}
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


def _note_unequal_training(jobs: Sequence[PreparedRun]) -> None:
    """Say which settings of local training differ between the methods compared."""
    for key in ("epochs", "lr", "batch", "momentum", "fraction"):
        values = {job.method.method_name: job.method.parameters[key] for job in jobs if key in job.method.parameters}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values.items())
            note(f"{key} differs: {listed} (--set {key}=VALUE makes it equal)")
