const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const coarse = matchMedia("(pointer: coarse)"), hovers = matchMedia("(hover: hover)");

function draw(div) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hidden = div.id === "choice" ? [] : [...document.querySelectorAll(".key input:not(:checked)")].map((box) => Number(box.value));
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

// plotly.js is packed in the page; the page's policy knows the hash of what comes out
async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (one) => one.charCodeAt(0));
  const script = document.createElement("script");
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

// the rows of a table whose words hold all that is looked for
function filter(field) {
  const words = field.value.toLowerCase().split(/\s+/);
  for (const row of field.closest("section").querySelectorAll("tbody tr"))
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
}

// the rows by a column: numbers by their size, and what has none last; once more turns them round
function sort(head) {
  const body = head.closest("table").tBodies[0], column = Number(head.dataset.column);
  const up = head.ariaSort === "descending" || (!head.ariaSort && column === 0);
  const value = (row) => {
    const text = row.cells[column].textContent.trim(), number = parseFloat(text.replace(/[,\u202f]/g, ""));
    return column === 0 ? text : Number.isNaN(number) ? -Infinity : number;
  };
  const compare = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (up ? 1 : -1);
  const rows = [...body.rows], runs = rows.filter((row) => !row.classList.contains("baseline"));
  body.append(...runs.sort(compare), ...rows.filter((row) => row.classList.contains("baseline")));
  for (const other of head.closest("thead").querySelectorAll("[data-column]")) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
}

const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
document.addEventListener("change", (event) => {
  const box = event.target;
  if (box.value === "all" && box.type === "checkbox")
    document.querySelectorAll(".key input").forEach((other) => { other.checked = box.checked; });
  if (box.type !== "search") drawAll();
});
document.addEventListener("input", (event) => { if (event.target.type === "search") filter(event.target); });
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-column] button");
  if (button) sort(button.closest("[data-column]"));
});
unpack().then(() => {
  dark.addEventListener("change", drawAll);
  drawAll();
});
