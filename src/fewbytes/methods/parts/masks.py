"""What secure aggregation is made of: whole numbers that add up, masks that cancel, secrets in shares, who shares.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, "Practical Secure Aggregation for
Privacy-Preserving Machine Learning", CCS 2017; the graph: Bell, Bonawitz, Gascón, Lepoint, Raykova, "Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020; shares: Shamir, "How to Share a Secret", 1979.

All that is random comes from the operating system: nobody who knows a run's seed can foretell it.
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
UNIT = 1 << 30  # what a whole cohort's largest values come to: their sum stays within 31 bits and a sign
PRIME = (1 << 256) + 297  # the first above every secret of 32 bytes
KEY, SECRET, SHARE = 32, 32, 33  # bytes
SEALED = 2 * SHARE + 16  # bytes of two shares once they are sealed
BLOCK = 1 << 16  # numbers masked at a time, which stay in the cache
_ZEROS = bytes(4 * BLOCK)


# ------------------------------------------------------------------------------------------------- numbers that add up


def quantised(values: Tensor, most: float, part: float) -> Words:
    """One client's contribution to a weighted mean, flat: `part`, its share of the cohort's weight, of each value, in
    steps of `most` / 2^30. Raises ValueError for a value beyond `most` or not a number."""
    wide = values.detach().cpu().double().flatten()
    if not bool((wide.abs() <= most).all()):
        raise ValueError(f"a value is beyond {most:g}")
    steps = (wide * (part * UNIT / most)).round_().to(torch.int32)
    return steps.numpy().view(np.uint32)


def dequantised(total: Words, most: float, part: float) -> Tensor:
    """The mean, float64 and flat, that contributions add up to whose clients have `part` of the cohort's weight."""
    return torch.from_numpy(total.view(np.int32).astype(np.float64)) * (most / (part * UNIT))


# ---------------------------------------------------------------------------------------------------- masks that cancel


def masked(words: Words, added: Iterable[bytes] = (), taken: Iterable[bytes] = ()) -> Words:
    """The numbers with the noise of some seeds (32 bytes each) added and of others taken off: AES-256, counter mode."""
    total = words.copy()
    for seed, sign in [*((seed, 1) for seed in added), *((seed, -1) for seed in taken)]:
        stream = Cipher(AES(seed), CTR(bytes(16))).encryptor()
        for start in range(0, total.size, BLOCK):
            block = total[start : start + BLOCK]
            noise = np.frombuffer(stream.update(_ZEROS[: 4 * block.size]), "<u4")
            (np.add if sign > 0 else np.subtract)(block, noise, out=block)
    return total


def digest_of(secret: bytes) -> bytes:
    """By which a secret is known again, and nothing else."""
    return sha256(secret).digest()


def new_key() -> bytes:
    """A private key."""
    return PrivateKey.generate().private_bytes_raw()


def private_key(raw: bytes) -> PrivateKey:
    """A private key, to agree on something with."""
    return PrivateKey.from_private_bytes(raw)


def public_key(raw: bytes) -> bytes:
    """What of a private key others may know."""
    return private_key(raw).public_key().public_bytes_raw()


def agreed(private: PrivateKey, public: bytes, purpose: str) -> bytes:
    """32 bytes for a purpose that only the two know one of whose keys is private here, the other's public. Raises
    ValueError for a public key with which anybody would know them."""
    secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), 32, salt=None, info=b"fewbytes " + purpose.encode()).derive(secret)


def usable(public: bytes) -> bool:
    """Whether what is agreed on with a public key is a secret."""
    try:
        return bool(agreed(PrivateKey.generate(), public, ""))
    except ValueError:
        return False


def sealed(key: bytes, text: bytes) -> bytes:
    """The text for who has the key, which is never used again."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)


def opened(key: bytes, text: bytes) -> bytes | None:
    """Undo `sealed`; None for anything else."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), text, None)
    except InvalidTag:
        return None


# --------------------------------------------------------------------------------------------------- secrets in shares


def shares_of(secret: bytes, holders: Sequence[Id], threshold: int) -> dict[Id, bytes]:
    """A secret of 32 bytes in shares of 33: so many of them give it, fewer tell nothing of it."""
    powers = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in powers:
            value = (value + coefficient) * (holder + 1) % PRIME
        shares[holder] = ((value + int.from_bytes(secret, "little")) % PRIME).to_bytes(SHARE, "little")
    return shares


def secret_of(shares: Mapping[Id, bytes]) -> bytes:
    """The secret that as many shares as its threshold give; something else of wrong ones."""
    secret = 0
    for holder, share in shares.items():
        above, below = 1, 1
        for other in shares.keys() - {holder}:
            above, below = above * (other + 1) % PRIME, below * (other - holder) % PRIME
        secret += int.from_bytes(share, "little") * above * pow(below, -1, PRIME)
    return (secret % PRIME).to_bytes(SHARE, "little")[:SECRET]


# ----------------------------------------------------------------------------------------------------------- who shares


def degree(clients: int) -> int:
    """How many neighbours each of so many clients has: 8 log2 of them, rounded up, and all others where that is
    as many (up to 49 clients). Of a thousand any fifth may drop out, or tell the server all they know."""
    return min(clients - 1, 8 * math.ceil(math.log2(max(clients, 2))))


def threshold(neighbours: int) -> int:
    """How many of a client's neighbours can open its secrets together: more than half, so that not half of them open
    one secret and half the other."""
    return neighbours // 2 + 1


def ring(clients: Sequence[Id], count: int) -> dict[Id, list[Id]]:
    """Each client's neighbours, ascending: those next to it on a ring in the order given, half of `count` (even) on
    either side; or all others, if there are no more. No graph of so few edges is better connected (Harary)."""
    n = len(clients)
    if count >= n - 1:
        return {i: sorted(set(clients) - {i}) for i in clients}
    half = range(1, count // 2 + 1)
    return {clients[at]: sorted(clients[(at + way * step) % n] for step in half for way in (1, -1)) for at in range(n)}
