"""Checks a SuperLink's certificates, such as those of a hospital's own CA, before any node depends on them."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fewbytes.base.errors import UserError


def check_certificates(folder: Path, hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Check server.pem, server.key and ca.crt for a SuperLink that is reached at `hosts`; returns the names that they
    cover. Raises UserError that says which file is unfit, and why."""
    for name in ("ca.crt", "server.key", "server.pem"):
        if not (folder / name).exists():
            remedy = "put it back, or remove the folder to have new ones made (every node then needs the new ca.crt)"
            raise UserError(f"{folder}: {name} is missing: {remedy}")
    roots, (server, *others), pem = read_chain(folder / "ca.crt"), read_chain(folder / "server.pem"), "server.pem"
    _check_key(folder, server, others)
    names = alternative_names(server)
    if missing := [host for host in hosts if not _covered(general_name(host), names)]:
        there = ", ".join(str(name.value) for name in names) or "no names"
        raise UserError(f"{folder / pem} covers {there}, not {', '.join(missing)}: request one for that name")
    chain, left = [server], list(others)
    while not any(issued_by(chain[-1], root) for root in roots):
        issuer = next((each for each in left if issued_by(chain[-1], each)), None)
        if issuer is None:
            why = f"of {chain[-1].issuer.rfc4514_string()!r}, which is neither there nor in ca.crt"
            raise UserError(
                f"{folder / pem} lacks the certificate {why}: append the intermediate certificates after the server's, "
                "or put the right ca.crt there"
            )
        left.remove(issuer)
        chain.append(issuer)
    if chain[1:] != others[: len(chain) - 1]:
        raise UserError(f"{folder / pem}: the certificates are in the wrong order: each must follow the one it issued")
    now = datetime.datetime.now(datetime.UTC)
    for each, where in [(each, pem) for each in chain] + [(root, "ca.crt") for root in roots]:
        what = f"{folder / where}: the certificate of {each.subject.rfc4514_string()!r}"
        if now >= each.not_valid_after_utc:
            raise UserError(f"{what} expired on {each.not_valid_after_utc:%Y-%m-%d}: put a new one there")
        if now < each.not_valid_before_utc:
            raise UserError(f"{what} is valid from {each.not_valid_before_utc:%Y-%m-%d} on: check this machine's clock")
    return names


def _check_key(folder: Path, server: x509.Certificate, others: Sequence[x509.Certificate]) -> None:
    """Raise UserError unless server.key is the key of the first certificate of server.pem."""
    path, encrypted = folder / "server.key", "it is encrypted: remove its password (openssl pkey -in OLD -out NEW)"
    try:
        public = load_pem_private_key(path.read_bytes(), None).public_key()
    except TypeError:
        raise UserError(f"{path}: {encrypted}") from None
    except ValueError:
        raise UserError(f"{path}: not a private key in PEM form: put the key of server.pem there") from None
    if public == server.public_key():
        return
    if any(public == each.public_key() for each in others):
        raise UserError(
            f"{folder / 'server.pem'}: the certificates are in the wrong order: the server's own must come first, then "
            "its intermediates"
        )
    raise UserError(f"{path} is not the key of server.pem: put the one there that the certificate was requested with")


def read_chain(path: Path) -> list[x509.Certificate]:
    """The certificates of a file in PEM form, at least one. Raises UserError."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it must hold certificates in PEM form"
        raise UserError(f"{path} is not a certificate: {why}") from None


def alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """The host names and IP addresses that a certificate covers."""
    with suppress(x509.ExtensionNotFound):
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    return []


def general_name(host: str) -> x509.GeneralName:
    """A host's name or IP address as certificates have it. Raises UserError."""
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host):
        raise UserError(f"{host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)


def _covered(name: x509.GeneralName, names: Sequence[x509.GeneralName]) -> bool:
    """Whether a certificate's names include a name; `*.example.org` includes `a.example.org`, not `b.a.example.org`."""
    if not isinstance(name, x509.DNSName):
        return name in names
    known = [each.value.lower() for each in names if isinstance(each, x509.DNSName)]
    first, dot, rest = name.value.lower().partition(".")
    return name.value.lower() in known or (bool(dot) and bool(first) and f"*.{rest}" in known)


def issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether one certificate has issued another."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
