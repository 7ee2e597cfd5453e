"""Commands for operators who follow what runs: status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbytes.cli.shared import AsJson, Out
from fewbytes.experiments.display import printed


def status(
    run: Annotated[
        str | None,
        typer.Argument(help="A run's folder, or http://HOST:PORT of a monitoring endpoint (default: the newest run)."),
    ] = None,
    out: Out = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Print the status of a run, during it or after it: rounds, sites, bytes, time left. Exit code 1: it stopped.

    Example: `fewbytes status`
    """
    import msgspec

    from fewbytes.federation.status import of_url, trouble, words
    from fewbytes.running.status import newest, read

    is_url = run is not None and run.startswith(("http://", "https://"))
    found = of_url(run) if run is not None and is_url else read(newest(out) if run is None else Path(run))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for line in words(found):
            printed.print(line, soft_wrap=True)
    if trouble(found):
        raise typer.Exit(1)
