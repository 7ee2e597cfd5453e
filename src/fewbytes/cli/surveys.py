"""The command that asks what the sites have, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fewbytes.base.errors import UserError
from fewbytes.cli.answers import print_survey
from fewbytes.cli.machines import (
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
from fewbytes.cli.options import option, options_of, with_options
from fewbytes.cli.shared import CONFIG, Allow, AsJson, Monitor, Out, settings_of, standard_output_for
from fewbytes.core.policy import Policy
from fewbytes.data.settings import Partition
from fewbytes.experiments.groups import DataSettings

OPTIONS = [
    CONFIG,
    *(each for group in (DataSettings, Partition, Policy) for each in options_of(group)),
    option("seed", 0, int, typer.Option(help="Random seed of the partition.")),
    option(
        "dp", None, str,
        typer.Option(help="Noise at each site, for its samples' privacy: epsilon=1,delta=1e-5.", metavar="TEXT"),
    ),
    option("workers", None, int, typer.Option(help="Number of worker processes (default: one per core).")),
]  # fmt: skip
NOT_READ = frozenset({"method", "parameters", "fraction", "rounds"})
"""Keys of a config file that say how a run trains."""


@with_options("settings", OPTIONS, settings_of)
def survey(
    settings: dict[str, Any],
    out: Out = Path("runs"),
    min_count: Annotated[int, typer.Option(help="Show no figure of fewer samples.", min=1)] = 10,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="Look for near-duplicates between sites, by salted digests.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            help="Your own table with the sites' columns, to sum up sites that do not report figures.",
            metavar="FILE",
        ),
    ] = None,
    tell: Annotated[
        str,
        typer.Option(help="In one process: what all sites or each report: figures, labels, sizes, nothing."),
    ] = "figures",
    hosts: Hosts = None,
    address: Address = None,
    listen: Listen = None,
    federation: FederationFolder = None,
    mailbox: MailboxPlace = None,
    by_mailbox: ByMailbox = None,
    allow: Allow = None,
    show: Annotated[bool, typer.Option("--print", help="Write the files and print the commands only.")] = False,
    monitor: Monitor = None,
    as_json: AsJson = False,
) -> None:
    """Ask the sites what data they have, without training; writes survey.json and survey.html.

    Each site describes its data as far as its `tell` allows: counts, classes, missing values, means, histograms,
    quantiles. The page shows the sites side by side, and what differs: units, classes, categories, drift.

    Example: `fewbytes survey --dataset digits --clients 5 --alpha 0.3`
    """
    from fewbytes.experiments.survey import survey_here

    settings = {key: value for key, value in settings.items() if key not in NOT_READ}
    if "dp" in settings:
        settings["dp"] = f"of=samples,clip=1,{settings['dp']}"
    settings |= {"method": "survey", "parameters": {"min_count": min_count, "duplicates": duplicates}}
    if like is not None:
        from fewbytes.experiments.surveying import described_like

        settings["parameters"]["like"] = described_like(DataSettings.read(settings), like)
    if hosts is not None or federation is not None:
        if tell != "figures":
            raise UserError("--tell is for sites in one process: real sites set it in their node.toml (tell)")
        settings["partition"] = settings.get("partition", "local")
        where = Where(hosts, address, listen, federation, mailbox=mailbox, by_mailbox=by_mailbox)
        how = Deploying(out, where, allow=allow, show=show, monitor=monitor, as_json=as_json)
        folder = deploy_run(settings, how)
    elif show or not {address, listen, mailbox, by_mailbox} <= {None}:
        raise UserError(
            "--address, --listen, --mailbox and --print are for sites on other hosts: add --hosts or --federation"
        )
    else:
        with standard_output_for(as_json):
            folder = survey_here(settings, out, [each.strip() for each in tell.split(",")])
    if folder is not None:
        print_survey(folder, as_json)
