"""The frame of every page: its style, its one script, and a policy that lets no other run."""

from __future__ import annotations

import base64
import hashlib
import html

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped, unused-ignore]

from fewbytes.report import pieces
from fewbytes.report.pieces import Charts


def document(title: str, body: str, charts: Charts) -> str:
    """A whole page around sections of HTML, which draws the charts they have places for."""
    scripts = [get_plotlyjs(), _SCRIPT]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {hashes};
 style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<title>{html.escape(title)} · fewbytes</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="charts">{pieces.script_json(charts)}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


_STYLE = """
:root {
  --bg: #f5f6f8; --card: #ffffff; --ink: #1d2530; --muted: #5b6775; --line: #e1e5ea; --accent: #2f6fb5;
  --low: #f1f4f8; --high: #1f5fa8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #11151a; --card: #191f26; --ink: #e4e8ee; --muted: #9aa5b1; --line: #2c343e; --accent: #7db4f0;
    --low: #1f262e; --high: #7db4f0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; overflow-wrap: anywhere; }
main { max-width: 1240px; margin: 0 auto; padding: 40px 20px 64px; }
header { margin: 0 4px 28px; }
.eyebrow { margin: 0 0 4px; color: var(--accent); font-size: 13px; font-weight: 600; letter-spacing: .04em; }
h1 { margin: 0 0 8px; font-size: clamp(24px, 4vw, 34px); line-height: 1.2; font-weight: 650; letter-spacing: -.015em; }
h2 { margin: 0 0 4px; font-size: 19px; line-height: 1.3; font-weight: 650; letter-spacing: -.005em; }
p { margin: 0 0 16px; max-width: 90ch; text-wrap: pretty; }
.facts, section > p, .note, dd { color: var(--muted); }
.facts { margin: 0; }
section b { color: var(--ink); font-weight: 600; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 24px;
  margin: 0 0 20px; }
section > :last-child { margin-bottom: 0; }
.note, small { font-size: 13px; }
.wide { overflow-x: auto; margin: 0 0 16px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
table.narrow { width: auto; }
.narrow td { text-align: left; }
th, td { padding: 9px 8px; text-align: right; border-bottom: 1px solid var(--line); vertical-align: baseline; }
th { font-weight: 500; }
td:empty { padding: 0; }
thead th { color: var(--muted); font-size: 13px; line-height: 1.3; vertical-align: bottom;
  white-space: nowrap; }
thead th[scope=colgroup] { text-align: center; color: var(--ink); }
th[rowspan]:first-child, th[scope=row], .narrow th { text-align: left; padding-left: 0; min-width: 8em;
  max-width: 20em; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
td.strong { font-weight: 650; }
td small { display: block; color: var(--muted); font-size: 12px; white-space: nowrap; }
.baseline > * { color: var(--muted); }
.badge { font-size: 12px; color: var(--muted); border: 1px solid var(--line); border-radius: 99px; padding: 1px 8px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; flex: none; }
.key { position: sticky; top: 8px; z-index: 5; display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 20px;
  max-height: 22vh; overflow-y: auto; padding: 10px 24px; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; font-size: 14px; box-shadow: 0 2px 10px rgb(0 0 0 / .05); }
.key label { position: relative; display: inline-flex; align-items: center; cursor: pointer; }
.key input { position: absolute; opacity: 0; }
.key label:has(input:not(:checked)) { color: var(--muted); text-decoration: line-through; }
.key label:has(input:not(:checked)) .dot { opacity: .25; }
label:has(:focus-visible) { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 6px; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 4px 24px;
  margin: 0 0 20px; font-size: 13px; }
dl div { display: flex; gap: 8px; align-items: baseline; }
dt { font-weight: 600; white-space: nowrap; flex: none; min-width: 7em; }
dd { margin: 0; }
.picker { display: flex; flex-wrap: wrap; align-items: center; gap: 6px; border: 0; padding: 0; margin: 0 0 20px;
  font-size: 14px; }
.picker legend { float: left; padding: 0 6px 0 0; color: var(--muted); }
.picker label { position: relative; border: 1px solid var(--line); border-radius: 99px; padding: 3px 14px;
  cursor: pointer; }
.picker input { position: absolute; opacity: 0; }
.picker label:has(:checked) { border-color: var(--accent); color: var(--accent); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 24px; }
figure { margin: 0 0 24px; min-width: 0; }
.pair figure { margin: 0; }
figcaption { font-weight: 600; font-size: 14px; }
.chart { width: 100%; }
h3 { margin: 0 0 4px; font-size: 16px; line-height: 1.3; font-weight: 650; }
article + article { margin-top: 28px; }
article > :last-child { margin-bottom: 0; }
article .pair + p { margin-top: 12px; }
.note:empty { display: none; }
.pictures td { padding: 3px; }
.pictures th[scope=col] { padding: 0 3px 4px; min-width: 0; text-align: left; }
.pictures th[scope=row] { position: sticky; left: 0; background: var(--card); vertical-align: middle;
  padding: 3px 8px 3px 0; min-width: 4em; }
.pictures tr > * { border-bottom: 0; }
.pictures img { display: block; image-rendering: pixelated; }
.pictures thead th:first-child { padding-left: 0; }
.legend { display: flex; max-width: none; flex-wrap: wrap; gap: 2px 18px; font-size: 13px; color: var(--muted); }
details + details { margin-top: 8px; }
details + p { margin-top: 16px; }
summary { cursor: pointer; font-weight: 500; }
pre { margin: 8px 0 0; padding: 14px 16px; background: var(--bg); border: 1px solid var(--line); border-radius: 8px;
  overflow-x: auto; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media (max-width: 640px) {
  main { padding: 24px 12px 40px; }
  section { padding: 18px 14px; }
  .key { padding: 8px 14px; flex-wrap: nowrap; overflow-x: auto; white-space: nowrap; }
  dl div { display: block; }
  th[rowspan]:first-child, th[scope=row] { position: sticky; left: 0; max-width: 9em; background: var(--card); }
}
"""

_SCRIPT = """
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)"), hovers = matchMedia("(hover: hover)");

function draw(div) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hidden = [...document.querySelectorAll(".key input:not(:checked)")].map((box) => Number(box.value));
  const picked = div.closest("article, section").querySelector(".picker input:checked");
  const views = charts[div.id];
  const [traces, layout] = views[picked ? picked.value : Object.keys(views)[0]];
  const family = getComputedStyle(document.body).fontFamily;
  const axis = (own) => ({
    automargin: true, gridcolor: colour("--line"), zerolinecolor: colour("--line"), nticks: 8, ticks: "",
    ticklabelstandoff: 6, separatethousands: true, tickfont: { color: colour("--muted") }, fixedrange: coarse.matches,
    ...own, title: { text: own.title, standoff: 12, font: { size: 13, color: colour("--muted") } },
  });
  const data = traces.filter((trace) => !hidden.includes(trace.meta)).map((trace) =>
    trace.type === "heatmap" ? { ...trace, colorscale: [[0, colour("--low")], [1, colour("--high")]] } : trace);
  Plotly.react(div, data, {
    ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), showlegend: false, autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 12, b: 8 },
    font: { family, size: 13, color: colour("--ink") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { family, color: colour("--ink") },
      align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--ink") },
  }, { responsive: true, displaylogo: false, displayModeBar: hovers.matches ? "hover" : false,
    modeBarButtons: [["toImage", "resetScale2d"]] });
}

const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
document.addEventListener("change", (event) => {
  const box = event.target;
  if (box.value === "all" && box.type === "checkbox")
    document.querySelectorAll(".key input").forEach((other) => { other.checked = box.checked; });
  drawAll();
});
dark.addEventListener("change", drawAll);
drawAll();
"""
