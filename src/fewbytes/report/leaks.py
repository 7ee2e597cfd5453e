"""Shows what `fewbytes attack` made of images again: a table of runs, and each run's picture.

The picture may be a stranger's: its pixels are decoded and encoded again, and words are escaped.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from html import escape

from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.report.folder import Attack, RunFolder
from fewbytes.report.table import decibels, percent

_FILE_BYTES = 1 << 24  # a larger picture is not shown


def section(runs: Sequence[RunFolder]) -> str:
    """The section of the page; nothing where no run was attacked. Raises UserError for a damaged picture."""
    found = [(run, run.attack) for run in runs if run.attack]
    if not found:
        return ""
    rows = "".join(_row(run, attack) for run, attack in found)
    figures = "".join(_figure(run, attack) for run, attack in found)
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("network", "client", "values seen", "noise", "label", "images", "mean", "median", "25 dB or more")
    )
    return f"""<section>
<h2>Gradient inversion</h2>
<p>What a server that knows the tensors a method uploads can make of a client's training images by iDLG: it looks for
images whose gradients match, one image at a time.</p>
<div class="wide" role="region" aria-label="Gradient inversion" tabindex="0">
<table><thead><tr><th scope="col">method</th>{heads}</tr></thead><tbody>{rows}</tbody></table>
</div>
{figures}
<p class="note">Mean and median are of the peak signal-to-noise ratio (PSNR): the higher, the more alike. Values seen
are the part of the network's parameters whose gradients are known; the others are drawn at random. Noise is the
variance of what is added to every gradient entry. A given label is one that the upload does not tell.</p>
</section>"""


def _row(run: RunFolder, attack: Attack) -> str:
    cells = [
        escape(attack["model"]), attack["client"], percent(attack["observed_values"] / max(1, attack["values"])),
        f"{attack['noise']:g}", escape(attack["label"]), len(attack["attacked"]), decibels(attack["psnr_mean"]),
        decibels(attack["psnr_median"]), percent(attack["recognised"]),
    ]  # fmt: skip
    return f'<tr><th scope="row">{escape(run.label)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _figure(run: RunFolder, attack: Attack) -> str:
    path = run.path / "attack.png"
    if not path.is_file():
        return ""
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if path.stat().st_size > _FILE_BYTES:
                raise ValueError("it is too large")
            with Image.open(path, formats=["PNG"]) as image:
                image.convert("RGB").save(file, "PNG")
    except Exception as error:  # a stranger's file may fail a decoder in any way
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    data = base64.b64encode(file.getvalue()).decode()
    told = ", ".join(f"sample {row['sample']}: {decibels(row['psnr'])}" for row in attack["attacked"])
    return f"""<figure class="wide"><figcaption>{escape(run.label)}: originals, below each what was made of its gradient
</figcaption><img src="data:image/png;base64,{data}" alt="{escape(told)}" style="max-width:100%"></figure>"""
