"""Commands on finished runs: report, probe, attack, export, inspect."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fewbytes.analysis.settings import Attacking, Imprinting, Inferring, Poisoning, Probing, attack_of
from fewbytes.base.errors import FewbytesError, UserError, visible
from fewbytes.base.extras import needs
from fewbytes.base.units import size
from fewbytes.cli.options import option, options_of, with_options
from fewbytes.cli.shared import (
    Allow,
    AsJson,
    DownlinkRate,
    LinkRate,
    Reach,
    naming,
    print_terms,
    show,
    standard_output_for,
)
from fewbytes.experiments.display import console, note, printed, progress


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or a folder of them.")],
    link: LinkRate = None,
    downlink: DownlinkRate = None,
    reach: Reach = None,
    csv: Annotated[Path | None, typer.Option(help="Also write a table as CSV.", metavar="FILE")] = None,
    latex: Annotated[Path | None, typer.Option(help="Also write a table as LaTeX (booktabs).", metavar="FILE")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write figures as SVG files.", metavar="DIR")] = None,
    pdf: Annotated[Path | None, typer.Option(help="Also write figures as one PDF file.", metavar="FILE")] = None,
) -> None:
    """Write an HTML report of one run, or one that compares several; and tables and figures for a paper.

    Example: `fewbytes report runs/my-comparison --link 10Mbps --reach 0.9 --latex table.tex --svg figures`
    """
    from fewbytes.report import read_runs, write_report
    from fewbytes.report.app_bytes import NAME, read_app_bytes, write_app_report

    if len(runs) == 1 and (runs[0] / NAME).is_file() and not (runs[0] / "config.toml").exists():
        for name, (sent, plain) in read_app_bytes(runs[0]).totals().items():
            fewer = f", {plain / sent:.3g} times fewer bytes than plain" if sent else ""
            printed.print(f"{name}: {size(sent)} sent, {size(plain)} plain{fewer}")
        printed.print(f"report: {write_app_report(runs[0])}", soft_wrap=True)
        return
    from fewbytes.report.repeats import repeated
    from fewbytes.report.times import Goal

    goal, found = Goal.read(link, downlink, reach), read_runs(runs)
    if svg or pdf:
        needs("figures as SVG or PDF", "results", "matplotlib")
    folder = runs[0] if len(runs) == 1 else Path(os.path.commonpath([os.path.realpath(path) for path in runs]))
    show(found, write_report(found, folder / "report.html", goal), goal)
    groups = repeated(found)
    if csv or latex:
        from fewbytes.report.paper import write_csv, write_latex

        for write, file in ((write_csv, csv), (write_latex, latex)):
            if file is not None:
                write(groups, file, goal)
                printed.print(f"table: {file}", soft_wrap=True)
    if svg or pdf:
        from fewbytes.report.figures import write_pdf, write_svg

        if svg is not None:
            printed.print(f"figures: {len(write_svg(groups, svg, goal))} in {svg}", soft_wrap=True)
        if pdf is not None:
            printed.print(f"figures: {write_pdf(groups, pdf, goal)}", soft_wrap=True)


@with_options("how", options_of(Probing), Probing.read)
def probe(
    how: Probing,
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    client: Annotated[int | None, typer.Option(help="Probe this client's own model, not the global one.")] = None,
    points: Annotated[str | None, typer.Option(help="Layers to probe, comma-separated.", metavar="LIST")] = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each layer of a trained model encodes of the image and the label; adds it to the run's report."""
    from fewbytes.analysis.probe import probe as probe_run
    from fewbytes.analysis.probe import probe_table
    from fewbytes.report import read_runs, write_report

    names = [name.strip() for name in points.split(",")] if points is not None else []
    with standard_output_for(as_json), naming(allow, run):
        with progress("probe") as bar:
            result = probe_run(run, client, names, how, bar)
        page = write_report(read_runs([run]), run / "report.html")
    for name in result["skipped"]:
        note(f"not probed after {name}: its branches differ in shape")
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        printed.print(probe_table(result))
        printed.print(f"report: {page}", soft_wrap=True)
        print_terms()


ATTACKS = [
    option(
        "membership", False, bool,
        typer.Option(
            "--membership", help="Infer which samples were in the training data.", rich_help_panel=Inferring.title
        ),
    ),
    option(
        "imprint", False, bool,
        typer.Option(
            "--imprint", help="Read images off with a first layer that a malicious server manipulates.",
            rich_help_panel=Imprinting.title,
        ),
    ),
    option(
        "poison", None, str,
        typer.Option(
            help="Repeat the run with malicious clients: scale, flip, noise, labels or backdoor.", metavar="ATTACK",
            rich_help_panel=Poisoning.title,
        ),
    ),
    *{
        each.name: each for group in (Poisoning, Inferring, Imprinting, Attacking) for each in options_of(group)
    }.values(),
]  # fmt: skip
"""The options of `attack`: the kinds of attack, and the settings of each."""


@with_options("how", ATTACKS, attack_of)
def attack(
    how: Attacking | Inferring | Poisoning | Imprinting,
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Attack a run, and add the result to its report. By default: reconstruct images from the gradients it uploads.

    --membership tests whether the model reveals its training samples; --imprint, what a server with a manipulated first
    layer reads off; --poison, how malicious clients change the result.
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
        print_terms()


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Write model.onnx (default: all three).")] = False,
    torch: Annotated[bool, typer.Option("--torch", help="Write model.pt2, for torch.export.load.")] = False,
    safetensors: Annotated[bool, typer.Option("--safetensors", help="Write model.safetensors, the weights.")] = False,
    client: Annotated[int | None, typer.Option(help="Export this client's own model, not the global one.")] = None,
    round_: Annotated[
        int | None,
        typer.Option("--round", help="Round of the model (default: the best if the run kept it, else the last)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: RUN/export).", metavar="DIR")] = None,
    allow: Allow = None,
    as_json: AsJson = False,
) -> None:
    """Export a run's model to files that work without fewbytes, with class names and instructions."""
    from fewbytes.models.export import FILES, export_model

    asked = dict(zip(FILES, (onnx, torch, safetensors), strict=True))
    with standard_output_for(as_json), naming(allow, run), console.status("exporting the model"):
        paths = export_model(run, client, [each for each in FILES if asked[each]] or list(FILES), out, round=round_)
    if as_json:
        print(json.dumps({path.name: str(path) for path in paths}, indent=2))
    else:
        printed.print("wrote " + ", ".join(path.name for path in paths), soft_wrap=True)
        printed.print(f"how to run it: {paths[0].parent / 'README.md'}", soft_wrap=True)


def audit(
    folder: Annotated[Path, typer.Argument(help="A node's folder, or one with several, which holds egress.jsonl.")],
    key: Annotated[
        Path | None,
        typer.Option(help="The node's public key, as registered (default: beside the record).", metavar="FILE"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file (default: FOLDER/audit.html).", metavar="FILE")] = None,
) -> None:
    """Verify a node's record of what left it, and write a page about it that can be printed.

    Exit code 1: the record was changed; the line is named.

    Example: `fewbytes audit ~/.fewbytes/nodes`
    """
    from fewbytes.report.audit import PAGE, audited, records_in, write_audit

    sites = [audited(place, key) for place in records_in(folder)]
    page = write_audit(sites, out or folder / PAGE, "What left this site")
    for site in sites:
        printed.print(f"{site.name}: {site.verdict}", soft_wrap=True)
    printed.print(f"page: {page}", soft_wrap=True)
    if changed := [site.name for site in sites if not site.sound]:
        raise FewbytesError(f"changed: the record of {', '.join(changed)}")


def statement(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="Output file (default: RUN/statement.html).", metavar="FILE")] = None,
    allow: Allow = None,
) -> None:
    """Write a page about what the clients of a run sent, and what attacks learn from it, to be printed."""
    from fewbytes.report import read_runs
    from fewbytes.report.audit import STATEMENT, stated, write_audit

    with naming(allow, run):
        [found] = read_runs([run])
        page = write_audit([stated(found)], out or run / STATEMENT, f"What the clients of {run.resolve().name} sent")
    printed.print(f"page: {page}", soft_wrap=True)


def inspect_file(
    frame: Annotated[
        Path,
        typer.Argument(
            help="A message's file, from `fewbytes run --keep-frames`, `fewbytes encode` or `fewbytes.codec`, or a "
            "reply that a node has kept (checkpoint/clients/*.reply), or a sealed file of a mailbox."
        ),
    ],
    node: Annotated[
        Path | None, typer.Option(help="The node.toml of the site that can read a sealed order.", metavar="FILE")
    ] = None,
    allow: Allow = None,
) -> None:
    """Print the contents of a message that was kept as a file."""
    from fewbytes.experiments.catalogue import payloads
    from fewbytes.wire.inspect import inspect_frame, inspected

    if frame.suffix in (".order", ".answer", ".refused"):
        _inspect_sealed(frame, node)
        return

    with naming(allow, frame.absolute().parent.parent):
        if frame.suffix != ".reply":
            printed.print(inspect_frame(frame, payloads(frame)))
            return
        from fewbytes.flower.node import beside, read_reply

        kept = read_reply(frame)
        for name, entries in kept.fields.items():
            printed.print(visible(f"{name}: {', '.join(entries)}" if entries else name), soft_wrap=True)
        printed.print(visible(f"beside: {', '.join(beside(kept.done)) or 'nothing'}"), soft_wrap=True)
        if kept.frame:
            printed.print(inspected(kept.frame, frame, payloads(frame, kept.fields)))


def _inspect_sealed(file: Path, node: Path | None) -> None:
    """Print what anyone can read of a sealed file and, with the file of its receiver's node, the order in it."""
    from fewbytes.mailbox.sealed import NotAccepted, read_header
    from fewbytes.wire.inspect import inspected

    try:
        header = read_header(data := file.read_bytes())
        for name in ("kind", "run", "series", "number", "sender", "receiver", "when", "nonce"):
            printed.print(visible(f"{name:8} {getattr(header, name)}"), soft_wrap=True, markup=False)
        printed.print(f"bytes    {len(data):,}, encrypted {header.length:,}")
        if node is None:
            return
        from fewbytes.flower.mailbox_site import read_order
        from fewbytes.flower.transport import KINDS

        order, frames = read_order(node.absolute(), data)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except NotAccepted as error:
        raise UserError(f"{file}: {error}") from None
    step = KINDS.get(order.job.handler, order.job.handler)
    printed.print(visible(f"order    round {order.job.round}, {step}"), soft_wrap=True, markup=False)
    for each in frames:
        printed.print(inspected(bytes(each), file))
