"""The other commands: reproduce, new, doctor."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.text import Text

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.cli.options import options_of, with_options
from fewbytes.cli.shared import NAME, AsJson, parameters_of, standard_output_for
from fewbytes.experiments.display import console, printed
from fewbytes.experiments.groups import Reproducing


def _reproducing(given: dict[str, Any]) -> Reproducing:
    """The options of a reproduction. Raises UserError."""
    return Reproducing.read(given | {"parameters": parameters_of(given.get("parameters", []))})


@with_options("how", options_of(Reproducing), _reproducing)
def reproduce(
    how: Reproducing,
    table: Annotated[str | None, typer.Argument(help="SYSTEM/TABLE (default: list the tables).")] = None,
    scale: Annotated[str, typer.Option(help="Scale: small (minutes), or paper (the paper's own).")] = "small",
    out: Annotated[Path, typer.Option(help="Output folder, with one folder per system and scale.")] = Path(
        "runs/reproduce"
    ),
    every: Annotated[bool, typer.Option("--all", help="Run every table; write one document of all claims.")] = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a paper's table, and compare its figures with ours; the same command resumes it."""
    from fewbytes.reproduce import NOT_HERE, TABLES, read_table, reproduce_all, scale_of
    from fewbytes.reproduce import reproduce as reproduce_table

    if every:
        if table is not None:
            raise UserError("--all runs every table: leave out the table's name, or --all")
        with standard_output_for(as_json):
            path, failed = reproduce_all(
                scale, out, tell=lambda text: console.print(text, soft_wrap=True), **dataclasses.asdict(how)
            )
        if as_json:
            print(json.dumps({"document": str(path), "failed": failed}, indent=2))
        else:
            printed.print(f"document: {path}", soft_wrap=True)
        if failed:
            raise FewbytesError(f"{len(failed)} of the tables failed; run the same command to retry them")
        return
    if table is None:
        known = {name: read_table(path, scale_of(scale)) for name, path in TABLES.items()}
        listed = {
            name: {"title": each.title, "runs": len({cell.run for cell in each.cells}) * len(each.seeds)}
            for name, each in known.items()
        }
        if as_json:
            print(json.dumps(listed, indent=2))
        for name, each in listed.items() if not as_json else ():
            runs = f"{each['runs']} run{'s' if each['runs'] != 1 else ''}"
            printed.print(Text.assemble((name, NAME), f": {each['title']} ({runs})"), soft_wrap=True)
        for name, why in NOT_HERE.items() if not as_json else ():
            printed.print(f"not available, {name}: {why}", soft_wrap=True)
        return
    with standard_output_for(as_json):
        reproduction = reproduce_table(
            table, scale, out, tell=lambda text: console.print(text, soft_wrap=True), **dataclasses.asdict(how)
        )
    if as_json:
        print(json.dumps(reproduction.as_json(reproduction.chosen()), indent=2))
    else:
        printed.print(reproduction.heading, soft_wrap=True)
        printed.print(reproduction.table())
        for verdict in reproduction.verdicts:
            printed.print(verdict, soft_wrap=True)
        printed.print(f"report: {reproduction.path.with_suffix('.html')}", soft_wrap=True)


new = typer.Typer(help="Write the files of a new project, or of a new method.")


@new.command("method")
def method_files(
    name: Annotated[str, typer.Argument(help="Name of its class, e.g. FedSAM.")],
    folder: Annotated[
        Path, typer.Option(help="Output folder, if it is outside a checkout of fewbytes.", metavar="DIR")
    ] = Path("."),
) -> None:
    """Write the files of a new method: code, test and page. It starts as a copy of FedAvg."""
    from fewbytes.experiments.new import new_method

    called, paths = new_method(name, folder)
    printed.print("wrote " + ", ".join(map(str, paths)), soft_wrap=True)
    printed.print(f"it runs: fewbytes run {called}", soft_wrap=True)


@new.command("project")
def project_files(
    name: Annotated[str, typer.Argument(help="Name of its folder, e.g. my-hospitals.")],
    folder: Annotated[Path, typer.Option(help="Parent folder.", metavar="DIR")] = Path("."),
) -> None:
    """Write a small project to start from: own data, own model, a config, a test.

    Example: `fewbytes new project my-hospitals`
    """
    from fewbytes.experiments.new import new_project

    paths = new_project(name, folder)
    printed.print("wrote " + ", ".join(map(str, paths)), soft_wrap=True)
    printed.print(f"it runs: cd {quote(str(paths[0].parent))}; fewbytes run -c config.toml", soft_wrap=True)


def doctor() -> None:
    """Check what is installed and what works: extras, cores, GPU, shared memory, data."""
    from fewbytes.experiments.doctor import findings

    for found in findings():
        line = Text.assemble((f"{found.about:<16}", NAME), found.words)
        printed.print(line if not found.fix else line + Text(f": {found.fix}", "yellow"), soft_wrap=True)
