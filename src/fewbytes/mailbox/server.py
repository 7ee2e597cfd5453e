"""The server's side of a mailbox: orders in members' inboxes, answers from their outboxes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

from fewbytes.base.errors import cleaned
from fewbytes.base.files import private_folder, replacing
from fewbytes.mailbox.box import Box, BoxError
from fewbytes.mailbox.keys import member_key, server_keys
from fewbytes.mailbox.sealed import Header, NotAccepted, Unfinished, fresh_nonce, open_sealed, read_header, seal

INBOX, OUTBOX = "inbox", "outbox"
"""The folders of a member in the mailbox: orders to it, and its answers."""
ORDER, ANSWER, REFUSED = ".order", ".answer", ".refused"
"""How the names of files end."""
SERVER = "server"
"""The server's name in headers."""
AGAIN_SECONDS = 60.0  # between looks whether an order that waits for its answer is still there


class Member(NamedTuple):
    """A member: its name, and its public key in OpenSSH form."""

    name: str
    key: str


class Series(msgspec.Struct):
    """What a server remembers of its mailbox: the deployment's series, and the last number used in it."""

    series: str
    last: int = 0


def file_name(header: Header, end: str) -> str:
    """The name of a sealed file."""
    return f"{header.run}.{header.series[:8]}.{header.number:06d}{end}"


class _Open(NamedTuple):
    """An order without an answer: its header, the receiver's key, and the server's when it was sent."""

    header: Header
    key: EllipticCurvePublicKey
    own: EllipticCurvePrivateKey


class ServerMailbox:
    """Sends orders and reads answers of one deployment.

    `place`: of the mailbox; `run`: the run's name; `folder`: on this machine, for the series and copies of open orders;
    `certificates`: the folder of the server's; `note`: called with a line about each file that is not accepted. Orders
    of an earlier process are withdrawn with the first new one to their member, unless they are opened again. Raises
    UserError for an unusable key or place.
    """

    def __init__(
        self, place: str, run: str, folder: Path, certificates: Path, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self.box, self._run, self.folder, self.note = Box(place), run, folder, note
        self._certificates = certificates
        self._open: dict[int, _Open] = {}
        self._later: dict[tuple[str, str], int] = {}  # files of answers that nobody has asked for yet, by their numbers
        self._others: set[tuple[str, str]] = set()  # files of other deployments
        self._restored: set[int] = set()  # the numbers of orders that were written again
        self._begun: set[str] = set()  # members without orders of an earlier process
        self._looked = time.monotonic()  # for missing orders
        self._trouble = ""  # why the mailbox cannot be reached, as noted
        private_folder(folder)
        path = folder / "series.json"
        self._series = msgspec.json.decode(path.read_bytes(), type=Series) if path.exists() else Series(fresh_nonce())

    def prepare(self, member: Member) -> None:
        """Make a member's folders. Raises BoxError."""
        for name in (INBOX, OUTBOX):
            self.box.below(member.name, name).make()

    def _withdraw(self, member: Member) -> None:
        """Withdraw orders to a member of an earlier process of this deployment, except open ones. Raises BoxError."""
        start, inbox = f"{self._run}.{self._series.series[:8]}.", self.box.below(member.name, INBOX)
        kept = {file_name(order.header, ORDER) for order in self._open.values()}
        for name in inbox.names(ORDER):
            if name.startswith(start) and name not in kept:
                inbox.remove(name)
        for copy in self.folder.glob(f"*{ORDER}"):
            if copy.name not in kept and read_header(copy.read_bytes()).receiver == member.name:
                copy.unlink()
        self._begun.add(member.name)

    def reopen(self, number: int, member: Member) -> bool:
        """Wait for the answer to an order of an earlier process; False if it is lost, or either end has another key
        since."""
        key, certificates = server_keys(self._certificates)
        for copy in self.folder.glob(f"*.{number:06d}{ORDER}"):
            header = read_header(copy.read_bytes())
            if (header.receiver, header.certificates) == (member.name, certificates):
                self._open[number] = _Open(header, member_key(member.key), key)
                return True
        return False

    def send(self, member: Member, content: bytes) -> int | None:
        """Write an order into a member's inbox; returns its number, or None if the mailbox cannot be reached."""
        self._series.last += 1
        with replacing(self.folder / "series.json", sync=True) as file:
            file.write(msgspec.json.encode(self._series))
        key, certificates = server_keys(self._certificates)
        number, receiver = self._series.last, member_key(member.key)
        header = Header(
            "order", self._run, self._series.series, number, SERVER, member.name, fresh_nonce(),
            certificates=certificates,
        )  # fmt: skip
        data = seal(header, content, key, receiver)
        try:
            if member.name not in self._begun:
                self._withdraw(member)
            with replacing(self._copy(header)) as file:
                file.write(data)
            self._inbox(header).write(file_name(header, ORDER), data)
        except BoxError as error:
            self.note(str(error))
            self._copy(header).unlink(missing_ok=True)
            return None
        self._open[number] = _Open(header, receiver, key)
        return number

    def answers(self, numbers: Collection[int]) -> dict[int, bytes]:
        """The content of the answers that are there, by the numbers of their orders; answered orders are over. Notes
        files that are not accepted, and restores missing orders."""
        found: dict[int, bytes] = {}
        try:
            self._restore()
            for name in sorted({self._open[number].header.receiver for number in numbers if number in self._open}):
                self._collect(name, numbers, found)
            self._trouble = ""
        except BoxError as error:
            if str(error) != self._trouble:
                self.note(f"{error}; retrying")
                self._trouble = str(error)
        return found

    def forget(self, number: int) -> None:
        """Withdraw an order, if it is open."""
        if (order := self._open.pop(number, None)) is not None:
            self._copy(order.header).unlink(missing_ok=True)
            try:
                self._inbox(order.header).remove(file_name(order.header, ORDER))
            except BoxError as error:
                self.note(str(error))

    def _collect(self, member: str, numbers: Collection[int], found: dict[int, bytes]) -> None:
        """Add a member's answers to these orders."""
        outbox = self.box.below(member, OUTBOX)
        for name in outbox.names(ANSWER):
            place = member, name
            if place in self._others or self._later.get(place, -1) in self._open.keys() - set(numbers):
                continue
            try:
                self._take(place, outbox.read(name), numbers, found)
            except Unfinished:
                continue
            except NotAccepted as error:
                self.note(f"{member}/{OUTBOX}/{cleaned(name)} is refused: {cleaned(str(error))}")
                outbox.rename(name, f"{name}{REFUSED}")
                continue
            if place not in self._others and place not in self._later:
                outbox.remove(name)

    def _take(self, place: tuple[str, str], data: bytes, numbers: Collection[int], found: dict[int, bytes]) -> None:
        """Add the answer in a file, note that it is too late, or leave it for later. Raises NotAccepted."""
        header, self._later = read_header(data), {k: v for k, v in self._later.items() if k != place}
        if header.series != self._series.series:
            self._others.add(place)  # of another deployment, which has the same mailbox
            return
        if header.kind != "answer" or header.sender != place[0]:
            raise NotAccepted(f"it is the {header.kind} of {header.sender}, in the outbox of {place[0]}")
        order = self._open.get(header.number)
        if order is None:
            why = f"order {header.number} is over: the file came late, or twice"
            self.note(f"{place[0]}/{OUTBOX}/{cleaned(place[1])} is ignored: {why}")
            return
        if header.number not in numbers:
            self._later[place] = header.number
            return
        if order.header.receiver != header.sender or order.header.nonce != header.nonce:
            raise NotAccepted(f"it answers another order than number {header.number}")
        found[header.number] = open_sealed(data, order.key, order.own)
        self.forget(header.number)

    def _restore(self) -> None:
        """Write open orders again that are no longer in the mailbox."""
        if time.monotonic() - self._looked < AGAIN_SECONDS:
            return
        self._looked = time.monotonic()
        for order in self._open.values():
            inbox, name = self._inbox(order.header), file_name(order.header, ORDER)
            if name not in inbox.names(ORDER):
                inbox.write(name, self._copy(order.header).read_bytes())
                if order.header.number not in self._restored:
                    self._restored.add(order.header.number)
                    self.note(f"{order.header.receiver}/{INBOX}/{name} was no longer there: it is written again")

    def _inbox(self, header: Header) -> Box:
        return self.box.below(header.receiver, INBOX)

    def _copy(self, header: Header) -> Path:
        return self.folder / file_name(header, ORDER)
