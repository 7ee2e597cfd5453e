"""The live line of a run, or of other long tasks, in the terminal."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.text import Text

from fewbytes.base.errors import visible
from fewbytes.base.units import listed, moved
from fewbytes.core.policy import ABSENT
from fewbytes.running.line import duration, score_words
from fewbytes.running.watcher import Watcher

if TYPE_CHECKING:
    from fewbytes.core.problem import Id

PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
"""Options of consoles that print text unchanged: paths, names and errors may contain [brackets] or :colons:."""
MAIN = ("global", "personalised")
"""The kinds of score on a live line besides the method's own; result.json and the report have all."""


class Visible(Console):
    """A console that escapes control characters: names of folders, classes or columns may be untrusted."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print as any console; with `soft_wrap`, lines end between words on a terminal, if each fits into one.
        Elsewhere they are whole."""
        longest = max((len(word) for each in objects for word in str(each).split()), default=0)
        super().print(*objects, soft_wrap=soft_wrap and (not self.is_terminal or longest > self.width), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Print as any console, with control characters made visible."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


console = Visible(stderr=True, **PLAIN)
"""Standard error, for progress, notes and errors."""
printed = Visible(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100, **PLAIN)
"""Standard output, for results."""


def note(text: str) -> None:
    """Print a note, above the live line if there is one."""
    console.print(Text.assemble(("note:", "yellow"), f" {text}"), soft_wrap=True)


class Display(Watcher):
    """A live line: rounds done, time left, score and megabytes so far (of both directions, and of each); at the end the
    figures of result.json. A narrow terminal shows the most important parts.

    Without a terminal it prints some of the lines; for a deployment, one per round. `headline`: the kind of score that
    comes first. `place`: the position among several runs, as in `2 of 3`.
    """

    def __init__(
        self, name: str, folder: Path, command: str = "run", headline: str = "global", place: str = ""
    ) -> None:
        self._command, self._headline = command, headline
        self._seconds: list[float] = []  # per round
        self._folder, self._up, self._down, self._replies = folder, 0, 0, 0
        self._name, self._rounds, self._when = name, 0, "round"
        self._scores: dict[str, dict[str, float]] = {}
        self._spent = ""  # privacy budget
        self._joined: list[Id] = []
        self._noted: set[str] = set()
        self._absent: dict[Id, str] = {}
        self._without: set[tuple[Id, str, str]] = set()  # clients left out of the last round, and why
        self._label = f"{name} ({place})" if place else name
        self._progress = _line()
        self._bar = self._progress.add_task(self._label, total=None, text="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._replies = 0
            self._show()
        self._progress.stop()
        if kind is KeyboardInterrupt:
            again = f"resume with: fewbytes {self._command} --resume {quote(str(self._folder))}"
            console.print(
                f"interrupted; {again if self._command else 'give the command again to continue'}", soft_wrap=True
            )

    def waiting(self, there: int, wanted: int) -> None:
        """Show how many clients are connected."""
        self.step(f"waiting for clients: {there} of {wanted} are connected")

    def awaited(self, clients: Sequence[str]) -> None:
        """Show their names."""
        self.step(f"waiting for {', '.join(clients[:3])}{f' and {len(clients) - 3} more' if len(clients) > 3 else ''}")

    def step(self, text: str) -> None:
        """Show what happens instead of a round."""
        self._progress.update(self._bar, text=text)
        if not console.is_terminal:
            console.print(f"{self._name}: {text}", soft_wrap=True)

    def started(self, folder: Path, rounds: int, done: int) -> None:
        """Set the length of the line."""
        self._rounds = rounds
        self._progress.update(self._bar, total=rounds, completed=done, text=f"round {done}/{rounds}")

    def note(self, text: str) -> None:
        """Print a note."""
        note(text)

    def joined(self, client: Id) -> None:
        """Show the client with the next round."""
        self._joined.append(client)
        self._replies = 0
        self._progress.update(self._bar, text=f"joined: {self._joiners()}")

    def refused(self, client: Id, why: str) -> None:
        """Print the reason, above the line."""
        self._absent[client] = why
        self.note(f"client {client} cannot join: {why}")

    def _joiners(self) -> str:
        return f"client{'s' if len(self._joined) > 1 else ''} {listed(self._joined)}"

    def replied(self, client: Id) -> None:
        """Count the client."""
        self._replies += 1
        self._show()

    def moved(self, uplink_bytes: int, downlink_bytes: int) -> None:
        """Show the bytes with the next line."""
        self._up, self._down = uplink_bytes, downlink_bytes

    def scored(self, row: dict[str, Any]) -> None:
        """Show the round and its scores; print its notes."""
        self._replies = 0
        last = row["phase"] == "finish"
        done = self._rounds if last else row["round"]
        self._seconds.append(row.get("seconds", 0.0))
        when = f"{'after ' if last else ''}round {done}"
        if self._joined:
            self.note(f"{when}: joined: {self._joiners()}")
            self._joined = []
        for what, how_much in row.get("notes", {}).items():
            if what not in self._noted:
                self.note(f"{self._name}, {when}: {what} ({how_much})")
                self._noted.add(what)
        for left in row.get("left_out", []):
            client, why = left["client"], left["why"]
            if left["outcome"] == "surplus":  # not a failure
                continue
            if left["handler"] != ABSENT:
                if (client, left["outcome"], why) not in self._without:
                    self.note(f"{when}: client {client} {left['outcome']}: {why}")
            elif self._absent.get(client) != why:
                self._absent[client] = why
                self.note(f"from {when} on, client {client} is left out until this changes: {why}")
        self._without = {(left["client"], left["outcome"], left["why"]) for left in row.get("left_out", [])}
        if row["scores"]:
            self._when = "after round" if last else "round"
            before = self._scores if last else {}
            self._scores = {metric: before.get(metric, {}) | kinds for metric, kinds in row["scores"].items()}
        if "privacy" in row:
            spent = row["privacy"]["epsilon"]
            self._spent = f"epsilon {spent:.2f}" if spent else ""  # a survey's is stated beside its figures
        self._progress.update(self._bar, completed=done)
        self._show()
        often = 1 if self._command == "deploy" else max(1, self._rounds // 5)
        due = row["scores"] if last else done % often == 0 or done == 1
        if due and not console.is_terminal:
            console.print(f"{self._label}: {self._text(done)}", soft_wrap=True)

    def stopped(self, t: int, why: str) -> None:
        """Shorten the line, and print the reason."""
        self._rounds = t
        self._progress.update(self._bar, total=t)
        self.note(f"{self._name} ends with round {t}: {why}")

    def _show(self) -> None:
        done = int(self._progress.tasks[self._bar].completed)
        room = console.width - len(self._label) - _bar_width() - 3
        self._progress.update(self._bar, text=self._text(done, room))

    def _text(self, done: int, room: int = 1 << 16) -> str:
        """The text of the line, in at most `room` characters."""
        kinds = {metric: list(of) for metric, of in self._scores.items()}
        first = next(((m, k) for m, of in kinds.items() for k in of if k == self._headline), None)
        first = first or next(((m, k) for m, of in kinds.items() for k in of), None)
        own = {first[0]: {first[1]: self._scores[first[0]][first[1]]}} if first else {}
        rest = {m: {k: v for k, v in of.items() if (m, k) != first and k in MAIN} for m, of in self._scores.items()}
        named = list(self._scores) != ["accuracy"]
        left = (self._rounds - done) * statistics.median(self._seconds) if self._seconds and console.is_terminal else 0
        sent = moved(self._up, self._down)
        parts = [  # in order; higher ranks are dropped first
            (f"{self._when} {done}/{self._rounds}", 0),
            (f"client {self._replies} of this one" if self._replies else "", 4),
            (score_words(own, named), 1),
            (score_words({m: of for m, of in rest.items() if of and m in own}, False), 5),
            (score_words({m: of for m, of in rest.items() if of and m not in own}, named), 5),
            (sent, 0),
            (self._spent, 1),
            (f"{duration(left)} left" if left >= 1 else "", 3),
        ]
        for gone in (6, 5, 4, 3, 2, 1):
            short = sent if gone > 2 else sent.partition(" (")[0]
            text = "  ".join(short if words == sent else words for words, rank in parts if words and rank < gone)
            if len(text) <= room:
                break
        return text


def _bar_width() -> int:
    return 24 if console.width >= 120 else 12 if console.width >= 100 else 6


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A live line with the time left for a task of known length; yields a function (steps done, steps, text)."""
    with _line(TimeRemainingColumn(), transient=True) as line:
        bar = line.add_task(name, total=None, text="starting")
        yield lambda done, steps, text: line.update(bar, completed=done, total=steps, text=text)


def _line(*more: ProgressColumn, **how: bool) -> Progress:
    name = TextColumn("{task.description}", style="bold", markup=False)
    columns = name, BarColumn(bar_width=_bar_width()), TextColumn("{task.fields[text]}", markup=False), *more
    how = {"disable": not console.is_terminal} | how
    return Progress(*columns, console=console, **how)  # type: ignore[arg-type]  # none of them but flags
