"""What a comparison was asked for, and the parameters it has chosen: comparison.json in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import UserError
from fewbytes.base.files import locked, make_folder, replacing

ASKED = "comparison.json"


class Chosen(msgspec.Struct):
    """A method's parameters as chosen on validation data, and the reason in words."""

    parameters: dict[str, Any]
    why: str


class Study(msgspec.Struct, omit_defaults=True):
    """Methods (or "all"), settings, the seeds of the runs (none: that of the settings), the values to try by parameter
    (KEY or METHOD.KEY) as text, the number of settings to try if not all (Optuna), and the choice for each method."""

    methods: list[str]
    settings: dict[str, Any]
    seeds: list[int] = []
    tune: dict[str, str] = {}
    trials: int | None = None
    chosen: dict[str, Chosen] = {}

    def asked(self) -> bytes:
        """What was asked for, without what has been chosen, as JSON."""
        return msgspec.json.encode(msgspec.structs.replace(self, chosen={}))


def read_study(folder: Path) -> Study:
    """The comparison in a folder. Raises UserError if it is missing or unreadable."""
    try:
        return msgspec.json.decode((folder / ASKED).read_bytes(), type=Study)
    except OSError:
        those = sorted(path.parent for path in folder.glob(f"*/{ASKED}"))
        such = f"; resume one of those in it, such as {those[-1]}" if those else ""
        raise UserError(f"{folder} is not a comparison's folder{such}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / ASKED} is damaged ({error}): start the comparison again") from None


def begin_study(folder: Path, study: Study) -> Study:
    """Write the comparison into a folder, or read the one that is there; returns it.

    Raises UserError if that is another comparison, or the folder holds something else.
    """
    try:
        make_folder(folder)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{folder} cannot be a comparison's folder: a file is in the way") from None
    with locked(folder / "lock"):
        if (folder / ASKED).exists():
            there = read_study(folder)
            check_same(folder, there, study)
            return there
        if strangers := sorted(path.name for path in folder.iterdir() if path.name != "lock"):
            raise UserError(f"{folder} holds {strangers[0]} and no comparison: name a new folder")
        _write(folder, study)
    return study


def check_same(folder: Path, there: Study, asked: Study) -> None:
    """Raises UserError if the comparison in a folder is not the one asked for."""
    was, now = (msgspec.json.decode(each.asked()) for each in (there, asked))
    for part in dict.fromkeys((*was, *now)):
        if was.get(part) != now.get(part):
            raise UserError(
                f"{folder} holds a comparison with other {part} ({_short(was.get(part))}, not {_short(now.get(part))}"
                "): give the same, or only --resume, or name another folder"
            )


def choose(folder: Path, method: str, chosen: Chosen) -> Chosen:
    """Record the choice for a method, unless another process has recorded one; returns the recorded one."""
    with locked(folder / "lock"):
        study = read_study(folder)
        if method not in study.chosen:
            study.chosen[method] = chosen
            _write(folder, study)
    return study.chosen[method]


def _write(folder: Path, study: Study) -> None:
    with replacing(folder / ASKED) as file:
        file.write(msgspec.json.format(msgspec.json.encode(study), indent=2))


def _short(value: Any) -> str:
    text = "none" if value is None else msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else f"{text[:97]}..."
