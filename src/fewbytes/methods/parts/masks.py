"""Primitives of secure aggregation: integers that add up, masks that cancel, secret sharing, graphs of neighbours.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017; the graph: Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020; shares: Shamir, "How to Share a Secret", 1979.

All random numbers come from the operating system, so a run's seed does not predict them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey as PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from fewbytes.core.problem import Id

Words = NDArray[np.uint32]
"""Numbers modulo 2^32."""
UNIT = 1 << 30  # a cohort's largest possible sum: it stays within 31 bits and a sign
PRIME = (1 << 256) + 297  # a prime above every secret of 32 bytes
KEY, SECRET, SHARE = 32, 32, 33  # bytes
SEALED = 2 * SHARE + 16  # bytes of two encrypted shares
BLOCK = 1 << 16  # numbers masked at a time, so that they stay in the cache
_ZEROS = bytes(4 * BLOCK)


# ------------------------------------------------------------------------------------------------- numbers that add up


def quantised(values: Tensor, most: float, part: float) -> Words:
    """One client's contribution to a weighted mean, flat: each value times `part`, its fraction of the cohort's weight,
    in steps of `most` / 2^30. Raises ValueError for NaN, and values beyond `most`."""
    wide = values.detach().cpu().double().flatten()
    if not bool((wide.abs() <= most).all()):
        raise ValueError(f"a value is beyond {most:g}")
    steps = (wide * (part * UNIT / most)).round_().to(torch.int32)
    return steps.numpy().view(np.uint32)


def dequantised(total: Words, most: float, part: float) -> Tensor:
    """The mean, float64 and flat, from the sum of contributions of clients with a fraction `part` of the weight."""
    return torch.from_numpy(total.view(np.int32).astype(np.float64)) * (most / (part * UNIT))


# ---------------------------------------------------------------------------------------------------- masks that cancel


def masked(words: Words, added: Iterable[bytes] = (), taken: Iterable[bytes] = ()) -> Words:
    """The numbers plus the noise of seeds `added`, minus that of `taken` (32 bytes each): AES-256 in counter mode."""
    total = words.copy()
    for seed, sign in [*((seed, 1) for seed in added), *((seed, -1) for seed in taken)]:
        stream = Cipher(AES(seed), CTR(bytes(16))).encryptor()
        for start in range(0, total.size, BLOCK):
            block = total[start : start + BLOCK]
            noise = np.frombuffer(stream.update(_ZEROS[: 4 * block.size]), "<u4")
            (np.add if sign > 0 else np.subtract)(block, noise, out=block)
    return total


def digest_of(secret: bytes) -> bytes:
    """A digest that identifies a secret without revealing it."""
    return sha256(secret).digest()


def new_key() -> bytes:
    """A new private key, as bytes."""
    return PrivateKey.generate().private_bytes_raw()


def private_key(raw: bytes) -> PrivateKey:
    """A private key from its bytes."""
    return PrivateKey.from_private_bytes(raw)


def public_key(raw: bytes) -> bytes:
    """The public key of a private key."""
    return private_key(raw).public_key().public_bytes_raw()


def agreed(private: PrivateKey, public: bytes, purpose: str) -> bytes:
    """A shared secret of 32 bytes, for a purpose, between the two keys' owners. Raises ValueError for a public key with
    which the secret would be known to all."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), 32, salt=None, info=b"fewbytes " + purpose.encode()).derive(secret)


def usable(public: bytes) -> bool:
    """Whether an agreement with this public key gives a secret."""
    try:
        return bool(agreed(PrivateKey.generate(), public, ""))
    except ValueError:
        return False


def sealed(key: bytes, text: bytes) -> bytes:
    """Encrypt the text with a key that is used only once."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)


def opened(key: bytes, text: bytes) -> bytes | None:
    """Decrypt `sealed`'s output; None for anything else."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), text, None)
    except InvalidTag:
        return None


# --------------------------------------------------------------------------------------------------- secrets in shares


def shares_of(secret: bytes, holders: Sequence[Id], threshold: int) -> dict[Id, bytes]:
    """Split a secret of 32 bytes into shares of 33: `threshold` shares restore it, fewer reveal nothing."""
    powers = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in powers:
            value = (value + coefficient) * (holder + 1) % PRIME
        shares[holder] = ((value + int.from_bytes(secret, "little")) % PRIME).to_bytes(SHARE, "little")
    return shares


def secret_of(shares: Mapping[Id, bytes]) -> bytes:
    """The secret from as many shares as its threshold; wrong shares give other bytes."""
    secret = 0
    for holder, share in shares.items():
        above, below = 1, 1
        for other in shares.keys() - {holder}:
            above, below = above * (other + 1) % PRIME, below * (other - holder) % PRIME
        secret += int.from_bytes(share, "little") * above * pow(below, -1, PRIME)
    return (secret % PRIME).to_bytes(SHARE, "little")[:SECRET]


# ---------------------------------------------------------------------------------------------------------- neighbours


def degree(clients: int) -> int:
    """The number of neighbours per client: 8 log2(clients), rounded up, or all others (up to 49 clients). Of a thousand
    clients, any fifth may drop out or collude with the server."""
    return min(clients - 1, 8 * math.ceil(math.log2(max(clients, 2))))


def threshold(neighbours: int) -> int:
    """How many neighbours together can restore a client's secrets: more than half, so that two halves cannot restore
    both secrets."""
    return neighbours // 2 + 1


def ring(clients: Sequence[Id], count: int) -> dict[Id, list[Id]]:
    """Each client's neighbours, ascending: on a ring in the given order, the `count` / 2 (`count` is even) nearest on
    either side, or all others if there are no more. No graph with as few edges is better connected (Harary)."""
    n = len(clients)
    if count >= n - 1:
        return {i: sorted(set(clients) - {i}) for i in clients}
    half = range(1, count // 2 + 1)
    return {clients[at]: sorted(clients[(at + way * step) % n] for step in half for way in (1, -1)) for at in range(n)}
