"""The command line. A command imports what it needs when it runs: help comes without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fewbytes.analysis.settings import Attacking, Imprinting, Inferring, Poisoning, Probing, attack_of
from fewbytes.base.errors import FewbytesError, Slip, UserError, raised_at, said, visible
from fewbytes.base.files import check_own
from fewbytes.base.named import only_allowed
from fewbytes.base.units import parse_rate
from fewbytes.cli.options import option, options_of, with_options
from fewbytes.experiments.display import Display, console, note, printed, progress
from fewbytes.experiments.groups import GROUPS, Reproducing

if TYPE_CHECKING:
    from fewbytes.report import RunFolder

NAME = "bold cyan"  # how the names of what is listed look
app = typer.Typer(
    name="fewbytes",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
USUAL = ("fedavg", "fedpurin", "separate")  # what `compare` runs where no method is named: same models, many rounds


def _method_names(incomplete: str) -> list[str]:
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
    typer.Argument(help="A name of `fewbytes methods`, or package.module:Class.", autocompletion=_method_names),
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


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """An experiment's settings: the config file's, and over them those named on the command line."""
    from fewbytes.core.speeds import Speeds
    from fewbytes.experiments.settings import folded, read_experiment

    config = given.pop("config", None)
    settings = read_experiment(config) if config is not None else {}
    if "partition_options" in given:
        pairs = _pairs(given["partition_options"], "--partition-option")
        given["partition_options"] = {key: _literal(value) for key, value in pairs.items()}
    if "parameters" in given:
        given["parameters"] = _pairs(given["parameters"], "--set")
    if "speeds" in given:
        given["speeds"] = str(Speeds.from_place(given["speeds"]))
    given = folded(given)
    if "parameters" in given:
        given["parameters"] = settings.get("parameters", {}) | given["parameters"]
    return settings | given


with_settings = with_options("settings", SETTINGS, _settings)
"""Gives a command the options of an experiment; it gets the settings that were named as `settings`."""


@app.callback()
def of_all() -> None:
    """Federated learning over slow links, measured in the bytes that cross the wire."""


@app.command()
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="A method to tell all of: a name, or package.module:Class.", autocompletion=_method_names),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods, or tell of one its paper, idea, cost and parameters.

    Example: `fewbytes methods fedpurin`
    """
    from fewbytes.cli.methods import all_of, one
    from fewbytes.experiments.catalogue import about
    from fewbytes.methods import METHODS, method_class

    if name is not None:
        found = [about(name, method_class(name))]
    else:
        found = []
        for each in METHODS:
            try:
                found.append(about(each, METHODS[each]))
            except UserError as error:  # of another package
                note(str(error))
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        printed.print(all_of(found) if name is None else one(found[0]))


@app.command()
@with_settings
def run(
    settings: dict[str, Any],
    method: MethodName = None,
    out: Out = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run folder.")] = None,
    from_round: FromRound = None,
    allow: Allow = None,
    watch: Watch = None,
    as_json: AsJson = False,
) -> None:
    """Run one method; writes a run folder with the result, the ledger, the models and a report.

    Example: `fewbytes run fedpurin --dataset digits --clients 10 --alpha 0.3 --rounds 5 --set batch=20`
    """
    from fewbytes.experiments.prepared import PreparedRun, new_folder, resumed, unless_refused
    from fewbytes.methods import short_name
    from fewbytes.running.recorders import watcher_of

    if method is not None:
        settings["method"] = method
    if from_round is not None and resume is None:
        raise UserError("--from-round goes back in a run: name it, --resume RUN")
    with _standard_output_for(as_json), _naming(allow, resume, settings.get("ray_address", "")):
        if resume is not None:
            settings = resumed(resume, settings, from_round)
        job = PreparedRun(settings)
        folder = resume or new_folder(out, short_name(job.experiment.method))
        with unless_refused(folder, folder if resume is None else None):
            watchers = [watcher_of(text, folder.absolute().name) for text in watch or ()]
            result = job.execute(folder, resume is not None, watchers=watchers, from_round=from_round)
    _print_results(folder, result, as_json)


@app.command()
@with_settings
def deploy(
    settings: dict[str, Any],
    method: MethodName = None,
    out: Out = Path("runs"),
    hosts: Annotated[str | None, typer.Option(help="Names of the clients' hosts, with commas.", metavar="LIST")] = None,
    address: Annotated[str | None, typer.Option(help="Where the nodes reach this machine.")] = None,
    node: Annotated[
        str | None, typer.Option(help="resident (stays warm; the default) or stock (Flower's SuperNode).")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a deployment that ended.")] = None,
    from_round: FromRound = None,
    allow: Allow = None,
    show: Annotated[bool, typer.Option("--print", help="Write the files, print the commands, start nothing.")] = False,
    watch: Watch = None,
    as_json: AsJson = False,
) -> None:
    """Run one method on Flower's SuperLink and nodes over TLS, on this machine or on a list of hosts.

    Example: `fewbytes deploy fedavg --dataset digits --clients 3 --rounds 2`
    """
    from fewbytes.experiments.deploy import (
        KINDS,
        LOOPBACK,
        Deployment,
        host_names,
        not_begun,
        places,
        remembered,
    )
    from fewbytes.experiments.prepared import PreparedRun, again_from, new_folder, resumed, unless_refused
    from fewbytes.experiments.settings import make_experiment
    from fewbytes.methods import short_name
    from fewbytes.running.recorders import watcher_of
    from fewbytes.running.watcher import together

    settings = {**settings, "engine": "flower-deployment"} | ({} if method is None else {"method": method})
    if from_round is not None and resume is None:
        raise UserError("--from-round goes back in a run: name it, --resume RUN")
    with _standard_output_for(as_json), _naming(allow, resume):
        anew = None if resume is None or from_round is not None else not_begun(resume)
        if resume is not None:
            settings = resumed(resume, settings, from_round) if anew is None else again_from(anew, settings)
            hosts, address, node = remembered(resume, hosts, address, node)
        elif hosts is not None:
            settings.setdefault("clients", len(host_names(hosts)))
        job = PreparedRun(settings, here=None if hosts is None else ())
        notes, nodes = job.notes, places(job.experiment, hosts)
        if resume is None or anew is not None:
            job.check()  # before anything of Flower's is started
        folder = resume or new_folder(out, short_name(job.experiment.method))
        with unless_refused(folder, folder if resume is None else None):
            watchers = [watcher_of(text, folder.absolute().name) for text in watch or ()]
            again, asked = resume is not None and anew is None, make_experiment(settings).toml()
            deployment = Deployment(
                job.experiment, folder, nodes, address or LOOPBACK, again, from_round, node or KINDS[0], asked
            )
            if show:
                deployment.prepare()
            else:
                command = job.experiment.resuming("deploy")
                with Display(job.method.method_name, folder, command, job.method.headline) as display:
                    for text in notes:
                        display.note(text)
                    deployment.execute(together([display, *watchers]), display.note)
    if show:
        printed.print(deployment.commands(), soft_wrap=True)
    else:
        _print_results(folder, json.loads((folder / "result.json").read_text()), as_json)


@app.command("node")
def be_nodes(
    files: Annotated[list[Path], typer.Argument(help="What each is, as `fewbytes deploy` writes it.", metavar="FILE…")],
) -> None:
    """Be the node of a client, or of a few, of a deployment: application and data are loaded once and stay."""
    from fewbytes.flower import compat

    os.environ.update({**compat.ENVIRONMENT, **os.environ})  # which Flower reads as it is imported
    from fewbytes.experiments.app import client
    from fewbytes.flower.node_file import NodeFile
    from fewbytes.flower.resident import serve

    paths = [path.absolute() for path in files]
    if len(set(paths)) < len(paths):
        raise UserError("a node's file is named twice")
    names = [path.parent.name if path.stem == "node" else path.stem for path in paths]
    nodes = [(name, NodeFile.read(path).placed(path.parent)) for name, path in zip(names, paths, strict=True)]
    os.chdir(paths[0].parent)
    serve(nodes, client)


@app.command()
@with_settings
def compare(
    settings: dict[str, Any],
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of `fewbytes methods` (default: fedavg, fedpurin, separate), or all.",
            autocompletion=_method_names,
        ),
    ] = None,
    out: Out = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(metavar="COMPARISON", help="Go on with an interrupted comparison's folder.")
    ] = None,
    allow: Allow = None,
    watch: Watch = None,
    as_json: AsJson = False,
) -> None:
    """Run several methods on the same clients; a table, a report of accuracy against megabytes, and which to take.

    `all` runs every method there is on equal terms: a few minutes on the digits.

    Example: `fewbytes compare fedavg fedpurin separate --dataset digits --rounds 5 --set epochs=2`
    """
    from fewbytes.experiments.compare import compare as compare_methods

    names = list(dict.fromkeys(methods or USUAL))
    if "all" in names and len(names) > 1:
        raise UserError(f"all stands for every method: leave out {', '.join(n for n in names if n != 'all')}")
    if resume is not None and (methods or settings):
        raise UserError("a comparison is gone on with as it was begun: name nothing but --resume, --allow and --watch")
    with _standard_output_for(as_json), _naming(allow, resume):
        folder, results = compare_methods(names, settings, out, resume, watch or ())
    _print_results(folder, results, as_json)
    if {result["status"] for result in results} & {
        "failed",
        *(["left out"] if "all" not in names and resume is None else []),
    }:
        raise typer.Exit(1)


def _print_results(folder: Path, results: Any, as_json: bool) -> None:
    """Print what came of runs: result.json as it is, or a table and where the report is."""
    from fewbytes.report import read_runs

    if as_json:
        print(json.dumps(results, indent=2))
    else:
        _show(read_runs([folder]), folder / "report.html")


def _show(runs: Sequence[RunFolder], page: Path) -> None:
    """Print the table of some runs, which to take, and where their report is."""
    from fewbytes.report import caveats, choices, summary_table

    printed.print(summary_table(runs, printed.width))
    found = choices(runs)
    for text in [*map(str, found), *caveats(runs)] if found else ():
        printed.print(text, soft_wrap=True)
    printed.print(f"report: {page}", soft_wrap=True)


@app.command()
@with_settings
def plan(
    settings: dict[str, Any],
    method: MethodName = None,
    uplink: Annotated[
        str, typer.Option(help="A client's uplink, e.g. 1MB/s or, in bits, 10Mbit/s or 10Mb/s.")
    ] = "1MB/s",
    downlink: Annotated[str | None, typer.Option(help="A client's downlink (default: as the uplink).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run would cost in bytes and time, from a few real rounds of a few clients.

    Example: `fewbytes plan fedpurin --dataset digits --model resnet8 --clients 50 --uplink 1MB/s`
    """
    from fewbytes.experiments.plan import EXCHANGE_SECONDS, make_plan, prepared_for_plan

    rates = parse_rate(uplink), parse_rate(downlink or uplink)
    if method is not None:
        settings["method"] = method
    job, many, notes = prepared_for_plan(settings)
    for text in [*job.notes, *notes]:
        note(text)
    with console.status(f"running a few rounds of {job.method.method_name} to measure its payloads"):
        how = job.experiment.run
        exchange = EXCHANGE_SECONDS if how.engine == "flower-deployment" else 0.0
        made = make_plan(job.method, job.task, how.rounds, *rates, exchange, how.budget, how.rounding, many)
    if as_json:
        print(json.dumps(dataclasses.asdict(made) | {"round_seconds": made.round_seconds}, indent=2))
    else:
        printed.print(made.table())


def _reproducing(given: dict[str, Any]) -> Reproducing:
    """What was named of a reproduction. Raises UserError."""
    return Reproducing.read(given | {"parameters": _pairs(given.get("parameters", []), "--set")})


@app.command()
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
        with _standard_output_for(as_json):
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
    with _standard_output_for(as_json):
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


@app.command()
def report(runs: Annotated[list[Path], typer.Argument(help="Run folders, or a folder of them.")]) -> None:
    """Write the report of one run, or one page that compares several."""
    from fewbytes.report import read_runs, write_report

    found = read_runs(runs)
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([os.path.realpath(path) for path in runs]))
    page = write_report(found, folder / "report.html")
    _show(found, page)


@app.command()
@with_options("how", options_of(Probing), Probing.read)
def probe(
    how: Probing,
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    client: Annotated[int | None, typer.Option(help="Probe this client's own model, not the global one.")] = None,
    points: Annotated[str | None, typer.Option(help="Units after which to probe, with commas.", metavar="LIST")] = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run's model knows at each depth of the image and the label; adds it to the run's report."""
    from fewbytes.analysis.probe import probe as probe_run
    from fewbytes.analysis.probe import probe_table
    from fewbytes.report import read_runs, write_report

    names = [name.strip() for name in points.split(",")] if points is not None else []
    with _standard_output_for(as_json), _naming(allow, run):
        with progress("probe") as bar:
            result = probe_run(run, client, names, how, bar)
        page = write_report(read_runs([run]), run / "report.html")
    for name in result["skipped"]:
        note(f"not probed after {name}: the branches differ in shape there")
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        printed.print(probe_table(result))
        printed.print(f"report: {page}", soft_wrap=True)


ATTACKS = [
    option(
        "membership", False, bool,
        typer.Option(
            "--membership", help="Tell members of the training data from others.", rich_help_panel=Inferring.title
        ),
    ),
    option(
        "imprint", False, bool,
        typer.Option(
            "--imprint", help="Read images off by a first layer that a server makes for it.",
            rich_help_panel=Imprinting.title,
        ),
    ),
    option(
        "poison", None, str,
        typer.Option(
            help="Repeat the run with clients that lie: scale, flip, noise, labels or backdoor.", metavar="LIE",
            rich_help_panel=Poisoning.title,
        ),
    ),
    *{
        each.name: each for group in (Poisoning, Inferring, Imprinting, Attacking) for each in options_of(group)
    }.values(),
]  # fmt: skip
"""The options of `attack`: which it is, and the settings of each."""


@app.command()
@with_options("how", ATTACKS, attack_of)
def attack(
    how: Attacking | Inferring | Poisoning | Imprinting,
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Show how well images can be made again from the gradients a run's method uploads; adds it to the run's report.

    With --membership: whether the run's model gives its training samples away. With --imprint: what a server that makes
    the first layer for it reads off. With --poison: what becomes of the run where some clients lie.
    """
    from fewbytes.analysis.attack import attack as attack_run
    from fewbytes.analysis.attack import attack_table
    from fewbytes.analysis.imprint import imprint, imprint_table
    from fewbytes.analysis.membership import membership, membership_table
    from fewbytes.analysis.poisoning import poison, poison_table
    from fewbytes.report import read_runs, write_report

    named = (how.model,) if isinstance(how, Attacking) else ()
    with _standard_output_for(as_json), _naming(allow, run, *named):
        with progress("attack") as bar:
            if isinstance(how, Poisoning):
                result, table = poison(run, how, bar), poison_table
            elif isinstance(how, Inferring):
                result, table = membership(run, how, bar), membership_table
            elif isinstance(how, Imprinting):
                result, table = imprint(run, how, bar), imprint_table
            else:
                result, table = attack_run(run, how, bar), attack_table
        page = write_report(read_runs([run]), run / "report.html")
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        printed.print(table(result))
        printed.print(f"report: {page}", soft_wrap=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx (default: all three).")] = False,
    torch: Annotated[bool, typer.Option("--torch", help="Write model.pt2, for torch.export.load.")] = False,
    safetensors: Annotated[bool, typer.Option("--safetensors", help="Write model.safetensors, the weights.")] = False,
    client: Annotated[int | None, typer.Option(help="Export this client's own model, not the global one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the files go (default: RUN/export).", metavar="DIR")] = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's model as files that run without this package, with class names and how to run them."""
    from fewbytes.models.export import FILES, export_model

    asked = dict(zip(FILES, (onnx, torch, safetensors), strict=True))
    with _standard_output_for(as_json), _naming(allow, run), console.status("exporting the model"):
        paths = export_model(run, client, [each for each in FILES if asked[each]] or list(FILES), out)
    if as_json:
        print(json.dumps({path.name: str(path) for path in paths}, indent=2))
    else:
        printed.print("wrote " + ", ".join(path.name for path in paths), soft_wrap=True)
        printed.print(f"how to run it: {paths[0].parent / 'README.md'}", soft_wrap=True)


new = typer.Typer(help="Write the files of something new.")
app.add_typer(new, name="new")


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


@app.command()
def doctor() -> None:
    """Tell what is installed here, and what works: extras, cores, GPU, shared memory, data."""
    from fewbytes.experiments.doctor import findings

    for found in findings():
        line = Text.assemble((f"{found.about:<16}", NAME), found.words)
        printed.print(line if not found.mend else line + Text(f": {found.mend}", "yellow"), soft_wrap=True)


@app.command("inspect")
def inspect_file(frame: Annotated[Path, typer.Argument(help="A frame, e.g. of `fewbytes run --keep-frames`.")]) -> None:
    """Print what a frame holds."""
    from fewbytes.experiments.catalogue import payload_fields
    from fewbytes.wire.inspect import inspect_frame

    printed.print(inspect_frame(frame, payload_fields(frame)))


@contextlib.contextmanager
def _standard_output_for(as_json: bool) -> Iterator[None]:
    """With --json, standard output is the result's alone: what models or handlers print goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def _naming(allow: str | None, folder: Path | None, *named: str) -> contextlib.AbstractContextManager[None]:
    """While something is made of the files in a run's folder: only code that --allow names, or was `named`, is
    imported, and only such machines are called. Where there is no folder, all settings are the user's own. Raises
    UserError for a folder with links out of it."""
    if folder is None:
        return contextlib.nullcontext()
    if any((folder / name).exists() for name in ("config.toml", "comparison.json", "deployment")):
        check_own(folder)  # any other is refused as what it is
    return only_allowed(*(name.strip() for name in (allow or "").split(",")), *named)


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{option} takes KEY=VALUE, not {text!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _debug() -> str:
    return "" if os.environ.get("FEWBYTES_DEBUG") else "FEWBYTES_DEBUG=1 shows all"


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 the user's input was wrong, 1 anything else, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # where a locale has few characters
    plain = warnings.formatwarning
    warnings.formatwarning = lambda text, kind, *of, **how: visible(
        f"note: {text}\n" if issubclass(kind, Slip) else plain(text, kind, *of, **how)
    )
    # a method, model or generator is found in the current folder; last, for a folder of others may have a torch.py
    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())] + [os.getcwd()]
    try:
        returned = app(standalone_mode=False)  # an exit code where it ended a command itself
        code = returned if isinstance(returned, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except typer.Exit as error:
        code = error.exit_code
    except UserError as error:
        code = _fail(str(error), 2)
    except OSError as error:
        mendable = errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR
        where = f": {error.filename}" if error.filename else ""
        advice = "; free some; a run that had begun goes on with --resume" if error.errno == errno.ENOSPC else ""
        code = _fail(f"{error.strerror or error}{where}{advice}", 2 if error.errno in mendable else 1)
    except FewbytesError as error:
        more = f" ({_debug()})" if getattr(error, "__notes__", None) and _debug() else ""  # a handler's own error
        code = _fail(f"{error}{more}", 1)
    except Exception as error:
        message = getattr(error, "format_message", None)  # a usage error of the command line's library
        if message is not None:
            code = _fail(_parameter(error) or f"{message()} (--help lists the options)", 2)
        else:
            who = (getattr(error, "__notes__", None) or ["unexpected"])[-1]  # a method's server half, in a round
            where = "; ".join(filter(None, (raised_at(error, own_code=who != "unexpected"), _debug())))
            code = _fail(f"{who}: {said(error)}{f' ({where})' if where else ''}", 1)
    sys.exit(code)


def _parameter(error: Exception) -> str:
    """How to set what was named as an option and is a parameter of the method; nothing for anything else."""
    from fewbytes.methods import METHODS

    option = str(getattr(error, "option_name", ""))
    key = option.lstrip("-").replace("-", "_")
    named = [METHODS[name] for name in sys.argv[2:] if name in METHODS] or [METHODS["fedavg"]]
    if not any(key in method.defaults() for method in named):
        return ""
    values = [after for before, after in itertools.pairwise(sys.argv) if before == option]
    return f"{option} is no option but a parameter of the method: --set {key}={(values or ['VALUE'])[0]}"


def _fail(text: str, code: int) -> int:
    if os.environ.get("FEWBYTES_DEBUG"):
        console.print_exception()
    console.print(Text.assemble(("fewbytes:", "bold red"), f" {text}".replace("\n", " ")), soft_wrap=True)
    return code
