"""Flower's SuperNode with some of its parts replaced: which applications it runs, after which failures it retries."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import httpx
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.retry import RetryInvoker
from flwr.supernode.cli import flower_supernode

from fewbytes.flower.private import replaced


def run_supernode(is_installed: Callable[[bytes], bool], application: str) -> None:
    """`flower-supernode` that runs only applications whose bundles are what is installed here, and retries
    over bad links.

    `application`: by which name and version Flower finds again what a bundle unpacked to. Raises AttributeError where
    Flower has changed, rather than run without.
    """

    def pull(
        *, get_run: Callable[[int], Any], get_fab: Callable[[str, int], Fab], trusted_entities: object, **others: Any
    ) -> Any:
        runs: dict[int, Any] = {}

        def noted(number: int) -> Any:
            runs[number] = get_run(number)
            return runs[number]

        def checked(digest: str, number: int) -> Fab:
            fab, run = get_fab(digest, number), runs[number]
            is_named = f"{run.fab_id} {run.fab_version}" == application and run.primary_task_type != TaskType.AGENT_APP
            same = sha256(fab.content).hexdigest() == fab.hash_str == run.fab_hash
            ours = is_named and same and is_installed(fab.content)
            return Fab(fab.hash_str, fab.content, {"valid_license": "installed"} if ours else {})

        return pulling(get_run=noted, get_fab=checked, trusted_entities={"installed": ""}, **others)

    pulling = replaced("flwr.supernode.start_client_internal", "_pull_and_store_message", pull)
    replaced("flwr.supernode.start_client_internal", "_verify_fab", lambda fab, _: bool(fab.verifications))
    retrying: Callable[[], RetryInvoker] = replaced(
        "flwr.supernode.fleet_http_connection", "make_simple_http_retry_invoker", lambda: retrying_more(retrying())
    )
    flower_supernode()


def retrying_more(invoker: RetryInvoker) -> RetryInvoker:
    """Have the invoker of calls to the SuperLink also retry after a link broke or damaged a TLS connection.

    Flower retries after other failures, but takes these for a wrong certificate: the message being fetched is lost,
    and the server waits for its reply in vain.
    """
    gives_up = invoker.should_giveup

    def hopeless(error: Exception) -> bool:
        broken = isinstance(error, httpx.TransportError) and "certificate" not in str(error).lower()
        return not broken and gives_up is not None and gives_up(error)

    invoker.should_giveup = hopeless
    return invoker
