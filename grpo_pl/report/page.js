// Fills the page from the data that stands in it.

const run = JSON.parse(document.getElementById("data").textContent);
document.getElementById("name").textContent = run.name;
const warning = document.getElementById("warning");
warning.textContent = run.warning;
warning.hidden = !run.warning;
document.getElementById("config").textContent = run.config;
document.getElementById("tiles").replaceChildren(...run.tiles.map((tile) => element("div", { class: "tile" },
  element("div", { class: "label", text: tile.label }),
  element("div", { class: "value", text: tile.value }),
  element("div", { class: "note", text: tile.note }))));
if (run.charts.length) showCharts(run.charts, document.getElementById("charts"));
showSamples(run.samples);
