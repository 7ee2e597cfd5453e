"""The command that tests models at every site, here or at real nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewbytes.base.errors import UserError
from fewbytes.cli.machines import Deploying, Where, deploy_run
from fewbytes.cli.shared import Allow, AsJson, Monitor, naming, standard_output_for
from fewbytes.experiments.display import printed

if TYPE_CHECKING:
    from fewbytes.experiments.evaluate import Evaluating
    from fewbytes.report.records import Evaluation

PANEL = "At real sites"


def evaluate(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, a folder of them, or one model's .safetensors file.", metavar="RUN|MODEL"),
    ],
    alone: Annotated[bool, typer.Option("--alone", help="Train every site alone, to compare with.")] = False,
    pooled: Annotated[
        bool, typer.Option("--pooled", help="Train on all sites' data together, to compare with.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Train without this site, to measure its contribution; repeatable.", metavar="NAME"),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            help="Further sites that never trained: a folder with one folder or table per site.", metavar="PLACE"
        ),
    ] = None,
    by: Annotated[str | None, typer.Option(help="Tables only: column of subgroups.", metavar="COLUMN")] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics, comma-separated (default: the run's).", metavar="LIST")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder (default: the run's folder; at real sites: runs).", metavar="DIR"),
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of a federation, whose members are the sites.", rich_help_panel=PANEL),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(help="Names of the sites' hosts, comma-separated.", metavar="LIST", rich_help_panel=PANEL),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="host:port where the sites reach this machine.", rich_help_panel=PANEL)
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="host:port where the server listens, if not everywhere at the address's port.", rich_help_panel=PANEL
        ),
    ] = None,
    min_replies: Annotated[
        float | None,
        typer.Option(help="Fraction of the sites that must answer (default: 0.5).", rich_help_panel=PANEL),
    ] = None,
    monitor: Monitor = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Test models on the data of every site, and compare with training alone; adds it to the run's report.

    With --federation or --hosts, the sites test the runs' shared models on their own machines.

    Example: `fewbytes evaluate runs/my-run --alone --pooled`
    """
    from fewbytes.experiments.evaluate import Evaluating

    names = tuple(name.strip() for name in metrics.split(",")) if metrics is not None else ()
    how = Evaluating(alone, pooled, tuple(without or ()), sites, by, names)
    if federation is None and hosts is None:
        _evaluate_here(runs, how, out, allow, as_json)
        return
    if alone or pooled or without or sites or by:
        raise UserError(
            "--alone, --pooled, --without, --sites and --by need the data on this machine: leave them out with "
            "--federation and --hosts"
        )
    at = Deploying(
        out or Path("runs"), Where(hosts, address, listen, federation), allow=allow, monitor=monitor, as_json=as_json
    )
    _evaluate_at_sites(runs, names, AtSites(at, min_replies), as_json)


def _evaluate_here(runs: Sequence[Path], how: Evaluating, out: Path | None, allow: str | None, as_json: bool) -> None:
    from fewbytes.experiments.evaluate import evaluate as evaluate_runs
    from fewbytes.report import read_runs, write_report

    file = runs[0].suffix == ".safetensors"
    with standard_output_for(as_json), naming(allow, None if file else runs[0]):
        folder, found = evaluate_runs(runs, how, out)
        if not file and out is None:
            write_report(read_runs(runs), folder / "report.html")
    _print(folder, found, as_json)


@dataclass(frozen=True)
class AtSites:
    """How real sites are asked."""

    deploying: Deploying
    min_replies: float | None


def _evaluate_at_sites(runs: Sequence[Path], metrics: Sequence[str], at: AtSites, as_json: bool) -> None:
    from fewbytes.experiments.evaluating import evaluating, into_runs

    with standard_output_for(as_json), naming(at.deploying.allow, runs[0]):
        settings = evaluating(runs, metrics)
    if at.min_replies is not None:
        settings["min_replies"] = at.min_replies
    folder = deploy_run(settings, at.deploying)
    assert folder is not None
    _print(folder, into_runs(folder, runs), as_json)


def _print(folder: Path, found: Evaluation, as_json: bool) -> None:
    from fewbytes.report.evaluation import PAGE
    from fewbytes.report.evaluation_tables import evaluation_table, group_table
    from fewbytes.report.evaluation_words import verdicts

    if as_json:
        print(json.dumps(found, indent=2))
        return
    for metric in found["metrics"]:
        printed.print(evaluation_table(found, metric))
    for text in verdicts(found):
        printed.print(text, soft_wrap=True)
    if (groups := group_table(found)) is not None:
        printed.print(groups)
    printed.print(f"evaluation: {folder / PAGE}", soft_wrap=True)
