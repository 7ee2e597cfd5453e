"""Fills the templates: one whole page with its style and scripts in it, and a policy that lets no other script run.

jinja2 escapes every value where it enters the page, and charts travel as JSON without a single `<`.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from fewbytes.report import pieces
from fewbytes.report.pieces import Charts
from fewbytes.report.table import decibels, megabytes, percent, seconds, whole

_TEMPLATES = Path(__file__).parent / "templates"


def document(template: str, charts: Charts, **values: Any) -> str:
    """The page that a template makes of some values, which draws the charts the template has places for."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only what writes a page needs these
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

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
        "decibels": decibels,
        "megabytes": megabytes,
        "percent": percent,
        "seconds": seconds,
        "whole": whole,
    }
    scripts = [get_plotlyjs(), (_TEMPLATES / "page.js").read_text("utf-8")]
    return environment.get_template(template).render(
        values,
        charts=charts,
        charts_json=Markup(pieces.script_json(charts)),
        style=Markup((_TEMPLATES / "page.css").read_text("utf-8")),
        scripts=[Markup(script) for script in scripts],
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
    )
