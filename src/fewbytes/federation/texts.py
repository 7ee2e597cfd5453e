"""The two texts that a server and a site exchange before they are connected: an invitation and a request.

Neither is secret. Both are one line, for a message or a file.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import ClassVar, Self

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384, Hash
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fewbytes.base.errors import UserError
from fewbytes.flower.certificates import node_name

LONGEST = 1 << 16  # characters of a text


class Text(msgspec.Struct, forbid_unknown_fields=True):
    """What a text says; `kind` is how it begins."""

    kind: ClassVar[str]
    made_by: ClassVar[str]

    def line(self) -> str:
        """The text."""
        return f"fewbytes-{self.kind}.{base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip('=')}"

    @classmethod
    def read(cls, given: str) -> Self:
        """Read a text, or the file of that name. Raises UserError."""
        start, text = f"fewbytes-{cls.kind}.", given.strip()
        try:
            if not text.startswith("fewbytes-") and Path(given).is_file():
                text = Path(given).read_bytes()[:LONGEST].decode().strip()
            packed = text.removeprefix(start)
            if packed == text:
                raise ValueError(f"it does not begin with {start}")
            return msgspec.json.decode(base64.b64decode(packed + "=" * (-len(packed) % 4), b"-_", True), type=cls)
        except (OSError, ValueError, binascii.Error) as error:
            what = given if len(given) < 60 else f"{given[:40]}…"
            why = str(error).splitlines()[0]
            raise UserError(f"{what}: not the whole {cls.kind} that `{cls.made_by}` prints: {why}") from None


class Invitation(Text):
    """What a site must know to make its key and to trust the server: its own name, the server's address (host:port) and
    the CA's certificate in PEM form."""

    kind = "invitation"
    made_by = "fewbytes federation invite"
    name: str
    superlink: str
    ca: str


class Request(Text):
    """A site's request to join: its name and public key in OpenSSH form, signed with its private key."""

    kind = "request"
    made_by = "fewbytes node init"
    name: str
    key: str
    signature: str

    @classmethod
    def of(cls, name: str, private: Path) -> Request:
        """The request of a site with this private key."""
        key = load_ssh_private_key(private.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        signature = key.sign(_signed(name, public), ec.ECDSA(SHA384()))
        return cls(name, public, base64.b64encode(signature).decode())

    def check(self) -> Request:
        """Itself, if its name is valid and it is signed with its key. Raises UserError."""
        node_name(self.name)
        try:
            key = load_ssh_public_key(self.key.encode())
            if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
                raise ValueError
            key.verify(base64.b64decode(self.signature), _signed(self.name, self.key), ec.ECDSA(SHA384()))
        except (ValueError, InvalidSignature):
            why = "the key that it names has not signed it: have the site send it again"
            raise UserError(f"the request of {self.name}: {why}") from None
        return self


def _signed(*parts: str) -> bytes:
    return b"\0".join(part.encode() for part in ("fewbytes request", *parts))


def fingerprint(key: str) -> str:
    """The fingerprint of a public key in OpenSSH form, as `ssh-keygen -l` prints it, to compare by telephone."""
    digest = Hash(SHA256())
    digest.update(base64.b64decode(key.split()[1]))
    return f"SHA256:{base64.b64encode(digest.finalize()).decode().rstrip('=')}"
