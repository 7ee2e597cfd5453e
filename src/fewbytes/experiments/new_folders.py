"""New folders for runs, which go again if the run is refused."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from fewbytes.base.errors import UserError
from fewbytes.base.files import make_durable, make_folder


@contextlib.contextmanager
def unless_refused(run: Path, new: Path | None) -> Iterator[None]:
    """Remove the folder made for a run if the run is refused before it starts."""
    try:
        yield
    except UserError:
        if new is not None and not (run / "config.toml").exists():
            shutil.rmtree(new)
        raise


def new_folder(out: Path, name: str) -> Path:
    """A new folder in `out`, named by the time and `name`. Raises UserError if it cannot be made."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with contextlib.suppress(OSError):
        make_folder(out)
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        folder = out / f"{stamp}-{name}{suffix}"
        try:
            folder.mkdir()
            make_durable(out)
        except FileExistsError:
            continue
        except OSError:
            break
        return folder
    raise UserError(f"no new run folder can be made in {out}")
