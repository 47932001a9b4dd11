// Fills the page of a comparison from the data that stand in it.

const found = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const [A, B] = found.names;
const WIDTH = 460, HEIGHT = 64;  // of the picture of the intervals, in its own units

const share = (value) => value.toFixed(3);
const gap = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;
const chance = (p) => (p < 0.001 ? p.toExponential(1) : p.toFixed(3));

const tile = (label, value, note) => element("div", { class: "tile" }, element("div", { class: "label", text: label }),
  element("div", { class: "value", text: value }), element("div", { class: "note", text: note }));

function measured(set) {
  const [paired] = set.intervals;
  const ratio = set.ratio === null ? "–" : set.ratio.toFixed(2);
  return element("div", { class: "measured" },
    tile(A, share(set.pass[0]), "pass@1"), tile(B, share(set.pass[1]), "pass@1"),
    tile("difference", gap(set.difference), `95 %, paired: ${gap(paired.low)} … ${gap(paired.high)}`),
    tile("McNemar's exact test", `p = ${chance(set.p)}`, `${set.cells.only_b} gained, ${set.cells.only_a} lost`),
    tile("width, paired / unpaired", ratio, "smaller is more certain"));
}

// The four cells as one bar, and what each part is.
function cells(set) {
  const parts = [["both", "solved by both", "both"], ["only-b", `only by ${B}`, "only_b"], ["only-a", `only by ${A}`, "only_a"],
    ["neither", "by neither", "neither"]];
  const told = parts.map(([, label, key]) => `${label}: ${set.cells[key]}`).join(", ");
  const bar = element("div", { class: "cells", role: "img", "aria-label": told }, ...parts.filter(([, , key]) => set.cells[key])
    .map(([kind, label, key]) => element("i", { class: kind, style: `flex: ${set.cells[key]}`, title: label })));
  const key = element("dl", { class: "key" }, ...parts.flatMap(([kind, label, name]) =>
    [element("dt", { class: kind, text: label }), element("dd", { text: String(set.cells[name]) })]));
  const solved = found.several ? "; solved: more than half of the answers are right" : "";
  return element("div", { class: "card" }, element("h3", {}, "Problems ", element("small", { text: `${set.problems}${solved}` })), bar, key);
}

// Both intervals of the difference above each other, around zero.
function intervals(set) {
  const ends = set.intervals.flatMap(({ low, high }) => [low, high]);
  const low = Math.min(0, ...ends), high = Math.max(0, ...ends), pad = 0.06 * (high - low || 1);
  const at = (value) => 12 + (WIDTH - 24) * (value - low + pad) / (high - low + 2 * pad);
  const told = set.intervals.map((one) => `${one.label}: ${gap(one.low)} … ${gap(one.high)}`).join("; ");
  const method = set.intervals[0].method === "bootstrap" ? "bootstrap over problems" : "Agresti and Min, as few problems flipped";
  const card = element("div", { class: "card" }, element("h3", {}, `pass@1: ${B} minus ${A} `, element("small", { text: `95 %, ${method}` })));
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": told }, card);
  shape("line", { class: "zero", x1: at(0), x2: at(0), y1: 2, y2: HEIGHT - 2 }, svg);
  set.intervals.forEach((one, index) => {
    const y = (HEIGHT * (index + 0.5)) / set.intervals.length;
    const line = shape("g", { style: `--color: var(--s${index})` }, svg);
    shape("line", { class: "whisker-line", x1: at(one.low), x2: at(one.high), y1: y, y2: y }, line);
    shape("circle", { class: "dot", cx: at(set.difference), cy: y, r: 5 }, line);
  });
  card.append(element("dl", { class: "key" }, ...set.intervals.flatMap((one, index) =>
    [element("dt", { style: `--fill: var(--s${index})`, text: one.label }), element("dd", { text: `${gap(one.low)} … ${gap(one.high)}` })]),
  element("dt", { class: "none", text: "dashed line: no difference" }), element("dd")));
  return card;
}

// One flipped problem; its answers are made when it is opened.
function flip(problem, open) {
  const counts = problem.sides.map((side) => `${side.filter((one) => one.correct).length}/${side.length}`).join(" → ");
  const item = element("details", { class: "card problem" }, element("summary", {},
    element("b", { class: "counts", text: counts }), " ", element("span", { class: "question", text: problem.question })));
  const fill = () => {
    if (!item.open || item.querySelector(".sides")) return;
    if (problem.answer) item.append(element("p", { class: "gold" }, "gold answer ", element("b", { text: problem.answer })));
    item.append(element("div", { class: "sides" }, ...problem.sides.map((side, i) => element("section", { class: "side" },
      element("h4", { text: found.names[i] }), ...distinct(side).map((same) => completionCard(same[0], 0, same.length - 1))))));
  };
  item.ontoggle = fill;
  item.open = open;
  return item;
}

function flips(set) {
  const holder = element("div", { class: "flips" });
  for (const [gained, title] of [[true, `${B} gained`], [false, `${B} lost`]]) {
    const problems = set.flipped.filter((one) => one.gained === gained);
    if (!problems.length) continue;
    holder.append(element("h3", {}, title, " ", element("small", { text: `${problems.length} problems; right answers of ${A} → of ${B}` })),
      ...problems.map((problem, index) => flip(problem, index === 0)));
  }
  if (!set.flipped.length) holder.append(element("p", { text: "No problem flipped." }));
  if (set.left_out) holder.append(element("p", { text: `${set.left_out} more are in the output of --json.` }));
  return holder;
}

get("name").textContent = `${A} · ${B}`;
get("notes").hidden = !found.notes.length;
get("notes").append(...found.notes.map((note) => element("li", { text: note })));
get("facts").append(element("dl", { class: "card facts-list" }, ...found.facts.map(([name, value]) =>
  element("div", {}, element("dt", { text: name }), element("dd", { text: value })))));
get("sets").append(...found.sets.map((set) => element("section", { class: "set" },
  element("h2", {}, set.name === "val" ? "Held-out problems" : `Held-out: ${set.name.replace(/^val\//, "")}`,
    ...(set.unjudged ? [" ", element("small", { text: `${set.unjudged} left out: on one side no answer could be judged` })] : [])),
  measured(set), element("div", { class: "shown" }, cells(set), intervals(set)), flips(set))));
get("settings").hidden = document.querySelector("nav a[href='#settings']").hidden = !found.settings.length;
if (found.settings.length) {
  get("differences").append(element("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "Settings" },
    numberTable(`${A} → ${B}`, [["setting", "values"], ...found.settings])));
}
window.onbeforeprint = () => document.querySelectorAll("details").forEach((one) => { one.open = true; });
