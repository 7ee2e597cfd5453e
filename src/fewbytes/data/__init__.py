"""Data sets by name, their partition over clients, and random transforms of training samples."""

from typing import TYPE_CHECKING

from fewbytes.base.lazy import names_of

if TYPE_CHECKING:
    from fewbytes.data.names import *  # noqa: F403

__getattr__, __dir__ = names_of("fewbytes.data")
