"""The versions of software at a server and its nodes: which must agree, and which may differ."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version

import msgspec

from fewbytes.base.errors import cleaned
from fewbytes.engines.roster import Software
from fewbytes.running.checkpoint import VERSION
from fewbytes.wire.frame import FORMAT

FRAMES = "frame format"
MAY_DIFFER = ("fewbytes", "flwr", "torch", "python")


def versions() -> dict[str, str]:
    """This process's versions, by name."""
    installed = {name: version(name) for name in ("flwr", "torch")}
    return {"fewbytes": VERSION, FRAMES: str(FORMAT), **installed, "python": platform.python_version()}


def series(of: str) -> str:
    """The part of a version of this package that must agree: 0.9 of 0.9.2."""
    return ".".join(of.split(".")[:2])


def refusal(server: Mapping[str, str]) -> str:
    """Why a node of this process cannot take part in a run of a server with those versions; empty if it can."""
    ours, theirs = versions(), {name: cleaned(text, 40) for name, text in server.items()}
    same = "fewbytes" not in theirs or series(ours["fewbytes"]) == series(theirs["fewbytes"])
    if same and theirs.get(FRAMES, ours[FRAMES]) == ours[FRAMES]:
        return ""
    there, frames = (theirs.get(name, "unknown") for name in ("fewbytes", FRAMES))
    here = f"this node has fewbytes {ours['fewbytes']} ({FRAMES} {ours[FRAMES]})"
    return f"{here}, the server {there} ({FRAMES} {frames}): install the same version at both"


def differing(server: Mapping[str, str]) -> dict[str, str]:
    """Those of this process's versions that differ from the server's, and may; all that a node reports."""
    ours = versions()
    return {name: ours[name] for name in MAY_DIFFER if name in server and server[name] != ours[name]}


def compared(node: Mapping[str, str]) -> Software:
    """What a node reports of versions, beside those here; nothing of software that may not differ."""
    ours = versions()
    return {name: {"node": cleaned(node[name], 40), "server": ours[name]} for name in MAY_DIFFER if name in node}


def words_of(found: Software) -> str:
    """Versions that differ, in words."""
    return ", ".join(f"{name} {of['node']} there, {of['server']} here" for name, of in found.items())


def packed() -> bytes:
    """The server's versions, as they are sent with its first question to a node."""
    return msgspec.json.encode(versions())


def unpacked(frame: bytes | memoryview) -> dict[str, str]:
    """The server's versions; none of an older server, which sends none."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(frame, type=dict[str, str])
    return {}
