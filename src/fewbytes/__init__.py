"""fewbytes: federated learning over slow links, measured in the bytes that cross the wire."""

from fewbytes.base.errors import FewbytesError, FrameError, MethodError, UserError
from fewbytes.base.state import Mean, State, state_of
from fewbytes.core.ledger import Ledger
from fewbytes.core.method import Method
from fewbytes.core.network import Network, Refused
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id, Task
from fewbytes.core.site import Site
from fewbytes.experiments.run import run
from fewbytes.methods import (
    DENSE,
    DGC,
    FML,
    METHODS,
    Clustered,
    Ensemble,
    FedADI,
    FedAvg,
    FedBN,
    FedCAC,
    FedCAMS,
    FedCOM,
    FedDAFL,
    FedDF,
    FedDistill,
    FedFina,
    FedGen,
    FedGH,
    FedKD,
    FedKGF,
    FedKTL,
    FedLP,
    FedLPS,
    FedPer,
    FedPM,
    FedProto,
    FedPURIN,
    FuseFL,
    GeneFL,
    Learngene,
    LG_FedAvg,
    PartialFed,
    PFedSD,
    Separate,
    SmartIdx,
)
from fewbytes.models.files import load_model
from fewbytes.running.checkpoint import VERSION as __version__
from fewbytes.running.loop import Result, Watcher
from fewbytes.wire import Bits, Dense, Images, Masked, Packages, Quantised, Signs, TopK, pack, payload, unpack

__all__ = [
    "DENSE", "DGC", "FML", "METHODS", "Bits", "Clustered", "Dense", "Ensemble", "FedADI", "FedAvg", "FedBN", "FedCAC",
    "FedCAMS", "FedCOM", "FedDAFL", "FedDF", "FedDistill", "FedFina", "FedGH", "FedGen", "FedKD", "FedKGF", "FedKTL",
    "FedLP", "FedLPS", "FedPM", "FedPURIN", "FedPer", "FedProto", "FewbytesError", "FrameError", "FuseFL", "GeneFL",
    "Id", "Images", "LG_FedAvg", "Learngene", "Ledger", "Masked", "Mean", "Method", "MethodError", "Network", "PFedSD",
    "Packages", "PartialFed", "Policy", "Quantised", "Refused", "Result", "Separate", "Signs", "Site", "SmartIdx",
    "State", "Task", "TopK", "UserError", "Watcher", "__version__", "load_model", "pack", "payload", "run", "state_of",
    "unpack",
]  # fmt: skip
