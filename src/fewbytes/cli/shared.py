"""What several commands take and do: options, an experiment's settings, whose code is imported, results printed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewbytes.base.errors import UserError
from fewbytes.base.files import check_own
from fewbytes.base.named import only_allowed
from fewbytes.cli.options import option, options_of, with_options
from fewbytes.core.speeds import FORM, Speeds
from fewbytes.experiments.display import printed
from fewbytes.experiments.groups import GROUPS

if TYPE_CHECKING:
    from fewbytes.report import RunFolder

NAME = "bold cyan"  # how the names of what is listed look


def method_names(incomplete: str) -> list[str]:
    """For the shell: the names of our own methods that begin so."""
    files = (Path(__file__).parents[1] / "methods").glob("*.py")
    return sorted(name for file in files if (name := file.stem).startswith(incomplete) and name != "__init__")


Out = Annotated[Path, typer.Option(help="Where run folders go.")]
Watch = Annotated[
    list[str] | None,
    typer.Option(
        help="Also show the run in tensorboard, mlflow or trackio; after a colon where: a folder, a store, a project.",
        metavar="NAME[:PLACE]",
    ),
]
FromRound = Annotated[
    int | None, typer.Option(metavar="ROUND", help="With --resume: go back to after this round.", min=0)
]
Allow = Annotated[
    str | None,
    typer.Option(
        help="Modules, with commas, of which code that a run's own files name may be imported (default: none).",
        metavar="LIST",
    ),
]
MethodName = Annotated[
    str | None,
    typer.Argument(help="A name of `fewbytes methods`, or package.module:Class.", autocompletion=method_names),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
CONFIG = option(
    "config", None, Path, typer.Option("-c", "--config", help="A TOML file with any of the settings below.")
)
METHOD = [
    option(
        "fraction", None, float,
        typer.Option(help="Part of the clients that takes part in a round.", rich_help_panel="Method"),
    ),
    option(
        "parameters", None, list[str],
        typer.Option(
            "--set", help="A field of the method (compare: or METHOD.KEY).", metavar="KEY=VALUE",
            rich_help_panel="Method",
        ),
    ),
]  # fmt: skip
SETTINGS = [CONFIG, *METHOD, *(each for group in GROUPS.values() for each in options_of(group))]
"""The options that `run`, `deploy`, `compare` and `plan` share: an experiment's settings."""


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """An experiment's settings: the config file's, and over them those named on the command line."""
    from fewbytes.experiments.settings import folded, read_experiment

    config = given.pop("config", None)
    settings = read_experiment(config) if config is not None else {}
    if "partition_options" in given:
        named = named_values(given["partition_options"], "--partition-option")
        given["partition_options"] = {key: _literal(value) for key, value in named.items()}
    if "parameters" in given:
        given["parameters"] = named_values(given["parameters"], "--set")
    if "speeds" in given:
        given["speeds"] = speeds_of(given["speeds"])
    given = folded(given)
    if "parameters" in given:
        given["parameters"] = settings.get("parameters", {}) | given["parameters"]
    return settings | given


def speeds_of(place: str) -> str:
    """Speeds as they are written, of which a file may hold one a line. Raises UserError."""
    if not Path(place).is_file():
        return place
    try:
        return str(Speeds.read(",".join(Path(place).read_text().split())))
    except (OSError, UnicodeDecodeError, UserError):
        raise UserError(f"speeds are {FORM}; the file {place} holds something else") from None


with_settings = with_options("settings", SETTINGS, settings_of)
"""Gives a command the options of an experiment; it gets the settings that were named as `settings`."""


def print_results(folder: Path, results: Any, as_json: bool) -> None:
    """Print what came of runs: result.json as it is, or a table and where the report is."""
    from fewbytes.report import read_runs

    if as_json:
        print(json.dumps(results, indent=2))
    else:
        show(read_runs([folder]), folder / "report.html")


def show(runs: Sequence[RunFolder], page: Path) -> None:
    """Print the table of some runs, which to take, and where their report is."""
    from fewbytes.report import caveats, choices, summary_table

    printed.print(summary_table(runs, printed.width))
    found = choices(runs)
    for text in [*map(str, found), *caveats(runs)] if found else ():
        printed.print(text, soft_wrap=True)
    printed.print(f"report: {page}", soft_wrap=True)


@contextlib.contextmanager
def standard_output_for(as_json: bool) -> Iterator[None]:
    """With --json, standard output is the result's alone: what models or handlers print goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def naming(allow: str | None, folder: Path | None, *named: str) -> contextlib.AbstractContextManager[None]:
    """While something is made of the files in a run's folder: only code that --allow names, or was `named`, is
    imported, and only such machines are called. Where there is no folder, all settings are the user's own. Raises
    UserError for a folder with links out of it."""
    if folder is None:
        return contextlib.nullcontext()
    if any((folder / name).exists() for name in ("config.toml", "comparison.json", "deployment")):
        check_own(folder)  # any other is refused as what it is
    return only_allowed(*(name.strip() for name in (allow or "").split(",")), *named)


def named_values(texts: Sequence[str], option: str) -> dict[str, str]:
    """Texts like KEY=VALUE, by key. Raises UserError for another, which names the option."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{option} takes KEY=VALUE, not {text!r}")
        found[key.strip()] = value.strip()
    return found


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
