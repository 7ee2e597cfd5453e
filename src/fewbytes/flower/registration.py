"""The nodes that a SuperLink accepts: registered by their public keys, replaced and removed while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.flower.private import cli

Ask = Callable[[str, Sequence[str]], Mapping[str, Any]]
"""Runs a `flwr` command: a function of what is being done, for the error's text, and the command."""


def registered(ask: Ask) -> list[cli.Registered]:
    """The nodes that the SuperLink accepts. Raises FewbytesError."""
    return cli.registered(ask("listing the nodes", cli.list_nodes_command()))


def register(ask: Ask, keys: Mapping[str, Path]) -> None:
    """Register the public keys, files by the names of their nodes; another key of such a name is removed.

    Raises FewbytesError with Flower's message, UserError for a key that was removed earlier.
    """
    there, wanted = registered(ask), {name: pem(path) for name, path in keys.items()}
    known = {(node.name, node.key) for node in there}
    for name, path in keys.items():
        if (name, wanted[name]) in known:
            continue
        try:
            ask(f"registering {name}", cli.register_command(path, name))
        except FewbytesError as error:
            if cli.ALREADY_REGISTERED in str(error):
                why = (
                    "is another node's, or was removed: every node needs a key of its own, and a removed one a new key"
                )
                raise UserError(f"{path}: the key {why}") from None
            raise
    for node in there:  # last, so that a node whose new key is refused keeps its old one
        if node.name in wanted and node.key != wanted[node.name]:
            _remove(ask, node)


def keep_only(ask: Ask, names: Sequence[str]) -> list[str]:
    """Remove all nodes but those of these names; returns the names of the removed ones. Raises FewbytesError."""
    others = [node for node in registered(ask) if node.name not in names]
    for node in others:
        _remove(ask, node)
    return [node.name for node in others]


def _remove(ask: Ask, node: cli.Registered) -> None:
    ask(f"removing {node.name}", cli.unregister_command(node.id))


def pem(path: Path) -> str:
    """The public key of an OpenSSH file, in the form in which the SuperLink lists it. Raises UserError."""
    try:
        key = load_ssh_public_key(path.read_bytes())
        return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not an OpenSSH public key: {error}") from None
