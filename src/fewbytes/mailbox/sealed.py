"""Seals a message for one receiver: encrypted to its key, signed with the sender's.

A sealed file is MAGIC, the header's length (4 bytes), the header (JSON, readable by anyone), the signature's length (2
bytes), the signature, and the ciphertext; lengths are little-endian. The construction:

- The sender draws an elliptic-curve key pair for this file only, on the curve of the receiver's key. Its public half is
  in the header (`ephemeral`).
- AES-256-GCM encrypts the content. HKDF-SHA384 derives the key and the 12-byte nonce from the two keys' Diffie-Hellman
  secret. The header is authenticated with the ciphertext, so that a file cannot be given another sender or number.
- The sender signs MAGIC, header and ciphertext by ECDSA with SHA-384. Anyone with its public key can check that.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from msgspec import Meta

from fewbytes.base.clock import now
from fewbytes.base.errors import FewbytesError

MAGIC = b"fewbytes mailbox 1\n"
LONGEST_HEADER = 1 << 16  # bytes; a certificate chain takes a few thousand
TAG = 16  # bytes that AES-GCM adds


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""The name of a member, or `server`."""


class NotAccepted(FewbytesError):
    """A file is not accepted, for the stated reason."""


class Unfinished(NotAccepted):
    """A file is shorter than its header states, as while it is being copied."""


class Header(msgspec.Struct, frozen=True):
    """What anyone can read of a sealed file.

    `series`: 32 hexadecimal digits, different for each deployment, also of runs with the same name. `number`: of the
    order in its series, from 1; an answer has its order's. `nonce`: 32 random hexadecimal digits of an order, which its
    answer repeats. `when`: the time (UTC) by the sender's clock, for people. `length`: of the ciphertext, in bytes.
    `ephemeral`: the public key of this file, in hexadecimal digits. `certificates`: the server's, with intermediate
    ones, in PEM form; empty in an answer.
    """

    kind: Literal["order", "answer"]
    run: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
    series: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    number: Annotated[int, Meta(ge=1)]
    sender: Name
    receiver: Name
    nonce: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    when: str = ""
    length: int = 0
    ephemeral: str = ""
    certificates: str = ""

    def described(self) -> str:
        """The file in a few words."""
        return f"{self.kind} {self.number} of the run {self.run} from {self.sender} of {self.when}"


def fresh_nonce() -> str:
    """A new nonce or series."""
    return secrets.token_hex(16)


def seal(
    header: Header, content: bytes, sender: ec.EllipticCurvePrivateKey, receiver: ec.EllipticCurvePublicKey
) -> bytes:
    """The content as a sealed file; fills in the header's `when`, `length` and `ephemeral`."""
    own = ec.generate_private_key(receiver.curve)
    point = own.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    header = msgspec.structs.replace(header, when=now(), length=len(content) + TAG, ephemeral=point.hex())
    head = _with_length(msgspec.json.encode(header), 4)
    cipher, nonce = _cipher(own.exchange(ec.ECDH(), receiver))
    ciphertext = cipher.encrypt(nonce, content, head)
    signature = sender.sign(_digest(head, ciphertext), _SIGNED)
    return b"".join((MAGIC, head, _with_length(signature, 2), ciphertext))


def read_header(data: bytes) -> Header:
    """The header of a sealed file, of which nothing is checked yet. Raises NotAccepted."""
    return _split(data)[0]


def open_sealed(data: bytes, sender: ec.EllipticCurvePublicKey, receiver: ec.EllipticCurvePrivateKey) -> bytes:
    """The content of a sealed file from the sender with that key. Raises NotAccepted."""
    header, head, signature, ciphertext = _split(data)
    try:
        sender.verify(signature, _digest(head, ciphertext), _SIGNED)
    except InvalidSignature:
        raise NotAccepted(
            f"it is not signed with the key of {header.sender}, or was changed since: have it sent again"
        ) from None
    try:
        point = ec.EllipticCurvePublicKey.from_encoded_point(receiver.curve, bytes.fromhex(header.ephemeral))
        cipher, nonce = _cipher(receiver.exchange(ec.ECDH(), point))
        return cipher.decrypt(nonce, ciphertext, head)
    except (InvalidTag, ValueError):
        raise NotAccepted(
            f"it is encrypted to another key than that of {header.receiver}: have it sent again"
        ) from None


_SIGNED = ec.ECDSA(Prehashed(SHA384()))


def _with_length(part: bytes, width: int) -> bytes:
    return len(part).to_bytes(width, "little") + part


def _digest(head: bytes, ciphertext: bytes) -> bytes:
    digest = hashlib.sha384(MAGIC + head)
    digest.update(ciphertext)
    return digest.digest()


def _cipher(secret: bytes) -> tuple[AESGCM, bytes]:
    """The cipher of one file, and its nonce: the secret is used once."""
    derived = HKDF(SHA384(), 44, None, MAGIC).derive(secret)
    return AESGCM(derived[:32]), derived[32:]


def _split(data: bytes) -> tuple[Header, bytes, bytes, bytes]:
    """The header, its bytes with their length, the signature and the ciphertext. Raises NotAccepted."""
    if not data.startswith(MAGIC[: max(1, len(data))]):
        raise NotAccepted("it is not a sealed file of fewbytes")
    start = len(MAGIC)
    end = start + 4 + int.from_bytes(data[start : start + 4], "little")
    if end - start - 4 > LONGEST_HEADER:
        raise NotAccepted("its header is damaged: have it sent again")
    signed = end + 2 + int.from_bytes(data[end : end + 2], "little")
    if len(data) < signed or len(data) < end + 2:
        raise Unfinished("it is not complete yet")
    try:
        header = msgspec.json.decode(data[start + 4 : end], type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise NotAccepted("its header is damaged: have it sent again") from None
    if len(data) - signed < header.length:
        raise Unfinished(f"it is not complete yet: {len(data) - signed:,} of {header.length:,} bytes")
    return header, data[start:end], data[end + 2 : signed], data[signed:]
