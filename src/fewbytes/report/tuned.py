"""The parameters that a comparison chose for its methods, from its comparison.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.report.folder import RunFolder


class _Choice(msgspec.Struct):
    why: str


class _Comparison(msgspec.Struct):
    settings: dict[str, Any]
    tune: dict[str, str] = {}
    chosen: dict[str, _Choice] = {}


def tuned(runs: Sequence[RunFolder]) -> list[str]:
    """How the parameters of runs were chosen, a line for each method; none for runs that no comparison tuned.

    Raises UserError for a damaged comparison.json.
    """
    lines: list[str] = []
    for found in _comparisons(runs):
        if found.chosen:
            share = found.settings.get("validation", 0)
            lines.append(f"parameters were chosen on validation data, {float(share):.0%} of the training samples:")
            lines += [each.why for each in found.chosen.values()]
    return lines


def tuned_keys(runs: Sequence[RunFolder]) -> set[str]:
    """The parameters that were tuned, for one method or all. Raises as `tuned`."""
    return {key.rpartition(".")[2] for found in _comparisons(runs) for key in found.tune}


def _comparisons(runs: Sequence[RunFolder]) -> list[_Comparison]:
    files = [folder / "comparison.json" for folder in dict.fromkeys(run.path.parent for run in runs)]
    return [_read(file) for file in files if file.is_file()]


def _read(file: Path) -> _Comparison:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Comparison)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged: {' '.join(str(error).split())}") from None
