"""The command line: its commands. They import when they run, so that help needs no torch."""

from __future__ import annotations

import typer

from fewbytes.cli.after import attack, audit, export, inspect_file, probe, report, statement
from fewbytes.cli.brief import FIRST, Brief
from fewbytes.cli.check import check
from fewbytes.cli.codec import decode, encode
from fewbytes.cli.endings import ending
from fewbytes.cli.evaluation import evaluate
from fewbytes.cli.federation import federation, node
from fewbytes.cli.machines import deploy
from fewbytes.cli.more import doctor, new, reproduce
from fewbytes.cli.partition import partition
from fewbytes.cli.runs import compare, methods, plan, run
from fewbytes.cli.schemas import schema
from fewbytes.cli.surveys import survey
from fewbytes.cli.watching import status

app = typer.Typer(
    name="fewbytes",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for each in (
    *(methods, run, deploy, compare, plan, partition, reproduce, report, probe, attack, export, encode, decode, doctor),
    *(audit, statement, check, status, evaluate, survey, schema),
):
    app.command(cls=Brief if each.__name__ in FIRST else None)(each)
app.command("inspect")(inspect_file)
app.add_typer(new, name="new")
app.add_typer(federation, name="federation")
app.add_typer(node, name="node")


@app.callback()
def of_all() -> None:
    """Federated learning over slow links, measured in the bytes that cross the wire."""


def main() -> None:
    """Run the command line."""
    ending(lambda: app(standalone_mode=False))  # which returns an exit code if typer ended the command itself
