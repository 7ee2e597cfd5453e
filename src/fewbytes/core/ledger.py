"""All exchanges of a run: client, round, handler, bytes each way, and outcome."""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fewbytes.core.problem import Id
from fewbytes.wire.value import Counted

OUTCOMES = ("answered", "unreachable", "late", "failed", "rejected", "surplus", "excluded", "declined")
"""Outcomes, in order: a reply came; the node was missing; no reply in time; the handler failed; the reply was refused,
before any use or because it broke the round, which was then repeated without it; others were faster than this surplus
client, or a stream's client (`Network.stream`) was still at work after the last round, or left; not asked, by the
operator's setting, after too many refused replies, or as its site declines; the site's policy declines."""


@dataclass(frozen=True)
class Row:
    """One exchange with one client: frame lengths in bytes, papers' counts of the same payloads, and the outcome."""

    round: int
    handler: str
    client: Id
    bytes_down: int
    bytes_up: int
    down: Counted
    up: Counted
    outcome: str = "answered"  # one of OUTCOMES
    steps: int = 0  # of local training, in a run with a round time
    seconds: float = 0.0  # of the simulated clock when the reply came; 0: no such clock was asked for


@dataclass(frozen=True)
class LeftOut:
    """A client whose reply was not used in an exchange, and the reason in words."""

    client: Id
    handler: str
    outcome: str
    why: str


BLOCK = 4096  # rows packed at once


class Ledger:
    """All exchanges of a run, in order: client, round, handler, bytes each way.

    In memory, full blocks of rows are packed by column, to about 3 bytes an exchange.

    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))] * 2)
    >>> ledger = fb.run(fb.FedAvg(), task, rounds=3).ledger
    >>> len(ledger), ledger.handlers, ledger.columns()["client"].tolist()
    (6, ['train'], [0, 1, 0, 1, 0, 1])
    >>> ledger.totals()["uplink_value_bytes"]
    480
    """

    COLUMNS = (
        "round",
        "handler",
        "client",
        "bytes_down",
        "bytes_up",
        "value_bytes_down",
        "value_bytes_up",
        "mask_bits_down",
        "mask_bits_up",
        "outcome",
        "steps",
        "simulated_ms",
    )

    def __init__(self) -> None:
        self._packed: list[bytes] = []
        self._rows = array("q")  # rows after the packed ones
        self._totals = _totals_of(self.columns())
        self._refused = False  # whether any reply was ever refused
        self.handlers: list[str] = []

    def __len__(self) -> int:
        return BLOCK * len(self._packed) + len(self._rows) // len(self.COLUMNS)

    def add(self, row: Row) -> None:
        """Append an exchange."""
        if row.handler not in self.handlers:
            self.handlers.append(row.handler)
        handler, outcome = self.handlers.index(row.handler), OUTCOMES.index(row.outcome)
        timing = row.steps, round(1000 * row.seconds)
        nominal = (row.down.value_bytes, row.up.value_bytes, row.down.mask_bits, row.up.mask_bits)
        self._rows.extend((row.round, handler, row.client, row.bytes_down, row.bytes_up, *nominal, outcome, *timing))
        self._refused |= row.outcome == "rejected"
        moved = (row.bytes_up, row.bytes_down, row.up.nominal_bytes, row.down.nominal_bytes, *nominal[1::-1])
        for name, size in zip(self._totals, moved, strict=True):
            self._totals[name] += size
        if len(self._rows) == BLOCK * len(self.COLUMNS):
            self._packed.append(zlib.compress(self._unpacked().tobytes(), 1))
            self._rows = array("q")

    def _unpacked(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The rows not packed yet; (columns, rows)."""
        return np.frombuffer(self._rows.tobytes(), np.int64).reshape(-1, len(self.COLUMNS)).T

    def _table(self, start: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The rows from `start` on; (columns, rows)."""
        first = start // BLOCK
        packed = (np.frombuffer(zlib.decompress(each), np.int64) for each in self._packed[first:])
        blocks = [block.reshape(-1, BLOCK) for block in packed]
        return np.concatenate([*blocks, self._unpacked()], axis=1)[:, start - BLOCK * min(first, len(self._packed)) :]

    def columns(self, start: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """The columns from row `start` on, int64; `handler` is an index into `handlers`, `outcome` into OUTCOMES."""
        return dict(zip(self.COLUMNS, self._table(start), strict=True))

    def totals(self, start: int = 0) -> dict[str, int]:
        """Bytes from row `start` on: `uplink_bytes`, `downlink_bytes`, the papers' counts of them (nominal), and the
        values' part of these."""
        return _totals_of(self.columns(start)) if start else dict(self._totals)

    def refused_in_a_row(self) -> dict[Id, int]:
        """For each client with a refused reply: the number of most recent rounds, without a break, in which it was
        asked and its reply refused."""
        if not self._refused:
            return {}
        c = self.columns()
        refused_once = np.unique(c["client"][c["outcome"] == OUTCOMES.index("rejected")])
        of = np.isin(c["client"], refused_once)
        rounds: dict[Id, dict[int, bool]] = {}
        for client, t, outcome in zip(*(c[name][of].tolist() for name in ("client", "round", "outcome")), strict=True):
            if OUTCOMES[outcome] in ("answered", "rejected"):
                rounds.setdefault(client, {})[t] = OUTCOMES[outcome] == "rejected"
        return {
            client: len(list(itertools.takewhile(bool, reversed(list(refused.values())))))
            for client, refused in rounds.items()
        }

    def write_parquet(self, path: Path, times: Mapping[int, str] | None = None) -> None:
        """The ledger as a Parquet file. `times`: when rounds ended (UTC, ISO 8601), for the column `time`. It is in the
        file alone: equal runs have equal ledgers."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = self.columns()
        arrays: dict[str, Any] = {
            name: pa.array(values, pa.int32() if name in ("round", "client") else pa.int64())
            for name, values in columns.items()
            if name not in ("handler", "outcome")
        }
        for name, words in (("handler", self.handlers or [""]), ("outcome", OUTCOMES)):
            arrays[name] = pa.array(np.array(words, dtype=object)[columns[name]] if len(self) else [], pa.string())
        table = pa.table({name: arrays[name] for name in self.COLUMNS})
        if times is not None:
            ended = [times.get(t, "").removesuffix("Z") or None for t in columns["round"].tolist()]
            when = pa.array(ended, pa.string()).cast(pa.timestamp("s")).cast(pa.timestamp("s", "UTC"))
            table = table.append_column("time", when)
        pq.write_table(table, path)

    @classmethod
    def read_parquet(cls, path: Path) -> Ledger:
        """Undo `write_parquet`; columns that files of earlier versions lack are 0. Raises UserError for a file that
        would be far larger in memory, KeyError for other columns or outcomes, and pyarrow's errors."""
        from fewbytes.base.parquet import read_parquet

        table = read_parquet(path)
        rows = np.zeros((table.num_rows, len(cls.COLUMNS)), np.int64)
        handlers = dict.fromkeys(table["handler"].to_pylist())
        numbers = {"handler": {each: i for i, each in enumerate(handlers)}}
        numbers["outcome"] = {each: i for i, each in enumerate(OUTCOMES)}
        for place, name in enumerate(cls.COLUMNS):
            if name in numbers:
                rows[:, place] = [numbers[name][word] for word in table[name].to_pylist()]
            elif name in table.column_names or name not in ("steps", "simulated_ms"):
                rows[:, place] = table[name].to_numpy()
        return cls.frombytes(rows.tobytes(), list(handlers))

    def tobytes(self, start: int = 0) -> bytes:
        """The rows from `start` on as bytes, for a checkpoint."""
        return self._table(start).T.tobytes()

    @classmethod
    def frombytes(cls, rows: bytes, handlers: list[str]) -> Ledger:
        """Undo `tobytes`."""
        ledger = cls()
        block = BLOCK * 8 * len(cls.COLUMNS)
        whole = len(rows) // block * block
        for start in range(0, whole, block):
            table = np.frombuffer(rows[start : start + block], np.int64).reshape(BLOCK, -1)
            ledger._packed.append(zlib.compress(table.T.tobytes(), 1))
        ledger._rows.frombytes(rows[whole:])
        ledger.handlers = list(handlers)
        columns = ledger.columns()
        ledger._totals = _totals_of(columns)
        ledger._refused = bool((columns["outcome"] == OUTCOMES.index("rejected")).any())
        return ledger


def _totals_of(c: Mapping[str, np.ndarray[Any, np.dtype[np.int64]]]) -> dict[str, int]:
    nominal = {way: c[f"value_bytes_{way}"] + (c[f"mask_bits_{way}"] + 7) // 8 for way in ("up", "down")}
    return {
        "uplink_bytes": int(c["bytes_up"].sum()),
        "downlink_bytes": int(c["bytes_down"].sum()),
        "uplink_nominal_bytes": int(nominal["up"].sum()),
        "downlink_nominal_bytes": int(nominal["down"].sum()),
        "uplink_value_bytes": int(c["value_bytes_up"].sum()),
        "downlink_value_bytes": int(c["value_bytes_down"].sum()),
    }
