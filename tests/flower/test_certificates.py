"""A SuperLink's certificates: made, issued again by the same CA, and those of somebody else's CA checked."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from pki import Authority, own, pem

from fewbytes.base.errors import UserError
from fewbytes.flower import certificates
from fewbytes.flower.certificates import days_left, expiry_note, renew, write_certificates
from fewbytes.flower.own_certificates import alternative_names, check_certificates, read_chain


@pytest.mark.parametrize(
    ("names", "host", "fits"),
    [
        (("server.example",), "server.example", True),
        (("server.example",), "Server.Example", True),
        (("*.example",), "server.example", True),
        (("*.example",), "a.server.example", False),
        (("*.example",), "example", False),
        (("server.example",), "other.example", False),
        (("localhost",), "server.example", False),
        (("server.example",), "192.0.2.7", False),
    ],
)
def test_own_certificates_cover_the_address_and_nothing_else_need_be_covered(names, host, fits, tmp_path):
    own(tmp_path, names)
    if fits:
        write_certificates(tmp_path, [host])
        assert [str(name.value) for name in alternative_names(read_chain(tmp_path / "local.pem")[0])] == ["localhost"]
    else:
        with pytest.raises(UserError, match=rf"server\.pem covers .*, not {host}: request"):
            write_certificates(tmp_path, [host])


def damaged(what: str, folder: Path) -> None:
    made, pem_file, key_file = own(folder), folder / "server.pem", folder / "server.key"
    other = ec.generate_private_key(ec.SECP256R1())
    how: dict[str, Callable[[], object]] = {
        "order": lambda: pem_file.write_bytes(pem(made["middle"], made["leaf"])),
        "root between": lambda: pem_file.write_bytes(pem(made["leaf"], made["root"], made["middle"])),
        "no intermediate": lambda: pem_file.write_bytes(pem(made["leaf"])),
        "other root": lambda: (folder / "ca.crt").write_bytes(pem(Authority("hospital root").certificate)),
        "other key": lambda: key_file.write_bytes(
            other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        ),
        "password": lambda: key_file.write_bytes(
            other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x"))
        ),
        "no key": lambda: key_file.write_bytes(b"nonsense"),
        "no certificate": lambda: pem_file.write_bytes(b"nonsense"),
        "no root": lambda: (folder / "ca.crt").unlink(),
        "expired": lambda: own(folder, days=(-9, -1)),
        "not yet": lambda: own(folder, days=(2, 9)),
    }
    how[what]()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", r"server\.pem: the certificates are in the wrong order: the server's own must come first"),
        ("root between", r"server\.pem: the certificates are in the wrong order: each must follow"),
        (
            "no intermediate",
            r"server\.pem lacks .* 'CN=hospital issuing CA', .*append the intermediate",
        ),
        ("other root", r"server\.pem lacks the certificate of 'CN=hospital root'.*the right ca\.crt"),
        ("other key", r"server\.key is not the key of server\.pem"),
        ("password", r"server\.key: it is encrypted: remove its password"),
        ("no key", r"server\.key: not a private key in PEM form"),
        ("no certificate", r"server\.pem is not a certificate"),
        ("no root", r"ca\.crt is missing"),
        ("expired", r"server\.pem: the certificate of 'CN=server' expired on 2"),
        ("not yet", r"server\.pem: .* is valid from .* on: check this machine's clock"),
    ],
)
def test_what_is_wrong_with_own_certificates_is_named_in_one_line(what, words, tmp_path):
    damaged(what, tmp_path)
    with pytest.raises(UserError, match=words) as raised:
        check_certificates(tmp_path, ["server.example"])
    assert "\n" not in str(raised.value)


def test_a_server_that_moves_gets_a_certificate_of_the_same_ca(tmp_path):
    write_certificates(tmp_path, ["one.example"])
    ca, before = (tmp_path / "ca.crt").read_bytes(), (tmp_path / "server.pem").read_bytes()
    write_certificates(tmp_path, ["one.example"])
    assert (tmp_path / "server.pem").read_bytes() == before
    write_certificates(tmp_path, ["two.example", "2001:db8::7"])
    assert (tmp_path / "ca.crt").read_bytes() == ca
    names = check_certificates(tmp_path, ["one.example", "two.example", "[2001:db8::7]", "localhost", "127.0.0.1"])
    assert len(names) == 5
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    assert not (tmp_path / "local.pem").exists()
    (tmp_path / "ca.key").rename(tmp_path / "safe")
    with pytest.raises(UserError, match=r"not three\.example: request one"):
        write_certificates(tmp_path, ["three.example"])
    with pytest.raises(UserError, match=r"has no ca\.key"):
        renew(tmp_path)
    write_certificates(tmp_path / "other", [])
    (tmp_path / "other" / "ca.key").rename(tmp_path / "ca.key")
    with pytest.raises(UserError, match=r"ca\.key is not the key of ca\.crt"):
        write_certificates(tmp_path, ["three.example"])


def test_a_certificate_is_issued_again_before_it_expires_and_others_are_announced(tmp_path, monkeypatch):
    monkeypatch.setattr(certificates, "SERVER_DAYS", 50)
    write_certificates(tmp_path, ["one.example"])
    assert 49 < days_left(tmp_path / "server.pem") < 51
    assert "server.pem expires in 49 days: put a new one" in expiry_note(tmp_path)  # if its CA's key is elsewhere
    monkeypatch.undo()
    before = (tmp_path / "server.pem").read_bytes()
    write_certificates(tmp_path, [])
    assert days_left(tmp_path / "server.pem") > 700
    check_certificates(tmp_path, ["one.example"])
    assert not expiry_note(tmp_path)
    assert (tmp_path / "server.pem").read_bytes() != before
    before = (tmp_path / "server.pem").read_bytes()
    renew(tmp_path)
    assert (tmp_path / "server.pem").read_bytes() != before
