"""Settings in a TOML file, read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError, suggestion
from fewbytes.experiments.groups import KEYS


def read_experiment(path: Path) -> dict[str, Any]:
    """The settings in a TOML file. Raises UserError if it cannot be read or names a setting that does not exist."""
    try:
        settings = msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise UserError(f"the config {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"the config {path} is not valid TOML: {error}") from None
    for key in settings:
        if key not in KEYS:
            raise UserError(f"the config {path} has an unknown key {key!r}{suggestion(key, KEYS)}")
    return folded(settings)


def folded(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with `fraction` moved to the parameters. Raises UserError if it is given in both places."""
    parameters = settings.get("parameters", {})
    if not isinstance(parameters, dict):
        raise UserError("parameters must be a table of the method's parameters")
    if "fraction" not in settings:
        return settings
    if "fraction" in parameters:
        both = f"{settings['fraction']} and, as a parameter, {parameters['fraction']}"
        raise UserError(f"fraction is given twice, {both}: give it once")
    others = {key: value for key, value in settings.items() if key != "fraction"}
    return others | {"parameters": {"fraction": settings["fraction"], **parameters}}
