"""The methods, one paper a file."""

from fewbytes.method import Method
from fewbytes.methods.dense import DENSE
from fewbytes.methods.ensemble import Ensemble
from fewbytes.methods.fed_adi import FedADI
from fewbytes.methods.fed_dafl import FedDAFL
from fewbytes.methods.fedavg import FedAvg
from fewbytes.methods.feddf import FedDF
from fewbytes.methods.fedktl import FedKTL
from fewbytes.methods.fedpurin import FedPURIN
from fewbytes.methods.fusefl import FuseFL
from fewbytes.methods.separate import Separate

METHODS: dict[str, type[Method]] = {
    cls.__name__.lower(): cls
    for cls in (FedAvg, FedPURIN, FuseFL, FedKTL, Separate, Ensemble, FedDF, FedDAFL, FedADI, DENSE)
}
"""Every method by its name on the command line."""

__all__ = [
    "DENSE",
    "METHODS",
    "Ensemble",
    "FedADI",
    "FedAvg",
    "FedDAFL",
    "FedDF",
    "FedKTL",
    "FedPURIN",
    "FuseFL",
    "Separate",
]
