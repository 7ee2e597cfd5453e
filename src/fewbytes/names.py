"""What `import fewbytes` offers."""

from fewbytes.base.errors import FewbytesError, FrameError, MethodError, UserError
from fewbytes.base.python_words import in_python
from fewbytes.base.state import Mean, State, state_of
from fewbytes.core.ledger import Ledger
from fewbytes.core.method import Method
from fewbytes.core.network import Network, Refused
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.core.task import Task
from fewbytes.core.training import Hooks, Local
from fewbytes.experiments.run import run
from fewbytes.methods import METHODS
from fewbytes.methods.parts.clustered import Clustered
from fewbytes.methods.parts.secure import SecureAggregation
from fewbytes.models.export import export_model as export
from fewbytes.models.files import load_model
from fewbytes.report.frame import results
from fewbytes.running.checkpoint import VERSION as __version__
from fewbytes.running.recorders import MLflow, TensorBoard, Trackio
from fewbytes.running.result import Result
from fewbytes.running.watcher import Watcher
from fewbytes.wire import Bits, Dense, Images, Masked, Packages, Quantised, Signs, TopK, pack, payload, unpack

export_model = in_python()(export)

__all__ = [
    "METHODS",
    "Bits",
    "Clustered",
    "Dense",
    "FewbytesError",
    "FrameError",
    "Hooks",
    "Id",
    "Images",
    "Ledger",
    "Local",
    "MLflow",
    "Masked",
    "Mean",
    "Method",
    "MethodError",
    "Network",
    "Packages",
    "Policy",
    "Problem",
    "Promises",
    "Quantised",
    "Refused",
    "Result",
    "SecureAggregation",
    "Signs",
    "Site",
    "State",
    "Task",
    "TensorBoard",
    "TopK",
    "Trackio",
    "UserError",
    "Watcher",
    "__version__",
    "export_model",
    "load_model",
    "pack",
    "payload",
    "results",
    "run",
    "state_of",
    "unpack",
]  # fmt: skip
