"""Certificates as a hospital's own PKI makes them: a root, an intermediate CA, and a server's."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

NOW = datetime.datetime.now(datetime.UTC)


class Authority:
    """A CA, the root or an intermediate one, as a hospital's own PKI has them."""

    def __init__(self, name: str, by: Authority | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate = (by or self).issue(self.name, self.key, True)

    def issue(self, subject, key, ca=False, names=(), days=(-1, 365)) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder(self.name, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(NOW + datetime.timedelta(days[0]))
            .not_valid_after(NOW + datetime.timedelta(days[1]))
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), False)
        return builder.sign(self.key, SHA256())


def pem(*certificates: x509.Certificate) -> bytes:
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)


def own(folder: Path, names=("server.example",), days=(-1, 365)) -> dict[str, x509.Certificate]:
    """ca.crt, server.pem with its intermediate, and server.key of a PKI."""
    folder.mkdir(exist_ok=True)
    root = Authority("hospital root")
    middle = Authority("hospital issuing CA", root)
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = middle.issue(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")]), key, False, names, days)
    (folder / "ca.crt").write_bytes(pem(root.certificate))
    (folder / "server.pem").write_bytes(pem(leaf, middle.certificate))
    (folder / "server.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return {"root": root.certificate, "middle": middle.certificate, "leaf": leaf}
