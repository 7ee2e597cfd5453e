"""Where the nodes of a deployment are: a place per client, the addresses, and the file that remembers both."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fewbytes.base.address import host_and_port
from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.files import replacing
from fewbytes.experiments.membership import named_in

if TYPE_CHECKING:  # it needs torch
    from fewbytes.experiments.settings import Experiment

LOOPBACK = "127.0.0.1:0"
KINDS = ("resident", "stock")
"""Our nodes, which stay loaded, and Flower's SuperNodes, which start a process per message."""
PLACES = "places.json"  # in the deployment's folder: --hosts, --address, --listen and --node


@dataclass(frozen=True)
class Place:
    """A client's node: its registered name, and whether `deploy` starts it on this machine."""

    name: str
    here: bool


def host_names(hosts: str) -> list[str]:
    """The names in a comma-separated list. Raises UserError if there is none, or one occurs twice."""
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not names or twice:
        raise UserError(f"--hosts names {twice!r} twice" if twice else "--hosts is empty: give comma-separated names")
    return names


def remembered(folder: Path, given: dict[str, str | None]) -> dict[str, str | None]:
    """`hosts`, `address`, `listen`, `node`, `federation`, `mailbox` and `by_mailbox` of a deployment: as `given`, else
    as before.

    Raises UserError if hosts, node or federation are given again and differ: a run resumes on the same nodes. Its
    server and mailbox may move.
    """
    try:
        there = json.loads((folder / "deployment" / PLACES).read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{folder} is not the folder of a deployment (it has no deployment/{PLACES})") from None
    there = {
        "node": "stock",
        "listen": None,
        "federation": None,
        "mailbox": None,
        "by_mailbox": None,
        **there,
    }  # of older versions
    for name in ("hosts", "node", "federation"):
        if given[name] is not None and given[name] != there[name]:
            raise UserError(
                f"{folder} was deployed with --{name} {there[name]}, not {given[name]}: resume it without changing that"
            )
    return {name: there[name] if given[name] is None else given[name] for name in given}


def places(experiment: Experiment, hosts: str | None) -> list[Place]:
    """A node per client: on comma-separated hosts, or all on this machine. Raises UserError."""
    count = experiment.partition.clients + experiment.partition.newcomers
    if hosts is None:
        return [Place(f"client-{i}", True) for i in range(count)]
    names = host_names(hosts)
    if len(names) != count:
        raise UserError(f"--hosts needs a name for each of the run's {count} clients, not {len(names)}")
    return [Place(name, False) for name in names]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run: a place per client, the `address` (host:port) where they reach the SuperLink, their kind (of
    KINDS), where it listens, if not everywhere at that port, and the folder of the federation that they are members of.
    `mailbox`: the place where files are exchanged with members; `by_mailbox`: with which, comma-separated (None: all).
    Raises UserError for invalid values."""

    places: Sequence[Place]
    address: str = LOOPBACK
    kind: str = KINDS[0]
    listen: str | None = None
    federation: Path | None = None
    mailbox: str | None = None
    by_mailbox: str | None = None

    def __post_init__(self) -> None:
        if self.mailbox is not None and self.federation is None:
            raise UserError("--mailbox needs --federation DIR: its members' keys sign and encrypt the files")
        if self.by_mailbox is not None and self.mailbox is None:
            raise UserError("--by-mailbox needs --mailbox PLACE: the folder in which files are exchanged")
        names = [place.name for place in self.places]
        if unknown := sorted(set(named_in(self.by_mailbox or "")) - set(names)):
            guess = suggestion(unknown[0], names)
            raise UserError(f"--by-mailbox names {unknown[0]!r}, which is not a member of the federation{guess}")
        if self.kind not in KINDS:
            raise UserError(f"--node is {' or '.join(KINDS)}, not {self.kind!r}")
        for name, given in (("address", self.address), ("listen", self.listen)):
            host_and_port(LOOPBACK if given is None else given, f"--{name}")
        if self.remote and self.address.endswith(":0"):
            raise UserError("nodes on other hosts need --address HOST:PORT, where they reach this machine")
        if not self.remote and self.listen:
            raise UserError("--listen needs --hosts or --federation: nodes on this machine use --address")

    @classmethod
    def of(cls, places: Sequence[Place], where: dict[str, str | None]) -> Self:
        """These places, with the options that `remembered` returns. Raises UserError for invalid ones."""
        address, kind, folder = where["address"] or LOOPBACK, where["node"] or KINDS[0], where["federation"]
        federation = None if folder is None else Path(folder)
        return cls(places, address, kind, where["listen"], federation, where["mailbox"], where["by_mailbox"])

    @property
    def files_only(self) -> bool:
        """Whether files reach all members."""
        some = None if self.by_mailbox is None else set(named_in(self.by_mailbox))
        return self.mailbox is not None and some in (None, {place.name for place in self.places})

    @property
    def remote(self) -> bool:
        """Whether any node is on another host."""
        return not all(place.here for place in self.places)

    @property
    def bind(self) -> str:
        """The address on which the SuperLink listens."""
        if not self.remote:
            return self.address
        everywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
        return self.listen or f"{everywhere}:{self.address.rpartition(':')[2]}"

    def resolved(self, port: int) -> str:
        """The address where nodes reach the SuperLink, which listens on that port."""
        return self.address if self.remote else f"{self.address.rpartition(':')[0]}:{port}"


def write_places(out: Path, how: Nodes) -> None:
    """Write what `remembered` reads."""
    about = {
        "hosts": ",".join(place.name for place in how.places) if how.remote else None,
        "address": how.address,
        "listen": how.listen,
        "node": how.kind,
        "federation": None if how.federation is None else str(how.federation.absolute()),
        "mailbox": how.mailbox,
        "by_mailbox": how.by_mailbox,
    }
    with replacing(out / "deployment" / PLACES) as file:
        file.write(json.dumps(about).encode())
