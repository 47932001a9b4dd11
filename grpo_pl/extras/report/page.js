// Fills the report from the data that stand in it.

const run = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const FILTERS = [["all", () => true], ["right", (one) => one.correct === true], ["wrong", (one) => one.correct === false],
  ["not judged", (one) => one.correct === null]];
const FIRST = 6;  // completions of an answer that are shown at once

function choices(holder, labels, chosen, choose) {
  holder.replaceChildren(...labels.map((text, index) => {
    const button = element("button", { type: "button", text, "aria-pressed": String(index === chosen) });
    button.onclick = () => { choose(index); holder.children[index]?.focus(); };
    return button;
  }));
}

const rightOf = (completions) => completions.filter((one) => one.correct).length;
const judges = (completions) => completions.some((one) => one.correct !== undefined);  // a reward says what is right
const valueOf = (one) => (one.reward === undefined ? one.rewards.reward.value : one.reward) ?? 0;
const meanOf = (completions) => completions.reduce((sum, one) => sum + valueOf(one), 0) / completions.length;
const countOf = (completions) => (judges(completions) ? `${rightOf(completions)}/${completions.length}` : meanOf(completions).toFixed(2));
// Rewards differ, so there is something to learn from this group.
const mixed = (group) => new Set(group.completions.filter((one) => one.reward !== null).map((one) => one.reward)).size > 1;

// Numbers are written as in the legends of charts.
const digits = (value) => (typeof value === "number" ? format(value) : value);

function noteOf({ note, first, interval }) {
  const since = first === undefined ? [] : [`from ${format(first)}`];
  return [note, ...since].filter(Boolean).join(", ") + (interval ? ` (95 %: ${interval.map(format).join("–")})` : "");
}

function showTop() {
  get("name").textContent = run.name;
  get("warning").textContent = run.warning;
  get("warning").hidden = !run.warning;
  get("tiles").replaceChildren(...run.tiles.map((tile) => element("div", { class: "tile" },
    element("div", { class: "label", text: tile.label }), element("div", { class: "value", text: digits(tile.value) }),
    element("div", { class: "note", text: noteOf(tile) }))));
  const [head, ...body] = run.facts;
  if (body.length && head.length === 2) {  // one run
    get("facts").replaceChildren(element("dl", { class: "card facts-list" }, ...body.map(([name, value]) =>
      element("div", {}, element("dt", { text: name }), element("dd", { text: value })))));
  } else if (body.length) {
    get("facts").replaceChildren(element("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "Runs" },
      numberTable("The runs", run.facts)));
  }
  const [names, ...differences] = run.differences;
  if (differences.length) {
    get("differences").replaceChildren(element("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": "Settings" },
      numberTable("Settings that differ", [names, ...differences])));
  }
  get("config").hidden = !run.config;
  get("config").append(element("pre", { text: run.config }));
}

// One problem: what was answered at each of the times (or by each run), side by side.
function answersOf(problem, times) {
  return element("div", { class: "sides" }, ...times.map((time, i) => {
    const side = problem.sides[i];
    const column = element("section", { class: "side" }, element("h4", { text: time }));
    if (!side) return column;
    column.append(answerBars(folded(side.completions), side.completions.length));
    const shown = side.greedy ? { ...side.greedy, title: "greedy" } : side.completions[0] && { ...side.completions[0], title: "first sample" };
    if (shown) column.append(element("h5", { text: shown.title }), completionCard(shown, 0));
    const rest = side.greedy ? side.completions : side.completions.slice(1);
    if (rest.length) {
      const more = element("details", {}, element("summary", { text: `${rest.length} sampled` }));
      more.ontoggle = () => {
        if (more.open && more.children.length === 1) more.append(...distinct(rest).map((same) => completionCard(same[0], 0, same.length - 1)));
      };
      column.append(more);
    }
    return column;
  }));
}

function showHeldOut() {
  const { charts, answers } = run.held_out;
  get("held-out").hidden = !charts.length && !answers.problems.length;
  document.querySelector("nav a").hidden = get("held-out").hidden;
  if (charts.length) showCharts(charts, get("held-out-charts"));
  if (!answers.problems.length) return;
  const items = answers.problems.map((problem) => {
    const counts = problem.sides.map((side) => (side ? countOf(side.completions) : "–")).join(run.runs > 1 ? " · " : " → ");
    const item = element("details", { class: "card problem" },
      element("summary", {}, element("b", { class: "counts", text: counts }), " ", element("span", { class: "question", text: problem.question })));
    item.ontoggle = () => {
      if (!item.open || item.querySelector(".sides")) return;
      item.append(...thumbnails(problem.images ?? []));
      if (problem.answer) item.append(element("p", { class: "gold" }, "gold answer ", element("b", { text: problem.answer })));
      item.append(answersOf(problem, answers.times));
    };
    return item;
  });
  items[0].open = true;
  const asked = answers.problems.some((problem) => problem.sides.some((side) => side && judges(side.completions)));
  const first = run.runs > 1 ? "where only the last run is right" : "what was wrong and became right";
  get("answers").replaceChildren(element("h3", {}, answers.title, " ",
    element("small", { text: `${asked ? "right of the" : "mean reward of the"} sampled completions; first ${first}, then where they differ most` })), ...items);
}

// The images of a problem in order; a placeholder for each that is not there any more.
function thumbnails(digests) {
  if (!digests.length) return [];
  return [element("div", { class: "images" }, ...digests.map((digest, index) => {
    const [title, label] = [`sha256 ${digest}`, `image ${index + 1}`];
    const source = run.images[digest];
    return source ? element("img", { src: source, alt: label, title }) : element("span", { class: "gone", title, text: `${label} is not kept` });
  }))];
}

// The command that explains a completion; a click marks all of it, to be copied.
function whyOf(step, group, one) {
  const command = `${run.why} --step ${step - 1} --prompt ${group.prompt_id} --sample ${one.sample}`;
  return element("p", { class: "why" }, "why? ", element("code", { text: command }));
}

function showSamples(rollouts) {
  get(rollouts.length ? "browser" : "no-samples").hidden = false;
  if (!rollouts.length) return;
  const state = { rollout: rollouts.length - 1, group: 0, filter: 0, kind: null };
  for (let i = rollouts.length - 1; i >= 0; i -= 1) {  // the last rollout that has something to show
    const found = rollouts[i].groups.findIndex(mixed);
    if (found >= 0) { Object.assign(state, { rollout: i, group: found }); break; }
  }
  const slider = get("rollout");
  slider.max = rollouts.length - 1;

  function show() {
    const { step, groups } = rollouts[state.rollout];
    state.group = Math.min(state.group, groups.length - 1);
    const group = groups[state.group], all = group.completions;
    slider.value = state.rollout;
    slider.setAttribute("aria-valuetext", `rollout ${step}`);
    get("rollout-label").textContent = `rollout ${step}`;
    get("previous").disabled = state.rollout === 0;
    get("next").disabled = state.rollout === rollouts.length - 1;
    const labels = groups.map((one, index) => `problem ${index + 1}: ${countOf(one.completions)}${mixed(one) ? "" : " all equal"}`);
    choices(get("groups"), labels, state.group, (index) => pick({ group: index }));
    const filters = FILTERS.filter(([, keep]) => all.some(keep));
    state.filter = Math.min(state.filter, filters.length - 1);
    choices(get("filters"), filters.map(([name, keep]) => `${name} ${all.filter(keep).length}`), state.filter, (index) => pick({ filter: index }));
    get("problem").replaceChildren(...thumbnails(group.images ?? []), element("pre", { text: group.prompt }),
      ...(group.answer ? [element("div", { class: "gold" }, "gold answer ", element("b", { text: group.answer }))] : []));
    const kept = all.filter(filters[state.filter][1]).sort(byReward), kinds = folded(kept);
    const open = kinds.find((kind) => kind.answer === state.kind?.answer && kind.correct === state.kind?.correct) ?? null;
    get("kinds").replaceChildren(answerBars(kinds, kept.length, open, (kind) => { state.kind = kind; show(); }));
    const largest = largestAdvantage(all), texts = distinct(open ? open.completions : kept);
    const cards = texts.map((same) => {
      const card = completionCard(same[0], largest, same.length - 1);
      if (run.why) card.append(whyOf(step, group, same[0]));
      return card;
    });
    get("completions").replaceChildren(...cards.slice(0, FIRST));
    if (cards.length > FIRST) {
      const more = element("button", { type: "button", text: `show ${cards.length - FIRST} more` });
      more.onclick = () => more.replaceWith(...cards.slice(FIRST));
      get("completions").append(more);
    }
  }

  const pick = (changes) => { Object.assign(state, { kind: null }, changes); show(); };
  const move = (to) => {
    const rollout = Math.max(0, Math.min(rollouts.length - 1, to));
    pick({ rollout, group: Math.max(0, rollouts[rollout].groups.findIndex(mixed)) });
  };
  slider.oninput = () => move(+slider.value);
  get("previous").onclick = () => move(state.rollout - 1);
  get("next").onclick = () => move(state.rollout + 1);
  show();
}

showTop();
showHeldOut();
get("curves").hidden = !run.charts.length;
if (run.charts.length) showCharts(run.charts.map((chart) => (chart.groups ? { ...chart, ...histogram(chart.groups) } : chart)), get("charts"));
get("samples").hidden = document.querySelector("nav a[href='#samples']").hidden = run.runs > 1;
showSamples(run.samples);
// a printed page shows all that can be opened, in the order of the screen
window.onbeforeprint = () => document.querySelectorAll("details:not(.numbers)").forEach((one) => { one.open = true; });
matchMedia("(prefers-color-scheme: dark)").onchange = () => document.querySelectorAll(".charts").forEach((holder) => holder.redraw?.());
