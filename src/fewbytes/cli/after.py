"""The commands for what runs leave: reports, models as files, what a model knows, what it gives away, frames."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fewbytes.analysis.settings import Attacking, Imprinting, Inferring, Poisoning, Probing, attack_of
from fewbytes.cli.options import option, options_of, with_options
from fewbytes.cli.shared import Allow, AsJson, naming, show, standard_output_for
from fewbytes.experiments.display import console, note, printed, progress


def report(runs: Annotated[list[Path], typer.Argument(help="Run folders, or a folder of them.")]) -> None:
    """Write the report of one run, or one page that compares several."""
    from fewbytes.report import read_runs, write_report

    found = read_runs(runs)
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([os.path.realpath(path) for path in runs]))
    page = write_report(found, folder / "report.html")
    show(found, page)


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
    with standard_output_for(as_json), naming(allow, run):
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
    with standard_output_for(as_json), naming(allow, run, *named):
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
    with standard_output_for(as_json), naming(allow, run), console.status("exporting the model"):
        paths = export_model(run, client, [each for each in FILES if asked[each]] or list(FILES), out)
    if as_json:
        print(json.dumps({path.name: str(path) for path in paths}, indent=2))
    else:
        printed.print("wrote " + ", ".join(path.name for path in paths), soft_wrap=True)
        printed.print(f"how to run it: {paths[0].parent / 'README.md'}", soft_wrap=True)


def inspect_file(
    frame: Annotated[Path, typer.Argument(help="A frame, e.g. of `fewbytes run --keep-frames`.")], allow: Allow = None
) -> None:
    """Print what a frame holds."""
    from fewbytes.experiments.catalogue import payloads
    from fewbytes.wire.inspect import inspect_frame

    with naming(allow, frame.absolute().parent.parent):
        printed.print(inspect_frame(frame, payloads(frame)))
