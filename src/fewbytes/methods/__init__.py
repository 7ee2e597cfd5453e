"""The methods, one paper a file."""

from fewbytes.method import Method
from fewbytes.methods.fedavg import FedAvg
from fewbytes.methods.fedpurin import FedPURIN
from fewbytes.methods.fusefl import FuseFL
from fewbytes.methods.separate import Separate

METHODS: dict[str, type[Method]] = {cls.__name__.lower(): cls for cls in (FedAvg, FedPURIN, FuseFL, Separate)}
"""Every method by its name on the command line."""

__all__ = ["METHODS", "FedAvg", "FedPURIN", "FuseFL", "Separate"]
