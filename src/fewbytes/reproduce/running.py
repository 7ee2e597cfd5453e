"""Runs the cells of a table, each seed in its own folder, and resumes where an earlier command stopped."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.named import only_allowed
from fewbytes.data.datasets import load_dataset
from fewbytes.experiments.display import Display, console
from fewbytes.experiments.groups import Reproducing
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.run_folders import begun, finished
from fewbytes.experiments.settings import Experiment, experiment_of, make_experiment
from fewbytes.generators import load_generator
from fewbytes.methods import short_name
from fewbytes.report.folder import RunFolder
from fewbytes.report.reading import read_run
from fewbytes.reproduce.grid import Cell

NOT_COMPARED = ("workers", "device")
"""Settings that may change when a cell resumes: figures depend on them only by rounding errors."""


class Pause(KeyboardInterrupt):
    """Ends a run after a round as Ctrl-C does, so that it can be resumed."""


class CellDisplay(Display):
    """The live line of one cell, which stops the run after the round `until`."""

    def __init__(self, name: str, folder: Path, until: int | None) -> None:
        super().__init__(name, folder)
        self._until = until

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(None)
        if kind is KeyboardInterrupt:
            console.print("interrupted; run the same command to resume")

    def scored(self, row: dict[str, Any]) -> None:
        """Show a scored round; from round `until` on, raise Pause, except in the last round."""
        super().scored(row)
        if self._until is not None and self._until <= row["round"] < self._rounds:
            raise Pause


def data_of(cell: Cell) -> set[str]:
    """The datasets that a cell needs, and the generator that its rules name."""
    return set(_loaders(cell))


def _loaders(cell: Cell) -> dict[str, Callable[[str], object]]:
    """The loader of each name in `data_of`."""
    data, generator = (
        (cell.settings["dataset"], cell.settings.get("public")),
        cell.settings["parameters"].get("generator"),
    )
    loaders: dict[str, Callable[[str], object]] = {name: load_dataset for name in data if isinstance(name, str)}
    return loaders | ({generator: load_generator} if generator else {})


def unavailable(cells: Sequence[Cell]) -> dict[str, str]:
    """The unavailable names among the cells' `data_of`, with reasons."""
    loaders = {name: load for cell in cells for name, load in _loaders(cell).items()}
    missing = {}
    for name in sorted(loaders):
        try:
            loaders[name](name)
        except UserError as error:
            missing[name] = str(error)
    return missing


def folder_of(cell: Cell, seed: int, out: Path) -> Path:
    """The folder of the run of a cell and seed."""
    return out / f"{cell.run}-seed{seed}"


def run_cells(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    out: Path,
    how: Reproducing,
    *,
    tell: Callable[[str], None] = lambda text: None,
    ended: Callable[[], object] = lambda: None,
) -> None:
    """Run the unfinished runs of the cells, seed by seed, each in its folder below `out`.

    Further measurements for figures use finished runs. `tell` is called with lines of progress, and `ended` after each
    run. Raises UserError, before any run starts, for a folder with a damaged run or one of other settings, and errors
    of `fewbytes.run`; finished work is kept, and is resumed.
    """
    jobs = {folder_of(cell, seed, out): (cell, seed) for seed in seeds for cell in cells}
    settings = {
        folder: {"save_models": False, **cell.settings, "seed": seed, "workers": how.workers, "device": how.device}
        for folder, (cell, seed) in jobs.items()
    }
    to_do = {folder for folder, each in settings.items() if _to_do(folder, make_experiment(each), how.until)}
    for number, (folder, (cell, seed)) in enumerate(jobs.items(), 1):
        equal = [each for each in cells if each.run == cell.run]
        if folder in to_do:
            others = len(equal) - 1
            more = f" and {others} more cell{'s' if others > 1 else ''}" if others else ""
            tell(f"run {number} of {len(jobs)}: {cell.row}, {cell.column}{more}, seed {seed} ({folder})")
            display = CellDisplay(short_name(cell.settings["method"]), folder, how.until)
            with contextlib.suppress(Pause):
                PreparedRun(settings[folder]).execute(folder, begun(folder), page=False, display=display)
                shutil.rmtree(folder / "checkpoint")  # the states of all clients, which are not needed any more
        if finished(folder):
            for each in equal:
                each.figure.measure(folder, tell)
        if folder in to_do:
            ended()


def read_cell(folder: Path) -> RunFolder:
    """The run in a cell's folder. Raises UserError if it is damaged."""
    finished(folder)
    try:
        return read_run(folder)
    except UserError as error:
        raise UserError(f"{error}; remove that run's folder to start it again") from None


def _to_do(folder: Path, experiment: Experiment, until: int | None) -> bool:
    """Whether a run has rounds to do. Raises UserError for a folder with a run of other settings, and as `begun` and
    `read_cell` do."""
    if not finished(folder) and not begun(folder):
        return True
    with only_allowed(experiment.method):  # the folder's config may name other code
        there, wanted = (
            {key: value for key, value in each.settings().items() if key not in NOT_COMPARED}
            for each in (experiment_of(folder), experiment)
        )
    if there != wanted:
        differ = ", ".join(sorted(key for key in there.keys() | wanted if there.get(key) != wanted.get(key)))
        raise UserError(f"{folder} holds a run with other settings ({differ}): move it away, or name another --out")
    done = max((row["round"] for row in read_cell(folder).rounds if row["phase"] == "round"), default=0)
    return not finished(folder) and (until is None or done < until or done == experiment.run.rounds)
