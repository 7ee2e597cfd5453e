"""The command that tests models at every site, here or at real nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fewbytes.base.errors import UserError
from fewbytes.cli.answers import print_ended, print_evaluation
from fewbytes.cli.brief import HelpAll
from fewbytes.cli.machines import (
    PANEL,
    Address,
    ByMailbox,
    Deploying,
    FederationFolder,
    Hosts,
    Listen,
    MailboxPlace,
    Where,
    deploy_run,
)
from fewbytes.cli.shared import Allow, AsJson, Monitor, naming, standard_output_for
from fewbytes.experiments.display import printed
from fewbytes.experiments.membership import named_in

if TYPE_CHECKING:
    from fewbytes.experiments.evaluate import Evaluating
    from fewbytes.experiments.evaluating import Repeat


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
    by: Annotated[
        str | None,
        typer.Option(help="Tables only: column of subgroups; of numbers with limits: age=50,70.", metavar="COLUMN"),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="Metrics, comma-separated (default: the run's).", metavar="LIST")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder (default: the run's folder; at real sites: runs).", metavar="DIR"),
    ] = None,
    hosts: Hosts = None,
    address: Address = None,
    listen: Listen = None,
    federation: FederationFolder = None,
    mailbox: MailboxPlace = None,
    by_mailbox: ByMailbox = None,
    min_replies: Annotated[
        float | None,
        typer.Option(help="Fraction of the sites that must answer (default: 0.5).", rich_help_panel=PANEL),
    ] = None,
    monitor: Monitor = None,
    allow: Allow = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,  # has ended the command before
) -> None:
    """Test models on the data of every site, and compare with training alone; adds it to the run's report.

    With --federation or --hosts, the sites test the models on their own machines.

    Example: `fewbytes evaluate runs/my-run --alone --pooled`
    """
    from fewbytes.experiments.evaluate import Evaluating

    names = tuple(name.strip() for name in metrics.split(",")) if metrics is not None else ()
    how = Evaluating(alone, pooled, tuple(without or ()), sites, by, names)
    where = Where(hosts, address, listen, federation, mailbox=mailbox, by_mailbox=by_mailbox)
    if federation is not None or hosts is not None:
        at = Deploying(out or Path("runs"), where, allow=allow, monitor=monitor, as_json=as_json)
        _evaluate_at_sites(runs, how, at, min_replies)
    elif not {address, listen, mailbox, by_mailbox, min_replies} <= {None}:
        raise UserError(
            "--address, --listen, --mailbox and --min-replies are for sites on other hosts: add --hosts or --federation"
        )
    else:
        _evaluate_here(runs, how, out, allow, as_json)


def _evaluate_here(runs: Sequence[Path], how: Evaluating, out: Path | None, allow: str | None, as_json: bool) -> None:
    from fewbytes.experiments.evaluate import evaluate as evaluate_runs
    from fewbytes.report import read_runs, write_report

    file = runs[0].suffix == ".safetensors"
    with standard_output_for(as_json), naming(allow, None if file else runs[0]):
        folder, found = evaluate_runs(runs, how, out)
        if not file and out is None:
            write_report(read_runs(runs), folder / "report.html")
    print_evaluation(folder, found, as_json)


def _evaluate_at_sites(runs: Sequence[Path], how: Evaluating, deploying: Deploying, min_replies: float | None) -> None:
    from fewbytes.experiments.evaluating import evaluating, repeats

    replies = {} if min_replies is None else {"min_replies": min_replies}
    with standard_output_for(deploying.as_json), naming(deploying.allow, runs[0]):
        further = repeats(runs, how)
        evaluating(runs, how)  # refused before anything is trained
    beside = {each.name: _trained(each, deploying, replies) for each in further}
    with standard_output_for(deploying.as_json), naming(deploying.allow, runs[0]):
        settings = evaluating(runs, how, beside)
    folder = deploy_run(settings | replies, deploying)
    assert folder is not None
    print_ended(folder, deploying.as_json)


def _trained(repeat: Repeat, how: Deploying, replies: dict[str, float]) -> Path:
    """The folder of a further run at the sites, which is resumed, or used again, if it was begun before."""
    from fewbytes.experiments.run_folders import finished

    if how.where.federation is None:
        raise UserError(
            "--alone and --without train again at the sites, which needs --federation: with --hosts, deploy these runs "
            "one by one (docs: Results by site)"
        )
    if (folder := repeat.begun()) is not None and finished(folder):
        return folder
    by_file = how.where.by_mailbox
    some = None if by_file is None else ",".join(name for name in named_in(by_file) if name in repeat.sites)
    mail = {"mailbox": None, "by_mailbox": None} if some == "" else {"by_mailbox": some}
    where = replace(how.where, hosts=",".join(repeat.sites), **mail)
    printed.print(f"{repeat.name}: the sites train", soft_wrap=True)
    settings = repeat.settings | replies if folder is None else {}
    done = deploy_run(settings, replace(how, out=repeat.place, where=where, resume=folder))
    assert done is not None
    return done
