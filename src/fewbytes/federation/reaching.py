"""The way from a site to its server: name, proxy, port and TLS, and what is wrong with each, in words."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from cryptography import x509

from fewbytes.base.address import host_and_port
from fewbytes.base.errors import FewbytesError, UserError, cleaned
from fewbytes.flower.certificates import days_left
from fewbytes.flower.own_certificates import alternative_names, issued_by, read_chain

NOT_BEYOND = (502, 503, 504)
"""Statuses of a proxy that does not reach the server."""
EXPIRED, EARLY, OTHER_NAMES = 10, 9, (62, 64)
"""OpenSSL's reasons to refuse a certificate."""


DER = 2
"""What Python's own certificates call that form."""


class Proxy(NamedTuple):
    """A proxy: its host, its port, and NAME:PASSWORD for it (empty: none)."""

    host: str
    port: int
    login: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Reaching:
    """The way to host:port. `seconds`: maximum for each step. Raises UserError for another address.

    Each method returns words about a step that is well, and raises FewbytesError with words about one that is not.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self.host, self.port = host_and_port(address)
        if not self.port:
            raise UserError(f"address {address!r}: port 0 is none that a server has")
        self.address, self.seconds = address, seconds
        self.proxy: Proxy | None = None
        self._beyond = ""  # why the proxy does not reach the server

    def ask_proxy(self) -> str:
        """The proxy that nodes here use, if any; it must agree to connect to the server."""
        set_there = getproxies()
        url = set_there.get("https") or set_there.get("all")
        if not url:
            return "none is set (HTTPS_PROXY)"
        if proxy_bypass(self.host):
            return f"not used: no_proxy names {self.host}"
        proxy = _proxy(url)
        try:
            _connect(proxy.host, proxy.port, self.seconds).close()
        except OSError as error:
            why = f"the proxy {proxy} (HTTPS_PROXY) does not answer: {_refusal(error, self.seconds)}"
            raise FewbytesError(f"{why}; correct HTTPS_PROXY, or add {self.host} to no_proxy") from None
        self.proxy = proxy
        try:
            self.connect().close()
        except _NotBeyond as error:
            self._beyond = str(error)
        return f"{proxy} (HTTPS_PROXY) answers and connects"

    def look_up(self) -> str:
        """The addresses of the server's name."""
        with suppress(ValueError):
            return f"{ipaddress.ip_address(self.host)} is an address, so that no name is looked up"
        if self.proxy is not None:
            return f"{self.host} is looked up by the proxy"
        found: list[Any] = []

        def ask() -> None:
            try:
                found.extend(dict.fromkeys(each[4][0] for each in socket.getaddrinfo(self.host, self.port, type=1)))
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=ask, daemon=True)  # which may outlive its patience
        thread.start()
        thread.join(self.seconds)
        why = f"no answer about {self.host} within {self.seconds:g} s" if not found else ""
        if found and isinstance(found[0], OSError):
            why = f"there is no host named {self.host} ({cleaned(found[0].strerror)})"
        if why:
            raise FewbytesError(f"{why}: correct the name in node.toml (superlink), or ask for this site's DNS")
        return f"{self.host} is {', '.join(map(str, found))}"

    def reach_port(self) -> str:
        """Whether the server's port is open."""
        if self._beyond:
            raise FewbytesError(self._beyond)
        try:
            self.connect().close()
        except OSError as error:
            remedy = "have its firewall, and this site's, let this site through"
            if isinstance(error, ConnectionRefusedError):
                remedy = "start the server (it listens while `fewbytes deploy` runs), or correct the port"
            raise FewbytesError(f"{self.address}: {_refusal(error, self.seconds)}; {remedy}") from None
        return f"{self.address} is open" + (f" through the proxy {self.proxy}" if self.proxy else "")

    def connect(self) -> socket.socket:
        """A connection to the server. Raises OSError, FewbytesError where the proxy does not connect."""
        if self.proxy is None:
            return _connect(self.host, self.port, self.seconds)
        there = _connect(self.proxy.host, self.proxy.port, self.seconds)
        try:
            self._ask_to_connect(there, self.proxy)
        except BaseException:
            there.close()
            raise
        return there

    def _ask_to_connect(self, there: socket.socket, proxy: Proxy) -> None:
        host = f"[{self.host}]" if ":" in self.host else self.host
        login = base64.b64encode(proxy.login.encode()).decode()
        lines = [f"CONNECT {host}:{self.port} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"Proxy-Authorization: Basic {login}"] if login else []
        answer = b""
        try:
            there.sendall("\r\n".join([*lines, "", ""]).encode())
            while b"\r\n\r\n" not in answer and len(answer) < 1 << 16 and (piece := there.recv(4096)):
                answer += piece
        except OSError as error:
            why = f"the proxy {proxy} (HTTPS_PROXY) does not answer: {_refusal(error, self.seconds)}"
            raise FewbytesError(f"{why}; correct HTTPS_PROXY, or add {self.host} to no_proxy") from None
        status = answer.partition(b"\r\n")[0].decode("latin-1")
        code = int(status[9:12]) if status.startswith("HTTP/1.") and status[9:12].isdecimal() else 0
        if 200 <= code < 300:
            return
        words = cleaned(status[9:], 60) or "no answer of a proxy"
        if code in NOT_BEYOND:
            why = f"the proxy {proxy} does not reach {self.address} ({words})"
            raise _NotBeyond(f"{why}: start the server, or have the proxy's owner look for what is in the way")
        remedy = f"have its owner allow {self.address}, or add {self.host} to no_proxy"
        if code == 407:
            remedy = "put its name and password into HTTPS_PROXY (http://NAME:PASSWORD@HOST:PORT)"
        raise FewbytesError(f"the proxy {proxy} refuses to connect to {self.address} ({words}): {remedy}")

    def shake_hands(self, ca: Path) -> str:
        """Whether the server answers with TLS, and the certificate that `ca` proves."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.load_verify_locations(cadata=ca.read_text())
        try:
            with tls.wrap_socket(self.connect(), server_hostname=self.host) as shown:
                there = x509.load_der_x509_certificate(shown.getpeercert(binary_form=True) or b"")
        except ssl.SSLCertVerificationError as error:
            raise FewbytesError(_refused(error, self._chain(), read_chain(ca), self.host)) from None
        except OSError as error:  # also ssl.SSLError
            why = f"{self.address} does not speak TLS ({_refusal(error, self.seconds)})"
            remedy = "another program or a device in between answers, or passes nothing on as the server does not run"
            raise FewbytesError(f"{why}: {remedy}; check the port") from None
        left = (there.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
        return f"its certificate is issued by {ca.name} and valid for {left} more days"

    def _chain(self) -> list[x509.Certificate]:
        """The certificates that the server sends, unverified; its own one at least."""
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        with tls.wrap_socket(self.connect(), server_hostname=self.host) as shown:
            first = shown.getpeercert(binary_form=True) or b""
            where: Any = shown if hasattr(shown, "get_unverified_chain") else getattr(shown, "_sslobj", None)
            sent = (
                where.get_unverified_chain() if hasattr(where, "get_unverified_chain") else None
            )  # from Python 3.13 on
            found = [each if isinstance(each, bytes) else each.public_bytes(DER) for each in sent or [first]]
        return [x509.load_der_x509_certificate(each) for each in found]


class _NotBeyond(FewbytesError):
    """A proxy answers, but does not reach the server."""


def _proxy(url: str) -> Proxy:
    """The proxy of a URL. Raises FewbytesError for one of another kind."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if parts.scheme != "http" or host is None:
        raise FewbytesError("HTTPS_PROXY names no http:// proxy, the only kind that is checked here: correct it")
    return Proxy(host, port, unquote(f"{parts.username}:{parts.password or ''}") if parts.username else "")


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((host, port), seconds)


def _refusal(error: OSError, seconds: float) -> str:
    """Why there was no connection, in words."""
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s, as where a firewall drops packets"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused, as nothing listens there"
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError):
        return "the connection is closed at once"
    if isinstance(error, ssl.SSLError):
        return cleaned((error.reason or "no TLS").replace("_", " ").lower())
    return cleaned((error.strerror or str(error)).lower())


def _refused(
    error: ssl.SSLCertVerificationError,
    chain: Sequence[x509.Certificate],
    roots: Sequence[x509.Certificate],
    host: str,
) -> str:
    """Why a server's certificate was refused, in words, and what to do."""
    first, last = chain[0], chain[-1]
    for each in (*chain, *roots):
        name = each.subject.rfc4514_string()
        if error.verify_code == EXPIRED and each.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            remedy = "the server's operator renews it (`fewbytes federation renew`)"
            return f"the certificate of {name!r} expired on {each.not_valid_after_utc:%Y-%m-%d}: {remedy}"
        if error.verify_code == EARLY and each.not_valid_before_utc > datetime.datetime.now(datetime.UTC):
            since = f"the certificate of {name!r} is not valid before {each.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            return f"{since}: set this machine's clock, or the server's operator replaces it"
    if error.verify_code in OTHER_NAMES:
        covered = ", ".join(str(each.value) for each in alternative_names(first)) or "no name"
        remedy = "use one of these names, or the operator issues one for it (`fewbytes federation renew --address`)"
        return f"its certificate covers {covered}, not {host}: {remedy}"
    issuer, ours = last.issuer.rfc4514_string(), ", ".join(repr(each.subject.rfc4514_string()) for each in roots)
    if any(root.subject == last.issuer for root in roots):
        why = f"its certificate is of another {issuer!r} than this node's CA: it is the server of another federation"
        return f"{why}, or its CA was made again; check the address, or ask for a new invitation"
    if len(chain) == 1 and not issued_by(first, first):
        remedy = "its operator appends that certificate to server.pem; if there is none, ca.crt is of another CA"
        why = f"an intermediate certificate is missing: the server does not send the one of its issuer {issuer!r}"
        return f"{why}; {remedy}"
    return f"its certificate is of the CA {issuer!r}, this node's ca.crt of {ours}: put the right ca.crt there"


def check_ca(path: Path) -> str:
    """Words about a CA's certificate. Raises FewbytesError for one that is missing, invalid or expired."""
    now, remedy = datetime.datetime.now(datetime.UTC), "ask for a new invitation"
    for each in read_chain(path):
        if each.not_valid_after_utc < now:
            raise FewbytesError(f"{path} expired on {each.not_valid_after_utc:%Y-%m-%d}: {remedy}")
        if each.not_valid_before_utc > now:
            since = f"{path} is not valid before {each.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            raise FewbytesError(f"{since}: set this machine's clock, or {remedy}")
    return f"{path.name} is valid for {int(days_left(path))} more days"
