"""Commands for real machines: `deploy` runs a method on Flower's SuperLink and nodes, `node` is one of them."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

from fewbytes.base.errors import UserError
from fewbytes.cli.answers import print_ended
from fewbytes.cli.shared import (
    Allow,
    AsJson,
    FromRound,
    MethodName,
    Monitor,
    Out,
    Watch,
    naming,
    standard_output_for,
    with_settings,
)
from fewbytes.experiments.display import Display, printed, progress

PANEL = "At real sites"
Hosts = Annotated[
    str | None,
    typer.Option(
        help="Names of the sites' hosts, comma-separated; with --federation: only these members.",
        metavar="LIST",
        rich_help_panel=PANEL,
    ),
]
Address = Annotated[
    str | None, typer.Option(help="host:port where the sites reach this machine.", rich_help_panel=PANEL)
]
Listen = Annotated[
    str | None,
    typer.Option(
        help="host:port where the server listens, if not everywhere at the address's port.", rich_help_panel=PANEL
    ),
]
FederationFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of a federation, whose members are the sites.", rich_help_panel=PANEL),
]
MailboxPlace = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE",
        help="With --federation: exchange files with the members, in a folder or in s3://BUCKET/FOLDER.",
        rich_help_panel=PANEL,
    ),
]
ByMailbox = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Members that --mailbox reaches, comma-separated (default: all).",
        rich_help_panel=PANEL,
    ),
]
"""The options of commands that reach sites on other machines."""


@with_settings
def deploy(
    settings: dict[str, Any],
    method: MethodName = None,
    out: Out = Path("runs"),
    hosts: Hosts = None,
    address: Address = None,
    listen: Listen = None,
    federation: FederationFolder = None,
    mailbox: MailboxPlace = None,
    by_mailbox: ByMailbox = None,
    node: Annotated[
        str | None, typer.Option(help="Kind of node: resident (stays loaded) or stock (Flower's); default: resident.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume an interrupted deployment.")] = None,
    from_round: FromRound = None,
    allow: Allow = None,
    show: Annotated[bool, typer.Option("--print", help="Write the files and print the commands only.")] = False,
    watch: Watch = None,
    monitor: Monitor = None,
    as_json: AsJson = False,
) -> None:
    """Run one method on Flower's SuperLink and nodes over TLS, on this machine or on a list of hosts.

    Example: `fewbytes deploy fedavg --dataset digits --clients 3 --rounds 2`
    """
    settings = settings if method is None else {**settings, "method": method}
    where = Where(hosts, address, listen, federation, node, mailbox, by_mailbox)
    how = Deploying(out, where, resume, from_round, allow, show, tuple(watch or ()), monitor, as_json)
    if (folder := deploy_run(settings, how)) is not None:
        print_ended(folder, as_json)


@dataclass(frozen=True)
class Where:
    """The hosts of a deployment, by the options of `deploy`."""

    hosts: str | None = None
    address: str | None = None
    listen: str | None = None
    federation: Path | None = None
    node: str | None = None
    mailbox: str | None = None
    by_mailbox: str | None = None


@dataclass(frozen=True)
class Deploying:
    """How a run is deployed, by the options of `deploy`."""

    out: Path
    where: Where
    resume: Path | None = None
    from_round: int | None = None
    allow: str | None = None
    show: bool = False
    watch: tuple[str, ...] = ()
    monitor: str | None = None
    as_json: bool = False


def deploy_run(settings: dict[str, Any], how: Deploying) -> Path | None:
    """Deploy a run with these settings, and follow it to its end: its folder; None if commands were only printed."""
    from fewbytes.cli.planned import Question, planned
    from fewbytes.experiments.deploy import Deployment
    from fewbytes.experiments.new_folders import new_folder, unless_refused
    from fewbytes.experiments.places import Nodes
    from fewbytes.federation.endpoint import of_run, serving
    from fewbytes.flower.dated_lines import DatedLines
    from fewbytes.running.recorders import watcher_of
    from fewbytes.running.watcher import together

    os.environ.pop("FEWBYTES_MONITOR", None)  # it is this process's, not that of the nodes which it starts
    settings = {**settings, "engine": "flower-deployment"}
    given, federation, resume, from_round = how.where, how.where.federation, how.resume, how.from_round
    if from_round is not None and resume is None:
        raise UserError("--from-round needs the run to go back in: add --resume RUN")
    place = None if federation is None else str(federation if resume is None else federation.absolute())
    where = {"hosts": given.hosts, "address": given.address, "listen": given.listen, "node": given.node}
    where |= {"federation": place, "mailbox": given.mailbox, "by_mailbox": given.by_mailbox}
    by_hand = sys.stderr.isatty()
    with (
        nullcontext() if by_hand else redirect_stderr(cast(TextIO, DatedLines(sys.stderr))),
        standard_output_for(how.as_json),
        naming(how.allow, resume),
    ):
        for text in how.watch:
            watcher_of(text, "")  # refused before the data are loaded
        with progress("checking the settings"):
            plan = planned(Question(settings, where, resume, from_round, how.allow, how.as_json))
        folder = resume or new_folder(how.out, plan.name)
        with unless_refused(folder, folder if resume is None else None):
            watchers = [watcher_of(text, folder.absolute().name) for text in how.watch]
            reached = Nodes.of(plan.nodes, plan.where)
            if reached.files_only:
                from fewbytes.experiments.deploy_by_mailbox import run_by_mailbox, write_deployment

                if how.show:
                    raise UserError("--print has nothing to print: no program is started for members reached by files")
                write_deployment(folder, reached, None if plan.again else plan.asked)
            else:
                deployment = Deployment(plan.settled, folder, reached, plan.again, from_round, plan.asked)
            if how.show:
                deployment.prepare()
            else:
                with Display(plan.method, folder, plan.resuming, plan.headline) as display:
                    for text in plan.notes:
                        display.note(text)
                    watcher = together([display, *watchers])
                    with serving(how.monitor, of_run(folder)):
                        if reached.files_only:
                            run_by_mailbox(plan.settled.run_config, folder, reached, watcher, plan.again, from_round)
                        else:
                            deployment.execute(watcher, display.note, display.step)
    if not how.show:
        return folder
    printed.print(deployment.commands(), no_wrap=True, overflow="ignore", crop=False)  # to copy
    return None


def be_nodes(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Node files that `fewbytes deploy` wrote (with --once: node.toml).", metavar="FILE…"),
    ] = None,
    once: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Carry out the orders in the folder INBOX, write the answers to OUTBOX, and end.",
            metavar="INBOX OUTBOX",
        ),
    ] = None,
    dry_run: Annotated[
        Path | None,
        typer.Option(
            help="A run's config.toml: train one round of it on the data here, print what would leave, send nothing.",
            metavar="CONFIG",
        ),
    ] = None,
    monitor: Monitor = None,
) -> None:
    """Start the node of one or more clients of a deployment; it loads code and data once and stays up.

    With --once, do a short job with files instead.

    Example: `fewbytes node --once /media/usb/inbox /media/usb/outbox`
    """
    from fewbytes.flower.private import programs

    os.environ.update({**programs.ENVIRONMENT, **os.environ})  # Flower reads it at import
    from fewbytes.experiments.app import client
    from fewbytes.federation.endpoint import serving
    from fewbytes.flower.dated_lines import DatedLines
    from fewbytes.flower.node_file import NodeFile
    from fewbytes.flower.resident import serve
    from fewbytes.running.node_status import NodeWatch

    if once is not None:
        _work_once(files or [Path("node.toml")], *once)
        return
    if not files:
        raise UserError("name the node's file, such as node.toml")
    paths = [path.absolute() for path in files]
    if len(set(paths)) < len(paths):
        raise UserError("a node's file is named twice")
    names = [path.parent.name if path.stem == "node" else path.stem for path in paths]
    if dry_run is not None:
        from fewbytes.experiments.dry_run import would_leave

        for name, path in zip(names, paths, strict=True):
            about = NodeFile.read(path).placed(path.parent)
            for line in would_leave(dry_run.absolute(), about.config):
                printed.print(f"{name}: {line}", soft_wrap=True, markup=False)
        return
    os.chdir(paths[0].parent)
    watched = [(path, NodeWatch(name, NodeFile.read(path).superlink)) for name, path in zip(names, paths, strict=True)]
    with (
        serving(monitor, lambda: [watch.read() for _, watch in watched]),
        redirect_stdout(cast(TextIO, DatedLines(sys.stdout))),
        redirect_stderr(cast(TextIO, DatedLines(sys.stderr))),
    ):
        serve(watched, client)


def _work_once(files: list[Path], inbox: str, outbox: str) -> None:
    """`fewbytes node --once`. With an empty inbox, it loads nothing large: the job may run every few minutes."""
    from fewbytes.flower.dated_lines import DatedLines
    from fewbytes.mailbox.box import Box
    from fewbytes.mailbox.server import ORDER

    if len(files) > 1:
        raise UserError("--once works for one node: name one file")
    path = files[0].absolute()
    if not path.exists():
        raise UserError(f"{path} does not exist: name the node's file, or run this in its folder")
    places = [place if "://" in place else os.path.abspath(place) for place in (inbox, outbox)]
    if not Box(places[0]).names(ORDER):
        printed.print(f"{places[0]} has no orders", soft_wrap=True, markup=False)
        return
    from fewbytes.experiments.app import client
    from fewbytes.flower.mailbox_site import carry_out_once

    os.chdir(path.parent)
    with (
        redirect_stdout(cast(TextIO, DatedLines(sys.stdout))),
        redirect_stderr(cast(TextIO, DatedLines(sys.stderr))),
    ):
        count = carry_out_once(path, client, places[0], places[1], lambda text: print(text, flush=True))
        print(f"orders carried out: {count}", flush=True)
