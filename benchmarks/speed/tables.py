"""Seconds and peak memory of reading tables as data sets, beside pandas reading the same file into float32.

    python benchmarks/speed/tables.py [ROWSxCOLUMNS ...]

Default: 200x20000 and 5000000x20, of numbers and a class, as CSV and as Parquet. Each reading is a process of its own;
its memory is the largest resident set, less that of a process which only imports.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

BY = {
    "nothing": "",
    "fewbytes": "load_dataset(path, schema=Schema(target=('y',)))",
    "pandas": "(pandas.read_csv if path.endswith('csv') else pandas.read_parquet)(path).to_numpy('float32')",
}
CHILD = """
import resource, sys, time
import pandas, torch
from fewbytes.data import Schema, load_dataset
path = sys.argv[1]
start = time.perf_counter()
{code}
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write(folder: Path, rows: int, columns: int) -> list[Path]:
    """A table of that size as CSV and as Parquet."""
    rng = np.random.default_rng(0)
    held = {f"x{i}": rng.normal(size=rows).round(4) for i in range(columns - 1)} | {"y": rng.integers(0, 2, rows)}
    table = pa.table(held)
    paths = [folder / f"{rows}x{columns}.csv", folder / f"{rows}x{columns}.parquet"]
    pyarrow.csv.write_csv(table, paths[0])
    pq.write_table(table, paths[1])
    return paths


def measured(path: Path, by: str) -> tuple[float, float]:
    """Seconds and bytes of one reading."""
    child = [sys.executable, "-c", CHILD.format(code=BY[by]), str(path)]
    seconds, kib = subprocess.run(child, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(kib) * 1024


def main() -> None:
    """Print a line a file and reader."""
    sizes = [tuple(map(int, size.split("x"))) for size in sys.argv[1:]] or [(200, 20_000), (5_000_000, 20)]
    with tempfile.TemporaryDirectory() as folder:
        for rows, columns in sizes:
            for path in write(Path(folder), rows, columns):
                _, imports = measured(path, "nothing")
                for by in ("fewbytes", "pandas"):
                    seconds, peak = measured(path, by)
                    size = path.stat().st_size / 1e6
                    print(f"{path.name} ({size:,.0f} MB), {by}: {seconds:.2f} s, {(peak - imports) / 1e9:.2f} GB")
                path.unlink()


if __name__ == "__main__":
    main()
