// Tables with figures sort by a column: a click on its head, or Enter; once more turns the order round.
function sortBy(head) {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const text = (row) => row.cells[column]?.textContent.trim() ?? "";
  const number = (row) => parseFloat(text(row).replace(/,/g, "").replace("−", "-"));
  const numeric = [...body.rows].some((row) => !Number.isNaN(number(row))) && column > 0;
  const up = head.ariaSort ? head.ariaSort === "descending" : !numeric;
  const last = up ? Infinity : -Infinity;  // what has no figure
  const value = (row) => !numeric ? text(row) : Number.isNaN(number(row)) ? last : number(row);
  body.append(...[...body.rows].sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (up ? 1 : -1)));
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = up ? "ascending" : "descending";
}

addEventListener("DOMContentLoaded", () => {
  for (const head of document.querySelectorAll("article table.docutils thead th")) {
    const table = head.closest("table");
    if (table.tBodies[0].rows.length < 4 || !table.querySelector("td.text-right")) continue;
    Object.assign(head, { tabIndex: 0, title: "sort", onclick: () => sortBy(head) });
    head.onkeydown = (event) => { if (event.key === "Enter") sortBy(head); };
    head.classList.add("sortable");
  }
});
