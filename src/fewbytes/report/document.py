"""Fills the templates: one self-contained page with style and scripts, and a policy that forbids other scripts.

jinja2 escapes every value on the page, and charts are embedded as JSON without any `<`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from pathlib import Path
from typing import Any

from fewbytes.base.units import in_unit, size
from fewbytes.report import numbers, pieces
from fewbytes.report.pieces import Charts
from fewbytes.report.table import GLOSSARY, decibels, percent, seconds, whole

_TEMPLATES = Path(__file__).parent / "templates"
_PLOTLY = Path(__file__).parent / "assets" / "plotly-cartesian.min.js.gz"
"""plotly.js 4.1.1 with the Cartesian traces (MIT, see its licence beside it), compressed; embedded unchanged."""


def document(template: str, charts: Charts, **values: Any) -> str:
    """The page of a template, filled with values and the charts that the template places."""
    from markupsafe import Markup

    environment = _environment()
    environment.globals["numbers"] = {name: numbers.tables(views) for name, views in charts.items()}
    packed, script = _PLOTLY.read_bytes(), (_TEMPLATES / "page.js").read_text("utf-8")
    page: str = environment.get_template(template).render(
        values,
        charts=charts,
        charts_json=Markup(pieces.script_json(charts)),
        style=Markup((_TEMPLATES / "page.css").read_text("utf-8")),
        plotly=base64.b64encode(packed).decode(),
        script=Markup(script),
        hashes=[
            base64.b64encode(hashlib.sha256(code).digest()).decode()
            for code in (gzip.decompress(packed), script.encode())
        ],
    )
    return page


def plain_document(template: str, **values: Any) -> str:
    """The page of a template without scripts or charts, filled with values."""
    page: str = _environment().get_template(template).render(values)
    return page


def _environment() -> Any:
    """The templates, with the filters that they use."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # needed only to write a page

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "colour": pieces.colour,
        "cut": pieces.cut,
        "dashes": pieces.dashes,
        "decibels": decibels,
        "in_unit": in_unit,
        "mark": pieces.mark,
        "percent": percent,
        "seconds": seconds,
        "size": size,
        "whole": whole,
    }
    environment.globals["glossary"] = GLOSSARY
    return environment
