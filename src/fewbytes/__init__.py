"""fewbytes: federated learning over slow links, measured in the bytes that cross the wire."""

import os
from typing import TYPE_CHECKING, Any

from fewbytes.base.lazy import names_of

if TYPE_CHECKING:
    from fewbytes.names import *  # noqa: F403

# torch's threads, loaded later, sleep while they wait for one another: spinning, on a machine that is busy otherwise
# they take seconds for what else takes a tenth of one
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# asking torch whether there is a GPU otherwise keeps the workers that are forked later from opening it
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_find, _names = names_of("fewbytes")


def __getattr__(name: str) -> Any:
    """What `fewbytes.names` lists, or a method's class, `fewbytes.FedAvg`, whose file is loaded when asked for."""
    try:
        return _find(name)
    except AttributeError as error:
        from fewbytes import methods

        if name.lower() not in methods.FILES:
            raise
        try:
            return methods.__getattr__(name)
        except AttributeError:
            raise error from None


def __dir__() -> list[str]:
    """All there is, the methods' classes excepted."""
    return _names()
