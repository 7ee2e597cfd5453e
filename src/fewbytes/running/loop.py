"""The loop every engine shares: rounds, from the first or from a checkpoint, into a run folder."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from fewbytes.base.errors import FewbytesError, MethodError, UserError, listed, raised_at
from fewbytes.base.files import (
    ScratchFolder,
    lock,
    make_durable,
    private_folder,
    remove_leftovers,
    replacing,
    write_text,
)
from fewbytes.core import gallery
from fewbytes.core.devices import open_device
from fewbytes.core.ledger import Ledger, LeftOut
from fewbytes.core.method import Method, check_state
from fewbytes.core.network import Refused
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id, Task
from fewbytes.core.records import means
from fewbytes.core.rules import Rule
from fewbytes.core.standing import Beside
from fewbytes.core.trial import check_models, try_models
from fewbytes.engines.base import Engine
from fewbytes.models.files import save_model
from fewbytes.running.alarms import Alarms
from fewbytes.running.checkpoint import VERSION, Checkpoint, Checkpoints, check, fingerprint, read_checkpoint
from fewbytes.running.counts import PartitionCounts
from fewbytes.running.result import Result
from fewbytes.running.rounding import check_rounding
from fewbytes.running.scoring import merged, scored_models
from fewbytes.running.settings import Settings
from fewbytes.running.spending import Spending, promised
from fewbytes.running.stopping import StopWhen
from fewbytes.running.summary import Outcome, summary
from fewbytes.wire import pack_state, unpack_state

MOST_GUESSES = 3  # of whose reply made a method raise, before that is taken for the method's own mistake
HEADROOM = 1.1  # what travels is coded, so that rounds differ: the next may send so many times what the largest has
Connect = Callable[[Path, Checkpoint | None], AbstractContextManager[Engine]]
"""Opens an engine's network for the run in a folder, from its checkpoint if it goes on from one."""


def drive(method: Method, task: Task, settings: Settings, connect: Connect) -> Result:
    """Run the loop over an engine's network: what every engine calls. Errors as in `fewbytes.run`."""
    method.handlers()  # raises for one that is no handler
    scratch = ScratchFolder("run") if settings.out is None else None
    try:
        folder = Path(settings.out or "") if scratch is None else scratch.path
        loop = _Loop(method, task, settings if scratch is None else replace(settings, durable=False), folder)
        if not settings.resume:
            # what cannot be is refused before anything is written, here and by the next lines
            check_models(method, task)
            check_state(method, "server", method.server(task.problem.on_cpu()))
            method.state_class("client")
            for note in try_models(task):
                settings.watcher.note(note)
        with _held(folder):
            checkpoint = loop.begin()
            with connect(folder, checkpoint) as engine:
                open_device(task.problem.device)
                if checkpoint is None:
                    loop.state = method.server(task.problem)
                summary = loop.run(engine, checkpoint)
                model = method.global_model(loop.state, task.problem)
                if settings.save_models:
                    about = task.described() | _without_places(settings.about)
                    for name, made in method.server_models(loop.state, task.problem).items():
                        save_model(made, folder / "models" / f"{name}.safetensors", about)
                    engine.save_models(folder / "models", about)
            result = Result(folder, summary, loop.rows, engine.ledger, model)
    except BaseException:
        if scratch is not None:
            scratch.close()
        raise
    if scratch is not None:
        weakref.finalize(result, scratch.close)
    return result


def _without_places(about: dict[str, Any]) -> dict[str, Any]:
    """What a model's file, which is passed on, says of its run: what data are called, not where they lie here."""
    places = {key: Path(about[key]).name for key in ("dataset", "client_data") if about.get(key)}
    return about | places


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make the folder and keep other processes from running in it. Raises UserError if one does."""
    try:
        private_folder(folder / "checkpoint")
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{folder} cannot be a run folder: a file is in the way") from None
    held = lock(folder / "checkpoint" / "lock")
    if held is None:
        raise UserError(f"another process is running in {folder}: wait for it, or choose another folder")
    with held:
        remove_leftovers(folder)
        yield


def within(budget: int | None, rows: list[dict[str, Any]]) -> bool:
    """Whether another round fits a budget of uplink bytes after the phases of these rows of rounds.jsonl: one that
    sends HEADROOM times what the largest so far has. The first round always fits."""
    rounds = [i for i, row in enumerate(rows) if row["phase"] == "round"]
    if budget is None or not rounds:
        return True
    so_far = sum(row["uplink_bytes"] for row in rows[: rounds[-1] + 1])  # not who joined later: resuming finds the same
    return bool(so_far + HEADROOM * max(rows[i]["uplink_bytes"] for i in rounds) <= budget)


class _Loop:
    def __init__(self, method: Method, task: Task, settings: Settings, folder: Path) -> None:
        self.method, self.task, self.folder = method, task, folder
        self.rounds = self.planned = method.planned_rounds(
            settings.rounds
        )  # a budget or a score may make the former fewer
        self.evaluate_every = settings.evaluate_every
        self.settings, self.watcher = settings, settings.watcher
        how = f"coded {settings.coded}, evaluated every {settings.evaluate_every}"
        how += f", budget {settings.budget}" if settings.budget is not None else ""
        self.metrics = task.problem.objective.metrics
        stop = StopWhen.read(settings.stop_when) if settings.stop_when is not None else None
        if stop is not None:
            stop.check(self.metrics)
            how += f", stop_when {stop}"
        self.rule = Rule.read(settings.aggregate)
        self.rule.check(method.method_name, method.promises.aggregates, len(task.problem.clients))
        check_rounding(method, settings)
        how += f", aggregate {self.rule}" if self.rule != Rule() else ""
        self.spending = Spending(promised(method, task, settings), self.planned, task.problem.seed, folder)
        how += f", speeds {settings.speeds}" if settings.speeds is not None else ""
        how += f", dp {self.spending.promise} over {self.planned} rounds" if self.spending.promise is not None else ""
        self.budget, self.stop = (None, None) if method.own_rounds else (settings.budget, stop)
        self.ended_by = self.why = ""  # what ends the run before its last round, and why
        self.fingerprint = fingerprint(method, task, how)
        for t in () if task.problem.stays else range(1, self.rounds + 1):
            if not task.problem.clients_in(t):
                raise UserError(f"no client is there in round {t} of {self.rounds}: change the rounds, or who is there")
        self.counts = PartitionCounts(task.data, folder)
        self.checkpoints = Checkpoints(folder, settings.durable)
        self.state: Any = None
        self.rows: list[dict[str, Any]] = []
        self.kept = 0, 0  # how many exchanges and rows the last checkpoint has
        self.missed: list[LeftOut] = []  # newcomers who could not be served before the round that begins
        self.refused: dict[Id, str] = {}  # newcomers the method cannot serve, and why
        self.warned = False  # of numbers that are not finite
        self.alarms = Alarms()
        self.seconds = 0.0
        self.status = "running"
        self.starts = 0

    def begin(self) -> Checkpoint | None:
        """The checkpoint to go on from, or a folder begun anew. Raises UserError if neither can be."""
        if not self.settings.resume:
            _begin_folder(self.folder, self.method, self.task, self.rounds, self.settings.config)
            self.counts.write()
            if self.settings.durable:
                make_durable(self.folder / "config.toml", self.folder / "partition.json", self.folder)
            return None
        checkpoint = read_checkpoint(self.folder, self.settings.from_round)
        last = self.checkpoints.rounds()[-1]
        if self.settings.from_round is None and checkpoint.round < last:
            path = self.checkpoints.path(last)
            self.watcher.note(f"the checkpoint {path} is damaged: the run goes on from round {checkpoint.round}")
        self.rows = [json.loads(line) for line in self.checkpoints.rows.read(checkpoint.rows).splitlines()]
        self.spending.recall(self.rows)
        self.alarms.recall(self.rows)
        if self._ends(self.rows):
            self.rounds = min(self.rounds, checkpoint.round)
        check(checkpoint, self.fingerprint, self.folder, self.rounds)
        if self.settings.from_round is not None:
            self.spending.check(checkpoint.round, self.rounds)
        if self.settings.config is not None:  # with what was asked for anew, for who goes on after this
            write_text(self.folder / "config.toml", self.settings.config)
        self.starts = checkpoint.starts = self.checkpoints.starts() + 1
        # so that no number is given twice, however often a run is gone on with
        self.checkpoints.write(checkpoint, most=None)
        staying = self._staying(checkpoint.known.tolist(), min(checkpoint.round + 1, self.rounds))
        checkpoint.known = torch.tensor(staying, dtype=torch.int64)
        return checkpoint

    def run(self, engine: Engine, checkpoint: Checkpoint | None) -> dict[str, Any]:
        done, finished = 0, False
        self.counts.enter(engine.sample_counts, self.settings.resume)
        engine.on_reply, engine.rule, engine.privacy = self.watcher.replied, self.rule, self.spending.privacy
        if checkpoint is not None:
            kind = self.method.state_class("server")
            self.state = unpack_state(kind, checkpoint.server) if kind is not None else None
            left_out = [left for row in self.rows if row["phase"] == "join" for left in row.get("left_out", [])]
            self.refused = {left["client"]: left["why"] for left in left_out if left["handler"] == "join"}
            done, finished, self.seconds = checkpoint.round, checkpoint.finished, checkpoint.seconds
            engine.peak_memory_bytes = checkpoint.peak_memory_bytes
            if self.checkpoints.go_back(done):  # nothing tells of rounds that are to be done again
                of_later = [self.folder / name for name in ("result.json", "ledger.parquet", "report.html")]
                for file in (*of_later, *(self.folder / "models").glob("*.safetensors")):
                    file.unlink(missing_ok=True)
            write_text(self.folder / "rounds.jsonl", self.checkpoints.rows.go_back(checkpoint.rows).decode())
            engine.ledger = Ledger.frombytes(self.checkpoints.ledger.go_back(checkpoint.ledger), checkpoint.handlers)
            self.kept = len(engine.ledger), len(self.rows)
            gallery.forget_after(self.folder, done + finished)
        self.watcher.started(self.folder, self.rounds, done)
        if self.rounds < self.planned:
            self.watcher.stopped(self.rounds, self.why)
        self._report_moved(engine)
        try:
            with terminating():
                if checkpoint is None:
                    self._phase(engine, 0, "start", lambda: self.method.start(self.state, engine.network))
                t = done
                while (t := t + 1) <= self.rounds:
                    engine.clients = self._staying(engine.clients, t)
                    arrived = engine.arrivals(t)
                    self.counts.enter(engine.sample_counts, self.settings.resume)
                    for client in arrived:
                        if client not in self.refused:
                            self._join(engine, t, client)
                    if not engine.clients:
                        raise FewbytesError(f"round {t} cannot begin: every client has left or could not join")
                    self._phase(engine, t, "round", functools.partial(self._round, engine, t))
                if not finished:
                    self._phase(engine, self.rounds + 1, "finish", lambda: self._finish(engine))
            self._note_headline()
            self.status = "done"
        except KeyboardInterrupt:
            self.status = "interrupted"
            raise
        except Exception as error:
            if not isinstance(error, FewbytesError):  # the method's own, of its server half
                error.add_note(f"{self.method.method_name}, round {engine.t}")
            elif isinstance(error, MethodError) and not getattr(error, "__notes__", None):  # nor a handler's
                place = raised_at(error, own_code=True)
                error.args = (f"{self.method.method_name}, round {engine.t}: {error}{f' ({place})' if place else ''}",)
            if isinstance(error, TooFewReplies) and self.alarms.named:
                who = "; ".join(f"{engine.called(i)} {words}" for i, words in self.alarms.named.items())
                first, these = min(self.alarms.since.values()), ",".join(map(str, sorted(self.alarms.named)))
                remedy = f"--resume RUN --from-round {first - 1} --exclude {these}"
                error.args = (f"{error} (before that {who}; go on without: {remedy})",)
            self.watcher.ended({"status": "failed", "why": str(error) or type(error).__name__})
            raise
        finally:
            if self.status != "running":
                self._summarise(engine)
                self.watcher.ended(self._summary(engine))
        return self._summary(engine)

    def _ends(self, rows: list[dict[str, Any]]) -> bool:
        """Whether no round comes after these rows of rounds.jsonl; keeps by what, and why."""
        if not within(self.budget, rows):
            self.ended_by, self.why = "budget", "another would exceed the budget"
        elif self.stop is not None and (why := self.stop.why(rows, self.metrics, self.method.promises.headline)):
            self.ended_by, self.why = "stop_when", why
        return bool(self.ended_by)

    def _round(self, engine: Engine, t: int) -> None:
        if self.method.round(self.state, engine.network, t) is not None:
            raise MethodError(f"{type(self.method).__name__}.round returns nothing: it changes what `state` holds")

    def _finish(self, engine: Engine) -> None:
        engine.give_up()
        engine.deliver()
        self.method.finish(self.state, engine.network)

    def _staying(self, clients: list[Id], t: int) -> list[Id]:
        """Those of the clients that have not left before round t."""
        present = set(self.task.problem.clients_in(t))
        return [i for i in clients if i in present]

    def _join(self, engine: Engine, t: int, client: Id) -> None:
        """Serve a client the run did not know, before round t; one that is gone again may come back later."""
        engine.clients = sorted([*engine.clients, client])

        def serve() -> None:
            try:
                self.method.join(self.state, engine.network, client)
            except Refused as error:
                engine.abandon()
                engine.clients = [i for i in engine.clients if i != client]
                engine.versions.pop(client, None)  # its state is of no use any more
                engine.left_out.append(LeftOut(client, "join", "rejected", str(error)))
                self.refused[client] = str(error)

        try:
            self._phase(engine, t, "join", serve, client)
        except TooFewReplies:
            engine.clients = [i for i in engine.clients if i != client]
            engine.abandon()
            self.missed += engine.left_out  # reported with the round: the step has no line of its own
        else:
            if client in self.refused:
                self.watcher.refused(client, self.refused[client])
            else:
                self.watcher.joined(client)

    def _phase(self, engine: Engine, t: int, phase: str, step: Callable[[], None], *who: Id) -> None:
        started, before = time.monotonic(), len(engine.ledger)
        scored = phase == "round" and (t % self.evaluate_every == 0 or t == self.rounds)
        may_be_last = phase == "round" and self.budget is not None  # known by what it sends
        shows = scored or may_be_last or phase == "finish"
        self._take(engine, lambda: engine.begin(t, shows, *(f"join {client}" for client in who)), step, bool(who))
        spent = self.spending.count(engine)
        exchanged = time.monotonic()
        sent = {"round": t, "phase": phase, "scores": {}, **engine.ledger.totals(before)}
        if may_be_last and self._ends([*self.rows, sent]):
            scored, self.rounds = True, t
        if may_be_last and not scored:
            engine.records.scores = {}
            engine.shown = {}
        scores, pooled = engine.records.means(), engine.records.pooled()
        if scored or (phase == "finish" and self.method.promises.scored_after_finish):
            shown, open_end = dict(engine.shown), scored and t < self.rounds and self.stop is not None
            scores = merged(scores, scored_models(engine, self.state, last=t >= self.rounds or open_end))
            if open_end and self._ends([*self.rows, sent | {"scores": scores}]):
                self.rounds = t
            elif open_end:
                engine.shown = shown  # without predictions, which are shown after the last round
        seconds = time.monotonic() - started
        self.seconds += seconds
        if phase in ("round", "join") or len(engine.ledger) > before or scores:
            cohort = len(np.unique(engine.ledger.columns(before)["client"]))
            row = {
                "round": t,
                "phase": phase,
                **({"client": who[0]} if who else {}),
                "cohort": cohort,
                "scores": scores,
                "loss": means(engine.records.losses),
            }
            row |= {"pooled": pooled} if pooled else {}
            measured = means(engine.records.measures)
            row |= {"measured": measured} if measured else {}
            row |= engine.ledger.totals(before)
            broken = engine.records.not_finite() + [f"reply.{handler}" for handler in sorted(engine.not_finite)]
            row |= {"not_finite": broken} if broken else {}
            updates = engine.updates.beside(engine.samples_of)
            beside = {str(i): [_short(part) for part in each] for i, each in updates.items()}
            row |= {"updates": beside} if beside else {}
            left_out, self.missed = [*self.missed, *engine.left_out], []
            row |= {"left_out": [asdict(left) for left in left_out]} if left_out else {}
            row |= {"notes": engine.notes} if engine.notes else {}
            row |= {"privacy": spent} if spent else {}
            stale = engine.staleness
            row |= {"staleness": round(sum(stale) / len(stale), 4)} if stale else {}
            row |= {"simulated_seconds": round(engine.clock, 4)} if self.settings.speeds is not None else {}
            row |= {"seconds": round(seconds, 4), "seconds_scoring": round(seconds - (exchanged - started), 4)}
            self.rows.append(row)
        gallery.keep(self.folder, t, engine.shown)
        self._checkpoint(engine, t, phase)
        self._report_moved(engine)
        if phase in ("round", "finish") and self.rows[-1]["phase"] == phase:
            self.watcher.scored(self.rows[-1])
            self._note(self.rows[-1], engine)
        if phase == "round" and t == self.rounds < self.planned:
            self.watcher.stopped(t, self.why)

    def _take(self, engine: Engine, begin: Callable[[], None], step: Callable[[], None], join: bool) -> None:
        """Take a step; again without them if clients' replies made the method raise, or, later, if too few answered."""
        engine.fresh()
        tries, guesses = 0, 0
        first: Exception | None = None  # what the method raised, as is told if nobody is to blame
        while True:
            blamed: list[Id] = []
            begin()
            try:
                step()
                engine.idle()
                blamed = engine.blame.strange()
                if not blamed:
                    return
            except TooFewReplies:
                engine.abandon()
                tries += 1
                if first is not None or join or not engine.patient(tries):
                    raise
            except Exception as error:
                first = first or error
                blamed = [] if _of_the_author(error) else engine.blamed(error)
                guesses += len(blamed) == 1
                if not blamed or guesses > MOST_GUESSES:
                    raise first from None
            if blamed:
                who = ", ".join(engine.called(i) for i in blamed)
                self.watcher.note(f"round {engine.t}: taken again without {who}: {engine.blame.barred[blamed[0]]}")
            self._go_back(engine)

    def _go_back(self, engine: Engine) -> None:
        """Forget what a step that is taken again has done."""
        if not self.checkpoints.rounds():
            self.state = self.method.server(self.task.problem)
            engine.go_back(None)
            return
        checkpoint = self.checkpoints.read(self.checkpoints.rounds()[-1])
        kind = self.method.state_class("server")
        self.state = None if kind is None else unpack_state(kind, checkpoint.server)
        engine.go_back(checkpoint.resumed())

    def _note(self, row: dict[str, Any], engine: Engine) -> None:
        """Tell people who stands out, of the first row that is not finite, and of the first scores if they are not
        those to stop by."""
        self._note_who_stands_out(row, engine)
        if row.get("not_finite") and not self.warned:
            self.warned = True
            rejected = [left for left in row.get("left_out", []) if left["outcome"] == "rejected"]
            why = "; ".join(f"client {left['client']} rejected: {left['why']}" for left in rejected)
            if not why and (whose := engine.records.not_finite_of()):
                why = f"{self.task.problem.objective.perhaps} ({', '.join(map(engine.called, whose[:3]))} first)"
            names = ", ".join(row["not_finite"])
            self.watcher.note(f"round {row['round']}: {names} not finite: {why or self.task.problem.objective.perhaps}")
        first = row["scores"] and not any(each["scores"] for each in self.rows[:-1])
        if first and self.stop is not None and (missing := self.stop.missing(row["scores"])):
            self.watcher.note(missing)

    def _note_who_stands_out(self, row: dict[str, Any], engine: Engine) -> None:
        updates = {int(i): Beside(*of) for i, of in row.get("updates", {}).items()}
        for client in self.alarms.hear(row["round"], updates):
            self.watcher.note(f"round {row['round']}: {engine.called(client)} {self.alarms.named[client]}")

    def _note_headline(self) -> None:
        """Tell people if nothing scores what the method is to be judged by."""
        kinds = list(dict.fromkeys(kind for row in self.rows for of in row["scores"].values() for kind in of))
        headline = self.method.promises.headline
        if kinds and headline not in (*kinds, "global", "personalised"):  # not all tasks have both
            self.watcher.note(
                f"{self.method.method_name} is to be judged by {headline!r} (its headline), which nothing "
                f"scores: there are {listed(kinds)}"
            )

    def _report_moved(self, engine: Engine) -> None:
        totals = engine.ledger.totals()
        self.watcher.moved(totals["uplink_bytes"], totals["downlink_bytes"])

    def _checkpoint(self, engine: Engine, t: int, phase: str) -> None:
        exchanges, lines = self.kept
        rows = "".join(json.dumps(row) + "\n" for row in self.rows[lines:])
        server = b"" if self.state is None else bytes(pack_state(self.state))
        whole = t - 1 if phase in ("join", "finish") else t
        checkpoint = Checkpoint(
            fewbytes=VERSION,
            nonce=engine.nonce,
            starts=self.starts,
            fingerprint=self.fingerprint,
            round=whole,
            known=torch.tensor(engine.clients, dtype=torch.int64),
            finished=phase == "finish",
            server=server,
            waiting=engine.waiting(),
            under_way=engine.under_way(),
            clock=engine.clock,
            lines=list(engine.downlink.lines.values()),
            heard=msgspec.msgpack.encode(engine.downlink.heard),
            versions=torch.tensor(sorted(engine.versions.items()), dtype=torch.int64).view(-1, 2),
            ledger=self.checkpoints.ledger.grow(engine.ledger.tobytes(exchanges)),
            handlers=engine.ledger.handlers,
            rows=self.checkpoints.rows.grow(rows.encode()),
            seconds=self.seconds,
            peak_memory_bytes=engine.peak_memory_bytes,
        )
        kept = self.checkpoints.files
        if self.settings.durable:
            engine.make_durable(kept[max(kept)] if kept else None)
        self.checkpoints.write(checkpoint, self.settings.keep_checkpoints)
        if engine.released:
            self.spending.keep()
        with open(self.folder / "rounds.jsonl", "a", encoding="utf-8") as file:
            file.write(rows)
        self.kept = len(engine.ledger), len(self.rows)
        engine.checkpointed(list(kept.values()))

    def _summarise(self, engine: Engine) -> None:
        with replacing(self.folder / "result.json") as file:
            file.write(json.dumps(self._summary(engine), indent=2).encode() + b"\n")
        temporary = self.folder / f".ledger.{os.getpid()}.tmp"
        engine.ledger.write_parquet(temporary)
        os.replace(temporary, self.folder / "ledger.parquet")

    def _summary(self, engine: Engine) -> dict[str, Any]:
        asked = {"budget": self.settings.budget, "stop_when": self.settings.stop_when}
        limits: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        if limits:
            limits["ended_by"] = self.ended_by if self.rounds < self.planned else None
        if self.rule != Rule():
            limits["aggregate"] = str(self.rule)
        if stands_out := self.alarms.told():
            limits["stands_out"] = stands_out
        limits |= self.spending.told()
        outcome = Outcome(self.status, self.rounds, len(self.refused), self.seconds, engine.peak_memory_bytes)
        about = self.settings.about | limits
        return summary(self.method, self.task, self.rows, engine.ledger, self.counts.held, outcome, about)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _of_the_author(error: Exception) -> bool:
    """Whether no client's reply can have made a method's server half raise this: a name that nowhere is, an attribute
    that objects of a class do not have."""
    if isinstance(error, AttributeError):
        return error.obj is not None
    return isinstance(error, NameError | ImportError)


def _begin_folder(folder: Path, method: Method, task: Task, rounds: int, config: str | None) -> None:
    if (folder / "config.toml").exists():
        raise UserError(f"{folder} already holds a run: choose another folder, or go on with it (resume=True)")
    if (folder / "gallery").exists():
        raise UserError(f"{folder} already holds a gallery, of another run: choose another folder")
    if config is None:
        made = {"method": method.method_name, "rounds": rounds, "seed": task.problem.seed}
        config = msgspec.toml.encode(made | {"parameters": method.parameters}).decode()
    write_text(folder / "config.toml", config)
    write_text(folder / "rounds.jsonl", "")


@contextmanager
def terminating(stop: threading.Event | None = None) -> Iterator[None]:
    """Treat a polite request to end (SIGTERM) like Ctrl-C; with `stop`, the first of either only sets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        if stop is None or stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    kinds = [signal.SIGTERM] if stop is None else [signal.SIGTERM, signal.SIGINT]
    before = [signal.signal(kind, interrupt) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)
