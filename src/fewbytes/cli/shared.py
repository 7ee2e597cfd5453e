"""Shared by several commands: options, an experiment's settings, the imports allowed, printed results."""

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
from fewbytes.experiments.display import note, printed
from fewbytes.experiments.groups import GROUPS, Repeating

if TYPE_CHECKING:
    from fewbytes.report import RunFolder
    from fewbytes.report.times import Goal

NAME = "bold cyan"  # style of names in lists


def method_names(incomplete: str) -> list[str]:
    """Shell completion: names of built-in methods that start with the text."""
    files = (Path(__file__).parents[1] / "methods").glob("*.py")
    return sorted(name for file in files if (name := file.stem).startswith(incomplete) and name != "__init__")


Out = Annotated[Path, typer.Option(help="Folder to create run folders in.")]
Watch = Annotated[
    list[str] | None,
    typer.Option(
        help="Also log the run to tensorboard, mlflow or trackio, optionally :PLACE (a folder, store or project).",
        metavar="NAME[:PLACE]",
    ),
]
Monitor = Annotated[
    str | None,
    typer.Option(
        help="Serve metrics for Prometheus, a health check and the status there; without HOST, on this machine alone.",
        metavar="[HOST:]PORT",
        envvar="FEWBYTES_MONITOR",
        show_envvar=False,
    ),
]
FromRound = Annotated[
    int | None, typer.Option(metavar="ROUND", help="With --resume: continue after this earlier round.", min=0)
]
Allow = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated modules that a run folder may import code from (default: none).",
        metavar="LIST",
    ),
]
MethodName = Annotated[
    str | None,
    typer.Argument(
        help="Method: a name from `fewbytes methods`, or package.module:Class.", autocompletion=method_names
    ),
]
LinkRate = Annotated[
    str | None,
    typer.Option(
        "--link", help="Results over time on this link, e.g. 10Mbps: training as measured, and bytes over the link.",
        metavar="RATE",
    ),
]  # fmt: skip
DownlinkRate = Annotated[
    str | None, typer.Option("--downlink", help="Download rate, if --link is of uploads only.", metavar="RATE")
]
Reach = Annotated[
    str | None,
    typer.Option(help="Bytes and seconds until this score: 0.9, or of one kind, global>=0.9.", metavar="SCORE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
CONFIG = option("config", None, Path, typer.Option("-c", "--config", help="TOML file with any of the settings below."))
SCHEMA = option(
    "schema", None, Path,
    typer.Option(
        help="Tables only: a survey.json, whose pooled means and categories replace those of the server's table.",
        metavar="FILE", rich_help_panel="Data",
    ),
)  # fmt: skip
METHOD = [
    option(
        "fraction", None, float,
        typer.Option(help="Fraction of clients sampled each round.", rich_help_panel="Method"),
    ),
    option(
        "parameters", None, list[str],
        typer.Option(
            "--set", help="Parameter of the method (compare: or METHOD.KEY).", metavar="KEY=VALUE",
            rich_help_panel="Method",
        ),
    ),
]  # fmt: skip
SETTINGS = [CONFIG, *METHOD, SCHEMA, *(each for group in GROUPS.values() for each in options_of(group))]
"""The options that `run`, `deploy`, `compare` and `plan` share: an experiment's settings."""


STUDIED = [*SETTINGS, *options_of(Repeating)]
"""The options that `run` and `compare` share."""


def study_of(given: dict[str, Any]) -> tuple[dict[str, Any], Repeating]:
    """An experiment's settings, as `settings_of` reads them, and how it is repeated. Raises UserError."""
    repeated = {key: given.pop(key) for key in Repeating.declared() if key in given}
    repeated["tune"] = named_values(repeated.get("tune", []), "--tune")
    return settings_of(given), Repeating.read(repeated)


def settings_of(given: dict[str, Any]) -> dict[str, Any]:
    """An experiment's settings: those of the config file, overridden by the command line."""
    from fewbytes.experiments.config_file import folded, read_experiment

    config = given.pop("config", None)
    settings = read_experiment(config) if config is not None else {}
    if "partition_options" in given:
        named = named_values(given["partition_options"], "--partition-option")
        given["partition_options"] = {key: _literal(value) for key, value in named.items()}
    if "parameters" in given:
        given["parameters"] = parameters_of(given["parameters"])
    if "speeds" in given:
        given["speeds"] = speeds_of(given["speeds"])
    given = folded(given)
    if isinstance(place := given.get("schema"), Path):
        from fewbytes.experiments.survey_schema import with_survey

        given |= with_survey(settings | given, place, note)
    if "parameters" in given:
        given["parameters"] = settings.get("parameters", {}) | given["parameters"]
    return settings | given


def parameters_of(texts: Sequence[str]) -> dict[str, str]:
    """The values of --set by key, KEY or METHOD.KEY, in which methods may be spelled in any way, and keys with dashes.
    Raises UserError."""
    from fewbytes.methods import canonical

    found = {}
    for key, value in named_values(texts, "--set").items():
        method, dot, rest = key.rpartition(".")
        found[f"{canonical(method) if dot else ''}{dot}{rest.replace('-', '_')}"] = value
    return found


def speeds_of(place: str) -> str:
    """Speeds as given, or read from a file with one per line. Raises UserError."""
    if not Path(place).is_file():
        return place
    try:
        return str(Speeds.read(",".join(Path(place).read_text().split())))
    except (OSError, UnicodeDecodeError, UserError):
        raise UserError(f"speeds are {FORM}; the file {place} holds something else") from None


with_study = with_options("asked", STUDIED, study_of)
"""Gives a command these and those of repeated runs; its argument `asked` holds both."""
with_settings = with_options("settings", SETTINGS, settings_of)
"""Gives a command the options of an experiment; its argument `settings` holds the given ones."""


def print_results(folder: Path, results: Any, as_json: bool, goal: Goal | None = None) -> None:
    """Print the results of runs: result.json as it is, or a table and the path of the report, which then has the goal's
    charts, too."""
    from fewbytes.report import read_runs, write_report

    if goal is not None and (goal.up or goal.target is not None):
        write_report(read_runs([folder]), folder / "report.html", goal)
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        show(read_runs([folder]), folder / "report.html", goal)


def show(runs: Sequence[RunFolder], page: Path, goal: Goal | None = None) -> None:
    """Print the table of some runs, their way to the goal's target, the recommended methods, results by site, and the
    path of the report."""
    from fewbytes.report import caveats, choices, summary_table
    from fewbytes.report.differences import differences, differences_table
    from fewbytes.report.evaluation import evaluation_of
    from fewbytes.report.evaluation_tables import evaluation_table
    from fewbytes.report.evaluation_words import verdicts
    from fewbytes.report.repeats import repeated
    from fewbytes.report.target import target_table
    from fewbytes.report.tuned import tuned

    printed.print(summary_table(runs, printed.width))
    for each in differences(runs):
        printed.print(differences_table(each))
        printed.print(f"{each.sentence}.", soft_wrap=True)
    for text in tuned(runs):
        printed.print(text, soft_wrap=True)
    if goal is not None and goal.target is not None:
        printed.print(target_table(repeated(runs), goal, printed.width))
    found, by_site = choices(runs), evaluation_of(runs)
    for text in [*map(str, found), *caveats(runs)] if found else ():
        printed.print(text, soft_wrap=True)
    if by_site is not None and len(runs) == 1:
        printed.print(evaluation_table(by_site))
    for text in verdicts(by_site) if by_site is not None else ():
        printed.print(text, soft_wrap=True)
    printed.print(f"report: {page}", soft_wrap=True)
    print_terms()


def print_terms() -> None:
    """Print where the terms of the tables above are explained."""
    from fewbytes.report.table import GLOSSARY

    printed.print(f"terms: {GLOSSARY}", soft_wrap=True)


@contextlib.contextmanager
def standard_output_for(as_json: bool) -> Iterator[None]:
    """With --json, only the result goes to standard output; prints of models and handlers go to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def naming(allow: str | None, folder: Path | None, *named: str) -> contextlib.AbstractContextManager[None]:
    """Restrict imports, and machines to call, to --allow and `named` while files of a run folder are read. Without a
    folder all settings are the user's own. Raises UserError for a folder with links out of it."""
    if folder is None:
        return contextlib.nullcontext()
    if any((folder / name).exists() for name in ("config.toml", "comparison.json", "deployment")):
        check_own(folder)  # other folders are refused later, as no run folder
    return only_allowed(*(name.strip() for name in (allow or "").split(",")), *named)


def named_values(texts: Sequence[str], option: str) -> dict[str, str]:
    """Texts like KEY=VALUE, by key. Raises UserError for another text, naming the option."""
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
