"""Models by name: compact ResNets, a small CNN and an MLP, torchvision's, or your own."""

from typing import TYPE_CHECKING

from fewbytes.base.lazy import names_of

if TYPE_CHECKING:
    from fewbytes.models.names import *  # noqa: F403

__getattr__, __dir__ = names_of("fewbytes.models")
