"""fewbytes: federated learning over slow links, measured in the bytes that cross the wire."""

from typing import TYPE_CHECKING

from fewbytes.base.lazy import names_of

if TYPE_CHECKING:
    from fewbytes.names import *  # noqa: F403

__getattr__, __dir__ = names_of("fewbytes")
