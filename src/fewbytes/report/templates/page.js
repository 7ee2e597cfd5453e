const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)"), hovers = matchMedia("(hover: hover)");
const plain = (text) => new DOMParser().parseFromString(String(text ?? ""), "text/html").documentElement.textContent;

// the view of a chart that is picked, and its name if there are several
function picked(div) {
  const choice = div.closest("article, section").querySelector(".picker input:checked"), views = charts[div.id];
  const view = choice && views[choice.value] ? choice.value : Object.keys(views)[0];
  return [...views[view], Object.keys(views).length > 1 ? view : ""];
}

// what plotly draws: the picked view in the page's colours, or those of paper
function drawing(div, paper) {
  const root = document.documentElement, was = root.classList.contains("paper");
  root.classList.toggle("paper", paper || was);
  const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(name).trim();
  const hidden = div.id === "choice" || div.id.startsWith("target") ? []
    : [...document.querySelectorAll(".key input:not(:checked)")].map((box) => Number(box.value));
  const [traces, layout] = picked(div);
  const family = getComputedStyle(document.body).fontFamily;
  const axis = (own) => ({
    automargin: true, gridcolor: colour("--line"), zerolinecolor: colour("--line"), nticks: 8, ticks: "",
    ticklabelstandoff: 6, separatethousands: true, tickfont: { color: colour("--muted") }, fixedrange: coarse.matches,
    ...own, title: { text: own.title, standoff: 12, font: { size: 13, color: colour("--muted") } },
  });
  const shown = {
    data: traces.filter((trace) => !hidden.includes(trace.meta)).map((trace) =>
      trace.type === "heatmap" ? { ...trace, colorscale: [[0, colour("--low")], [1, colour("--high")]] } : { ...trace }),
    layout: {
      ...layout, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis), showlegend: false, autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 12, b: 8 },
      font: { family, size: 13, color: colour("--ink") },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { family, color: colour("--ink") },
        align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--ink") },
    },
  };
  root.classList.toggle("paper", was);
  return shown;
}

function draw(div) {
  const { data, layout } = drawing(div, false);
  Plotly.react(div, data, layout, { responsive: true, displaylogo: false,
    displayModeBar: hovers.matches ? "hover" : false, modeBarButtons: [["resetScale2d"]] });
  if (data.some((trace) => "first" in trace)) name(div);
}

// the names of marks, where they cover no mark, no other name and if possible no line: first those that matter most; hover shows the others
function name(div) {
  const { xaxis, yaxis, font } = div._fullLayout, pen = document.createElement("canvas").getContext("2d");
  pen.font = `${font.size}px ${font.family}`;
  const marks = div.data.map((trace, index) => ({ trace, index })).filter(({ trace }) => "first" in trace)
    .map((mark) => ({ ...mark, x: xaxis.d2p(mark.trace.x[0]), y: yaxis.d2p(mark.trace.y[0]) }));
  const taken = marks.map(({ x, y, trace }) => {
    const half = trace.marker.size / 2 + 1;
    return [x - half, y - half, x + half, y + half];
  });
  const lines = div.data.filter((trace) => !("first" in trace)).flatMap(({ x, y }) => x.slice(1).flatMap((end, i) =>
    [[x[i], y[i], end, y[i]], [end, y[i], end, y[i + 1]]])).map(([x0, y0, x1, y1]) => [
    Math.min(xaxis.d2p(x0), xaxis.d2p(x1)) - 1, Math.min(yaxis.d2p(y0), yaxis.d2p(y1)) - 1,
    Math.max(xaxis.d2p(x0), xaxis.d2p(x1)) + 1, Math.max(yaxis.d2p(y0), yaxis.d2p(y1)) + 1]);
  const free = ([l, t, r, b], boxes) => l > -4 && t > -8 && r < xaxis._length + 8 && b < yaxis._length + 4
    && !boxes.some(([left, top, right, bottom]) => l < right && r > left && t < bottom && b > top);
  const places = { "top left": [-1, -1], "top center": [0, -1], "top right": [1, -1], "bottom right": [1, 1],
    "bottom center": [0, 1], "bottom left": [-1, 1], "middle right": [1, 0], "middle left": [-1, 0] };
  const mode = {}, position = {};
  for (const { trace, index, x, y } of marks.sort((a, b) => b.trace.first - a.trace.first)) {
    const width = pen.measureText(plain(trace.text[0])).width, away = trace.marker.size / 2 + 2;
    const boxes = (width ? Object.entries(places) : []).map(([place, [across, down]]) => {
      const left = x + (across - 1) * width / 2 + across * (down ? 2 : away), middle = y + down * (away + 8);
      return [place, [left, middle - 8, left + width, middle + 8]];
    });
    const [place, box] = boxes.find(([, box]) => free(box, [...taken, ...lines]))
      ?? boxes.find(([, box]) => free(box, taken)) ?? [];
    if (!place) continue;
    taken.push(box);
    [mode[index], position[index]] = ["markers+text", place];
  }
  const indices = marks.map(({ index }) => index);
  Plotly.restyle(div, { mode: indices.map((i) => mode[i] ?? "markers"),
    textposition: indices.map((i) => position[i] ?? "top left") }, indices);
}

// plotly.js is packed in the page; the page's policy knows the hash of what comes out
async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (one) => one.charCodeAt(0));
  const script = document.createElement("script");
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// ---- files: a chart as SVG on white paper, and its data as CSV ----

function save(div, type, ending, text) {
  const link = document.createElement("a"), view = picked(div)[2];
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${[div.id, view].filter(Boolean).join("-").replace(/[^\w.-]+/g, "-")}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// the names of traces: of their run, and of what differs within one
function namesOf(traces) {
  const first = traces.map((trace) => trace.customdata?.[0]);
  const names = traces.map((trace, i) => plain(trace.name ?? (Array.isArray(first[i]) ? first[i][0] : first[i])));
  return names.map((name, i) => names.indexOf(name) !== names.lastIndexOf(name) && Array.isArray(first[i])
    && typeof first[i][1] === "string" && traces[i].type === "scatter" ? `${name} ${plain(first[i][1])}` : name);
}

async function svg(div) {
  const { data, layout } = drawing(div, true), shown = new Map(div.data.map((trace, i) => [i, trace]));
  for (const [i, trace] of data.entries())
    if ("first" in trace) Object.assign(trace, { mode: shown.get(i)?.mode, textposition: shown.get(i)?.textposition });
  const lines = data.filter((trace) => trace.mode?.startsWith("lines") && trace.hoverinfo !== "skip");
  const names = namesOf(lines);
  for (const trace of data) trace.showlegend = lines.includes(trace);
  lines.forEach((trace, i) => { trace.name = names[i]; });
  layout.showlegend = lines.length > 1;
  const size = { width: Math.max(div.clientWidth, 320), height: div.clientHeight };
  Object.assign(layout, { paper_bgcolor: "#ffffff" });
  const url = await Plotly.toImage({ data, layout: { ...layout, ...size } }, { format: "svg", ...size });
  return decodeURIComponent(url.slice(url.indexOf(",") + 1));
}

function csv(div) {
  const [traces, layout] = picked(div), title = (axis, other) => plain(layout[axis]?.title) || other;
  const ticks = (axis) => new Map((layout[axis]?.tickvals ?? []).map((at, i) => [at, plain(layout[axis].ticktext[i])]));
  const across = ticks("xaxis"), up = ticks("yaxis"), rows = [], drawn = traces.filter((t) => t.hoverinfo !== "skip");
  const read = (names, value) => names.get(value) ?? names.get(Math.round(value)) ?? (value ?? "");
  const exact = (value) => across.get(value) ?? (value ?? "");
  const spread = drawn.some((trace) => trace.deviations), error = drawn.some((trace) => trace.error_x);
  rows.push(["name", title("xaxis", "x"), title("yaxis", "y"), ...(drawn.some((t) => t.z) ? ["value"] : []),
    ...(spread ? ["deviation"] : []), ...(error ? ["low", "high"] : [])]);
  const names = namesOf(drawn);
  for (const [number, trace] of drawn.entries()) {
    const label = trace.type === "box" ? (i) => `${names[number]} ${plain(trace.customdata[i][1])}` : () => names[number];
    if (trace.z) {
      trace.z.forEach((line, i) => Array.from(line).forEach((value, j) => rows.push(
        [plain(trace.customdata?.[i]?.[0] ?? names[number]), plain(trace.x?.[j] ?? j), read(up, trace.y?.[i] ?? i), value ?? ""])));
      continue;
    }
    const { x = [], y = [] } = trace, horizontal = up.size && typeof y[0] === "number";
    x.forEach((at, i) => rows.push([label(i), horizontal ? at : exact(at), horizontal ? read(up, y[i]) : y[i] ?? "",
      ...(spread ? [trace.deviations?.[i] ?? ""] : []),
      ...(error && trace.error_x?.visible === false ? ["", ""] : error ? [at - (trace.error_x?.arrayminus ?? trace.error_x?.array ?? [])[i],
        at + (trace.error_x?.array ?? [])[i]].map((end) => Number.isNaN(end) ? "" : end) : [])]));
  }
  const cell = (value) => typeof value === "number" ? String(value) : `"${String(value).replace(/^[=+\-@]/, "'$&").replaceAll('"', '""')}"`;
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

for (const div of document.querySelectorAll(".chart")) {
  const buttons = document.createElement("span");
  buttons.className = "save";
  for (const [text, make] of [["CSV", () => save(div, "text/csv", "csv", csv(div))],
    ["SVG", () => svg(div).then((image) => save(div, "image/svg+xml", "svg", image))]]) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: text, onclick: make });
    button.ariaLabel = `Save as ${text}: ${div.closest("figure").querySelector("figcaption").textContent}`;
    buttons.append(button);
  }
  div.closest("figure").querySelector("figcaption").append(buttons);
}

// ---- tables: sorted by a column, filtered by words; on a narrow screen stacked, or long ones with a fixed first column

const LONG = 12;  // rows

// the rows of a table whose words hold all that is looked for; baselines stay
function filter(field) {
  const words = field.value.toLowerCase().split(/\s+/);
  for (const row of field.closest(".filter").nextElementSibling.querySelectorAll("tbody tr:not(.baseline)"))
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
}

// the rows by a column: numbers by their size, and what has none last; a second click reverses the order
function sort(head) {
  const body = head.closest("table").tBodies[0], column = head.cellIndex, rows = [...body.rows];
  const text = (row) => row.cells[column]?.textContent.trim() ?? "";
  const number = (row) => parseFloat(text(row).replace(/[,\u202f]/g, "").replace("−", "-"));
  const runs = rows.filter((row) => !row.classList.contains("baseline"));
  const numeric = runs.some((row) => !Number.isNaN(number(row))) && column > 0;
  const up = head.ariaSort ? head.ariaSort === "descending" : !numeric;
  const value = (row) => Number.isNaN(number(row)) ? (up ? Infinity : -Infinity) : number(row);
  const order = (a, b) => numeric ? (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0)
    : text(a).localeCompare(text(b), "en", { numeric: true });
  const compare = (a, b) => order(a, b) * (up ? 1 : -1);
  body.append(...runs.sort(compare), ...rows.filter((row) => row.classList.contains("baseline")));
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
}

for (const table of document.querySelectorAll(".wide table:not(.pictures, .matrix, .numbers table)")) {
  const heads = table.tHead?.rows.length === 1 ? [...table.tHead.rows[0].cells] : [];
  if (!heads.length) continue;
  for (const row of table.tBodies[0].rows)
    [...row.cells].forEach((cell, i) => { if (i) cell.dataset.label = heads[i]?.textContent ?? ""; });
  if (!table.classList.contains("narrow")) table.classList.add(table.tBodies[0].rows.length > LONG ? "narrow" : "stacked");
  if (table.tBodies[0].rows.length < 2) continue;
  for (const head of heads.filter((each) => each.textContent)) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: head.textContent, onclick: () => sort(head) });
    head.replaceChildren(button);
  }
  if (table.tBodies[0].rows.length < 6) continue;
  const label = document.createElement("label"), field = document.createElement("input");
  Object.assign(field, { type: "search", placeholder: "part of a name or a word", oninput: () => filter(field) });
  label.className = "filter";
  label.append("Show rows with ", field);
  table.closest(".wide").before(label);
}

// a table that is too wide for its place is set smaller
for (const place of document.querySelectorAll(".wide"))
  if (place.scrollWidth > place.clientWidth) place.firstElementChild.classList.add("dense");

const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
const named = () => document.querySelectorAll(".chart").forEach((div) => {
  if (div.data?.some((trace) => "first" in trace)) name(div);
});
document.addEventListener("change", (event) => {
  const box = event.target;
  if (box.value === "all" && box.type === "checkbox")
    document.querySelectorAll(".key input").forEach((other) => { other.checked = box.checked; });
  if (box.type !== "search") drawAll();
});
function paper(on) {
  document.documentElement.classList.toggle("paper", on);
  drawAll();
  for (const div of document.querySelectorAll(".chart")) Plotly.Plots.resize(div);
}
unpack().then(() => {
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  let later;
  addEventListener("resize", () => { clearTimeout(later); later = setTimeout(named, 300); });
  drawAll();
});
