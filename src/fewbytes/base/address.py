"""Network addresses as people write them, host:port."""

from __future__ import annotations

import re

from fewbytes.base.errors import UserError

EXAMPLE = "server.example:9092 or [2001:db8::7]:9092"


def host_and_port(address: str, what: str = "the address") -> tuple[str, int]:
    """The host, without the brackets of an IPv6 address, and the port. Raises UserError, which names `what`."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    written = f"[{bare}]" if ":" in bare else bare
    if host != written or not re.fullmatch(r"[A-Za-z0-9._:-]+ [0-9]{1,5}", f"{bare} {port}") or int(port) > 65535:
        raise UserError(f"{what} is {address!r}: expected host:port, such as {EXAMPLE}")
    return bare, int(port)
