"""The methods, one paper a file."""

from fewbytes.method import Method
from fewbytes.methods.dense import DENSE
from fewbytes.methods.ensemble import Ensemble
from fewbytes.methods.fed_adi import FedADI
from fewbytes.methods.fed_dafl import FedDAFL
from fewbytes.methods.fedavg import FedAvg
from fewbytes.methods.feddf import FedDF
from fewbytes.methods.feddistill import FedDistill
from fewbytes.methods.fedgen import FedGen
from fewbytes.methods.fedgh import FedGH
from fewbytes.methods.fedkd import FedKD
from fewbytes.methods.fedktl import FedKTL
from fewbytes.methods.fedproto import FedProto
from fewbytes.methods.fedpurin import FedPURIN
from fewbytes.methods.fml import FML
from fewbytes.methods.fusefl import FuseFL
from fewbytes.methods.lg_fedavg import LG_FedAvg
from fewbytes.methods.separate import Separate

METHODS: dict[str, type[Method]] = {
    cls.__name__.lower(): cls
    for cls in (
        FedAvg, FedPURIN, FuseFL, FedKTL, Separate, Ensemble, FedDF, FedDAFL, FedADI, DENSE,
        LG_FedAvg, FedProto, FedDistill, FML, FedKD, FedGH, FedGen,
    )
}  # fmt: skip
"""Every method by its name on the command line."""

__all__ = [
    "DENSE", "FML", "METHODS", "Ensemble", "FedADI", "FedAvg", "FedDAFL", "FedDF", "FedDistill", "FedGH", "FedGen",
    "FedKD", "FedKTL", "FedPURIN", "FedProto", "FuseFL", "LG_FedAvg", "Separate",
]  # fmt: skip
