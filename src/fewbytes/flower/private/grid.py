"""Undocumented parts of Flower's grid on the server: nodes' names, polling for replies."""

from __future__ import annotations

from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import pull_objects

LOOK_SECONDS = 0.1  # between polls for the rest of a message that is still being uploaded


def look_often() -> None:
    """Have Flower poll for the rest of a reply every LOOK_SECONDS during its upload. By default, it waits 1, 2, 4, 8,
    10 s, which may double a slow upload's time, and polls at most 500 times."""
    defaults = getattr(pull_objects, "__kwdefaults__", None) or {}
    often = {"initial_backoff": LOOK_SECONDS, "backoff_cap": LOOK_SECONDS, "max_tries_per_object": None}
    defaults.update({name: value for name, value in often.items() if name in defaults})


def connected_nodes(grid: Grid) -> dict[int, str]:
    """The nodes that are connected: their ids, and the names they are registered by (empty: none)."""
    return {info.node_id: info.name for info in grid.get_nodes()}
