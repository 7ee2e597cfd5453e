"""Folders of runs: whether a run in one is finished or can be resumed, and the settings to resume it with."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.files import lock
from fewbytes.base.settings import in_file
from fewbytes.core.method import Method
from fewbytes.experiments.config_file import read_experiment
from fewbytes.experiments.deploy import ASKED
from fewbytes.experiments.groups import DECLARED
from fewbytes.experiments.settings import make_experiment, make_method
from fewbytes.running.checkpoint import Checkpoints, read_checkpoint
from fewbytes.running.rounding import unrounded
from fewbytes.running.settings import ROUNDING


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
        handle = lock(folder / "checkpoint" / "lock")
        if handle is None:
            raise UserError(f"another process is running in {folder}: wait for it, or name another --out")
        with handle:
            shutil.rmtree(folder)
    return False


def not_begun(folder: Path) -> Path | None:
    """The config of a deployment that ended before its run's first checkpoint, else None. Such a run starts again in
    its folder, with the keys and certificates that hosts have."""
    asked = folder / "deployment" / ASKED
    return asked if asked.is_file() and not Checkpoints(folder).rounds() else None


def resumed(folder: Path, given: dict[str, Any], from_round: int | None = None) -> dict[str, Any]:
    """The settings to resume a run folder with: its own, and those `given` now that may change (`resumable`).

    Raises UserError for others that differ.
    """
    if not (folder / "config.toml").exists() and (runs := sorted(folder.glob("*/config.toml"))):
        raise UserError(
            f"{folder} holds runs: resume one of them, such as {runs[-1].parent}, or a comparison by `fewbytes compare "
            "--resume`"
        )
    ended = read_checkpoint(folder, from_round).finished  # refuses other folders, and runs that cannot be resumed
    settings = read_experiment(folder / "config.toml")
    if "dataset" not in settings:
        raise UserError(f"{folder} was made from Python: resume it with fewbytes.run(..., out=..., resume=True)")
    parameters = settings.get("parameters", {}) | given.get("parameters", {})
    own = make_experiment(settings).settings()
    settings = _without_replaced_rounding(settings, given, make_method(own["method"], own["parameters"]))
    new = make_experiment(settings | given | {"method": own["method"], "parameters": parameters}).settings()
    new["method"] = given.get("method", own["method"])
    free = {key for key in given if key in DECLARED and DECLARED[key].about.resumable}
    for key in given.keys() - free:
        default: Any = in_file(DECLARED[key].default) if key in DECLARED else None
        was, now = own.get(key, default), new.get(key, default)
        if was != now and key == "parameters":
            key = next(each for each in was if was[each] != now[each])
            was, now = was[key], now[key]
        if was != now:
            raise UserError(
                f"{folder} was made with another {key} ({was!r}, not {now!r}): resume it without changing {key}"
            )
    if ended and any(new.get(key) != own.get(key) for key in ("bits", *chain(*ROUNDING.values()))):
        raise UserError(f"{folder} has ended, so nothing is left to round otherwise: go back with --from-round ROUND")
    return settings | {key: given[key] for key in free}


def _without_replaced_rounding(settings: dict[str, Any], given: dict[str, Any], method: Method) -> dict[str, Any]:
    """The settings without the rounding that `given` replaces: in each direction that it sets, or in both."""
    replaced = {way for way, keys in ROUNDING.items() if "bits" in given or given.keys() & set(keys)}
    if replaced and "bits" in settings:
        both = {keys[0]: settings["bits"] for way, keys in ROUNDING.items() if not unrounded(method, way)}
        settings = settings | both
        del settings["bits"]
    gone = set(chain(*(ROUNDING[way] for way in replaced)))
    return {key: value for key, value in settings.items() if key not in gone}


def again_from(asked: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run that has not started yet: those in its file, updated with those given now."""
    there = read_experiment(asked)
    return there | given | {"parameters": there.get("parameters", {}) | given.get("parameters", {})}
