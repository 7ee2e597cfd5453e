"""The live line of a run, or of other long work, in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fewbytes.base.units import listed, written
from fewbytes.running.watcher import Watcher

if TYPE_CHECKING:
    from fewbytes.core.problem import Id

PLAIN: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
"""Of consoles that print text as it is: paths, names and errors may hold [brackets] or :colons:."""
console = Console(stderr=True, **PLAIN)
"""Where the command line talks to people."""
printed = Console(**PLAIN)
"""Standard output, which is for results."""


def note(text: str) -> None:
    """Print something worth knowing, above the live line if there is one."""
    console.print(Text.assemble(("note:", "yellow"), f" {text}"), soft_wrap=True)


class Display(Watcher):
    """A live line: rounds done, scores by their kinds and megabytes so far; at the end what result.json says.

    Where there is no terminal, lines now and then; of a deployment, of which logs are kept, one a round.
    """

    def __init__(self, name: str, folder: Path, command: str = "run") -> None:
        self._command = command
        self._folder, self._up, self._down, self._replies = folder, 0, 0, 0
        self._name, self._rounds, self._when = name, 0, "round"
        self._scores: dict[str, dict[str, float]] = {}
        self._spent = ""  # of what the run promises of privacy
        self._joined: list[Id] = []
        self._noted: set[str] = set()
        self._progress = _line(TimeElapsedColumn())
        self._bar = self._progress.add_task(name, total=None, text="starting")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._replies = 0
            self._show()
        self._progress.stop()
        if kind is KeyboardInterrupt:
            console.print(f"interrupted; go on with: fewbytes {self._command} --resume {self._folder}", soft_wrap=True)

    def waiting(self, there: int, wanted: int) -> None:
        """Show how many clients are connected."""
        text = f"waiting for clients: {there} of {wanted} are connected"
        self._progress.update(self._bar, text=text)
        if not console.is_terminal:
            console.print(f"{self._name}: {text}")

    def started(self, folder: Path, rounds: int, done: int) -> None:
        """Set the length of the line."""
        self._rounds = rounds
        self._progress.update(self._bar, total=rounds, completed=done, text=f"round {done}/{rounds}")

    def note(self, text: str) -> None:
        """As `note`."""
        note(text)

    def joined(self, client: Id) -> None:
        """Name the client with the next round."""
        self._joined.append(client)
        self._replies = 0
        self._progress.update(self._bar, text=f"joined: {self._joiners()}")

    def refused(self, client: Id, why: str) -> None:
        """Say why, above the line."""
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
        """Show the round and its scores; say what people should know of it."""
        self._replies = 0
        last = row["phase"] == "finish"
        done = self._rounds if last else row["round"]
        when = f"{'after ' if last else ''}round {done}"
        if self._joined:
            self.note(f"{when}: joined: {self._joiners()}")
            self._joined = []
        for what, how_much in row.get("notes", {}).items():
            if what not in self._noted:
                self.note(f"{self._name}, {when}: {what} ({how_much})")
                self._noted.add(what)
        for left in row.get("left_out", []):
            if left["outcome"] == "surplus":  # nothing went wrong
                continue
            self.note(f"{when}: client {left['client']} {left['outcome']}: {left['why']}")
        if row["scores"]:
            self._when = "after round" if last else "round"
            before = self._scores if last else {}
            self._scores = {metric: before.get(metric, {}) | kinds for metric, kinds in row["scores"].items()}
        if "privacy" in row:
            self._spent = f"  epsilon {row['privacy']['epsilon']:.2f}"
        self._progress.update(self._bar, completed=done)
        self._show()
        often = 1 if self._command == "deploy" else max(1, self._rounds // 5)
        due = row["scores"] if last else done % often == 0 or done == 1
        if due and not console.is_terminal:
            console.print(f"{self._name}: {self._text(done)}")

    def stopped(self, t: int, why: str) -> None:
        """Shorten the line, and say why."""
        self._rounds = t
        self._progress.update(self._bar, total=t)
        self.note(f"{self._name} ends with round {t}: {why}")

    def _show(self) -> None:
        done = int(self._progress.tasks[self._bar].completed)
        self._progress.update(self._bar, text=self._text(done))

    def _text(self, done: int) -> str:
        now = f", client {self._replies} of this one" if self._replies else ""
        scores = score_words(self._scores)
        moved = f"{self._up / 1e6:.2f} MB up {self._down / 1e6:.2f} MB down"
        return f"{self._when} {done}/{self._rounds}{now}  {scores}  {moved}{self._spent}"


def score_words(scores: dict[str, dict[str, float]]) -> str:
    """Scores by metric and kind in a line; accuracy, where it is the only metric, needs no name."""
    from fewbytes.core.metrics import traits  # imports torch, which is there where something was scored

    lines = []
    for metric, kinds in scores.items():
        share = traits(metric)[1]
        line = "  ".join(f"{kind} {written(value, share)}" for kind, value in kinds.items())
        lines.append(line if list(scores) == ["accuracy"] else f"{metric}: {line}")
    return "  ".join(lines)


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """A live line with the time left for work of a known length; what it gives shows (steps done, steps, text)."""
    with _line(TimeRemainingColumn(), transient=True, disable=not console.is_terminal) as line:
        bar = line.add_task(name, total=None, text="starting")
        yield lambda done, steps, text: line.update(bar, completed=done, total=steps, text=text)


def _line(time: ProgressColumn, **how: bool) -> Progress:
    name = TextColumn("{task.description}", style="bold", markup=False)
    columns = name, BarColumn(bar_width=24), TextColumn("{task.fields[text]}", markup=False), time
    return Progress(*columns, console=console, **how)  # type: ignore[arg-type]  # none of them but flags
