"""The keys of sealed files: the server's, which its certificate proves, and the members'."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key, load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fewbytes.base.errors import UserError, one_line
from fewbytes.mailbox.sealed import NotAccepted


def server_keys(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, str]:
    """The server's private key, and its certificates in PEM form, from server.key and server.pem of a folder. Raises
    UserError if they cannot be read, or are not of an elliptic curve."""
    try:
        key = load_pem_private_key((folder / "server.key").read_bytes(), None)
        certificates = (folder / "server.pem").read_text()
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder}: server.key and server.pem cannot be read: {one_line(error)}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"{folder / 'server.key'}: rounds carried as files need a key of an elliptic curve, such as P-384"
        )
    return key, certificates


def proven_key(certificates: str, ca: Path, host: str) -> ec.EllipticCurvePublicKey:
    """The key of the server at `host` (a name or an IP address), as these certificates in PEM form prove it to who
    trusts those of the file `ca`. Raises NotAccepted if they do not, UserError for an unreadable file."""
    try:
        roots = x509.load_pem_x509_certificates(ca.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{ca}: not the CA's certificate: {one_line(error)}") from None
    subject: x509.DNSName | x509.IPAddress = x509.DNSName(host)
    with suppress(ValueError):
        subject = x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    try:
        server, *others = x509.load_pem_x509_certificates(certificates.encode())
        PolicyBuilder().store(Store(roots)).build_server_verifier(subject).verify(server, others)
        key = server.public_key()
    except (VerificationError, ValueError) as error:
        why = one_line(error, 300)
        raise NotAccepted(f"its certificate is none that {ca.name} accepts for the server {host}: {why}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise NotAccepted("the key of its certificate is not of an elliptic curve")
    return key


def member_key(openssh: str) -> ec.EllipticCurvePublicKey:
    """A member's public key, from its OpenSSH form. Raises UserError."""
    with suppress(ValueError):
        key = load_ssh_public_key(openssh.encode())
        if isinstance(key, ec.EllipticCurvePublicKey):
            return key
    raise UserError(f"not a member's public key, in OpenSSH form and of an elliptic curve: {openssh[:40]!r}")


def node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A node's private key, from an OpenSSH file without a password. Raises UserError."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a node's private key: {one_line(error)}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: not a node's private key: it must be of an elliptic curve")
    return key
