"""Options given in the wrong place: which place in Python is the right one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.settings import Group
from fewbytes.core.training import Local

Places = Mapping[str, Collection[str]]
"""The names of options by how they are given, such as `fb.run(…, {})`."""
OF_METHOD: Places = {"the method, as in FedAvg({})": tuple(each.name for each in fields(Local))}
"""Options of most methods."""


def belongs(name: str, value: Any, places: Places) -> str:
    """Where an option belongs, `: it belongs to fb.run(…, rounds=5)`: to one of these places or to a run."""
    of_runs = {group.given: [each.name for each in fields(group)] for group in Group.__subclasses__() if group.given}
    plain = value is None or (isinstance(value, str | int | float) and len(repr(value)) < 40)
    given = f"{name}={value!r}" if plain else f"{name}=…"
    for place, names in {**places, **of_runs}.items():
        if name in names:
            return f": it belongs to {place.format(given)}"
    return ""


def check_options(given: Mapping[str, Any], known: Collection[str], places: Places) -> None:
    """Raises UserError for an option of a task that is not one of the known ones."""
    for name, value in given.items():
        if name not in known:
            raise UserError(f"a task has no option {name!r}{belongs(name, value, places) or suggestion(name, known)}")
