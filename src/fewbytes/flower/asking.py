"""What a node asks its SuperLink before any run: the time, whether its key is known, versions, a megabyte each way."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from fewbytes.base.errors import FewbytesError, cleaned, one_line
from fewbytes.flower.answering import CHECK, KNOWN, MEGABYTE, PACKAGES
from fewbytes.flower.private import calls

MOST_AHEAD, MOST_BEHIND = 5, 300
"""By how many seconds a node's clock may be ahead of its SuperLink's, or behind: other requests are refused."""
MOVING_SECONDS = 60.0  # maximum for a megabyte
PIECE = 20_000  # bytes


@dataclass(frozen=True)
class Answer:
    """A SuperLink's answer: its HTTP status, by how many seconds this machine's clock is ahead of its (negative:
    behind; None: not stated), and the versions of PACKAGES there (empty: not stated)."""

    status: int
    ahead: float | None
    versions: Mapping[str, str]


class Questions:
    """Questions to the SuperLink at host:port, which `ca` (a certificate in PEM form) proves, signed with a node's key.

    They use the same proxy as a node's requests. `key`: None asks for the time only. `seconds`: to wait for an answer.
    Every question raises FewbytesError if there is none.
    """

    def __init__(self, superlink: str, ca: str, key: EllipticCurvePrivateKey | None, seconds: float) -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.load_verify_locations(cadata=ca)
        self._client = httpx.Client(verify=tls, timeout=seconds)
        self._url, self._key = f"https://{superlink}{CHECK}", key

    def ask(self) -> Answer:
        """The time there, whether the key is known, and versions."""
        before = time.time()
        answer = self._sent("POST", b"")
        middle = (before + time.time()) / 2
        ahead = None
        if "date" in answer.headers:
            ahead = middle - (parsedate_to_datetime(answer.headers["date"]).timestamp() + 0.5)  # cut to whole seconds
        stated = _object(answer) if answer.status_code == KNOWN else {}
        return Answer(answer.status_code, ahead, {name: cleaned(str(stated.get(name, "")), 50) for name in PACKAGES})

    def move(self) -> tuple[float, float]:
        """Seconds that MEGABYTE takes to the SuperLink, and from it."""
        began = time.monotonic()
        self._sent("POST", b"", _pieces(began + MOVING_SECONDS))
        up = time.monotonic() - began
        began = time.monotonic()
        self._sent("GET", b"")
        return up, time.monotonic() - began

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _sent(self, method: str, body: bytes, pieces: Iterator[bytes] | None = None) -> httpx.Response:
        """The answer to a request, of at most MEGABYTE bytes within MOVING_SECONDS."""
        headers = {"content-type": "application/octet-stream"}
        if pieces is not None:
            headers["content-length"] = str(MEGABYTE)
        request = self._client.build_request(method, self._url, content=pieces or body, headers=headers)
        if self._key is not None:
            calls.sign(request, self._key)
        until, found = time.monotonic() + 2 * MOVING_SECONDS, bytearray()
        try:
            answer = self._client.send(request, stream=True)
            for piece in answer.iter_raw(PIECE):
                found += piece
                if time.monotonic() > until or len(found) > MEGABYTE:
                    raise FewbytesError(f"{len(found):,} bytes came in {2 * MOVING_SECONDS:.0f} s, and not the whole")
            answer.close()
        except httpx.HTTPError as error:
            raise FewbytesError(one_line(error, 300)) from None
        return httpx.Response(
            answer.status_code, headers={"date": answer.headers.get("date", "")}, content=bytes(found)
        )


def _pieces(until: float) -> Iterator[bytes]:
    for sent in range(0, MEGABYTE, PIECE):
        if time.monotonic() > until:
            raise FewbytesError(f"only {sent:,} bytes left in {MOVING_SECONDS:.0f} s")
        yield bytes(PIECE)


def _object(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; empty for another body."""
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
