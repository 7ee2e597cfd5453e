"""The privacy that all runs together have spent of a node's samples, and the limit that their owner sets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from blake3 import blake3

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.base.files import locked, open_plain, private_folder, replacing
from fewbytes.core.privacy import SamplePrivacy, Steps, epsilon_of
from fewbytes.core.problem import Id
from fewbytes.engines.store import ClientStore

FOLDER = ".privacy"
"""The folder of the diaries, beside a node's run folders; no run can have this name."""
SPENT = ".spent"  # the suffix of diaries


@dataclass(frozen=True)
class Allowed:
    """How much all runs may spend of a client's samples; by default there is no limit."""

    epsilon: float = math.inf
    delta: float = 1.0

    @classmethod
    def read(cls, text: str) -> Self:
        """`epsilon=8,delta=1e-5`, or `any` for no limit. Raises UserError for anything else."""
        if text.strip() == "any":
            return cls()
        number = r"([0-9.]+(?:e[+-]?[0-9]+)?)"
        found = re.fullmatch(rf"\s*epsilon={number}\s*,\s*delta={number}\s*", text)
        try:
            epsilon, delta = map(float, found.groups() if found else ())
        except ValueError:
            epsilon, delta = 0.0, 0.0
        if not (epsilon > 0 and 0 < delta < 1):
            raise UserError(
                f"privacy-in-all is epsilon=8,delta=1e-5 or any, in this node's configuration, not {text!r}"
            )
        return cls(epsilon, delta)

    def __str__(self) -> str:
        return f"epsilon={self.epsilon:g},delta={self.delta:g}" if self.limits else "any"

    @property
    def limits(self) -> bool:
        """Whether there is a limit."""
        return self.epsilon < math.inf


class Allows(NamedTuple):
    """A node's limits for runs: the number of run folders, its samples' privacy (None: as the first run promises), and
    the distance of a model's first layer from the agreed first model's (`fewbytes.core.trust`). `holds`: the client
    whose data it has, by its configuration."""

    run_folders: int = 100
    privacy: Allowed | None = None
    drift: float = math.inf
    holds: Id | None = None


class Entry(msgspec.Struct, array_like=True):
    """One training: its run, a digest of its initial state keyed by the run's secret, and what it spent."""

    run: str
    begin: bytes
    spent: Steps


class Diary(msgspec.Struct):
    """What all runs have spent of a client's samples. `first`: the first run's promise, epsilon and delta."""

    first: tuple[float, float]
    entries: list[Entry] = []


class Allowance:
    """A run's diary at a node (`fewbytes.core.privacy.Diary`), whose trainings count in all runs together.

    `folder`: of the node's run folders, which the diaries outlive. `run`: its name. `settings`: those that the server
    sends; other settings give other noise. `allows`: the node's limits. If it names no client (`holds` is None), all
    that was ever spent on the node counts together, as only the server names the client that it asks.
    """

    def __init__(
        self,
        store: ClientStore,
        folder: Path,
        run: str,
        settings: str,
        terms: SamplePrivacy,
        allows: Allows,
    ) -> None:
        self._holds, self._name = allows.holds, "node" if allows.holds is None else str(allows.holds)
        self.store, self.folder, self.run, self.settings, self.terms = store, folder / FOLDER, run, settings, terms
        promise = terms.privacy
        self._promise = Allowed(promise.epsilon, promise.delta)
        self._allowed = allows.privacy
        private_folder(self.folder)

    def secret(self) -> bytes:
        """32 secret bytes, the same for the same run with the same settings."""
        return blake3(self.store.secret() + self.settings.encode()).digest()

    def trained(self, client: Id, begin: bytes, spent: Steps) -> int:
        """As in `Diary`, for all runs together. Raises FewbytesError if they may not spend that much."""
        key = blake3(self.secret() + begin).digest()
        with locked(self.folder / f"{self._name}.lock"):
            diary = self._diary()
            if key not in {entry.begin for entry in diary.entries}:
                self._check(diary, [entry.spent for entry in self._entries(diary)], spent)
                diary.entries.append(Entry(self.run, key, spent))
                written = msgspec.msgpack.encode(diary)
                with replacing(self._path, sync=True) as file:
                    file.write(written + blake3(written).digest())
        return self.store.trained(client, key, spent)

    def spending(self, samples: int) -> tuple[float, float | None]:
        """What other runs have spent of a client's samples, and the limit for all. Raises FewbytesError if this run
        would exceed it. `samples`: their number."""
        diary = self._diary()
        others = [entry.spent for entry in self._entries(diary) if entry.run != self.run]
        allowed = self._limit(diary)
        self._check(diary, others, self.terms.spent(samples, self.terms.rounds))
        spent = epsilon_of(others, allowed.delta if allowed.limits else self._promise.delta)
        return spent, allowed.epsilon if allowed.limits else None

    def spent(self) -> float:
        """The epsilon that all runs have spent, at the delta of the limit or, without one, of the run's promise."""
        diary = self._diary()
        delta = allowed.delta if (allowed := self._limit(diary)).limits else self._promise.delta
        return epsilon_of([entry.spent for entry in self._entries(diary)], delta)

    def _limit(self, diary: Diary) -> Allowed:
        return Allowed(*diary.first) if self._allowed is None else self._allowed

    def _check(self, diary: Diary, before: Sequence[Steps], more: Steps) -> None:
        allowed = self._limit(diary)
        if not allowed.limits:
            return
        if self.terms.privacy.noise == "seeded":
            raise FewbytesError(
                "dp: noise=seeded hides nothing from the server, which knows the seed: leave it out, or have "
                "privacy-in-all any in this node's configuration"
            )
        if (epsilon := epsilon_of([*before, more], allowed.delta)) <= allowed.epsilon * (1 + 1e-6):
            return
        whose = f"of client {self._holds}" if self._holds is not None else "on this node, which has no partition-id,"
        raise FewbytesError(
            f"the samples {whose} may spend epsilon {allowed.epsilon:g} at delta {allowed.delta:g} in all "
            f"runs together (privacy-in-all in their node's configuration), have spent "
            f"{epsilon_of(before, allowed.delta):.3g}, and this run would reach {epsilon:.3g}"
        )

    @property
    def _path(self) -> Path:
        return self.folder / f"{self._name}{SPENT}"

    def _diary(self) -> Diary:
        return _read(self._path) or Diary((self._promise.epsilon, self._promise.delta))

    def _entries(self, own: Diary) -> list[Entry]:
        """Entries of all diaries that may be of these samples, also from before the node's partition-id changed."""
        every = self._holds is None
        paths = self.folder.glob(f"*{SPENT}") if every else [self.folder / f"node{SPENT}"]
        others = [_read(path) for path in paths if path != self._path]
        return [entry for diary in (own, *others) if diary is not None for entry in diary.entries]


def _read(path: Path) -> Diary | None:
    """A diary, or None if there is none. Raises UserError if it is damaged."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            content = file.read()
        if len(content) > 32 and blake3(content[:-32]).digest() == content[-32:]:
            return msgspec.msgpack.decode(content[:-32], type=Diary)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError):
        pass
    raise UserError(
        f"{path.name}, the diary of what was spent of privacy, is damaged: restore a copy of it; without one, "
        "removing it restarts the count at zero, which only the owner of the data may decide"
    )
