"""Asks a monitoring endpoint, as operators' tools do."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as there:
        return there.getsockname()[1]


def get(port: int, path: str) -> tuple[int, str]:
    """An answer's status and text; 0 if nobody answers."""
    try:
        with OPEN(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def scraped(port: int) -> dict[str, float]:
    """Values by name and labels, without that of the run or node."""
    found = {}
    for family in text_string_to_metric_families(get(port, "/metrics")[1]):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name not in ("run", "node")]
            found[" ".join([sample.name, *labels])] = sample.value
    return found
