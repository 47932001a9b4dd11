// Fills the page of one completion from the data that stand in it.

const told = JSON.parse(document.getElementById("data").textContent);
const get = (id) => document.getElementById(id);
const digits = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? format(value) : String(value));
const more = (value, places = 3) => (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(places);
const shown = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll("\\\\", "\\");
const yes = (value) => (value === null ? "–" : value ? "yes" : "no");

function table(name, rows) {
  return element("div", { class: "card scroll", tabindex: 0, role: "region", "aria-label": name }, numberTable(name, rows));
}

function showHead() {
  const { explanation: one } = told;
  get("name").textContent = told.title;
  get("problem").replaceChildren(element("pre", { text: one.prompt }),
    ...(one.answer ? [element("div", { class: "gold" }, "gold answer ", element("b", { text: one.answer }))] : []));
  const rewards = Object.fromEntries(one.rewards.map((each) => [each.name, each]));
  get("completion").replaceChildren(completionCard({ ...one, rewards, tokens: one.tokens.length }, largestAdvantage(one.group)));
  get("conclusions").replaceChildren(...told.conclusions.map((text) => element("li", { text })));
}

const kindOf = (token) => (!token.written ? "read" : token.probability >= 0.9 ? "likely" : token.probability >= 0.1 ? "unsure" : "unlikely");

function showToken(index) {
  const token = told.explanation.tokens[index], facts = element("dl");
  const fact = (name, value) => facts.append(element("div", {}, element("dt", { text: name }), element("dd", { text: value })));
  fact("token", `${index}: ${shown(token.text)}`);
  if (token.written) {
    fact("probability", digits(token.probability));
    fact("log-probability, in the update", `${token.logprob.toFixed(3)} → ${token.after.toFixed(3)} (${more(token.after - token.logprob)})`);
    fact("entropy", digits(token.entropy));
    fact("advantage", signed(token.advantage));
    fact("ratio", digits(token.ratio));
    fact("clipped", yes(token.clipped));
    fact("weight in the loss", digits(token.weight));
    fact("pull (−∂L/∂ log π)", digits(token.pull));
  } else fact("", "the policy read it");
  const bars = [...(token.written ? [{ text: token.text, probability: token.probability, drawn: true }] : []), ...token.others].map((other) =>
    element("li", {}, element("div", { class: `kind${other.drawn ? " right" : ""}` },
      element("i", { style: `width: ${100 * other.probability}%`, "aria-hidden": "true" }), element("code", { text: shown(other.text) }),
      ...(other.drawn ? [element("span", { class: "verdict", text: "drawn" })] : []), element("b", { text: digits(other.probability) }))));
  get("token").replaceChildren(facts, element("ul", { class: "kinds", "aria-label": "what was likely" }, ...bars));
}

function showTokens() {
  const { tokens, steps } = told.explanation, holder = get("text");
  const spans = tokens.map((token) => element("span", { class: `t ${kindOf(token)}`, text: token.text }));
  let chosen = 0;
  const choose = (index) => {
    spans[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(spans.length - 1, index));
    spans[chosen].classList.add("chosen");
    holder.setAttribute("aria-valuenow", chosen);
    holder.setAttribute("aria-valuetext", `${chosen}: ${shown(tokens[chosen].text)}, probability ${digits(tokens[chosen].probability)}`);
    showToken(chosen);
  };
  holder.replaceChildren(...spans);
  get("tokens").hidden = document.querySelector("nav a[href='#tokens']").hidden = !spans.length;
  if (!spans.length) return;
  holder.setAttribute("aria-valuemax", spans.length - 1);
  spans.forEach((span, index) => { span.onclick = () => choose(index); });
  holder.onkeydown = (event) => {
    const to = { ArrowRight: chosen + 1, ArrowDown: chosen + 1, ArrowLeft: chosen - 1, ArrowUp: chosen - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to);
    spans[chosen].scrollIntoView({ block: "nearest" });
  };
  const surest = tokens.map((token) => token.probability ?? 2);
  choose(surest.indexOf(Math.min(...surest)));  // the least likely one
  if (told.charts.length) showCharts(told.charts, get("charts"));
  if (steps.length > 1) {
    get("steps").append(table("Optimiser steps that had it, means over its tokens", [["step", "ratio", "clipped", "pull, summed"],
      ...steps.map((step) => [step.number + 1, digits(step.ratio), digits(step.clipped), digits(step.pull)])]));
  }
  const head = ["", "token", "probability", "log-probability", "after", "entropy", "advantage", "ratio", "clipped", "weight", "pull", "others"];
  get("numbers").append(table("Every token", [head, ...tokens.map((token, index) => [String(index), shown(token.text), digits(token.probability),
    digits(token.logprob), digits(token.after), digits(token.entropy), digits(token.advantage), digits(token.ratio), yes(token.clipped),
    digits(token.weight), digits(token.pull), token.others.map((other) => `${shown(other.text)} ${digits(other.probability)}`).join("  ")])]));
}

function showAdvantage() {
  const { rewards, arithmetic } = told.explanation;
  get("rewards").append(table("What each reward gave", [["reward", "value", "weight", "status", "detail"],
    ...rewards.map((each) => [each.name, digits(each.value), digits(each.weight), words(each.status), each.detail])]));
  get("arithmetic").append(table("From the rewards to the advantage", [["", "in numbers", "value"],
    ...arithmetic.map((line) => [line.what, line.sum, digits(line.value)])]));
}

function showGroup() {
  const { group, sample, later } = told.explanation, largest = largestAdvantage(group);
  get("members").replaceChildren(...group.map((each) => {
    const card = completionCard({ ...each, rewards: {} }, largest), facts = card.querySelector(".facts");
    facts.prepend(chip(each.sample === sample ? `sample ${each.sample}, this one` : `sample ${each.sample}`));
    if (!each.in_loss) facts.append(chip("not in the loss"));
    facts.append(chip(`log-probability ${each.before.toFixed(2)} → ${each.after.toFixed(2)} (${more(each.after - each.before, 2)})`));
    if (each.sample === sample) card.classList.add("mine");
    return card;
  }));
  get("later").hidden = document.querySelector("nav a[href='#later']").hidden = !later.length;
  get("answers").replaceChildren(...later.map((each) => {
    const card = completionCard({ ...each, rewards: {} }, 0), facts = card.querySelector(".facts");
    facts.prepend(chip(`after ${each.rollouts} rollouts`));
    const parts = each.parts_at === null ? "the same tokens" : `other from token ${each.parts_at} on: ${shown(each.there)} → ${shown(each.here)}`;
    facts.append(chip(parts));
    return card;
  }));
}

showHead();
showTokens();
showAdvantage();
showGroup();
window.onbeforeprint = () => document.querySelectorAll("details").forEach((one) => { one.open = true; });
matchMedia("(prefers-color-scheme: dark)").onchange = () => document.querySelectorAll(".charts").forEach((holder) => holder.redraw?.());
