"""The folder of a federation: who is a member, by which key, since when, and what happened before.

In it: federation.json (the server's address, members and invitations), history.jsonl (a dated line for each change) and
certificates/ (the CA with its key, and the server's certificate). Private keys of members are never there.
"""

from __future__ import annotations

import datetime
import getpass
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.address import EXAMPLE, host_and_port
from fewbytes.base.errors import UserError, listed, suggestion
from fewbytes.base.files import locked, private_folder, replacing
from fewbytes.federation.texts import Invitation, Request, fingerprint
from fewbytes.flower.certificates import node_name, renew, write_certificates

FILE, HISTORY, CERTIFICATES = "federation.json", "history.jsonl", "certificates"


class Member(msgspec.Struct, forbid_unknown_fields=True):
    """A member: its name, its public key in OpenSSH form, and the time since which it has that key."""

    name: str
    key: str
    since: str


class Federation(msgspec.Struct, forbid_unknown_fields=True):
    """A federation: where its nodes reach the server (host:port), where that listens (None: everywhere at that port),
    its members in the order in which they joined, and invited names."""

    address: str
    listen: str | None = None
    members: list[Member] = []
    invited: list[str] = []

    def member(self, name: str) -> Member | None:
        """The member of that name."""
        return next((each for each in self.members if each.name == name), None)


def read(folder: Path) -> Federation:
    """The federation of a folder. Raises UserError."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Federation)
    except FileNotFoundError:
        remedy = "make one with `fewbytes federation init`, or name its folder"
        raise UserError(f"{folder} is not the folder of a federation (it has no {FILE}): {remedy}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / FILE} cannot be read: {error}; restore a copy of it") from None


def make(folder: Path, address: str, listen: str | None) -> None:
    """Make a federation, with a CA unless certificates of one's own are there. Raises UserError, also for an invalid
    address."""
    if (folder / FILE).exists():
        raise UserError(f"{folder} is a federation already; `fewbytes federation renew --address` moves its server")
    _check(address, listen)
    private_folder(folder)
    write_certificates(folder / CERTIFICATES, [host_and_port(address)[0]])
    with locked(folder / "lock"):
        _write(folder, Federation(address, listen))
        _record(folder, "made", address=address)


def invite(folder: Path, name: str) -> Invitation:
    """The invitation for a site; its name may then join, or get a new key. Raises UserError."""
    with _changed(folder) as federation:
        if node_name(name) not in federation.invited:
            federation.invited.append(name)
            _record(folder, "invited", name)
        ca = (folder / CERTIFICATES / "ca.crt").read_text()
        return Invitation(name, federation.address, ca)


def join(folder: Path, request: Request) -> str:
    """Accept an invited site's request; returns what changed: `joined`, `replaced` (its key) or `unchanged`.

    Raises UserError for a name that was not invited, a key that another member has, or one that was removed.
    """
    request.check()
    name, mark = request.name, fingerprint(request.key)
    with _changed(folder) as federation:
        there = federation.member(name)
        if there is not None and there.key == request.key:
            return "unchanged"
        if name not in federation.invited:
            guess = suggestion(name, federation.invited)
            raise UserError(f"{name} is not invited{guess}: `fewbytes federation invite {name}` first, if it should be")
        other = next((each.name for each in federation.members if each.key == request.key), None)
        if other is not None:
            raise UserError(f"the key of {name} is that of {other}: every site makes a key of its own")
        if mark in {line.get("old") for line in history(folder)}:
            raise UserError(f"the key {mark} of {name} was removed earlier: the site must make a new one")
        since, what = _now(), "joined" if there is None else "replaced"
        if there is None:
            federation.members.append(Member(name, request.key, since))
            _record(folder, what, name, key=mark)
        else:
            _record(folder, what, name, key=mark, old=fingerprint(there.key))
            there.key, there.since = request.key, since
        federation.invited.remove(name)
    return what


def remove(folder: Path, name: str) -> None:
    """Remove a member, or an invitation; its key is never accepted again. Raises UserError."""
    with _changed(folder) as federation:
        there = federation.member(name)
        if there is None and name not in federation.invited:
            known = [each.name for each in federation.members]
            raise UserError(f"{name} is not a member{suggestion(name, known)}; members: {listed(known) or 'none'}")
        federation.invited = [each for each in federation.invited if each != name]
        federation.members = [each for each in federation.members if each.name != name]
        _record(folder, "removed", name, **({} if there is None else {"old": fingerprint(there.key)}))


def renew_certificate(folder: Path, address: str | None, listen: str | None) -> None:
    """Issue the server's certificate again, also for a new address if one is given. Raises UserError without the CA's
    key, and for an invalid address; certificates of one's own are then checked for a new address only."""
    _check(address, listen)
    with _changed(folder) as federation:
        certificates = folder / CERTIFICATES
        if address is not None:
            write_certificates(certificates, [host_and_port(address)[0]])
        if address is None or (certificates / "ca.key").exists():
            renew(certificates)
        federation.address, federation.listen = address or federation.address, listen or federation.listen
        _record(folder, "renewed", address=federation.address)


def history(folder: Path) -> list[dict[str, Any]]:
    """What happened, oldest first: `when` (UTC), `what`, `by` which account, `name`, and prints of `key` and `old`."""
    path = folder / HISTORY
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _check(address: str | None, listen: str | None) -> None:
    """Raises UserError for what is not an address of a server."""
    for name, given in (("address", address), ("listen", listen)):
        if given is not None and not host_and_port(given, f"--{name}")[1] and name == "address":
            raise UserError(f"--address is {given!r}: sites need the port, such as {EXAMPLE}")


@contextmanager
def _changed(folder: Path) -> Iterator[Federation]:
    """The federation, written when the block ends without an error."""
    read(folder)  # before a lock is made in another folder
    with locked(folder / "lock"):
        federation = read(folder)
        before = msgspec.json.encode(federation)
        yield federation
        if msgspec.json.encode(federation) != before:
            _write(folder, federation)


def _write(folder: Path, federation: Federation) -> None:
    with replacing(folder / FILE, sync=True) as file:
        file.write(msgspec.json.format(msgspec.json.encode(federation), indent=1) + b"\n")


def _record(folder: Path, what: str, name: str = "", **more: str) -> None:
    """Append to the history. It comes before the change: a removed key is known as such even after a loss of power."""
    by = ""
    with suppress(OSError, KeyError, ImportError):  # accounts without a name
        by = getpass.getuser()
    line = {"when": _now(), "what": what, **({"name": name} if name else {}), **more, "by": by}
    with open(folder / HISTORY, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
