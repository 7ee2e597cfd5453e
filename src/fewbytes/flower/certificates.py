"""Certificates and keys of a deployment, which authenticate the SuperLink and its nodes."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.files import replacing
from fewbytes.flower.own_certificates import alternative_names, check_certificates, general_name, read_chain

CA_DAYS, SERVER_DAYS = 3650, 730  # validity of a CA's and of a server's certificate
RENEW_DAYS = 60  # before its end, a server's certificate is issued again
EXPIRY_DAYS = 56  # before the end of a certificate that somebody must renew, notes say so


def write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Make ca.crt, ca.key, server.pem and server.key of a SuperLink that is reached at `hosts` (names, IPs).

    They are kept if they are there. If ca.key is, too, the server's certificate is issued again before it expires, or
    if it does not cover the hosts; nodes need no change. Others' certificates are checked. If they do not cover
    127.0.0.1, local.pem and local.key stand in for connections of this machine to `localhost`.

    Raises UserError for unfit certificates.
    """
    wanted = {general_name(host): None for host in ("localhost", "127.0.0.1", *hosts)}
    if not (folder / "server.pem").exists() and not (folder / "ca.key").exists():
        folder.mkdir(parents=True, exist_ok=True)
        ca_key = ec.generate_private_key(ec.SECP384R1())
        issuer = _name("CA")
        write_file(folder / "ca.key", _pem(ca_key), 0o600)
        write_file(folder / "ca.crt", _certificate(ca_key, issuer, issuer, ca_key, CA_DAYS))
    if (folder / "ca.key").exists():
        _issue(folder, wanted)
        (folder / "local.pem").unlink(missing_ok=True)
        return
    names = check_certificates(folder, hosts)
    local = folder / "local.pem"
    if x509.IPAddress(ipaddress.ip_address("127.0.0.1")) in names:
        local.unlink(missing_ok=True)
    elif not local.exists() or days_left(local) < RENEW_DAYS:
        key, name = ec.generate_private_key(ec.SECP384R1()), _name("local")
        write_file(folder / "local.key", _pem(key), 0o600)
        write_file(local, _certificate(key, name, name, key, CA_DAYS, [general_name("localhost")]))


def renew(folder: Path) -> None:
    """Issue the server's certificate again, for the same names. Raises UserError without the CA's key."""
    if not (folder / "ca.key").exists():
        raise UserError(f"{folder} has no ca.key: put a new server.pem and server.key of your own CA there")
    _issue(folder, {}, always=True)


def days_left(path: Path) -> float:
    """Days until the first certificate of a file expires. Raises UserError for another file."""
    return (read_chain(path)[0].not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def trusting(ca: Path) -> ssl.SSLContext:
    """A client's terms of TLS that trust this CA's certificate alone. Raises UserError if the file holds none."""
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:  # also ssl.SSLError
        remedy = f"put it back, or remove {ca.parent} to have new certificates made"
        raise UserError(f"{ca} does not hold a certificate ({one_line(error)}): {remedy}") from None


def expiry_note(folder: Path) -> str:
    """What the operator must do before a certificate of the folder expires; empty until EXPIRY_DAYS before."""
    remedies = {
        "server.pem": "put a new one of your CA there",
        "ca.crt": "remove the folder to have new ones made (every node then needs the new ca.crt)",
    }
    for name, remedy in remedies.items():
        if (left := days_left(folder / name)) < EXPIRY_DAYS:
            return f"{folder / name} expires in {max(0, int(left))} days: {remedy}"
    return ""


def _issue(folder: Path, wanted: dict[x509.GeneralName, None], always: bool = False) -> None:
    """Issue server.pem with a new server.key, if it does not cover what is wanted or expires soon; names are added."""
    names = dict(wanted)
    if (folder / "server.pem").exists():
        names = dict.fromkeys(alternative_names(read_chain(folder / "server.pem")[0])) | names
        soon = days_left(folder / "server.pem") < RENEW_DAYS or not (folder / "server.key").exists()
        if not always and not soon and len(names) == len(alternative_names(read_chain(folder / "server.pem")[0])):
            return
    try:
        ca = read_chain(folder / "ca.crt")[0]
        ca_key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / 'ca.key'}: not the CA's private key: {one_line(error)}") from None
    if ca_key.public_key() != ca.public_key() or not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{folder / 'ca.key'} is not the key of ca.crt: put the one of ca.crt back, or remove ca.key")
    if days_left(folder / "ca.crt") <= 0:
        raise UserError(expiry_note(folder))
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _certificate(ca_key, ca.subject, _name("SuperLink"), key, SERVER_DAYS, list(names))
    write_file(folder / "server.key", _pem(key), 0o600)
    write_file(folder / "server.pem", certificate)  # last, so that its presence means that all four are there


def _name(role: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"fewbytes {role}")])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate(
    ca_key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    names: Sequence[x509.GeneralName] = (),
) -> bytes:
    """A certificate for `key`, of a CA if that is the CA's key, in PEM."""
    ca, now = key is ca_key and not names, datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
        .add_extension(x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(ca_key, SHA384()).public_bytes(Encoding.PEM)


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


def node_name(name: str) -> str:
    """The name, if it can be a node's. Raises UserError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name.endswith(".pub"):
        raise UserError(f"{name!r} is not a name for a node: 1 to 64 of A-Z a-z 0-9 . _ - with a letter or digit first")
    return name


def write_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file at once, readable as `mode` says from the first byte on."""
    with replacing(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
