"""Drives a run from its settings to its result, on any engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbytes.base.files import ScratchFolder
from fewbytes.core.devices import open_device
from fewbytes.engines.engine import Engine
from fewbytes.engines.terms import Origin, Terms
from fewbytes.models.files import save_model
from fewbytes.running.folder import locked_folder
from fewbytes.running.loop import Loop
from fewbytes.running.promises.best import Best, BestModel
from fewbytes.running.promises.every import promises_of
from fewbytes.running.promises.status import StatusFile
from fewbytes.running.result import Result
from fewbytes.running.run import Run
from fewbytes.running.settings import USUALLY_KEPT
from fewbytes.running.watcher import Watcher, together

Connect = Callable[[Terms, Origin, Watcher], AbstractContextManager[Engine]]
"""Opens an engine for a run that begins there, and that a watcher follows."""


def drive(run: Run, connect: Connect) -> Result:
    """Run the loop over an engine's network. Errors as in `fewbytes.run`."""
    if run.settings.out is not None:
        return _drive(run, Path(run.settings.out), connect)
    scratch = ScratchFolder("run")
    try:
        result = _drive(replace(run, settings=replace(run.settings, durable=False)), scratch.path, connect)
    except BaseException:
        scratch.close()
        raise
    weakref.finalize(result, scratch.close)
    return result


def _drive(run: Run, folder: Path, connect: Connect) -> Result:
    method, task, settings = run.method, run.task, run.settings
    status = StatusFile(folder, method, task.problem.objective.metrics)
    if settings.out is not None:
        settings = replace(settings, watcher=together([settings.watcher, status]))
    promises = promises_of(replace(run, settings=settings), folder)
    loop = Loop(method, task, settings, folder, [*promises, status])
    best = next((promise for promise in promises if isinstance(promise, BestModel)), None)
    if best is not None:
        loop.checkpoints.spared = best.spared
    for note in run.notes:
        settings.watcher.note(note)
    with locked_folder(folder):
        checkpoint = loop.begin()
        with (
            status.of_failure() if settings.out is not None else nullcontext(),
            connect(run.terms(folder), loop.origin(checkpoint), settings.watcher) as engine,
        ):
            open_device(task.problem.device)
            summary = loop.run(engine, checkpoint)
            model = method.global_model(loop.state, task.problem)
            if settings.save_models:
                about = task.described() | _without_places(settings.about)
                _save(loop, engine, folder / "models", about, "global")
                _save_kept(loop, engine, about, None if best is None else best.best())
        return Result(folder, summary, loop.rows, engine.ledger, model)


def _save(loop: Loop, engine: Engine, folder: Path, about: dict[str, Any], name: str) -> None:
    """Save the server's models of the loop's state, the global one under this name, and those of clients at their
    sites."""
    for each, model in loop.method.server_models(loop.state, loop.task.problem).items():
        file = name if each == "global" else each if name == "global" else f"{name}-{each}"
        save_model(model, folder / f"{file}.safetensors", about)
    if loop.method.has_local_models(loop.task.problem.own):
        mine = folder if name == "global" else folder / name
        engine.sites.save_models(mine, about, engine.step.t)


def _save_kept(loop: Loop, engine: Engine, about: dict[str, Any], best: Best | None) -> None:
    """Save the best model as `best`, and those of rounds that the user keeps as `round-<t>`, from their checkpoints.

    The engine is used no further: its clients' states are then of these rounds.
    """
    kept, last = loop.checkpoints, loop.rounds.last
    names = {t: f"round-{t}" for t in kept.rounds() if t and loop.settings.keep_checkpoints > USUALLY_KEPT}
    saved = [*names.items(), *([] if best is None else [(best.round, "best")])]
    final = loop.state, dict(engine.roster.versions), engine.step.t
    for t, name in saved:
        if t == last:
            loop.state, engine.roster.versions, engine.step.t = final
        else:
            checkpoint = kept.read(t)
            loop.recall_state(checkpoint)
            engine.roster.versions, engine.step.t = checkpoint.named(), t
        _save(loop, engine, loop.folder / "models", about | {"round": t, "kept": name}, name)
    loop.state, engine.roster.versions, engine.step.t = final


def _without_places(about: dict[str, Any]) -> dict[str, Any]:
    """The run's entries in a model's file, which may be shared: data by name, without their local paths, and without
    the notes about them."""
    places = {key: Path(about[key]).name for key in ("dataset", "client_data") if about.get(key)}
    return {key: value for key, value in (about | places).items() if key != "notes"}
