"""The members of a federation in a run: whose key stands for which client, also while the run goes."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from pathlib import Path

from fewbytes.base.errors import FewbytesError, UserError, listed, suggestion
from fewbytes.base.files import replacing
from fewbytes.federation.members import FILE, Federation, read
from fewbytes.flower.certificates import write_file
from fewbytes.flower.processes import Processes

JOINED = "joined.json"  # in the deployment's folder: the member that took each newcomer's place ("": nobody yet)


def places_for(federation: Federation, newcomers: int, some: Sequence[str] | None = None) -> list[str]:
    """The names of a run's clients: the members, or `some` of them, then places for those that join later. Raises
    UserError for a name that is no member's."""
    names = [member.name for member in federation.members]
    if unknown := [name for name in some or () if name not in names]:
        raise UserError(
            f"{unknown[0]} is no member of the federation{suggestion(unknown[0], names)}; there are {listed(names)}"
        )
    return [*(names if some is None else some), *(f"newcomer-{i + 1}" for i in range(newcomers))]


def named_in(text: str) -> list[str]:
    """The names in a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


class Membership:
    """A run's clients as members of the federation in a folder. `names`: as of `places_for` when the run began;
    `deployment`: its folder, which keeps who took a newcomer's place."""

    def __init__(self, folder: Path, deployment: Path, names: list[str]) -> None:
        self.folder, self._deployment, self._names = folder, deployment, names
        self._seen: int | None = None
        self._keys: dict[str, str] = {}  # by place
        self._registered: dict[str, str] = {}  # the same, as of the last look
        self._others: set[str] = set()  # members that are not part of the run, as reported
        self._looked, self._vacant = 0, set[str]()

    def sync(self, processes: Processes) -> list[str]:
        """Have the SuperLink accept exactly the members' keys, if the federation has changed; returns notes about it.

        Raises FewbytesError with Flower's message, UserError for an unreadable federation."""
        if (now := (self.folder / FILE).stat().st_mtime_ns) == self._seen:
            return []
        before = self._registered
        whose, keys = self.write_keys()
        notes = []
        for place in self._keys:
            if before.get(place) == self._keys[place]:
                continue
            try:
                processes.register([place])
            except FewbytesError as error:
                notes.append(f"{whose[place]} cannot take part: {error}")
                continue
            if self._seen is not None:
                new = "has a new key" if place in before else "may take part from now on"
                notes.append(f"{whose[place]} {new}")
        processes.keep_only(list(self._keys))
        notes += [
            f"{whose.get(place, place)} is no longer a member, and refused" for place in before.keys() - self._keys
        ]
        others = keys.keys() - whose.values() - self._others
        notes += [f"{name} is a member, but not of this run: the next one has it" for name in sorted(others)]
        self._others |= others
        self._seen, self._registered = now, self._keys
        return notes

    def vacant(self) -> Set[str]:
        """The places that no member has now: of newcomers that have not joined yet, and of removed members. Raises
        UserError for an unreadable federation."""
        if (now := (self.folder / FILE).stat().st_mtime_ns) != self._looked:
            federation = read(self.folder)
            there, whose = {member.name for member in federation.members}, self._assigned(federation)
            self._looked, self._vacant = now, {name for name in self._names if whose.get(name) not in there}
        return self._vacant

    def write_keys(self) -> tuple[dict[str, str], dict[str, str]]:
        """Write keys/<place>.pub in the deployment's folder; returns each place's member, and members' keys. Raises
        UserError for an unreadable federation."""
        federation = read(self.folder)
        whose, keys = self._assigned(federation), {member.name: member.key for member in federation.members}
        self._keys = {place: keys[name] for place, name in whose.items() if name in keys}
        for place, key in self._keys.items():
            path = self._deployment / "keys" / f"{place}.pub"
            path.parent.mkdir(exist_ok=True)
            write_file(path, f"{key} {place}\n".encode())
        return whose, keys

    def _assigned(self, federation: Federation) -> dict[str, str]:
        """The member of each place. A member without a place takes the first free one of a newcomer."""
        path = self._deployment / JOINED
        joined = dict(json.loads(path.read_bytes())) if path.exists() else {}
        known = {member.name for member in federation.members}
        for name in self._names:
            if name not in known and not path.exists() and name.startswith("newcomer-"):
                joined[name] = ""
        for member in federation.members:
            free = [place for place, name in joined.items() if not name]
            if free and member.name not in (*self._names, *joined.values()):
                joined[free[0]] = member.name
        with replacing(path) as file:
            file.write(json.dumps(joined).encode())
        return {name: joined.get(name, name) for name in self._names if joined.get(name, name)}
