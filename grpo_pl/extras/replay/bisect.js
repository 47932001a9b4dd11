// Fills the page of a search from the data that stand in it.

const told = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const nats = (value) => `${value < 0 ? "−" : ""}${Math.abs(value).toFixed(2)}`;

// How far a group moved the answer, as the report shows advantages.
function moved(value, largest) {
  const half = largest ? (Math.abs(value) / largest) * 50 : 0;
  const side = value < 0 ? "right: 50%; background: var(--bad)" : "left: 50%; background: var(--good)";
  return element("span", { class: "advantage" }, "moved it at once by ",
    element("span", { class: "bar", "aria-hidden": "true" }, element("i", { style: `${side}; width: ${half}%` })),
    element("b", { text: signed(value) }), " nats");
}

function showHead() {
  const { found } = told;
  get("name").textContent = told.title;
  get("problem").replaceChildren(element("pre", { text: found.prompt }), textBlock(found.scored),
    element("div", { class: "gold" }, ...(found.answer ? ["gold answer ", element("b", { text: found.answer }), " · "] : []),
      `scored: ${found.origin}, ${found.tokens} tokens`));
  get("conclusions").replaceChildren(...told.conclusions.map((text) => element("li", { text })));
  get("why").hidden = !told.why;
  if (told.why) get("why").replaceChildren("why? ", element("code", { text: told.why }));
  showCharts(told.charts, get("charts"));
}

function showGroups() {
  const { groups, all_groups: all, looked_at: step, culprit } = told.found;
  const largest = Math.max(0, ...groups.map((group) => Math.abs(group.moved)));
  get("groups").hidden = document.querySelector("nav a[href='#groups']").hidden = !groups.length;
  const some = groups.length < all ? `; the ${groups.length} of ${all} that moved it most` : "";
  get("step").textContent = `the update of step ${step} (rollout ${step + 1}) made again without each of its groups${some}`;
  get("members").replaceChildren(...groups.map((group, index) => {
    const facts = element("div", { class: "facts" }, chip(told.names[index]), moved(group.moved, largest),
      chip(`in all ${signed(group.lasting)}`), chip(`without it ${nats(group.without)} nats`));
    if (group.right !== null) facts.append(chip(`${group.right} of ${group.size} right`));
    const card = element("article", { class: "card completion" }, facts, element("pre", { text: group.question }), textBlock(group.answer));
    if (JSON.stringify(group) === JSON.stringify(culprit)) card.classList.add("mine");
    return card;
  }));
}

showHead();
showGroups();
window.onbeforeprint = () => document.querySelectorAll("details").forEach((one) => { one.open = true; });
matchMedia("(prefers-color-scheme: dark)").onchange = () => document.querySelectorAll(".charts").forEach((holder) => holder.redraw?.());
