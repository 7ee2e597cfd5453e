"""The methods, one paper a file."""

from fewbytes.core.method import Method
from fewbytes.methods.dense import DENSE
from fewbytes.methods.dgc import DGC
from fewbytes.methods.ensemble import Ensemble
from fewbytes.methods.fed_adi import FedADI
from fewbytes.methods.fed_dafl import FedDAFL
from fewbytes.methods.fedavg import FedAvg
from fewbytes.methods.fedbn import FedBN
from fewbytes.methods.fedcac import FedCAC
from fewbytes.methods.fedcams import FedCAMS
from fewbytes.methods.fedcom import FedCOM
from fewbytes.methods.feddf import FedDF
from fewbytes.methods.feddistill import FedDistill
from fewbytes.methods.fedfina import FedFina
from fewbytes.methods.fedgen import FedGen
from fewbytes.methods.fedgh import FedGH
from fewbytes.methods.fedkd import FedKD
from fewbytes.methods.fedkgf import FedKGF
from fewbytes.methods.fedktl import FedKTL
from fewbytes.methods.fedlp import FedLP
from fewbytes.methods.fedlps import FedLPS
from fewbytes.methods.fedper import FedPer
from fewbytes.methods.fedpm import FedPM
from fewbytes.methods.fedproto import FedProto
from fewbytes.methods.fedpurin import FedPURIN
from fewbytes.methods.fml import FML
from fewbytes.methods.fusefl import FuseFL
from fewbytes.methods.genefl import GeneFL
from fewbytes.methods.learngene import Learngene
from fewbytes.methods.lg_fedavg import LG_FedAvg
from fewbytes.methods.partialfed import PartialFed
from fewbytes.methods.pfedsd import PFedSD
from fewbytes.methods.separate import Separate
from fewbytes.methods.smartidx import SmartIdx

METHODS: dict[str, type[Method]] = {
    cls.__name__.lower(): cls
    for cls in (
        FedAvg, GeneFL, FedPURIN, FedKGF, FuseFL, FedKTL, Separate, Ensemble, FedDF, FedDAFL, FedADI, DENSE,
        FedPer, PFedSD, FedCAC,
        LG_FedAvg, FedProto, FedDistill, FML, FedKD, FedGH, FedGen,
        FedBN, PartialFed, FedFina, FedLP, FedLPS, Learngene,
        FedCOM, FedPM,
        DGC, FedCAMS, SmartIdx,
    )
}  # fmt: skip
"""Every method by its name on the command line."""

__all__ = [
    "DENSE", "DGC", "FML", "METHODS", "Ensemble", "FedADI", "FedAvg", "FedBN", "FedCAC", "FedCAMS",
    "FedCOM", "FedDAFL", "FedDF", "FedDistill", "FedFina", "FedGH", "FedGen", "FedKD", "FedKGF", "FedKTL", "FedLP",
    "FedLPS", "FedPM", "FedPURIN", "FedPer", "FedProto", "FuseFL", "GeneFL", "LG_FedAvg", "Learngene", "PFedSD",
    "PartialFed", "Separate", "SmartIdx",
]  # fmt: skip
