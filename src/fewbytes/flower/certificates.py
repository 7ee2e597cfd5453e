"""Certificates and keys of a deployment, which authenticate the SuperLink and its nodes."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key

from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing


def write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """ca.crt, ca.key, server.pem, server.key of a SuperLink reached at `hosts` (names, IPs), localhost and 127.0.0.1.

    They are kept if they are there. Raises UserError if those do not cover the hosts or are out of date.
    """
    wanted = {_general_name(host) for host in ("localhost", "127.0.0.1", *hosts)}
    now = datetime.datetime.now(datetime.UTC)
    if (folder / "server.pem").exists():
        there = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
        missing = wanted - set(there.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        faults = [f"{name} is missing" for name in ("ca.crt", "server.key") if not (folder / name).exists()]
        faults += [f"server.pem does not cover {name}" for name in sorted(str(each.value) for each in missing)]
        faults += ["server.pem is out of date"] * (now >= there.not_valid_after_utc)
        if faults:
            remedy = "remove the folder to have new ones made (every node then needs the new ca.crt)"
            raise UserError(f"{folder}: {', '.join(faults)}; {remedy}")
        return
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer, subject = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"fewbytes {role}")]) for role in ("CA", "SuperLink")
    )

    def certificate(name: x509.Name, of: ec.EllipticCurvePrivateKey, *more: x509.ExtensionType) -> bytes:
        ca = of is ca_key
        builder = (
            x509.CertificateBuilder(issuer, name, of.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
            .not_valid_after(now + datetime.timedelta(days=3650))
            .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
            .add_extension(x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(of.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(ca_key, SHA384()).public_bytes(Encoding.PEM)

    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "ca.key", ca_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    write_file(folder / "ca.crt", certificate(issuer, ca_key))
    write_file(folder / "server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    # last, so that its presence means that all four are there
    write_file(folder / "server.pem", certificate(subject, key, x509.SubjectAlternativeName(wanted)))


def write_node_key(folder: Path, name: str) -> None:
    """A node's OpenSSH P-384 keys, `<name>` and `<name>.pub`; kept if there (a remote node's public one is enough).

    Raises UserError for a name that is not 1 to 64 of A-Z a-z 0-9 . _ - with a letter or digit first.
    """
    private, public = folder / node_name(name), folder / f"{name}.pub"
    if public.exists() and not private.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not private.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        write_file(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)
    try:
        there = load_ssh_private_key(private.read_bytes(), None).public_key()
    except ValueError as error:
        raise UserError(f"{private}: not an OpenSSH private key without a password ({error})") from None
    if not public.exists():
        write_file(public, there.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode())


def _general_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host):
        raise UserError(f"{host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)


def node_name(name: str) -> str:
    """The name, if it can be a node's. Raises UserError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.endswith(".pub"):
        raise UserError(f"{name!r} is no name for a node: 1 to 64 of A-Z a-z 0-9 . _ - with a letter or digit first")
    return name


def write_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file at once, readable as `mode` says from the first byte on."""
    with replacing(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
