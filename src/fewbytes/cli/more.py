"""The other commands: papers' tables, the files of something new, what is installed here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.cli.options import options_of, with_options
from fewbytes.cli.shared import NAME, AsJson, named_values, standard_output_for
from fewbytes.experiments.display import console, printed
from fewbytes.experiments.groups import Reproducing


def _reproducing(given: dict[str, Any]) -> Reproducing:
    """What was named of a reproduction. Raises UserError."""
    return Reproducing.read(given | {"parameters": named_values(given.get("parameters", []), "--set")})


@with_options("how", options_of(Reproducing), _reproducing)
def reproduce(
    how: Reproducing,
    table: Annotated[str | None, typer.Argument(help="SYSTEM/TABLE; without it, those there are.")] = None,
    scale: Annotated[str, typer.Option(help="small (minutes), or paper: as the paper has it.")] = "small",
    out: Annotated[
        Path, typer.Option(help="Where the runs and the table go, below a folder each system and scale.")
    ] = Path("runs/reproduce"),
    every: Annotated[bool, typer.Option("--all", help="Every table, and one document of the papers' claims.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a paper's table, ours beside theirs; the same command goes on where it was stopped."""
    from fewbytes.reproduce import NOT_HERE, TABLES, read_table, reproduce_all, scale_of
    from fewbytes.reproduce import reproduce as reproduce_table

    if every:
        if table is not None:
            raise UserError("--all is of every table: leave out the table's name, or --all")
        with standard_output_for(as_json):
            path, failed = reproduce_all(
                scale, out, tell=lambda text: console.print(text, soft_wrap=True), **dataclasses.asdict(how)
            )
        if as_json:
            print(json.dumps({"document": str(path), "failed": failed}, indent=2))
        else:
            printed.print(f"document: {path}", soft_wrap=True)
        if failed:
            raise FewbytesError(f"{len(failed)} of the tables failed; the same command tries them again")
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
            printed.print(f"not here, {name}: {why}", soft_wrap=True)
        return
    with standard_output_for(as_json):
        made = reproduce_table(
            table, scale, out, tell=lambda text: console.print(text, soft_wrap=True), **dataclasses.asdict(how)
        )
    if as_json:
        print(json.dumps(made.as_json(made.chosen()), indent=2))
    else:
        printed.print(made.heading, soft_wrap=True)
        printed.print(made.table())
        for verdict in made.verdicts:
            printed.print(verdict, soft_wrap=True)
        printed.print(f"report: {made.path.with_suffix('.html')}", soft_wrap=True)


new = typer.Typer(help="Write the files of something new.")


@new.command("method")
def method_files(
    name: Annotated[str, typer.Argument(help="The name of its class, e.g. FedSAM.")],
    folder: Annotated[
        Path, typer.Option(help="Where the files go, outside a checkout of fewbytes.", metavar="DIR")
    ] = Path("."),
) -> None:
    """Write a method's file, its test and its card: FedAvg under another name, to be changed."""
    from fewbytes.experiments.new import new_method

    called, paths = new_method(name, folder)
    printed.print("wrote " + ", ".join(map(str, paths)), soft_wrap=True)
    printed.print(f"it runs: fewbytes run {called}", soft_wrap=True)


@new.command("project")
def project_files(
    name: Annotated[str, typer.Argument(help="The name of its folder, e.g. my-hospitals.")],
    folder: Annotated[Path, typer.Option(help="Where the folder goes.", metavar="DIR")] = Path("."),
) -> None:
    """Write a small tested project: own data, own model, a config, a test.

    Example: `fewbytes new project my-hospitals`
    """
    from fewbytes.experiments.new import new_project

    paths = new_project(name, folder)
    printed.print("wrote " + ", ".join(map(str, paths)), soft_wrap=True)
    printed.print(f"it runs: cd {paths[0].parent}; fewbytes run -c config.toml", soft_wrap=True)


def doctor() -> None:
    """Tell what is installed here, and what works: extras, cores, GPU, shared memory, data."""
    from fewbytes.experiments.doctor import findings

    for found in findings():
        line = Text.assemble((f"{found.about:<16}", NAME), found.words)
        printed.print(line if not found.mend else line + Text(f": {found.mend}", "yellow"), soft_wrap=True)
