// The browser of sample groups: rollout, prompt, and which completions.

const FILTERS = [["all", () => true], ["correct", (one) => one.correct === true], ["wrong", (one) => one.correct === false]];

function choices(holder, labels, chosen, choose) {
  holder.replaceChildren(...labels.map((text, index) => {
    const button = element("button", { type: "button", text, "aria-pressed": String(index === chosen) });
    button.onclick = () => choose(index);
    return button;
  }));
}

// The text with its tags, thoughts and boxed answers set apart.
function marked(text) {
  const holder = element("div", { class: "text" });
  let thinking = false;
  for (const piece of text.split(/(<\/?think>|<\/?answer>|\\boxed\{[^{}]*\})/)) {
    if (piece === "<think>") thinking = true;
    const kind = /^<\/?(think|answer)>$/.test(piece) ? "tag" : piece.startsWith("\\boxed{") ? "boxed" : thinking ? "thought" : null;
    if (piece) holder.append(element("span", { class: kind, text: piece }));
    if (piece === "</think>") thinking = false;
  }
  return holder;
}

function advantageBar(value, largest) {
  const half = largest ? (Math.abs(value) / largest) * 50 : 0;
  const side = value < 0 ? `right: 50%; background: var(--bad)` : `left: 50%; background: var(--good)`;
  return element("span", { class: "bar" }, element("i", { style: `${side}; width: ${half}%` }));
}

function advantage(value, largest) {
  const sign = value > 0 ? "+" : "";
  return element("span", { class: "advantage" }, "advantage", advantageBar(value, largest), sign + value.toFixed(2));
}

function observed(observation) {
  if (typeof observation === "string") return observation;
  return observation.map((message) => `${message.role}: ${message.content}`).join("\n");
}

// An episode turn by turn: what the policy wrote, what it got for it, and what it read next.
function exchange(episode, largest) {
  const turns = episode.turns.map((turn) => {
    const facts = element("div", { class: "facts" });
    if (turn.reward) facts.append(element("span", {}, "reward ", element("span", { class: "number", text: +turn.reward.toFixed(3) })));
    if (turn.advantage != null) facts.append(advantage(turn.advantage, largest));
    if (turn.invalid_action) facts.append(element("span", { class: "chip", text: "invalid action" }));
    if (turn.finish_reason === "length") facts.append(element("span", { class: "chip", text: "cut off" }));
    const item = element("li", {}, turn.action ? marked(turn.action) : element("div", { class: "text tag", text: "(nothing)" }), facts);
    if (observed(turn.observation)) item.append(element("pre", { class: "observation", text: observed(turn.observation) }));
    return item;
  });
  return element("ol", { class: "exchange" }, ...turns);
}

function largestAdvantage(completions) {
  const turns = completions.flatMap((one) => one.episode?.turns ?? []);
  return Math.max(...[...completions, ...turns].map((one) => Math.abs(one.advantage ?? 0)));
}

const CUT = { length: ", cut off", turns: ", out of turns", tokens: ", out of tokens" };

function completionCard(one, largest) {
  const verdict = one.correct === null ? "not judged" : one.correct ? "correct" : "wrong";
  const facts = element("div", { class: "facts" }, element("span", { class: "chip verdict", text: verdict }));
  facts.append(element("span", {}, "reward ", element("span", { class: "number", text: one.reward === null ? "–" : one.reward.toFixed(2) })));
  if (one.advantage !== null) facts.append(advantage(one.advantage, largest));
  for (const [name, score] of Object.entries(one.rewards)) {
    const value = score.value === null ? "–" : +score.value.toFixed(3);
    const status = score.status === "ok" ? "" : ` ${score.status.replaceAll("_", " ")}`;
    facts.append(element("span", { class: "chip", title: score.detail, text: `${name} ${value}${status}` }));
  }
  const episode = one.episode;
  if (episode && episode.status !== "ok") {
    facts.append(element("span", { class: "chip", title: episode.detail, text: `environment: ${episode.status.replaceAll("_", " ")}` }));
  }
  const count = episode?.turns.length;
  const turns = episode ? `${count} turn${count === 1 ? "" : "s"}, ` : "";
  facts.append(element("span", { class: "length", text: `${turns}${one.tokens} tokens${CUT[one.finish_reason] ?? ""}` }));
  const kind = one.correct === null ? "" : one.correct ? "correct" : "wrong";
  return element("article", { class: `card completion ${kind}` }, facts, episode ? exchange(episode, largest) : marked(one.completion));
}

function showSamples(rollouts) {
  const get = (id) => document.getElementById(id);
  get(rollouts.length ? "browser" : "no-samples").hidden = false;
  if (!rollouts.length) return;
  const state = { rollout: rollouts.length - 1, group: 0, filter: 0 };
  const slider = get("rollout");
  slider.max = rollouts.length - 1;
  get("problem").className = "card";

  function show() {
    const { step, groups } = rollouts[state.rollout];
    state.group = Math.min(state.group, groups.length - 1);
    const group = groups[state.group];
    slider.value = state.rollout;
    get("rollout-label").textContent = `rollout ${step}`;
    get("previous").disabled = state.rollout === 0;
    get("next").disabled = state.rollout === rollouts.length - 1;
    const solved = groups.map((one, index) => {
      const right = one.completions.filter((each) => each.correct).length;
      return `prompt ${index + 1}: ${right}/${one.completions.length}`;
    });
    choices(get("groups"), solved, state.group, (index) => { state.group = index; show(); });
    const counts = FILTERS.map(([name, keep]) => `${name} ${group.completions.filter(keep).length}`);
    choices(get("filters"), counts, state.filter, (index) => { state.filter = index; show(); });
    get("problem").replaceChildren(
      element("pre", { text: group.prompt }),
      ...(group.answer ? [element("div", { class: "gold" }, "gold answer ", element("b", { text: group.answer }))] : []),
    );
    const largest = largestAdvantage(group.completions);
    const kept = group.completions.filter(FILTERS[state.filter][1]).sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    get("completions").replaceChildren(...kept.map((one) => completionCard(one, largest)));
  }

  const move = (by) => {
    state.rollout = Math.max(0, Math.min(rollouts.length - 1, state.rollout + by));
    show();
  };
  slider.oninput = () => { state.rollout = +slider.value; show(); };
  get("previous").onclick = () => move(-1);
  get("next").onclick = () => move(1);
  show();
}
