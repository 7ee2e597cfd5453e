"""The command that shows how a dataset is split among clients, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fewbytes.cli.options import options_of, with_options
from fewbytes.cli.shared import CONFIG, SCHEMA, AsJson, print_terms, settings_of, standard_output_for
from fewbytes.data.settings import Partition
from fewbytes.experiments.display import note, printed
from fewbytes.experiments.groups import DataSettings, LearningSettings, ModelSettings

USED = ("validation", "seed", "model")  # among the settings of learning and of models
OPTIONS = [CONFIG, SCHEMA]
OPTIONS += [each for group in (Partition, DataSettings) for each in options_of(group)]
OPTIONS += [each for group in (LearningSettings, ModelSettings) for each in options_of(group) if each.name in USED]


@with_options("settings", OPTIONS, settings_of)
def partition(
    settings: dict[str, Any],
    figure: Annotated[
        Path | None, typer.Option(help="Also draw it, clients by classes: a .svg or .png file.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a dataset is split among clients: samples of each client by class. Nothing is trained.

    Example: `fewbytes partition --dataset digits --partition quantity --alpha 0.5 --figure partition.svg`
    """
    from fewbytes.experiments.partition import partition_of
    from fewbytes.report.partition_figure import check_figure, partition_table, write_figure

    if figure is not None:
        check_figure(figure)
    with standard_output_for(as_json):
        found, notes, title = partition_of(settings)
    for text in notes:
        note(text)
    if figure is not None:
        write_figure(found, title, figure)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    printed.print(partition_table(found, printed.width))
    if figure is not None:
        printed.print(f"figure: {figure}", soft_wrap=True)
    print_terms()
