"""Checks of a server before a run: certificates, names, port, members, disk, memory, clock."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fewbytes.base.address import host_and_port
from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.federation import members
from fewbytes.federation.preflight import Step, Unasked, check_disk, check_folder, check_versions, span
from fewbytes.federation.reaching import Reaching
from fewbytes.federation.texts import fingerprint
from fewbytes.flower.certificates import SERVER_DAYS, days_left, expiry_note
from fewbytes.flower.children import listen, why_of
from fewbytes.flower.own_certificates import check_certificates, read_chain

SERVER_BYTES = 500_000_000
"""The least free space for run folders."""
SERVER_MEMORY = 1_000_000_000
"""The least available memory, in bytes: a server and what it starts take about as much."""
GROUP = Path("/sys/fs/cgroup")
"""Where Linux states the memory of a container."""


@dataclass
class Server:
    """Checks of a server. `address`, `listen`: as for `fewbytes deploy` (host:port); `certificates`: their folder, and
    `keys` the members' public keys in OpenSSH form, by name (None: made when the server starts first). `folder`: of the
    federation; `out`: where run folders go. `seconds`: maximum for each answer."""

    address: str
    listen: str | None
    out: Path
    seconds: float
    certificates: Path | None = None
    keys: Mapping[str, str] | None = None
    folder: Path | None = None
    _reaching: Reaching = field(init=False)

    def __post_init__(self) -> None:
        self._reaching = Reaching(self.address, self.seconds)

    def steps(self) -> list[Step]:
        """The checks."""
        return [
            Step("certificate", (), self._check_certificates),
            Step("name", (), self._reaching.look_up),
            Step("port", (), self._look_at_port),
            Step("members", (), self._check_keys),
            Step("disk", (), lambda: check_disk(self.out.absolute(), SERVER_BYTES)),
            Step("folder", ("disk",), self._check_folders),
            Step("memory", (), check_memory),
            Step("clock", (), self._check_clock),
            Step("versions", (), check_versions),
        ]

    def _check_certificates(self) -> str:
        if self.certificates is None or not self.certificates.exists():
            raise Unasked("`fewbytes deploy` makes certificates at its first start")
        own = (self.certificates / "ca.key").exists()
        try:
            names = check_certificates(self.certificates, [self._reaching.host])
        except UserError as error:
            raise FewbytesError(f"{error}{'; `fewbytes federation renew` issues one' if own else ''}") from None
        left = int(days_left(self.certificates / "server.pem"))
        if not own and (note := expiry_note(self.certificates)):
            raise FewbytesError(note)
        again = f" (of {SERVER_DAYS}; `fewbytes deploy` issues it again)" if own else ""
        covered = ", ".join(str(name.value) for name in names)
        ca = int(days_left(self.certificates / "ca.crt"))
        return f"valid for {left} more days{again}, the CA for {ca}; covers {covered}"

    def _look_at_port(self) -> str:
        host, port = host_and_port(self.listen) if self.listen else ("::", self._reaching.port)
        try:
            listen("0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host, port).close()
        except OSError as error:
            if self._is_ours(port):
                return f"port {port}: the server listens there"
            why = f"cannot listen on {self.listen or f'[::]:{port}'}: {why_of(error)}"
            raise FewbytesError(f"{why}; stop what uses it, or choose another port or address (--listen)") from None
        return f"port {port} is free: no server listens there now"

    def _is_ours(self, port: int) -> bool:
        """Whether a server with this certificate listens on the port."""
        if self.certificates is None:
            return False
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        with suppress(OSError):
            tls.load_verify_locations(cafile=self.certificates / "ca.crt")
            with (
                socket.create_connection(("127.0.0.1", port), self.seconds) as plain,
                tls.wrap_socket(plain, server_hostname=self._reaching.host),
            ):
                return True
        return False

    def _check_keys(self) -> str:
        if self.keys is None:
            raise Unasked("keys are made, or members read, when a deployment starts")
        for name, key in self.keys.items():
            try:
                fingerprint(key)
            except (ValueError, IndexError):
                remedy = f"invite it again (`fewbytes federation invite {name}`)"
                raise FewbytesError(f"the public key of {name} cannot be read: {remedy}") from None
        if not self.keys:
            raise FewbytesError("there are no members: `fewbytes federation invite NAME` is the first step")
        return f"the keys of {', '.join(self.keys)} can be read"

    def _check_folders(self) -> str:
        for each in filter(None, (self.folder, self.out)):
            words = check_folder(each.absolute())
        return words

    def _check_clock(self) -> str:
        now = datetime.datetime.now(datetime.UTC)
        done = [] if self.folder is None else members.history(self.folder)
        last = datetime.datetime.fromisoformat(done[-1]["when"]) if done else now
        if self.certificates is not None and self.certificates.exists():
            last = max(last, read_chain(self.certificates / "server.pem")[0].not_valid_before_utc)
        if (behind := (last - now).total_seconds()) > 60:
            why = f"by this machine's clock it is {now:%Y-%m-%d %H:%M} UTC, {span(behind)} before the last change here"
            raise FewbytesError(f"{why}: set it, and keep it right (NTP)")
        return f"it is {now:%Y-%m-%d %H:%M:%S} UTC by this machine's clock"


def of_federation(folder: Path, out: Path, seconds: float) -> Server:
    """The checks of a federation's server. Raises UserError for an unreadable federation."""
    there = members.read(folder)
    keys = {member.name: member.key for member in there.members}
    return Server(there.address, there.listen, out, seconds, folder / members.CERTIFICATES, keys, folder)


def check_memory() -> str:
    """Words about the available memory, of this container if it is one. Raises FewbytesError if it is too little."""
    free = available_memory()
    if free is None:
        raise Unasked("this machine does not state it")
    if free < SERVER_MEMORY:
        wanted = f"a server takes about {SERVER_MEMORY / 1e9:g} GB"
        raise FewbytesError(f"{free / 1e6:,.0f} MB are available, and {wanted}: end other programs, or add memory")
    return f"{free / 1e9:,.1f} GB are available"


def available_memory() -> int | None:
    """Available bytes of memory, at most what the container may still take; None where the system does not state it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        with suppress(OSError, ValueError):  # "max" is not a number: no limit
            limit, used = (int((GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
            free = min(free, max(0, limit - used))
        return free
    return None
