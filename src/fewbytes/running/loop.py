"""The loop every engine shares: begin, phases, checkpoint, finish."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fewbytes.base.errors import MethodError
from fewbytes.base.files import make_durable, write_text
from fewbytes.core import gallery
from fewbytes.core.ledger import Ledger
from fewbytes.core.method import Method
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.engines.engine import Engine
from fewbytes.engines.terms import Origin
from fewbytes.running.checkpoint import Checkpoint, Checkpoints, Progress, check, fingerprint, read_checkpoint
from fewbytes.running.folder import begin_folder, forget_result
from fewbytes.running.promises.counts import PartitionCounts
from fewbytes.running.promises.joiners import staying
from fewbytes.running.promises.promise import Opening, Phase, Promise, Row
from fewbytes.running.rounds import Rounds
from fewbytes.running.scoring import score
from fewbytes.running.settings import Settings
from fewbytes.running.signals import terminating
from fewbytes.running.steps import add_place, take
from fewbytes.running.summary import Outcome, summary, write_results
from fewbytes.wire import unpack_state


class Loop:
    """A run of a method on a task in a folder, which keeps its `promises`: first `begin`, then `run`."""

    engine: Engine

    def __init__(
        self, method: Method, task: Task, settings: Settings, folder: Path, promises: Sequence[Promise]
    ) -> None:
        self.method, self.task, self.settings, self.folder = method, task, settings, folder
        self.watcher, self.counts = settings.watcher, PartitionCounts(task.data, folder)
        self.promises = [self.counts, *promises]
        self.rounds = Rounds(method.planned_rounds(settings.rounds), promises)
        how = f"coded {settings.coded}, evaluated every {settings.evaluate_every}"
        self.fingerprint = fingerprint(method, task, how + "".join(promise.terms for promise in promises))
        self.checkpoints = Checkpoints(folder, settings.durable, settings.keep_checkpoints)
        self.state: Any = None  # the server's
        self.rows: list[Row] = []  # the lines of rounds.jsonl
        self.kept = 0, 0  # how many exchanges and rows the last checkpoint has
        self.starts, self.seconds, self.status = 0, 0.0, "running"

    def begin(self) -> Checkpoint | None:
        """The checkpoint to resume from; None for a new folder, which it creates. Raises UserError if it cannot."""
        settings = self.settings
        if not settings.resume:
            begin_folder(self.folder, self.method, self.rounds.planned, self.task.problem.seed, settings.config)
            self.counts.write()
            if settings.durable:
                make_durable(self.folder / "config.toml", self.folder / "partition.json", self.folder)
            return None
        checkpoint = read_checkpoint(self.folder, settings.from_round)
        last = self.checkpoints.rounds()[-1]
        if settings.from_round is None and checkpoint.round < last:
            path = self.checkpoints.path(last)
            self.watcher.note(f"the checkpoint {path} is damaged: the run resumes after round {checkpoint.round}")
        self.rows = [json.loads(line) for line in self.checkpoints.rows.read(checkpoint.rows).splitlines()]
        for promise in self.promises:
            promise.recall(self.rows)
        self.rounds.end(self.rows, checkpoint.round)
        check(checkpoint, self.fingerprint, self.folder, self.rounds.last)
        for promise in self.promises if settings.from_round is not None else ():
            promise.restore(self.rows, self.rounds.last - checkpoint.round)
        if settings.config is not None:  # with settings that changed, for the next resumption
            write_text(self.folder / "config.toml", settings.config)
        self.starts = checkpoint.starts = self.checkpoints.starts() + 1
        # so that no number is used twice, however often a run is resumed
        self.checkpoints.write_again(checkpoint)
        known = staying(checkpoint.known.tolist(), self.task.problem, min(checkpoint.round + 1, self.rounds.last))
        checkpoint.known = torch.tensor(known, dtype=torch.int64)
        return checkpoint

    def origin(self, checkpoint: Checkpoint | None) -> Origin:
        """The state from which an engine continues: of a checkpoint, or at the start."""
        return Origin.start(self.task.problem) if checkpoint is None else checkpoint.origin()

    def run(self, engine: Engine, checkpoint: Checkpoint | None) -> dict[str, Any]:
        """Run all phases on an engine; returns the content of result.json."""
        self.engine, engine.replies.on_reply = engine, self.watcher.replied
        for promise in self.promises:
            promise.begin(engine)
        if checkpoint is None:
            self.state = self.method.server(self.task.problem)
        else:
            self._resume(checkpoint)
        self.watcher.started(self.folder, self.rounds.last, 0 if checkpoint is None else checkpoint.round)
        if self.rounds.last < self.rounds.planned:
            self.watcher.stopped(self.rounds.last, self.rounds.why)
        self._report_moved()
        try:
            with terminating():
                self._phases(checkpoint)
                self.checkpoints.settle()
                engine.checkpointed(self.checkpoints.named())
            self.status = "done"
        except KeyboardInterrupt:
            self.status = "interrupted"
            self.checkpoints.settle()
            raise
        except Exception as error:
            add_place(error, self.method.method_name, engine.step.t)
            if more := "".join(promise.explain(error) for promise in self.promises):
                error.args = (f"{error}{more}",)
            self.watcher.ended({"status": "failed", "why": str(error) or type(error).__name__})
            raise
        finally:
            self.checkpoints.close()
            if self.status != "running":
                write_results(self.folder, self._summary(), engine.ledger, self.rows)
                self.watcher.ended(self._summary())
        return self._summary()

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Restore everything from the checkpoint."""
        self.recall_state(checkpoint)
        self.seconds, self.engine.memory.peak = checkpoint.seconds, checkpoint.peak_memory_bytes
        if self.checkpoints.restore(checkpoint.round):
            forget_result(self.folder)
        write_text(self.folder / "rounds.jsonl", self.checkpoints.rows.restore(checkpoint.rows).decode())
        exchanges = self.checkpoints.ledger.restore(checkpoint.ledger)
        self.engine.replies.resume(Ledger.frombytes(exchanges, checkpoint.handlers))
        self.kept = len(self.engine.ledger), len(self.rows)
        gallery.forget_after(self.folder, checkpoint.round + checkpoint.finished)

    def recall_state(self, checkpoint: Checkpoint) -> None:
        """Restore the server's state."""
        kind = self.method.state_class("server")
        self.state = None if kind is None else unpack_state(kind, checkpoint.server)

    def _phases(self, checkpoint: Checkpoint | None) -> None:
        """The start, the rounds and the final step, from a checkpoint on."""
        engine, method, problem = self.engine, self.method, self.task.problem
        if checkpoint is None:
            self._phase(0, "start", lambda state: method.start(state, engine.network))
        t = 0 if checkpoint is None else checkpoint.round
        while (t := t + 1) <= self.rounds.last:
            engine.roster.clients = staying(engine.roster.clients, problem, t)
            opening = Opening(t, engine.arrivals(t), engine, partial(self._phase, t))
            for promise in self.promises:
                promise.before_round(opening)
            self._phase(t, "round", partial(self._round, t))
        if checkpoint is None or not checkpoint.finished:
            self._phase(self.rounds.last + 1, "finish", self._finish)

    def _round(self, t: int, state: Any) -> None:
        if self.method.round(state, self.engine.network, t) is not None:
            raise MethodError(f"{type(self.method).__name__}.round returns nothing: it changes what `state` holds")

    def _finish(self, state: Any) -> None:
        self.engine.streaming.give_up()
        self.engine.scheduler.deliver()
        self.method.finish(state, self.engine.network)

    def _phase(self, t: int, phase: str, step: Callable[[Any], None], client: Id | None = None) -> None:
        """Run a phase: take its step, score the models, write the results, and call the watcher."""
        engine, started, before = self.engine, time.monotonic(), len(self.engine.ledger)
        due = phase == "round" and (t % self.settings.evaluate_every == 0 or t == self.rounds.last)
        shows = due or phase == "finish" or (phase == "round" and self.rounds.may_end("sent"))
        names = () if client is None else (f"join {client}",)
        begin = partial(engine.begin, t, shows, *names)
        take(engine, begin, lambda: step(self.state), self._go_back, self.watcher.note, patient=client is None)
        done = Phase.of(engine, phase, client, before)
        for promise in self.promises:
            promise.after_phase(done)
        exchanged = time.monotonic()
        done.seconds = exchanged - started, 0.0
        score(done, engine, self.state, self.rounds, self.rows, due)
        ended = time.monotonic()
        done.seconds = ended - started, ended - exchanged
        self.seconds += ended - started
        if phase in ("round", "join") or len(engine.ledger) > before or done.scores:
            for promise in self.promises:
                done.row |= promise.row(done)
            self.rows.append(done.row)
        gallery.keep(self.folder, t, engine.step.shown)
        self._checkpoint(done)
        self._report(done)

    def _go_back(self) -> None:
        """Undo a step that will be repeated."""
        if not self.checkpoints.rounds():
            self.state = self.method.server(self.task.problem)
            self.engine.restore(self.origin(None))
            return
        checkpoint = self.checkpoints.read(self.checkpoints.rounds()[-1])
        self.recall_state(checkpoint)
        self.engine.restore(self.origin(checkpoint))

    def _checkpoint(self, done: Phase) -> None:
        """Write the checkpoint after a phase, and its line; both are synced to disk during the next phase."""
        engine, checkpoints, (exchanges, lines) = self.engine, self.checkpoints, self.kept
        checkpoints.settle()
        rows = "".join(json.dumps(row) + "\n" for row in self.rows[lines:])
        progress = Progress(self.fingerprint, self.starts, self.seconds, done.round, done.phase, self.state)
        checkpoints.write(checkpoints.build(engine, progress, exchanges, rows), engine)
        if done.released:
            checkpoints.settle()  # count spent privacy durably before anything is sent
        for promise in self.promises:
            promise.kept(done)
        with open(self.folder / "rounds.jsonl", "a", encoding="utf-8") as file:
            file.write(rows)
        self.kept = len(engine.ledger), len(self.rows)
        engine.checkpointed(checkpoints.named())
        checkpoints.sync()  # last, as files are slow to change while others are synced

    def _report(self, done: Phase) -> None:
        """Report a phase to the watcher."""
        self._report_moved()
        if done.phase in ("round", "finish"):
            if done.row:
                self.watcher.scored(done.row)
            for promise in self.promises:
                for note in promise.notes(done):
                    self.watcher.note(note)
        if done.phase == "round" and done.round == self.rounds.last < self.rounds.planned:
            self.watcher.stopped(done.round, self.rounds.why)

    def _report_moved(self) -> None:
        totals = self.engine.ledger.totals()
        self.watcher.moved(totals["uplink_bytes"], totals["downlink_bytes"])

    def _summary(self) -> dict[str, Any]:
        entries = self.rounds.result_entries()
        for promise in self.promises:
            entries |= promise.result_entries()
        outcome = Outcome(self.status, self.rounds.last, self.seconds, self.engine.memory.peak)
        about, counts = self.settings.about | entries, self.counts.counts
        return summary(self.method, self.task, self.rows, self.engine.ledger, counts, outcome, about)
