"""Checks of a site, or of a server, before a run: one line for each thing, the ones that depend on others last."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from fewbytes.base.errors import FewbytesError, one_line
from fewbytes.base.files import check_writable
from fewbytes.federation.reaching import Reaching, check_ca
from fewbytes.flower.answering import KNOWN, REMOVED, UNKNOWN, versions
from fewbytes.flower.application import REQUIREMENT
from fewbytes.flower.apps import node_folder
from fewbytes.flower.asking import MOST_AHEAD, MOST_BEHIND, Answer, Questions
from fewbytes.flower.fleet import private_key
from fewbytes.flower.node_file import NodeFile

NODE_BYTES = 100_000_000
"""The least free space for a node's folder."""
OK, WRONG, NOT = "ok", "wrong", "not looked at"


class Line(NamedTuple):
    """What was looked at, whether it is OK, WRONG or was NOT looked at, and words: what was found, or what is wrong and
    what to do."""

    about: str
    state: str
    words: str


class Step(NamedTuple):
    """A check: its name, those that must be well before, and a function that returns words, or raises FewbytesError or
    OSError."""

    about: str
    needs: Sequence[str]
    look: Callable[[], str]


def lines(steps: Sequence[Step]) -> Iterator[Line]:
    """The steps' lines, in order, as they are known. A step whose need is not well is not looked at."""
    not_well: dict[str, str] = {}  # by step, the first that is wrong
    for step in steps:
        if (first := next((not_well[each] for each in step.needs if each in not_well), None)) is not None:
            not_well[step.about] = first
            yield Line(step.about, NOT, f"because of: {first}")
            continue
        try:
            yield Line(step.about, OK, step.look())
        except Unasked as why:
            not_well[step.about] = step.about
            yield Line(step.about, NOT, str(why))
        except (FewbytesError, OSError) as error:
            not_well[step.about] = step.about
            words = str(error) if isinstance(error, FewbytesError) else one_line(error)
            yield Line(step.about, WRONG, " ".join(words.split()))


class Unasked(Exception):
    """There is nothing to look at, which is not wrong."""


class Site:
    """Checks of a site's node.

    `file`: its node.toml. `address`: the server's host:port (None: as in the file). `seconds`: maximum for each answer.
    `read_data`: reads data at a place, for a node with that configuration, and returns words about them.
    """

    def __init__(self, file: Path, address: str | None, seconds: float, read_data: Callable[[NodeFile], str]) -> None:
        self.file, self.seconds, self._read_data = file.absolute(), seconds, read_data
        self._reaching = None if address is None else Reaching(address, seconds)
        self._given, self._about = address, NodeFile("", "", "", {})
        self._key: EllipticCurvePrivateKey | None = None
        self._answer = Answer(0, None, {})

    def steps(self) -> list[Step]:
        """The checks."""
        way = ("node.toml",) if self._reaching is None else ()
        return [
            Step("node.toml", (), self._read_file),
            Step("key", ("node.toml",), self._read_key),
            Step("CA", ("node.toml",), lambda: check_ca(Path(self._about.ca))),
            Step("proxy", way, lambda: self._way.ask_proxy()),
            Step("name", ("proxy", *way), lambda: self._way.look_up()),
            Step("port", ("proxy", "name", *way), lambda: self._way.reach_port()),
            Step("TLS", ("port", "CA"), lambda: self._way.shake_hands(Path(self._about.ca))),
            Step("clock", ("TLS",), self._compare_clocks),
            Step("membership", ("TLS", "key", "clock"), self._look_for_key),
            Step("versions", ("membership",), self._compare_versions),
            Step("1 MB", ("membership",), self._move),
            Step("data", ("node.toml",), lambda: self._read_data(self._about)),
            Step("disk", ("node.toml",), lambda: check_disk(self._folder, NODE_BYTES)),
            Step("folder", ("disk",), lambda: check_folder(self._folder)),
        ]

    @property
    def _way(self) -> Reaching:
        if self._reaching is None:
            self._reaching = Reaching(self._about.superlink, self.seconds)
        return self._reaching

    @property
    def _folder(self) -> Path:
        return self.file.parent / node_folder(self._about.config)

    def _read_file(self) -> str:
        self._about = NodeFile.read(self.file).placed(self.file.parent)
        if self._given is not None and self._given != self._about.superlink:
            raise FewbytesError(
                f'{self.file} has superlink = "{self._about.superlink}", not {self._given}: its node would ask there'
            )
        return f"{self.file} is valid"

    def _read_key(self) -> str:
        path = Path(self._about.key)
        if not path.exists():
            remedy = "put it back, or make a new one with `fewbytes node init` and a new invitation"
            raise FewbytesError(f"{path} is missing, this node's private key: {remedy}")
        self._key = private_key(path)
        return f"{path.name} is a node's private key"

    def _compare_clocks(self) -> str:
        self._ask()
        ahead = self._answer.ahead
        if ahead is None:
            raise FewbytesError("the server does not state its time: it is not a server of fewbytes")
        off = f"this machine's clock is {span(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the server's"
        if -MOST_BEHIND < ahead < MOST_AHEAD:
            return off if abs(ahead) > 1.5 else "this machine's clock agrees with the server's"
        most = f"a node may be {MOST_AHEAD} s ahead and {MOST_BEHIND} s behind"
        raise FewbytesError(f"{off}; {most}: set the one that is wrong, and keep it right (NTP)")

    def _look_for_key(self) -> str:
        key, status = self._about.key, self._answer.status
        if status == KNOWN:
            return "the server knows this node's key"
        if status == UNKNOWN:
            why = f"the server does not know the key {key}: it was never accepted, or removed before this run"
            raise FewbytesError(f"{why}; have the server accept this node's request (`fewbytes federation join`)")
        if status == REMOVED:
            raise FewbytesError(
                f"the server has removed the key {key} and refuses it for good: ask for a new invitation"
            )
        why = f"the server does not answer checks (HTTP status {status})"
        raise FewbytesError(f"{why}: it runs an older fewbytes, or was not started by `fewbytes deploy`")

    def _ask(self) -> None:
        questions = self._questions()
        try:
            self._answer = questions.ask()
        finally:
            questions.close()

    def _questions(self) -> Questions:
        return Questions(self._way.address, Path(self._about.ca).read_text(), self._key, self.seconds)

    def _compare_versions(self) -> str:
        return compare_versions(versions(), self._answer.versions)

    def _move(self) -> str:
        questions = self._questions()
        try:
            up, down = questions.move()
        finally:
            questions.close()
        return f"1 MB takes {up:.2f} s to the server and {down:.2f} s from it"


def compare_versions(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Words about the versions here and at the server, if they can work together. Raises FewbytesError if not."""
    for name in ("fewbytes", "flwr"):
        if _minor(here[name]) != _minor(there[name]):
            wanted = ".".join(map(str, _minor(there[name])))
            raise FewbytesError(
                f"{name} is {here[name] or 'not installed'} here and {there[name] or 'unknown'} at the server, which "
                f"refuses other versions than {wanted}: pip install '{name}=={wanted}.*' here, or the server changes"
            )
    if here["torch"] == there["torch"]:
        return f"{words_of(here)}, as at the server"
    return f"{words_of(here)}; torch {there['torch']} at the server is accepted, results may differ in the last digits"


def check_versions() -> str:
    """Words about the versions installed here. Raises FewbytesError for one of Flower that is not supported."""
    here, limits = versions(), re.findall(r"\d+\.\d+", REQUIREMENT)
    least, first_too_new = map(_minor, limits)
    if not least <= _minor(here["flwr"]) < first_too_new:
        raise FewbytesError(f"flwr is {here['flwr']}, which is not supported: pip install '{REQUIREMENT}'")
    return words_of(here)


def words_of(found: Mapping[str, str]) -> str:
    """Versions in words."""
    return ", ".join(f"{name} {number}" for name, number in found.items())


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, within which versions can work together."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_disk(folder: Path, least: int) -> str:
    """Words about the free space where a folder is, or will be. Raises FewbytesError for less than `least` bytes."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free < least:
        raise FewbytesError(
            f"{free / 1e6:,.1f} MB are free in {there}, and runs need {least / 1e6:,.0f}: free some space there"
        )
    return f"{free / 1e9:,.1f} GB are free in {there}"


def check_folder(folder: Path) -> str:
    """Words about a folder that a file was written in. Raises UserError if it cannot be written."""
    check_writable(folder)
    return f"{folder} is writable"


def span(seconds: float) -> str:
    """A time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
