"""Commands for real machines: `deploy` runs a method on Flower's SuperLink and nodes, `node` is one of them."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer

from fewbytes.base.errors import UserError
from fewbytes.cli.shared import (
    Allow,
    AsJson,
    FromRound,
    MethodName,
    Monitor,
    Out,
    Watch,
    naming,
    print_results,
    standard_output_for,
    with_settings,
)
from fewbytes.experiments.display import Display, printed


@with_settings
def deploy(
    settings: dict[str, Any],
    method: MethodName = None,
    out: Out = Path("runs"),
    hosts: Annotated[
        str | None, typer.Option(help="Names of the clients' hosts, comma-separated.", metavar="LIST")
    ] = None,
    address: Annotated[str | None, typer.Option(help="host:port where the nodes reach this machine.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="host:port where the server listens, if not everywhere at the address's port.")
    ] = None,
    federation: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of a federation, whose members are the clients.")
    ] = None,
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
    from fewbytes.experiments.deploy import (
        KINDS,
        LOOPBACK,
        Deployment,
        Nodes,
        host_names,
        not_begun,
        places,
        remembered,
    )
    from fewbytes.experiments.membership import places_for
    from fewbytes.experiments.prepared import PreparedRun
    from fewbytes.experiments.run_folders import again_from, new_folder, resumed, unless_refused
    from fewbytes.experiments.settings import make_experiment
    from fewbytes.federation.endpoint import of_run, serving
    from fewbytes.federation.members import read as read_federation
    from fewbytes.flower.dated_lines import DatedLines
    from fewbytes.methods import short_name
    from fewbytes.running.recorders import watcher_of
    from fewbytes.running.watcher import together

    os.environ.pop("FEWBYTES_MONITOR", None)  # it is this process's, not that of the nodes which it starts
    settings = {**settings, "engine": "flower-deployment"} | ({} if method is None else {"method": method})
    if from_round is not None and resume is None:
        raise UserError("--from-round needs the run to go back in: add --resume RUN")
    by_hand = sys.stderr.isatty()
    with (
        nullcontext() if by_hand else redirect_stderr(cast(TextIO, DatedLines(sys.stderr))),
        standard_output_for(as_json),
        naming(allow, resume),
    ):
        unbegun = None if resume is None or from_round is not None else not_begun(resume)
        if resume is not None:
            settings = resumed(resume, settings, from_round) if unbegun is None else again_from(unbegun, settings)
            where = None if federation is None else str(federation.absolute())
            given = {"hosts": hosts, "address": address, "listen": listen, "node": node, "federation": where}
            hosts, address, listen, node, where = remembered(resume, given).values()
            federation = None if where is None else Path(where)
        elif federation is not None:
            if hosts or address or listen:
                raise UserError("--federation has its own hosts and address: leave out --hosts, --address and --listen")
            members = read_federation(federation)
            settings.setdefault("clients", len(members.members))
            hosts = ",".join(places_for(members, int(settings.get("newcomers") or 0)))
            if not members.members:
                raise UserError(f"{federation} has no members yet: `fewbytes federation invite NAME` is the first step")
        if federation is not None:  # whose server may have moved
            there = read_federation(federation)
            address, listen = there.address, there.listen
        elif resume is None and hosts is not None:
            settings.setdefault("clients", len(host_names(hosts)))
        job = PreparedRun(settings, here=None if hosts is None else ())
        notes, nodes = job.notes, places(job.experiment, hosts)
        if resume is None or unbegun is not None:
            job.check()  # before anything of Flower's is started
        folder = resume or new_folder(out, short_name(job.experiment.method))
        with unless_refused(folder, folder if resume is None else None):
            watchers = [watcher_of(text, folder.absolute().name) for text in watch or ()]
            again, asked = resume is not None and unbegun is None, make_experiment(settings).toml()
            how = Nodes(nodes, address or LOOPBACK, node or KINDS[0], listen, federation)
            deployment = Deployment(job.experiment, folder, how, again, from_round, asked)
            if show:
                deployment.prepare()
            else:
                command = job.experiment.resuming("deploy")
                with Display(job.method.method_name, folder, command, job.method.promises.headline) as display:
                    for text in notes:
                        display.note(text)
                    with serving(monitor, of_run(folder)):
                        deployment.execute(together([display, *watchers]), display.note)
    if show:
        printed.print(deployment.commands(), soft_wrap=True)
    else:
        print_results(folder, json.loads((folder / "result.json").read_text()), as_json)


def be_nodes(
    files: Annotated[list[Path], typer.Argument(help="Node files that `fewbytes deploy` wrote.", metavar="FILE…")],
    dry_run: Annotated[
        Path | None,
        typer.Option(
            help="A run's config.toml: train one round of it on the data here, print what would leave, send nothing.",
            metavar="CONFIG",
        ),
    ] = None,
    monitor: Monitor = None,
) -> None:
    """Start the node of one or more clients of a deployment; it loads code and data once and stays up."""
    from fewbytes.flower.private import programs

    os.environ.update({**programs.ENVIRONMENT, **os.environ})  # Flower reads it at import
    from fewbytes.experiments.app import client
    from fewbytes.federation.endpoint import serving
    from fewbytes.flower.dated_lines import DatedLines
    from fewbytes.flower.node_file import NodeFile
    from fewbytes.flower.resident import serve
    from fewbytes.running.node_status import NodeWatch

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
