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
    chosen: dict[str, _Choice] = {}


def tuned(runs: Sequence[RunFolder]) -> list[str]:
    """How the parameters of runs were chosen, a line for each method; none for runs that no comparison tuned.

    Raises UserError for a damaged comparison.json.
    """
    lines: list[str] = []
    for folder in dict.fromkeys(run.path.parent for run in runs):
        file = folder / "comparison.json"
        found = _read(file) if file.is_file() else None
        if found is not None and found.chosen:
            share = found.settings.get("validation", 0)
            lines.append(f"parameters were chosen on validation data, {float(share):.0%} of the training samples:")
            lines += [each.why for each in found.chosen.values()]
    return lines


def _read(file: Path) -> _Comparison:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Comparison)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged: {' '.join(str(error).split())}") from None
