"""A fewbytes method as a Flower app: the run config says which, on what data, with what parameters."""

from fewbytes.experiments.app import client, server

__all__ = ["client", "server"]
