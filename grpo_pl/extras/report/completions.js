// Completions as the report and the server's page show them: verdicts in words, answers and how many gave them, texts
// with their tags set apart, episodes turn by turn.

const VERDICTS = { true: "right", false: "wrong", null: "not judged", undefined: "" };  // undefined: nobody was asked
const verdict = (one) => VERDICTS[String(one.correct)];
const verdictClass = (one) => verdict(one).replace(" ", "-");
const words = (status) => status.replaceAll("_", " ");
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(2);

// The last \boxed{…} with its braces matched; null without one.
function lastBoxed(text) {
  const start = text.lastIndexOf("\\boxed{");
  if (start < 0) return null;
  let depth = 0;
  for (let i = start + 6; i < text.length; i += 1) {
    if (text[i] === "{") depth += 1;
    if (text[i] === "}" && (depth -= 1) === 0) return text.slice(start + 7, i).trim();
  }
  return null;
}

// What a completion answers, to put equal ones together: its last box, its <answer>, or else its last line.
function answerOf(text) {
  const boxed = lastBoxed(text);
  if (boxed !== null) return boxed;
  const tagged = [...text.matchAll(/<answer>([^]*?)(?:<\/answer>|$)/g)].pop();
  const said = (tagged ? tagged[1] : text.split("</think>").pop()).trim();
  const line = said.split("\n").pop().trim().replace(/\s+/g, " ");
  return line.length > 80 ? `${line.slice(0, 79)}…` : line || "(nothing)";
}

// Completions of one answer and one verdict together, the most frequent first; each keeps its completions by reward.
function folded(completions, answer = (one) => answerOf(one.completion)) {
  const kinds = new Map();
  for (const one of completions) {
    const said = answer(one), key = `${verdict(one)} ${said}`;
    if (!kinds.has(key)) kinds.set(key, { answer: said, correct: one.correct, completions: [] });
    kinds.get(key).completions.push(one);
  }
  return [...kinds.values()].sort((a, b) => b.completions.length - a.completions.length || byReward(a.completions[0], b.completions[0]));
}

const byReward = (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity);

// Equal texts once, with their number.
function distinct(completions) {
  const texts = new Map();
  for (const one of completions) {
    const text = one.episode ? JSON.stringify(one.episode.turns.map((turn) => turn.action)) : one.completion;
    texts.set(text, [...(texts.get(text) ?? []), one]);
  }
  return [...texts.values()];
}

// A bar for each answer: the answer, how many gave it, and the verdict as a word. `choose` makes them buttons.
function answerBars(kinds, total, chosen = null, choose = null) {
  return element("ul", { class: "kinds" }, ...kinds.map((kind) => {
    const count = kind.completions.length;
    const bar = element(choose ? "button" : "div", { class: `kind ${verdictClass(kind)}`, type: choose ? "button" : null,
      "aria-pressed": choose ? String(kind === chosen) : null },
      element("i", { style: `width: ${(100 * count) / total}%`, "aria-hidden": "true" }),
      element("code", { text: kind.answer }), element("span", { class: "verdict", text: verdict(kind) }),
      element("b", { text: `×${count}` }));
    if (choose) bar.onclick = () => choose(kind === chosen ? null : kind);
    return element("li", {}, bar);
  }));
}

// The text with its tags, thoughts and answers set apart; a block that is not closed runs to the end.
function marked(text) {
  const nodes = [];
  let mode = null;
  for (const piece of text.split(/(<\/?(?:think|answer)>|\\boxed\{[^{}]*\})/)) {
    const tag = piece.match(/^<(\/?)(think|answer)>$/);
    if (tag) mode = tag[1] ? null : tag[2];
    const kind = tag ? "tag" : piece.startsWith("\\boxed{") ? "boxed" : mode;
    if (piece) nodes.push(element("span", { class: kind, text: piece }));
  }
  return nodes;
}

const textBlock = (text) => element("div", { class: "text", tabindex: 0, role: "group", "aria-label": "completion" }, ...marked(text));

function advantage(value, largest) {
  const half = largest ? (Math.abs(value) / largest) * 50 : 0;
  const side = value < 0 ? "right: 50%; background: var(--bad)" : "left: 50%; background: var(--good)";
  return element("span", { class: "advantage" }, "advantage ",
    element("span", { class: "bar", "aria-hidden": "true" }, element("i", { style: `${side}; width: ${half}%` })),
    element("b", { text: signed(value) }));
}

const chip = (text, title = null) => element("span", { class: "chip", title, text });

function rewardChips(rewards) {
  return Object.entries(rewards).map(([name, score]) => {
    const value = score.value === null ? "none" : +score.value.toFixed(3);
    return chip(`${name} ${value}${score.status === "ok" ? "" : ` ${words(score.status)}`}`, score.detail || null);
  });
}

function observed(observation) {
  if (typeof observation === "string") return observation;
  return observation.map((message) => `${message.role}: ${message.content}`).join("\n");
}

// An episode turn by turn: what the policy wrote, what it got for it, and what it read next.
function exchange(episode, largest) {
  const turns = episode.turns.map((turn) => {
    const facts = element("div", { class: "facts" });
    if (turn.reward) facts.append(element("span", {}, "reward ", element("b", { text: +turn.reward.toFixed(3) })));
    if (turn.advantage != null) facts.append(advantage(turn.advantage, largest));
    if (turn.invalid_action) facts.append(chip("invalid action"));
    if (turn.finish_reason === "length") facts.append(chip("cut off"));
    const said = element("div", { class: "text" }, ...(turn.action ? marked(turn.action) : [element("span", { class: "tag", text: "(nothing)" })]));
    const item = element("li", {}, said, facts);
    if (observed(turn.observation)) item.append(element("pre", { class: "observation", text: observed(turn.observation) }));
    return item;
  });
  return element("ol", { class: "exchange", tabindex: 0, "aria-label": "turns" }, ...turns);
}

function largestAdvantage(completions) {
  const turns = completions.flatMap((one) => one.episode?.turns ?? []);
  return Math.max(0, ...[...completions, ...turns].map((one) => Math.abs(one.advantage ?? 0)));
}

const CUT = { length: ", cut off", turns: ", out of turns", tokens: ", out of tokens" };

// One text with what it got; `same` further completions are equal to it, word for word.
function completionCard(one, largest, same = 0) {
  const facts = element("div", { class: "facts" }, element("span", { class: "chip verdict", text: verdict(one) }));
  if (same) facts.append(chip(`${same + 1} equal texts`));
  if (one.reward !== undefined) {
    facts.append(element("span", {}, "reward ", element("b", { text: one.reward === null ? "none" : one.reward.toFixed(2) })));
  }
  if (one.advantage != null) facts.append(advantage(one.advantage, largest));
  facts.append(...rewardChips(one.rewards ?? {}));
  const episode = one.episode;
  if (episode && episode.status !== "ok") facts.append(chip(`environment: ${words(episode.status)}`, episode.detail));
  const count = episode?.turns.length;
  const turns = episode ? `${count} turn${count === 1 ? "" : "s"}, ` : "";
  facts.append(element("span", { class: "length", text: `${turns}${one.tokens} tokens${CUT[one.finish_reason] ?? ""}` }));
  return element("article", { class: `card completion ${verdictClass(one)}` }, facts,
    episode ? exchange(episode, largest) : textBlock(one.completion));
}
