"""What a browser saves of the report's charts: their data as CSV, and SVG images on white."""

from __future__ import annotations

import csv
import json
import re
from html import unescape
from pathlib import Path

from test_report import browse, make_compare, show

from fewbytes.report import read_runs, write_report

SAVED = """
(async () => {
  const found = {};
  for (const div of document.querySelectorAll(".chart")) found[div.id] = [csv(div), await svg(div)];
  const out = document.createElement("pre");
  out.id = "saved";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
"""


def test_every_chart_can_be_saved_as_its_data_and_its_image(tmp_path: Path) -> None:
    folder = make_compare(tmp_path / "c")
    show(folder / "1-fedavg", [1, 2], ("cat", "dog"))
    runs = read_runs([folder])
    page = write_report(runs, tmp_path / "r.html")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page.read_text("utf-8"), flags=re.S)
    page.write_text(text.replace("  drawAll();\n});", f"  drawAll();\n{SAVED}}});"), "utf-8")  # without its policy
    dom, console, asked = browse(page, tmp_path / "profile")
    assert "Uncaught" not in console
    assert asked == []
    found = re.search(r'<pre id="saved">(.*?)</pre>', dom, re.DOTALL)
    assert found
    saved = json.loads(unescape(found[1]))
    assert dom.count(">CSV</button>") == dom.count(">SVG</button>") == len(saved) > 6
    for data, image in saved.values():
        widths = {len(row) for row in csv.reader(data.splitlines())}
        assert len(widths) == 1
        assert len(data.splitlines()) > 1
        assert image.startswith("<svg")
        assert "rgb(255, 255, 255)" in image
    head, *rows = csv.reader(saved["scores-rounds"][0].splitlines())
    assert head == ["name", "round", "accuracy"]
    curve = [(row["round"], value) for row, value in runs[0].curve("personalised")]
    assert [(float(t), float(value)) for name, t, value in rows if name == "fedavg"] == curve
