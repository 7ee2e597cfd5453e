"""A client's node: carries out each order once, and keeps the client's state and last reply on its own disk."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from fewbytes.base.clock import minute
from fewbytes.base.errors import FewbytesError, FrameError, UserError, one_line
from fewbytes.base.files import locked, make_durable, private_folder, remove_leftovers, replacing
from fewbytes.core.method import Method
from fewbytes.core.problem import Id
from fewbytes.core.site_policy import HIDING, Request
from fewbytes.core.task import Task
from fewbytes.core.trust import check_drift
from fewbytes.engines.handlers import SCORE, Done, Job, Runner
from fewbytes.engines.results import attempt
from fewbytes.engines.store import ClientStore
from fewbytes.flower.allowance import Allowance, Allows
from fewbytes.flower.gate import DECLINED, Gate, say
from fewbytes.flower.versions import series
from fewbytes.methods import registered
from fewbytes.running.checkpoint import VERSION
from fewbytes.wire.frame import FORMAT, Parsed, digest_of
from fewbytes.wire.schema import leaves_of

TELL = ("sizes", "labels", "nothing", "figures")
"""What a node may report of its client's data before the run, or in a survey; a method's replies may reveal more.
Before a run, figures are numbers by label."""
DATA = ":data"
"""The handler that asks a node for its client's sample counts."""
CLIENTS = "checkpoint/clients"  # in a run folder
USUAL = Allows()
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def run_folders(folder: Path) -> int:
    """The number of nodes' run folders, also unused ones."""
    return len(list(folder.glob(f"*/{CLIENTS}")))


def _check_room(folder: Path, most: int) -> None:
    """Raises UserError if there are `most` run folders or more."""
    if run_folders(folder) >= most:
        raise UserError(
            f"this node has {most} run folders and makes no more (max-runs in its configuration): "
            "remove those of runs that are over"
        )


def run_name(folder: Path) -> str:
    """The name that nodes know a run by: its folder's, with `-` for what is not in RUN_NAME."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-")[:128] or "run"


class Order(msgspec.Struct, array_like=True):
    """A server's order to a client's node; its messages' frames are sent beside it."""

    run: str  # the run's name: the node's folder for it
    agreed: bytes  # digest of what both ends must have in common
    job: Job
    call: int  # which call of the round this is
    kept: int  # the oldest version of the client's state that the server may go back to
    coded: bool
    nonce: bytes = b""  # distinguishes runs with the same name


Fields = dict[str, list[str]]
"""The fields of a reply by path, each with the names of its entries."""


class StoredReply(msgspec.Struct, array_like=True):
    """A client's last reply: its job, a digest of its order, and the reply."""

    number: int
    asked: bytes
    done: Done
    frame: bytes
    fields: Fields = {}


def in_common(method: Method, task: Task, client: Id) -> dict[str, str]:
    """What a server and a client's node must have in common to understand each other, with readable names."""
    return {
        "fewbytes version": series(VERSION),
        "frame format": str(FORMAT),
        "method": repr(method),
        "model (names, types and shapes of its entries)": task.problem.layout(client).hash.hex(),
        **({FROZEN: frozen} if (frozen := task.problem.frozen(client)) else {}),
        "seed": str(task.problem.seed),
        "precision": task.problem.precision,
        **({} if (given := task.problem.pretrained) is None else {"weights (of which models start)": given.digest}),
        **task.problem.agreed,
    }


def digest(common: dict[str, str]) -> bytes:
    """16 bytes that are equal for equal `in_common`."""
    return blake3(msgspec.json.encode(common)).digest()[:16]


class Node:
    """Answers orders of one run for the clients whose data are here.

    `folder`: the place of run folders on this node. A client's files are in `<run>/checkpoint/clients`: its state in
    the versions that the server may ask for, and its last reply, so that a repeated order is answered again but carried
    out once. Both survive a power failure once the order is answered. `settings`: those that the server sends.
    `allows`: the node's limits; None: a simulation, whose server and nodes end together, so that no reply is kept.
    `gate`: applies the policy of the site whose client is asked, and records what leaves; set before each order, as
    one process may serve several sites (None: a simulation).
    """

    gate: Gate | None = None
    _nonce: bytes | None = None

    def __init__(
        self, method: Method, task: Task, folder: Path, run: str, settings: str = "", allows: Allows | None = USUAL
    ) -> None:
        if not RUN_NAME.fullmatch(run):
            raise FewbytesError(f"the server's name for the run, {run!r}, cannot name a folder")
        self.method, self.task, self.folder, self.replies = method, task, folder / run, allows is not None
        self._settings, self._fields, self._reasons = settings, Fields(), dict[Id, str]()
        if allows is not None and not self.folder.exists():
            _check_room(folder, allows.run_folders)
        private_folder(self.folder)
        private_folder(self.folder / "checkpoint")
        self.store = ClientStore(self.folder / CLIENTS)
        remove_leftovers(self.store.folder)
        terms = task.problem.privacy
        counted = None if allows is None or terms is None else (terms, allows)
        self._allowance = None if counted is None else Allowance(self.store, folder, run, settings, *counted)
        self.runner = Runner(method, task, self.store, True, self._allowance)
        if allows is not None and allows.drift != math.inf:
            self.runner.check = functools.partial(check_drift, task.problem, most=allows.drift)
        self.runner.leaving = self._note

    @functools.cached_property
    def _replying(self) -> set[str]:
        """The names of the handlers that send a reply."""
        return {each.name for each in self.method.handlers() if each.reply is not None}

    def answer(self, order: Order, frames: Sequence[memoryview]) -> tuple[Done, bytes]:
        """Run the order's job with the frames of its messages, or return its stored reply: the result and the reply's
        frame (empty: none)."""
        job = order.job
        if why := self._unable(order):
            return Done(job.number, error=why), b""
        self.runner.coded = order.coded
        # one order at a time for a client, whichever process it reached: a straggler is waited for
        with locked(self.store.folder / f"{job.client}.lock"):
            return self._answer(order, frames)

    def sample_counts(self, order: Order, tell: str) -> Done:
        """How many samples the client of the order's job has, as far as `tell`, one of TELL, allows."""
        number, client = order.job.number, order.job.client
        if tell not in TELL:
            return Done(number, error=f"tell is one of {', '.join(TELL)}, not {tell!r}, in this node's configuration")
        if why := self._unable(order):
            return Done(number, error=why)
        why = self._refusal(self._request(order, order.agreed))
        before, self._reasons[client] = self._reasons.get(client, ""), why
        if why:  # the server asks again before each round
            return refused(number, why) if why == before else declined(order.job, why)
        counts = self.task.data.label_counts()
        train, test = counts["train"][client], counts["test"][client]
        spent = None
        if self._allowance is not None:
            try:
                spent = self._allowance.spending(sum(train))
            except FewbytesError as error:
                return Done(number, error=str(error))
        allowed = {"sizes": (sum(train), sum(test)), "nothing": (None, None)}
        first = self.runner.firsts.of(client).digest
        return Done(number, sample_counts=allowed.get(tell, (train, test)), spent=spent, first=first)

    def save_model(self, order: Order, about: dict[str, Any]) -> Done:
        """Keep the own model of the client of the order's job, if it has one."""
        job = order.job
        if why := self._unable(order):
            return Done(job.number, error=why)
        kept = str(about.get("kept", ""))
        folder = self.folder / "models" / (kept if re.fullmatch(r"best|round-[0-9]{1,9}", kept) else "")
        self.runner.save_model(job.client, job.version, job.round, folder, about)
        return Done(job.number)

    def _unable(self, order: Order) -> str:
        """Why the order cannot be carried out here; empty if it can."""
        client = order.job.client
        if not 0 <= client < len(self.task.problem.clients) or not len(self.task.data.clients[client].train):
            return f"the data of client {client} are not on this node"
        ours = in_common(self.method, self.task, client)
        if digest(ours) != order.agreed:
            return DIFFERENT + msgspec.json.encode(ours).decode()
        if self._bound(order.nonce):
            return ""
        return (
            f"this node's folder of the run {order.run!r} belongs to another run, or another server's, with that name: "
            "choose another name for the run, or remove the folder on the node"
        )

    def _bound(self, nonce: bytes) -> bool:
        """Whether the folder belongs to the run with this nonce; an unused folder is assigned to it."""
        if self._nonce != nonce:
            path = self.store.folder / "nonce"
            with locked(self.store.folder / "nonce.lock"):
                if not (path.exists() and any(self.store.folder.glob("*.reply"))):
                    with replacing(path, sync=True) as file:
                        file.write(nonce)
                self._nonce = path.read_bytes()
        return self._nonce == nonce

    def _answer(self, order: Order, frames: Sequence[memoryview]) -> tuple[Done, bytes]:
        job = order.job
        asked = self._digest(order, frames)
        request = self._request(order, asked)
        if why := self._refusal(request):
            return declined(job, why), b""
        kept = _kept(self._path(job.client))
        if kept is not None and kept.asked == asked and _whole(kept.frame):
            self._fields = kept.fields
            return kept.done, kept.frame
        if kept is not None and job.number < kept.number:
            return Done(job.number, error="the order is older than one this client has already followed"), b""
        if kept is not None and self.replies and job.version != kept.done.version and not self._goes_back(job):
            return Done(job.number, error="the client is past the state that this order is for"), b""
        self._fields = {}
        done, reply = attempt(self.runner, job, frames)
        packed = b"" if reply is None else bytes(reply)
        if self.gate is not None and (why := self.gate.withheld(request, len(encoded(done)) + len(packed))):
            return declined(job, why), b""
        if not done.error and job.handler != SCORE:
            record = (
                StoredReply(job.number, asked, done, packed, self._fields)
                if self.replies
                else StoredReply(job.number, b"", Done(0), b"")
            )
            if self.replies and done.version != job.version:
                make_durable(*self.store.places([(job.client, done.version)]))
            with replacing(self._path(job.client), sync=self.replies) as file:
                file.write(msgspec.msgpack.encode(record))
            self.store.keep_only_of(job.client, range(min(order.kept, job.version), done.version + 1))
        return done, packed

    def recorded(self, order: Order, frames: Sequence[memoryview], done: Done, reply: bytes) -> tuple[Done, bytes]:
        """The answer, once it is recorded that it leaves; a refusal in its place if it must not leave."""
        if self.gate is None or done.declined:
            return done, reply
        own = order.job.handler in (DATA, SCORE)
        request = self._request(order, order.agreed if own else self._digest(order, frames))
        about: dict[str, Any] = {"fields": self._fields if len(reply) else {}, "beside": beside(done)}
        if self._allowance is not None and request.replies:
            about["epsilon"] = round(self._allowance.spent(), 6)
        if why := self.gate.leaves(request, [encoded(done), reply], about):
            return declined(order.job, why), b""
        return done, reply

    def _note(self, reply: Any) -> None:
        """Note the names of what a reply has."""
        self._fields = {leaf.path: [name for name in leaf.tensors if name] for leaf in leaves_of(reply)}

    def _refusal(self, request: Request) -> str:
        return "" if self.gate is None else self.gate.refusal(request)

    def _request(self, order: Order, asked: bytes) -> Request:
        about = functools.partial(in_common, self.method, self.task, order.job.client)
        approved = self.gate is None or self.gate.approved(order.run, order.agreed, self._settings, about)
        return request_of(self.method, self.task, order, asked, order.job.handler in self._replying, approved)

    def _goes_back(self, job: Job) -> bool:
        return job.handler == SCORE or self.method.goes_back(job.handler)

    def _digest(self, order: Order, frames: Sequence[memoryview]) -> bytes:
        job = order.job
        asked = (job.handler, job.client, job.round, order.call, job.scored, job.version, job.rate)
        what = (order.agreed, order.coded, *asked, *([] if job.steps is None else [job.steps]))
        return blake3(msgspec.msgpack.encode(what) + b"".join(digest_of(frame) for frame in frames)).digest()

    def _path(self, client: Id) -> Path:
        return self.store.folder / f"{client}.reply"


def request_of(method: Method, task: Task, order: Order, asked: bytes, replies: bool, approved: bool) -> Request:
    """What an order with the digest `asked` asks of the site. `replies`: whether its handler sends a reply; `approved`:
    whether a person approved of its run."""
    job, terms = order.job, task.problem.privacy
    names = frozenset(map(registered, method.runs()))
    promise = None if terms is None or terms.privacy.noise == "seeded" else terms.privacy
    return Request(
        order.run,
        job.round,
        job.handler,
        asked.hex()[:32],
        names,
        len(task.data.clients[job.client].train),
        replies,
        hidden=HIDING in names,
        evaluates=method.promises.evaluates,
        privacy=None if promise is None else (promise.epsilon, promise.delta),
        approved=approved,
        minute=minute(),
    )


def declined(job: Job, why: str) -> Done:
    """The answer of a site that declines, which its own log states in one line, too."""
    say(f"round {job.round}, {job.handler}: client {job.client} declines: {why}")
    return refused(job.number, why)


def refused(number: int, why: str) -> Done:
    """The answer of a site that declines."""
    return Done(number, error=f"{DECLINED}{why}", declined=True)


def encoded(done: Done) -> bytes:
    """An answer without its frame, as it travels."""
    return msgspec.msgpack.encode(done)


def beside(done: Done) -> list[str]:
    """The names of what an answer has beside its reply."""
    records = done.records
    measured: dict[str, Collection[str]] = {
        "scores": records.scores, "losses": records.losses, "measures": records.measures
    }  # fmt: skip
    there = [f"{kind}: {name}" for kind, by in measured.items() for name in by]
    there += [f"scores: {name}" for name in done.scores]
    there += [f"validation: {name}" for name in done.validation]
    if done.sample_counts is not None and done.sample_counts[0] is not None:
        there.append("numbers of samples" + ("" if isinstance(done.sample_counts[0], int) else " by class"))
    there += ["number of local steps"] if records.steps else []
    there += ["versions of its software"] if done.versions else []
    return there + (["an error's text"] if done.error else [])


def read_reply(path: Path) -> StoredReply:
    """A reply that a node has kept. Raises UserError for another file."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=StoredReply)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path} is not a reply that a node has kept: {one_line(error)}") from None


def _kept(path: Path) -> StoredReply | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=StoredReply)
    except (OSError, msgspec.MsgspecError):
        return None  # nothing kept, or torn by a loss of power: doing it again gives the same


def _whole(frame: bytes) -> bool:
    """Whether a stored frame is undamaged after a power failure; if not, repeating the order gives the same reply."""
    with suppress(FrameError):
        return not frame or bool(Parsed(frame))
    return False


DIFFERENT = "different:"
FROZEN = "model (values that are not trained, or are computed from these: give every node the server's weights)"
"""How an error begins that carries, as JSON, what the node has that the server was to have in common with it."""
