"""The scores of runs as a pandas frame, in long form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbytes.base.extras import needs
from fewbytes.report.folder import RunFolder
from fewbytes.report.reading import read_runs
from fewbytes.report.repeats import repeated

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("method", "seed", "round", "kind", "metric", "value", "bytes_up", "bytes_down", "seconds", "run")


def results(folders: Path | str | Sequence[Path | str]) -> pd.DataFrame:
    """Every score of some runs, a row each, as a pandas frame.

    `folders`: run folders, or folders of them, such as a comparison's. Columns: `method` (with the settings that
    differ, if it ran with several), `seed`, `round`, `kind` and `metric` of the score, its `value`, and what all
    clients together had sent (`bytes_up`) and received (`bytes_down`), and how long the run had taken (`seconds`), when
    that round ended; `run` is the run's folder. Raises UserError if pandas is missing, or as `read_runs` does.

    >>> import tempfile
    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))], test=(x, y))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for method in (fb.FedAvg(), fb.FedProx()):
    ...         result = fb.run(method, task, rounds=2, out=f"{folder}/{method.method_name}")
    ...     frame = fb.results(folder)
    >>> list(frame["method"].unique()), len(frame[frame["kind"] == "global"]), list(frame.columns)[:4]
    (['fedavg', 'fedprox'], 4, ['method', 'seed', 'round', 'kind'])
    """
    needs("a frame of results", "results", "pandas")
    import pandas as pd

    runs = read_runs([folders] if isinstance(folders, Path | str) else folders)
    rows = [row for each in repeated(runs) for run in each.runs for row in _rows(each.label, run)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(label: str, run: RunFolder) -> Iterator[tuple[Any, ...]]:
    up = down = 0
    seconds, seed = 0.0, run.fact("seed")
    for row in run.rounds:
        up, down = up + row["uplink_bytes"], down + row["downlink_bytes"]
        seconds += row.get("seconds", 0.0)
        for metric, kinds in row.get("scores", {}).items() if row["phase"] != "join" else ():
            for kind, value in kinds.items():
                yield label, seed, row["round"], kind, metric, value, up, down, round(seconds, 4), str(run.path)
