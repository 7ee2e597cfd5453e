"""A node's gate: its site's policy decides what is answered, and a signed chain records what left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from blake3 import blake3

from fewbytes.base.chain import Chain, make_key
from fewbytes.base.clock import now
from fewbytes.base.errors import FewbytesError, UserError, one_line, suggestion, visible
from fewbytes.base.files import locked, private_folder, replacing
from fewbytes.core.problem import Id
from fewbytes.core.site_policy import HIDING, History, Request, SitePolicy, refusal, withheld
from fewbytes.methods import METHODS, WITHOUT_TRAINING

FOLDER = ".egress"
"""The folder of the records of what left, beside a node's run folders; no run can have this name."""
DECLINED = "its site declines: "
"""How a refusal begins."""


class Approval(msgspec.Struct):
    """The file that asks a person to approve a run: `about` is what both ends have in common, and the settings."""

    approved: bool
    run: str
    about: dict[str, str] = {}


class Gate:
    """The gate of one node.

    `folder`: of its run folders, which the record outlives. `holds`: the client whose data it has (None: not said).
    `key`: the private key that signs (None: one that is made here). Raises UserError for an unreadable key, or a record
    that is damaged.
    """

    def __init__(self, folder: Path, holds: Id | None, policy: SitePolicy, key: Path | None = None) -> None:
        self.place, self.policy, self.history = (
            folder / FOLDER / ("node" if holds is None else str(holds)),
            policy,
            History(),
        )
        private_folder(folder / FOLDER)
        private_folder(self.place)
        self._rules: list[str] | None = None  # of the last line about them
        self._chain = Chain(self.place, make_key(self.place / "key") if key is None else key)
        with locked(self._lock):
            self._look()

    def refusal(self, request: Request) -> str:
        """Why the request is not carried out; empty if it is. Raises UserError for a record that is damaged."""
        with locked(self._lock):
            self._look()
            return refusal(self.policy, request, self.history) or ""

    def withheld(self, request: Request, nbytes: int) -> str:
        """Why an answer of `nbytes` is not sent; empty if it is."""
        return withheld(self.policy, request, nbytes, self.history) or ""

    def leaves(self, request: Request, answer: Sequence[bytes | memoryview], about: Mapping[str, Any]) -> str:
        """Record that an answer leaves, before it does; why it must not, or an empty text. `about`: what it has."""
        nbytes, digest = sum(map(len, answer)), blake3()
        for each in answer:
            digest.update(each)
        try:
            with locked(self._lock):
                self._look()
                if why := self.withheld(request, nbytes):
                    return why
                if self._rules != (rules := self.policy.rules()):
                    self._chain.append({"time": now(), "rules": rules})
                    self._rules = rules
                self._chain.append(
                    {
                        "time": now(), "run": request.run, "round": request.round, "handler": request.handler,
                        "replies": request.replies, "methods": sorted(request.methods), "hidden": request.hidden,
                        "order": request.order, "digest": digest.hexdigest()[:32], **about, "bytes": nbytes,
                    }
                )  # fmt: skip
                self.history.add(request, nbytes)
        except OSError as error:
            return f"it cannot record what leaves ({error.strerror})"
        return ""

    def approved(self, run: str, agreed: bytes, settings: str, about: Callable[[], Mapping[str, str]]) -> bool:
        """Whether a person approved this run, with these settings; if nobody was asked yet, a file asks, which is
        `about` the run."""
        if not self.policy.ask:
            return True
        path = self.request_file(run, agreed, settings)
        if not path.exists():
            asked = Approval(_asked(run, settings), run, {**about(), "settings": settings})
            with replacing(path) as file:
                file.write(tomli_w.dumps(msgspec.structs.asdict(asked)).encode())
            if not asked.approved:
                say(f"the run {run!r} asks to take part: to approve it, set approved = true in {path}")
        try:
            return msgspec.toml.decode(path.read_bytes(), type=Approval).approved
        except (OSError, msgspec.MsgspecError) as error:
            say(f"{path} cannot be read, so that the run is not approved: {one_line(error)}")
            return False

    def request_file(self, run: str, agreed: bytes, settings: str) -> Path:
        """The file that asks for a run's approval; another run, or other settings, have another."""
        name = blake3(msgspec.msgpack.encode((run, agreed, settings))).hexdigest()[:16]
        return self.place / f"run-{name}.toml"

    @property
    def _lock(self) -> Path:
        return self.place / "lock"

    def _look(self) -> None:
        """Count what other processes of this node have recorded."""
        for line in self._chain.news():
            if "rules" in line:
                self._rules = line["rules"]
            else:
                try:
                    handler = line["handler"] if line["replies"] else ""
                    self.history.count(line["run"], line["round"], handler, line["order"], line["bytes"])
                except (KeyError, TypeError) as error:
                    raise FewbytesError(f"{self.place.name}: a line of egress.jsonl is none of a node's") from error


def policy_of(config: Mapping[str, Any]) -> SitePolicy:
    """The rules in a node's configuration. Raises UserError as `SitePolicy.read` does, and for a method that is not
    installed: a misspelt name would forbid all others."""
    policy, known = SitePolicy.read(config), {*METHODS, *WITHOUT_TRAINING, "clustered", HIDING}
    if unknown := sorted(name for name in policy.methods - known if ":" not in name):
        why = f"methods names {unknown[0]!r}, which is no method here{suggestion(unknown[0], known)}"
        raise UserError(f"{why}; `fewbytes methods` lists them")
    return policy


def _asked(run: str, settings: str) -> bool:
    """Whether a person at the node's terminal approves the run; False without a terminal."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(visible(f"the run {run!r} asks to take part, with {settings}: approve it? [y/N] ")).strip() == "y"
    except EOFError:
        return False


def say(text: str) -> None:
    """A line in the node's log."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {visible(text)}", flush=True)
