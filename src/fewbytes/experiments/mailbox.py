"""How a run exchanges messages with members of a federation by files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fewbytes.experiments.membership import Membership
from fewbytes.experiments.settings import Experiment
from fewbytes.federation.members import CERTIFICATES, FILE
from fewbytes.flower.link import Exchange
from fewbytes.flower.mailbox_link import ByMailbox, MailboxLink
from fewbytes.flower.node import run_name
from fewbytes.mailbox.server import Member, ServerMailbox

FOLDER = "mailbox"  # in the deployment's folder: the series, and copies of open orders
POLL_SECONDS, STORE_SECONDS = 0.2, 5.0  # between looks for answers, in a folder and in an object store


@dataclass(frozen=True)
class Mail:
    """Where files are exchanged with the members of a federation: the mailbox's `place`, the federation's folder, and
    the names of the clients' nodes in their order, with the members that are reached by files (None: all)."""

    place: str
    federation: Path
    names: Sequence[str]
    some: frozenset[str] | None = None

    @property
    def by_file(self) -> frozenset[str]:
        """The names of the nodes that are reached by files."""
        return frozenset(self.names) if self.some is None else self.some

    def exchange(self, experiment: Experiment, out: Path, note: Callable[[str], None], poll: float = 0.0) -> Exchange:
        """How a run in the folder `out` exchanges messages. `poll`: seconds between looks for answers (default: by the
        kind of the place). Raises UserError for an unusable place, key or federation."""
        deployment = out / "deployment"
        mailbox = ServerMailbox(self.place, run_name(out), deployment / FOLDER, self.federation / CERTIFICATES, note)
        membership = Membership(self.federation, deployment, list(self.names))
        members = _Members(membership, self)
        by = ByMailbox(mailbox, members.now, experiment.run_config())
        usual = POLL_SECONDS if mailbox.box.is_local else STORE_SECONDS
        return Exchange(poll=poll or usual, link=partial(MailboxLink, by), vacant=membership.vacant)


class _Members:
    """The members of a federation that files reach, by the names of their nodes; read again when it changes."""

    def __init__(self, membership: Membership, mail: Mail) -> None:
        self._membership, self._mail = membership, mail
        self._seen, self._found = 0, dict[str, Member]()

    def now(self) -> Mapping[str, Member]:
        """The members now. Raises UserError for an unreadable federation."""
        if (now := (self._mail.federation / FILE).stat().st_mtime_ns) != self._seen:
            whose, keys = self._membership.write_keys()
            by_file = self._mail.by_file
            self._found = {
                place: Member(name, keys[name])
                for place, name in whose.items()
                if name in keys and (place in by_file or name in by_file)
            }
            self._seen = now
        return self._found
