"""fewbytes: federated learning over slow links, measured in the bytes that cross the wire."""

from fewbytes.checkpoint import VERSION as __version__
from fewbytes.errors import FewbytesError, FrameError, MethodError, UserError
from fewbytes.method import Id, Method, Site, Task
from fewbytes.methods import (
    DENSE,
    FML,
    METHODS,
    Clustered,
    Ensemble,
    FedADI,
    FedAvg,
    FedBN,
    FedDAFL,
    FedDF,
    FedDistill,
    FedFina,
    FedGen,
    FedGH,
    FedKD,
    FedKTL,
    FedLP,
    FedLPS,
    FedProto,
    FedPURIN,
    FuseFL,
    GeneFL,
    Learngene,
    LG_FedAvg,
    PartialFed,
    Separate,
)
from fewbytes.models.files import load_model
from fewbytes.net import Ledger, Network, Policy, Refused
from fewbytes.run import Result, Watcher, run
from fewbytes.state import Mean, State, state_of
from fewbytes.wire import Dense, Images, Masked, pack, payload, unpack

__all__ = [
<<<<<<< HEAD
    "DENSE", "FML", "METHODS", "Dense", "Ensemble", "FedADI", "FedAvg", "FedDAFL", "FedDF", "FedDistill", "FedGH",
    "FedGen", "FedKD", "FedKTL", "FedPURIN", "FedProto", "FewbytesError", "FrameError", "FuseFL", "Id", "Images",
    "LG_FedAvg", "Ledger", "Masked", "Mean", "Method", "MethodError", "Network", "Policy", "Refused", "Result",
    "Separate", "Site", "State", "Task", "UserError", "Watcher", "__version__", "load_model", "pack", "payload", "run",
    "state_of", "unpack",
=======
    "DENSE", "FML", "METHODS", "Clustered", "Dense", "Ensemble", "FedADI", "FedAvg", "FedBN", "FedDAFL", "FedDF",
    "FedDistill", "FedFina", "FedGH", "FedGen", "FedKD", "FedKTL", "FedLP", "FedLPS", "FedPURIN", "FedProto",
    "FewbytesError", "FrameError", "FuseFL", "GeneFL", "Id", "Images", "LG_FedAvg", "Learngene", "Ledger", "Masked",
    "Mean", "Method", "MethodError", "Network", "PartialFed", "Policy", "Result", "Separate", "Site", "State",
    "Task", "UserError", "Watcher", "__version__", "load_model", "pack", "payload", "run", "state_of", "unpack",
>>>>>>> 2c94ca6e785485ff0c9f150f38c0cb256fcfcb39
]  # fmt: skip
