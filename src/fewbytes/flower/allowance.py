"""What the samples on a node have given away in all runs together, and how much of that their owner allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.base.files import lock, private_folder, replacing
from fewbytes.core.privacy import SamplePrivacy, Steps, epsilon_of
from fewbytes.core.problem import Id
from fewbytes.engines.store import ClientStore

FOLDER = ".privacy"
"""Where the diaries lie, beside a node's run folders; no run has such a name."""
ANY = "any"


class Allowed(NamedTuple):
    """How much all runs may spend of a client's samples."""

    epsilon: float
    delta: float

    @classmethod
    def read(cls, text: str) -> Allowed | None:
        """`epsilon=8,delta=1e-5`, or `any` for no limit. Raises UserError for anything else."""
        if text.strip() == ANY:
            return None
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


class Entry(msgspec.Struct, array_like=True):
    """One training: by which run, what it began with (a digest that knows the run's secret), what it spent."""

    run: str
    begin: bytes
    spent: Steps


class Diary(msgspec.Struct):
    """What all runs have spent of a client's samples. `first`: what the first of them promised, epsilon and delta."""

    first: tuple[float, float]
    entries: list[Entry] = []


class Allowance:
    """A run's diary at a node (`fewbytes.core.privacy.Diary`), whose trainings count in all runs together.

    `folder`: of the node's run folders, beside which the diaries outlive them. `run`: its name. `said`: all that the
    server says of the run: of other settings noise is never the same. `allowed`: how much all runs may spend, as
    `Allowed.read` takes it; empty: as much as the first run promised.
    """

    def __init__(
        self, store: ClientStore, folder: Path, run: str, said: str, allowed: str, terms: SamplePrivacy
    ) -> None:
        self.store, self.folder, self.run, self.said, self.terms = store, folder / FOLDER, run, said, terms
        promise = terms.privacy
        self._promise = Allowed(promise.epsilon, promise.delta)
        self._given, self._allowed = bool(allowed), Allowed.read(allowed) if allowed else None
        private_folder(self.folder)

    def secret(self) -> bytes:
        """32 bytes that nobody else knows, the same for the same run, asked for in the same words."""
        return blake3(self.store.secret() + self.said.encode()).digest()

    def trained(self, client: Id, begin: bytes, spent: Steps) -> int:
        """As in `Diary`, and in all runs. Raises FewbytesError where these may not spend so much."""
        key = blake3(self.secret() + begin).digest()
        held = lock(self.folder / f"{client}.lock", wait=True)
        try:
            diary = self._diary(client)
            if key not in {entry.begin for entry in diary.entries}:
                self._check(client, diary, [entry.spent for entry in diary.entries], spent)
                diary.entries.append(Entry(self.run, key, spent))
                with replacing(self._path(client), sync=True) as file:
                    file.write(msgspec.msgpack.encode(diary))
        finally:
            if held is not None:
                held.close()
        return self.store.trained(client, key, spent)

    def told(self, client: Id, samples: int) -> tuple[float, float | None]:
        """What other runs have spent of a client's samples, and how much all may. Raises FewbytesError where this run
        would come to more."""
        diary = self._diary(client)
        others = [entry.spent for entry in diary.entries if entry.run != self.run]
        allowed = self._limit(diary)
        self._check(client, diary, others, self.terms.spent(samples, self.terms.rounds))
        spent = epsilon_of(others, self._promise.delta if allowed is None else allowed.delta)
        return spent, None if allowed is None else allowed.epsilon

    def _limit(self, diary: Diary) -> Allowed | None:
        return self._allowed if self._given else Allowed(*diary.first)

    def _check(self, client: Id, diary: Diary, before: Sequence[Steps], more: Steps) -> None:
        allowed = self._limit(diary)
        if allowed is not None and self.terms.privacy.noise == "seeded":
            raise FewbytesError(
                "dp: noise=seeded hides nothing from the server, which knows the seed: leave it out, or have "
                "privacy-in-all any in this node's configuration"
            )
        if allowed is None or (epsilon := epsilon_of([*before, more], allowed.delta)) <= allowed.epsilon * (1 + 1e-6):
            return
        raise FewbytesError(
            f"the samples of client {client} may spend epsilon {allowed.epsilon:g} at delta {allowed.delta:g} in all "
            f"runs together (privacy-in-all in their node's configuration), have spent "
            f"{epsilon_of(before, allowed.delta):.3g}, and this would come to {epsilon:.3g}"
        )

    def _path(self, client: Id) -> Path:
        return self.folder / f"{client}.spent"

    def _diary(self, client: Id) -> Diary:
        """Raises UserError for one that was damaged."""
        path = self._path(client)
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=Diary)
        except FileNotFoundError:
            return Diary(self._promise)
        except (OSError, msgspec.MsgspecError):
            raise UserError(f"{path.name}, the diary of what was spent of privacy, cannot be read") from None
