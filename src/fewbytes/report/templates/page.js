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
