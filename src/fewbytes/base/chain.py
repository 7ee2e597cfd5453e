"""A signed chain: a file of JSON lines, append-only, in which every line seals the one before it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fewbytes.base.errors import UserError
from fewbytes.base.files import open_plain, private_folder, replacing

START = "0" * 64
"""What the first line names as the hash of the line before it."""
_SEALED = re.compile(rb'(\{.+),"hash":"([0-9a-f]{64})","signature":"([0-9a-f]+)"\}')


class Fault(NamedTuple):
    """The first fault of a chain: the number of its line, from 1, and what is wrong there."""

    line: int
    why: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.why}"


class Chain:
    """The lines of a chain in `folder`, and the private key (OpenSSH, elliptic) that signs them.

    Three files: `egress.jsonl`; `egress.head`, the number of lines and the last hash, which shows missing lines at the
    end; `key.pub`, the public
    keys. The caller must lock the folder around each call. Raises UserError for an unreadable
    key or folder.
    """

    def __init__(self, folder: Path, key: Path) -> None:
        private_folder(folder)
        self.path, self._head, self._key = folder / "egress.jsonl", folder / "egress.head", _private(key)
        self._read, self._count = 0, 0  # bytes and lines
        self._last, self._earlier = START, START  # the hashes of the last line and of the one before it
        _add_public(folder / "key.pub", self._key)

    def news(self) -> list[dict[str, Any]]:
        """The lines since the last call, or of the whole file. Raises UserError for a chain that is damaged."""
        data = b""
        if self.path.exists():
            with open(self.path, "rb", opener=open_plain) as file:
                if file.seek(0, os.SEEK_END) < self._read:
                    raise self._damaged(Fault(self._count, "it is missing"))
                file.seek(self._read)
                data = file.read()
        whole, found = data[: data.rfind(b"\n") + 1], []
        for line in whole.split(b"\n")[:-1]:
            entry = _opened(line, self._count + 1, self._last)
            if isinstance(entry, str):
                raise self._damaged(Fault(self._count + 1, entry))
            self._count, self._earlier, self._last = self._count + 1, self._last, _sealed(line)[2].decode()
            found.append(entry)
        self._read += len(whole)
        if fault := _short(self._head, self._count, self._last, self._earlier):
            raise self._damaged(fault)
        if len(data) > len(whole):  # torn by a loss of power: nothing left under it
            os.truncate(self.path, self._read)
        return found

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line, after `news`; it is on disk when this returns."""
        body = json.dumps({"line": self._count + 1, **entry, "before": self._last}, separators=(",", ":"))[:-1].encode()
        hashed = hashlib.sha256(body).hexdigest()
        line = body + f',"hash":"{hashed}","signature":"{_signed(self._key, hashed)}"}}\n'.encode()
        with open(self.path, "ab", opener=open_plain) as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._read, self._count, self._earlier, self._last = self._read + len(line), self._count + 1, self._last, hashed
        with replacing(self._head, sync=True) as file:
            file.write(f"{self._count} {hashed}\n".encode())

    def _damaged(self, fault: Fault) -> UserError:
        return UserError(
            f"{self.path.name}, this node's record of what left, is damaged ({fault}): restore a copy of its folder; "
            "removing the folder restarts the count at zero, which only the owner of the data may decide"
        )


def verify(folder: Path, key: Path | None = None) -> tuple[list[dict[str, Any]], Fault | None]:
    """The lines of the chain in a folder, up to its first fault, and that fault (None: the chain is whole).

    `key`: a file of the public keys that may have signed it, one a line (default: the one in the folder). Raises
    UserError if there is no chain, or no public key.
    """
    try:
        keys, data = _public_keys(key or folder / "key.pub"), (folder / "egress.jsonl").read_bytes()
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    found, last, before = list[dict[str, Any]](), START, START
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else [], 1):
        entry = _opened(line, number, last)
        if isinstance(entry, str):
            return found, Fault(number, entry)
        hashed, signature = (each.decode() for each in _sealed(line).groups()[1:])
        if not any(_is_by(public, hashed, signature) for public in keys):
            return found, Fault(number, "its signature is not by this node's key")
        before, last = last, hashed
        found.append(entry)
    if data and not data.endswith(b"\n"):
        return found, Fault(len(found), "the end of the line is missing")
    return found, _short(folder / "egress.head", len(found), last, before)


def _opened(line: bytes, number: int, last: str) -> dict[str, Any] | str:
    """The entry of a line; a text says what is wrong with it."""
    match = _SEALED.fullmatch(line)
    if match is None:
        return "it is not a line of such a file"
    if hashlib.sha256(match[1]).hexdigest().encode() != match[2]:
        return "it was changed: its hash is another"
    entry: dict[str, Any] = json.loads(match[1] + b"}")
    if entry.get("line") != number or entry.get("before") != last:
        return f"it does not follow the line before it (it was written as line {entry.get('line')})"
    return entry


def _sealed(line: bytes) -> re.Match[bytes]:
    match = _SEALED.fullmatch(line)
    assert match is not None
    return match


def _short(head: Path, count: int, last: str, before: str) -> Fault | None:
    """What the head says is missing at the end. A loss of power may leave the head one line behind."""
    try:
        number, sealed = head.read_text().split()
    except FileNotFoundError:
        return None if count <= 1 else Fault(count, "egress.head, which seals the last line, is missing")
    except ValueError:
        return Fault(count, "egress.head, which seals the last line, is damaged")
    if (number, sealed) in ((str(count), last), (str(count - 1), before)):
        return None
    if number.isdecimal() and int(number) > count:
        return Fault(count + 1, f"missing, and all after it: egress.head counts {number} lines")
    return Fault(count, "egress.head, which seals the last line, is of another file")


def _private(path: Path) -> Any:
    """A node's private key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"{path}, the key that signs what leaves, cannot be read: {error.strerror}") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(f"{path} is not a node's private key: an OpenSSH key of an elliptic curve, without a password")
    return key


def make_key(path: Path) -> Path:
    """A private key at this path; made if there is none."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    if not path.exists():
        private_folder(path.parent)
        key = ec.generate_private_key(ec.SECP384R1())
        with replacing(path, sync=True) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return path


def _add_public(path: Path, key: Any) -> None:
    """Add the public key to a file of public keys: a node's key may be replaced, and older lines remain."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    text, there = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH), b""
    if path.exists():
        there = path.read_bytes()
    if text not in there.splitlines():
        with replacing(path, sync=True) as file:
            file.write(there + text + b"\n")


def _public_keys(path: Path) -> list[Any]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        keys = [load_ssh_public_key(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (ValueError, UnsupportedAlgorithm):
        keys = []
    if not keys or not all(isinstance(each, EllipticCurvePublicKey) for each in keys):
        raise UserError(f"{path} is not a node's public key, in OpenSSH's format and of an elliptic curve")
    return keys


def _signed(key: Any, hashed: str) -> str:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    made: bytes = key.sign(hashed.encode(), ECDSA(SHA256()))
    return made.hex()


def _is_by(public: Any, hashed: str, signature: str) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        public.verify(bytes.fromhex(signature), hashed.encode(), ECDSA(SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprints(key: Path) -> list[str]:
    """The fingerprints of a file of public keys, as `ssh-keygen -l` prints them. Raises UserError for another file."""
    _public_keys(key)
    raw = [base64.b64decode(line.split()[1]) for line in key.read_bytes().splitlines() if line.strip()]
    return ["SHA256:" + base64.b64encode(hashlib.sha256(each).digest()).decode().rstrip("=") for each in raw]
