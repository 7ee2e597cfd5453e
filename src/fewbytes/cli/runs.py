"""Commands that run methods: run, compare, plan; and the list of methods."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewbytes.base.errors import UserError
from fewbytes.base.units import parse_rate
from fewbytes.cli.shared import (
    Allow,
    AsJson,
    DownlinkRate,
    FromRound,
    LinkRate,
    MethodName,
    Monitor,
    Out,
    Reach,
    Watch,
    method_names,
    naming,
    print_results,
    print_terms,
    standard_output_for,
    with_settings,
    with_study,
)
from fewbytes.experiments.display import console, note, printed
from fewbytes.experiments.groups import Repeating

if TYPE_CHECKING:
    from fewbytes.report.times import Goal

USUAL = ("fedavg", "fedpurin", "separate")  # default of `compare`: same models, many rounds


@with_study
def run(
    asked: tuple[dict[str, Any], Repeating],
    method: MethodName = None,
    out: Out = Path("runs"),
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder.")] = None,
    from_round: FromRound = None,
    allow: Allow = None,
    watch: Watch = None,
    monitor: Monitor = None,
    as_json: AsJson = False,
) -> None:
    """Run one method; writes a run folder with the result, the ledger, the models and a report.

    With --seeds or --tune it writes a folder of runs, as `fewbytes compare` does.

    Example: `fewbytes run fedpurin --dataset digits --clients 10 --alpha 0.3 --rounds 5 --set batch=20`
    """
    from fewbytes.experiments.new_folders import new_folder, unless_refused
    from fewbytes.experiments.prepared import PreparedRun, check_alone
    from fewbytes.experiments.run_folders import resumed
    from fewbytes.federation.endpoint import of_run, serving
    from fewbytes.methods import short_name
    from fewbytes.running.recorders import watcher_of

    settings, how = asked
    if how != Repeating():
        if from_round is not None or monitor is not None:
            raise UserError("--from-round and --monitor are for one run: leave them out, or seeds and tuning")
        if method is None and "method" not in settings:
            raise UserError("name a method to repeat (`fewbytes methods` lists them)")
        _repeat([method or settings.pop("method")], (settings, how), (out, resume, allow), watch, as_json)
        return
    if method is not None:
        settings["method"] = method
    if from_round is not None and resume is None:
        raise UserError("--from-round needs the run to go back in: add --resume RUN")
    with standard_output_for(as_json), naming(allow, resume, settings.get("ray_address", "")):
        if resume is not None:
            settings = resumed(resume, settings, from_round)
        for text in watch or ():
            watcher_of(text, "")  # refused before the data are loaded
        check_alone(settings)
        job = PreparedRun(settings)
        folder = resume or new_folder(out, short_name(job.experiment.method))
        with unless_refused(folder, folder if resume is None else None):
            watchers = [watcher_of(text, folder.absolute().name) for text in watch or ()]
            with serving(monitor, of_run(folder)):
                result = job.execute(folder, resume is not None, watchers=watchers, from_round=from_round)
    print_results(folder, result, as_json)


@with_study
def compare(
    asked: tuple[dict[str, Any], Repeating],
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Methods to compare, or all (default: fedavg, fedpurin, separate).",
            autocompletion=method_names,
        ),
    ] = None,
    out: Out = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(metavar="COMPARISON", help="Resume the comparison in this folder, or begin it there.")
    ] = None,
    link: LinkRate = None,
    downlink: DownlinkRate = None,
    reach: Reach = None,
    allow: Allow = None,
    watch: Watch = None,
    as_json: AsJson = False,
) -> None:
    """Run several methods on the same clients; writes a table and a report, and recommends a method.

    `all` runs every method on equal terms: a few minutes on the digits. --seeds repeats every run with other seeds;
    --tune chooses parameters for each method on validation data. The same command with --resume FOLDER resumes it.

    Example: `fewbytes compare fedavg fedpurin separate --dataset digits --rounds 5 --set epochs=2`
    """
    from fewbytes.report.times import Goal

    goal, (settings, how) = Goal.read(link, downlink, reach), asked
    if "all" in (methods or ()) and len(set(methods or ())) > 1:
        raise UserError(f"all stands for every method: leave out {', '.join(n for n in methods or () if n != 'all')}")
    bare = not methods and not settings and not (how.seeds or how.tune or how.trials)
    names = None if bare and (resume is not None or how.merge) else list(dict.fromkeys(methods or USUAL))
    _repeat(names, asked, (out, resume, allow), watch, as_json, goal)


def _repeat(
    names: list[str] | None,
    asked: tuple[dict[str, Any], Repeating],
    places: tuple[Path, Path | None, str | None],
    watch: list[str] | None,
    as_json: bool,
    goal: Goal | None = None,
) -> None:
    """Run a comparison and print its results; `names`: None for what its folder states. `places`: where new folders
    go, the folder to resume, and what it may import. `goal`: what is asked of the finished runs."""
    from fewbytes.experiments.compare import compare as compare_methods
    from fewbytes.methods import canonical
    from fewbytes.running.recorders import watcher_of

    (settings, how), (out, resume, allow) = asked, places
    names = None if names is None else list(dict.fromkeys(map(canonical, names)))
    for text in watch or ():
        watcher_of(text, "")  # refused before the data are loaded
    stated = None if names is not None else resume if resume is not None or not how.merge else Path(how.merge[0])
    with standard_output_for(as_json), naming(allow, stated):
        folder, results = compare_methods(names, settings, out, resume, watch or (), how)
    if results or as_json:
        print_results(folder, results, as_json, goal)
    if {result["status"] for result in results} & {
        "failed",
        *(["left out"] if names is not None and "all" not in names else []),
    }:
        raise typer.Exit(1)


@with_settings
def plan(
    settings: dict[str, Any],
    method: MethodName = None,
    uplink: Annotated[
        str, typer.Option(help="Upload speed of a client, e.g. 1MB/s or, in bits, 10Mbit/s or 10Mb/s.")
    ] = "1MB/s",
    downlink: Annotated[str | None, typer.Option(help="Download speed of a client (default: the same).")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what a run costs in bytes and time, from a few real rounds of a few clients.

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
        result = make_plan(job.method, job.task, how.rounds, *rates, exchange, how.budget, how.rounding, many)
    if as_json:
        more = {"round_seconds": result.round_seconds, "round_time": result.round_time}
        print(json.dumps(dataclasses.asdict(result) | more, indent=2))
    else:
        printed.print(result.table())
        print_terms()


def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Method to describe: a name, or package.module:Class.", autocompletion=method_names),
    ] = None,
    bibtex: Annotated[bool, typer.Option("--bibtex", help="Print the papers to cite, as BibTeX.")] = False,
    as_json: AsJson = False,
) -> None:
    """List all methods, or show one method's paper, idea, cost and parameters.

    Example: `fewbytes methods fedpurin`
    """
    from fewbytes.cli.methods import all_of, cited, one
    from fewbytes.experiments.catalogue import about
    from fewbytes.methods import METHODS, canonical, method_class

    if name is not None:
        found = [about(canonical(name), method_class(name))]
    else:
        found = []
        for each in METHODS:
            try:
                found.append(about(each, METHODS[each]))
            except UserError as error:  # of another package
                note(str(error))
    if bibtex and as_json:
        raise UserError("--json has the papers, too: leave --bibtex out")
    if bibtex:
        entries = cited(found)
        for text in entries:
            print(text, end="\n\n")
        if name is not None and not entries:
            note(f"{found[0].name} states no paper to cite: {found[0].paper or 'its file has no docstring'}")
    elif as_json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        printed.print(all_of(found) if name is None else one(found[0]))
