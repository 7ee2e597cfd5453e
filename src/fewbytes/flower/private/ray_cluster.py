"""Finds a Ray cluster with private parts of Ray, as its documented ones end the process if there is none."""

from __future__ import annotations

import importlib
import re
from contextlib import suppress

from fewbytes.base.errors import UserError
from fewbytes.base.named import check_address

RAY_SECONDS = 5  # timeout for a Ray cluster to answer; Ray itself waits over a minute, then ends the process


def ray_cluster(address: str) -> str:
    """The host:port of the Ray cluster at `address`, which is host:port or "auto". Raises UserError if there is none,
    or this host is not part of it."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.services import canonicalize_bootstrap_address, get_node_to_connect_for_driver
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    remedy = "give host:port of its head, as `ray start --head` prints it, or auto on one of its hosts"
    if not re.fullmatch(r"auto|[^/\s]+:[0-9]{1,5}", address):
        raise UserError(f"ray_address is where a Ray cluster is, not {address!r}: {remedy}")
    here = None
    with suppress(OSError):  # there is none
        here = canonicalize_bootstrap_address("auto")
    if address not in ("auto", here):
        check_address(address)
    try:
        place = canonicalize_bootstrap_address(address)
        if place is None:
            raise UserError(f"no Ray cluster runs on this host: {remedy}")
        stub = NodeInfoGcsServiceStub(init_grpc_channel(place))
        stub.CheckAlive(CheckAliveRequest(), timeout=RAY_SECONDS, wait_for_ready=True)
    except (OSError, ValueError, grpc.RpcError):
        raise UserError(f"no Ray cluster answers at {address}: {remedy}") from None
    try:
        client = importlib.import_module("ray._raylet").GcsClient(address=place)
        get_node_to_connect_for_driver(client, timeout_seconds=RAY_SECONDS)
    except RuntimeError:
        raise UserError(f"this host has no part in the Ray cluster: `ray start --address={place}` here first") from None
    return str(place)
