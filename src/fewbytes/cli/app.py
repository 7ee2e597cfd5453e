"""The command line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fewbytes.analysis.attack import Attacking, attack_table
from fewbytes.analysis.attack import attack as attack_run
from fewbytes.analysis.probe import Probing, probe_table
from fewbytes.analysis.probe import probe as probe_run
from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.base.units import parse_rate
from fewbytes.experiments.compare import compare as compare_methods
from fewbytes.experiments.display import Display, console, note, printed, progress
from fewbytes.experiments.job import Job, new_folder, resumed, unless_refused
from fewbytes.experiments.plan import deployment_seconds, make_plan
from fewbytes.experiments.settings import read_experiment
from fewbytes.methods import METHODS
from fewbytes.report import CAVEAT, RunFolder, choices, read_runs, summary_table, write_report
from fewbytes.reproduce import TABLES, read_table, scale_of
from fewbytes.reproduce import reproduce as reproduce_table
from fewbytes.wire.inspect import inspect_frame

NAME = "bold cyan"  # how the names of what is listed look
app = typer.Typer(
    help="Federated learning over slow links, measured in the bytes that cross the wire.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _option(kind: Any, text: str, *names: str, metavar: str | None = None) -> Any:
    return Annotated[kind | None, typer.Option(*names, help=text, metavar=metavar)]


SHARED: dict[str, Any] = {
    "config": _option(Path, "A TOML file with any of these settings.", "-c", "--config"),
    "dataset": _option(str, "digits, a folder under FEWBYTES_DATA, a path, or a name to download.", metavar="NAME"),
    "image_size": _option(int, "Pixels a side that images are scaled to and cropped (for detection: letter-boxed)."),
    "part": _option(float, "Use only this part of the data set, e.g. 0.1, drawn by the seed."),
    "partition": _option(
        str, "dirichlet, iid, pathological, shards, main-category, flwr:<Partitioner>, or local.", metavar="NAME"
    ),
    "client_data": _option(str, "For local: a folder with a data set for each client.", metavar="DIR"),
    "partition_option": _option(list[str], "An option of a flwr: partitioner.", metavar="KEY=VALUE"),
    "alpha": _option(float, "Dirichlet alpha: the smaller, the less alike the clients."),
    "classes_per_client": _option(int, "For pathological."),
    "shards_per_client": _option(int, "For shards."),
    "main_share": _option(float, "For main-category: part of a client's samples that is of its main classes."),
    "samples": _option(str, "Fixed samples per client, e.g. 500/100.", metavar="TRAIN/TEST"),
    "public": _option(str, "For servers that distil: a data set, or a number of samples held out.", metavar="NAME"),
    "clients": _option(int, "Number of clients."),
    "newcomers": _option(int, "Further clients, with classes of their own, that come later."),
    "arrival": _option(int, "Round the newcomers come in (default: the first of the second half)."),
    "stay": _option(bool, "Whether the other clients go on when newcomers come.", "--stay/--leave"),
    "known_classes": _option(str, "The other clients' classes, e.g. 0,1,2 (default: half, drawn).", metavar="LIST"),
    "newcomer_classes": _option(str, "The newcomers' classes (default: the rest).", metavar="LIST"),
    "augment": _option(str, "Change training images at random: none, or crop-flip.", metavar="NAME"),
    "backdoor": _option(int, "Stamp a shape, by label, on the training images of the first so many clients."),
    "fraction": _option(float, "Part of the clients that takes part in a round."),
    "rounds": _option(int, "Number of rounds."),
    "budget": _option(str, "Most bytes all clients may send in a run, e.g. 200MB; it then ends early.", metavar="SIZE"),
    "model": _option(
        str,
        "mlp, vgg9, resnet8:width=32, torchvision:<name>, package.module:callable; @512 pools features; a+b, HtFE8.",
        metavar="NAME",
    ),
    "kgf": _option(int, "Generate the kernels of convolutions from so many base kernels, as Fed-KGF does."),
    "seed": _option(int, "Same seed, same results, bit for bit."),
    "workers": _option(int, "Worker processes (default: one per core)."),
    "device": _option(str, "cpu or cuda.", metavar="NAME"),
    "precision": _option(str, "float32 or bf16.", metavar="NAME"),
    "engine": _option(str, "local, or flower-simulation (Ray); plan: or flower-deployment.", metavar="NAME"),
    "min_replies": _option(float, "Part of the clients asked that must answer with finite numbers, or the run stops."),
    "round_timeout": _option(float, "Flower: seconds an exchange waits for its clients."),
    "over_selection": _option(float, "Flower: ask a cohort this part larger; the first to answer are taken."),
    "connect_timeout": _option(float, "Flower: seconds the start waits for all clients."),
    "evaluate_every": _option(int, "Score the models every so many rounds."),
    "coding": _option(bool, "Lossless coding of what travels.", "--coding/--no-coding"),
    "keep_frames": _option(bool, "Keep every frame as a file, for `fewbytes inspect`.", "--keep-frames"),
    "save_models": _option(bool, "Save the trained models.", "--models/--no-models"),
    "parameters": _option(list[str], "A field of the method (compare: or METHOD.KEY).", "--set", metavar="KEY=VALUE"),
}
"""The options that `run`, `compare` and `plan` share: an experiment's settings."""
USUAL = ("fedavg", "fedpurin", "separate")  # what `compare` runs unless told otherwise: same models, many rounds
Out = Annotated[Path, typer.Option(help="Where run folders go.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared options; it gets those that were named as `settings`."""
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "settings"]
    kind = inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(name, kind, default=None, annotation=of) for name, of in SHARED.items()]

    @functools.wraps(function)
    def command(**options: Any) -> None:
        given = {name: options.pop(name) for name in SHARED}
        function(settings=_settings(given), **options)

    parameters = [p.replace(kind=kind) for p in own] + shared
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods: paper, what each sends, its parameters and their defaults."""

    rows = []
    for name, cls in METHODS.items():
        text = inspect.getdoc(inspect.getmodule(cls)) or ""
        paper, idea, *_, cost = (" ".join(part.split()) for part in text.split("\n\n"))
        fields = cls.defaults()
        rows.append({"name": name, "paper": paper, "idea": idea, "bytes": cost, "parameters": fields})
        if not as_json:
            listed = ", ".join(f"{key}={value}" for key, value in fields.items())
            more = f"{cost}\n  parameters: {listed}"
            printed.print(Text.assemble((name, NAME), f": {paper}\n  {idea}\n  ", (more, "dim"), "\n"))
    if as_json:
        print(json.dumps(rows, indent=2))


@app.command()
@with_settings
def run(
    settings: dict[str, Any],
    method: Annotated[str | None, typer.Argument(help="A name of `fewbytes methods`.")] = None,
    out: Out = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with an interrupted run folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run one method; writes a run folder with the result, the ledger, the models and a report."""

    if method is not None:
        settings["method"] = method
    if resume is not None:
        settings = resumed(resume, settings)
    if "method" not in settings:
        raise UserError("name a method (`fewbytes methods` lists them), or a config that does")
    with _standard_output_for(as_json):
        job = Job(settings)
        folder = resume or new_folder(out, job.experiment.method)
        with unless_refused(folder, folder if resume is None else None):
            result = job.execute(folder, resume is not None)
    _told(folder, result, as_json)


@app.command()
@with_settings
def deploy(
    settings: dict[str, Any],
    method: Annotated[str | None, typer.Argument(help="A name of `fewbytes methods`.")] = None,
    out: Out = Path("runs"),
    hosts: Annotated[str | None, typer.Option(help="Names of the clients' hosts, with commas.", metavar="LIST")] = None,
    address: Annotated[str | None, typer.Option(help="Where the nodes reach this machine.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a deployment that ended.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Write the files, print the commands, start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run one method on Flower's SuperLink and SuperNodes over TLS, on this machine or on a list of hosts."""
    from fewbytes.experiments.deploy import LOOPBACK, Deployed, host_names, remembered, sites

    settings = {**settings, "engine": "flower-deployment"} | ({} if method is None else {"method": method})
    if resume is not None:
        settings = resumed(resume, settings)
        hosts, address = remembered(resume, hosts, address)
    elif hosts is not None:
        settings.setdefault("clients", len(host_names(hosts)))
    if "method" not in settings:
        raise UserError("name a method (`fewbytes methods` lists them), or a config that does")
    with _standard_output_for(as_json):
        job = Job(settings, here=None if hosts is None else ())
        nodes = sites(job.experiment, hosts)
        folder = resume or new_folder(out, job.experiment.method)
        with unless_refused(folder, folder if resume is None else None):
            deployed = Deployed(job.experiment, folder, nodes, address or LOOPBACK, resume is not None)
            if show:
                deployed.prepare()
            else:
                with Display(job.experiment.method, folder, "deploy") as display:
                    deployed.execute(display, display.note)
    if show:
        printed.print(deployed.commands(), soft_wrap=True)
    else:
        _told(folder, json.loads((folder / "result.json").read_text()), as_json)


@app.command()
@with_settings
def compare(
    settings: dict[str, Any],
    methods: Annotated[
        list[str] | None,
        typer.Argument(help="Names of `fewbytes methods` (default: fedavg, fedpurin, separate), or all."),
    ] = None,
    out: Out = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(metavar="COMPARISON", help="Go on with an interrupted comparison's folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run several methods on the same clients; a table, a report of accuracy against megabytes, and which to take.

    `all` runs every method there is on equal terms: a few minutes on the digits.
    """

    names = list(dict.fromkeys(methods or USUAL))
    if "all" in names and len(names) > 1:
        raise UserError(f"all stands for every method: leave out {', '.join(n for n in names if n != 'all')}")
    if resume is not None and (methods or settings):
        raise UserError("a comparison is gone on with as it was begun: name nothing but --resume")
    with _standard_output_for(as_json):
        folder, results = compare_methods(names, settings, out, resume)
    _told(folder, results, as_json)
    if {result["status"] for result in results} & {
        "failed",
        *(["left out"] if "all" not in names and resume is None else []),
    }:
        raise typer.Exit(1)


def _told(folder: Path, results: Any, as_json: bool) -> None:
    """Print what came of runs: result.json as it is, or a table and where the report is."""
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        _show(read_runs([folder]), folder / "report.html")


def _show(runs: Sequence[RunFolder], page: Path) -> None:
    """Print the table of some runs, which to take, and where their report is."""
    printed.print(summary_table(runs))
    found = choices(runs)
    for text in [*map(str, found), CAVEAT] if found else ():
        printed.print(text, soft_wrap=True)
    printed.print(f"report: {page}", soft_wrap=True)


@app.command()
@with_settings
def plan(
    settings: dict[str, Any],
    method: Annotated[str | None, typer.Argument(help="A name of `fewbytes methods`.")] = None,
    uplink: Annotated[
        str, typer.Option(help="A client's uplink, e.g. 1MB/s or, in bits, 10Mbit/s or 10Mb/s.")
    ] = "1MB/s",
    downlink: Annotated[str | None, typer.Option(help="A client's downlink (default: as the uplink).")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a run would cost in bytes and time, from a few real rounds of a few clients."""

    rates = parse_rate(uplink), parse_rate(downlink or uplink)
    if method is not None:
        settings["method"] = method
    if "method" not in settings:
        raise UserError("name a method (`fewbytes methods` lists them), or a config that does")
    job = Job(settings)
    with console.status(f"running a few rounds of {job.experiment.method} to measure its payloads"):
        deployed = job.experiment.engine == "flower-deployment"
        exchange = deployment_seconds(job.experiment) if deployed else 0.0
        made = make_plan(job.method, job.task, job.experiment.rounds, *rates, exchange, job.experiment.budget)
    if as_json:
        print(json.dumps(dataclasses.asdict(made) | {"round_seconds": made.round_seconds}, indent=2))
    else:
        printed.print(made.table())


@app.command()
def reproduce(
    table: Annotated[str | None, typer.Argument(help="SYSTEM/TABLE; without it, those there are.")] = None,
    scale: Annotated[str, typer.Option(help="small (minutes), or paper: as the paper has it.")] = "small",
    out: Annotated[
        Path, typer.Option(help="Where the runs and the table go, below a folder each system and scale.")
    ] = Path("runs/reproduce"),
    rows: Annotated[
        str | None, typer.Option(help="Only these rows, with commas; FedP* is all that begin so.", metavar="LIST")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Only these columns, likewise.", metavar="LIST")] = None,
    seeds: Annotated[str | None, typer.Option(help="Only these seeds, e.g. 1,2,3.", metavar="LIST")] = None,
    until: Annotated[int | None, typer.Option(help="Stop each run after this round for now.")] = None,
    parameters: Annotated[
        list[str] | None, typer.Option("--set", help="A field of the methods, or METHOD.KEY.", metavar="KEY=VALUE")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes (default: one per core).")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Run a paper's table, ours beside theirs; the same command goes on where it was stopped."""

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
        return
    with _standard_output_for(as_json):
        made = reproduce_table(
            table, scale, out, rows=_names(rows), columns=_names(columns), seeds=_names(seeds), until=until,
            parameters=_pairs(parameters or [], "--set"), workers=workers, device=device,
            tell=lambda text: console.print(text, soft_wrap=True),
        )  # fmt: skip
    if as_json:
        print(json.dumps(made.as_json(made.chosen()), indent=2))
    else:
        printed.print(made.heading, soft_wrap=True)
        printed.print(made.table())
        printed.print(f"report: {made.path.with_suffix('.html')}", soft_wrap=True)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


@app.command()
def report(runs: Annotated[list[Path], typer.Argument(help="Run folders, or a folder of them.")]) -> None:
    """Write the report of one run, or one page that compares several."""

    found = read_runs(runs)
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([path.resolve() for path in runs]))
    page = write_report(found, folder / "report.html")
    _show(found, page)


@app.command()
def probe(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    client: Annotated[int | None, typer.Option(help="Probe this client's own model, not the global one.")] = None,
    points: Annotated[str | None, typer.Option(help="Units after which to probe, with commas.", metavar="LIST")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of the probes for mutual information.")] = Probing.epochs,
    linear_epochs: Annotated[int, typer.Option(help="Epochs of the linear layers.")] = Probing.linear_epochs,
    samples: Annotated[int | None, typer.Option(help="Train probes on at most so many samples.")] = Probing.samples,
    batch: Annotated[int, typer.Option(help="Samples of a batch.")] = Probing.batch,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = Probing.lr,
    seed: Annotated[int, typer.Option(help="Same seed, same figures.")] = Probing.seed,
    as_json: AsJson = False,
) -> None:
    """Tell what a run's model knows at each depth of the image and the label; adds it to the run's report."""

    how = Probing(epochs, linear_epochs, samples, batch, lr, seed)
    names = [name.strip() for name in points.split(",")] if points is not None else []
    with _standard_output_for(as_json):
        with progress("probe") as told:
            result = probe_run(run, client, names, how, told)
        page = write_report(read_runs([run]), run / "report.html")
    for name in result["skipped"]:
        note(f"not probed after {name}: the branches differ in shape there")
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        printed.print(probe_table(result))
        printed.print(f"report: {page}", soft_wrap=True)


@app.command()
def attack(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    client: Annotated[int, typer.Option(help="Whose training images.")] = 0,
    model: Annotated[
        str,
        typer.Option(help="lenet, resnet18-sigmoid, another model, or run: the trained one.", metavar="NAME"),
    ] = "lenet",
    images: Annotated[int, typer.Option(help="Number of images, each attacked alone.")] = Attacking.images,
    iterations: Annotated[int, typer.Option(help="Iterations of L-BFGS, 20 steps each.")] = Attacking.iterations,
    restarts: Annotated[int, typer.Option(help="Further starts where gradients do not match.")] = Attacking.restarts,
    noise: Annotated[float, typer.Option(help="Variance of Gaussian noise on what is uploaded.")] = Attacking.noise,
    seed: Annotated[int, typer.Option(help="Same seed, same figures.")] = Attacking.seed,
    as_json: AsJson = False,
) -> None:
    """Tell how well images can be made again from the gradients a run's method uploads; adds it to the run's report."""

    how = Attacking(images, iterations, restarts, noise, seed)
    with _standard_output_for(as_json):
        with progress("attack") as told:
            result = attack_run(run, model, client, how, told)
        page = write_report(read_runs([run]), run / "report.html")
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        printed.print(attack_table(result))
        printed.print(f"report: {page}", soft_wrap=True)


@app.command("inspect")
def inspect_file(frame: Annotated[Path, typer.Argument(help="A frame, e.g. of `fewbytes run --keep-frames`.")]) -> None:
    """Print what a frame holds."""

    printed.print(inspect_frame(frame))


@contextlib.contextmanager
def _standard_output_for(as_json: bool) -> Iterator[None]:
    """With --json, standard output is the result's alone: what models or handlers print goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def _settings(options: dict[str, Any]) -> dict[str, Any]:
    """An experiment's settings: the config file's, and over them those named on the command line."""

    given = {name: value for name, value in options.items() if value is not None}
    config = given.pop("config", None)
    settings = read_experiment(config) if config is not None else {}
    partition = _pairs(given.pop("partition_option", None) or [], "--partition-option")
    if partition:
        given["partition_options"] = {key: _literal(value) for key, value in partition.items()}
    parameters: dict[str, Any] = dict(_pairs(given.pop("parameters", None) or [], "--set"))
    if parameters:
        given["parameters"] = {**dict(settings.get("parameters", {})), **parameters}
    return settings | given


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


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 the user's input was wrong, 1 anything else, 130 interrupted."""
    sys.path.insert(0, os.getcwd())  # --model finds a module in the current folder, as `python -m` would
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
        told = errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR
        where = f": {error.filename}" if error.filename else ""
        advice = "; free some; a run that had begun goes on with --resume" if error.errno == errno.ENOSPC else ""
        code = _fail(f"{error.strerror or error}{where}{advice}", 2 if error.errno in told else 1)
    except FewbytesError as error:
        code = _fail(str(error), 1)
    except Exception as error:
        message = getattr(error, "format_message", None)  # a usage error of the command line's library
        if message is not None:
            code = _fail(f"{message()} (--help lists the options)", 2)
        else:
            code = _fail(f"unexpected: {type(error).__name__}: {error} (FEWBYTES_DEBUG=1 shows where)", 1)
    sys.exit(code)


def _fail(text: str, code: int) -> int:
    if os.environ.get("FEWBYTES_DEBUG"):
        console.print_exception()
    console.print(Text.assemble(("fewbytes:", "bold red"), f" {text}".replace("\n", " ")), soft_wrap=True)
    return code
