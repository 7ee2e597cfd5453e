// Tables sort by a column: numbers by size, then words, then the rest; a second click reverses the order. Long ones have a filter.
const LONG = 10;  // rows
const textOf = (cell) => cell?.textContent.trim() ?? "";
const numberOf = (text) => parseFloat(text.replace(/[,\u202f]/g, "").replace("−", "-"));

function sortBy(head) {
  const body = head.closest("table").tBodies[0], rows = [...body.rows];
  const keys = new Map(rows.map((row) => [row, textOf(row.cells[head.cellIndex])]));
  const numeric = head.cellIndex > 0 && rows.some((row) => !Number.isNaN(numberOf(keys.get(row))));
  const up = head.ariaSort ? head.ariaSort === "descending" : !numeric;
  const kind = (text) => !Number.isNaN(numberOf(text)) ? 0 : /\p{L}/u.test(text) ? 1 : 2;
  const compare = (a, b) => kind(a) - kind(b)
    || (up ? 1 : -1) * (kind(a) ? a.localeCompare(b, "en", { numeric: true }) : numberOf(a) - numberOf(b));
  body.append(...rows.sort((a, b) => compare(keys.get(a), keys.get(b))));
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
}

// the rows whose words hold all that is looked for
function filter(table, text) {
  const words = text.toLowerCase().split(/\s+/);
  for (const row of table.tBodies[0].rows)
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
}

addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const heads = table.tHead?.rows.length === 1 ? [...table.tHead.rows[0].cells] : [], rows = [...table.tBodies[0].rows];
    // a row without a first cell belongs to the one above
    if (rows.length < 3 || rows.some((row) => row.cells.length !== heads.length || !textOf(row.cells[0]))) continue;
    for (const head of heads.filter(textOf)) {
      const button = document.createElement("button"), words = head.querySelector("p") ?? head;
      Object.assign(button, { type: "button", className: "sort", onclick: () => sortBy(head) });
      button.append(...words.childNodes);
      words.append(button);
    }
    if (rows.length <= LONG) continue;
    const label = document.createElement("label"), field = document.createElement("input");
    Object.assign(field, { type: "search", placeholder: "part of a name or a word", oninput: () => filter(table, field.value) });
    label.className = "filter";
    label.append("Show rows with ", field);
    (table.closest(".table-wrapper") ?? table).before(label);
  }
});
