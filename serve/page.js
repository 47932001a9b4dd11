// The server's page: asks for a group of samples, shows them as they are drawn, then judged, sorted and counted.

const at = (id) => document.getElementById(id);
const OPEN = 6, FIRST_OPEN = 16;  // groups up to these sizes begin with all texts open, and with the first
const FIELDS = { n: "Samples", temperature: "Temperature", top_p: "Top-p", max_tokens: "Length", seed: "Seed", tools: "Tools",
  messages: "Problem", answer: "Gold answer" };  // names in requests, and on the page
const state = { running: null, model: null, example: null, samples: [], kind: null, images: [], reading: null };

function fail(message) {
  at("error").textContent = message;
  at("error").hidden = false;
}

// An error of the server with the page's name of the field in place of the request's.
function inWords({ message, param }) {
  const path = (param ?? "").split("."), name = path.find((part) => part in FIELDS);
  if (!name || !message.startsWith(`${param}: `)) return message;
  if (path.includes("image_url")) return `Image ${Number(path[path.indexOf("content") + 1]) + 1}${message.slice(param.length)}`;
  const inside = name === "tools" && path.length > 1 ? ` (${path.slice(1).join(".")})` : "";
  return FIELDS[name] + inside + message.slice(param.length);
}

async function refusal(response) {
  try {
    return inWords((await response.json()).error);
  } catch {
    return `the server answered ${response.status}`;
  }
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  return response;
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", done = false;
  for (;;) {
    const { value, done: ended } = await reader.read();
    if (ended) break;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") { done = true; continue; }
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Error(inWords(parsed.error));
      yield parsed;
    }
  }
  if (!done) throw new Error("the connection ended before the answer did");
}

// --- what is asked ---------------------------------------------------------------------------------------------------

// What is typed in the form, read once: what is typed while samples stream in belongs to the next ones.
function asked() {
  let tools = [];
  if (at("tools").value.trim() !== "") {
    try { tools = JSON.parse(at("tools").value); } catch (error) { throw new Error(`Tools: ${error.message}`); }
  }
  const seed = at("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(at("seed").value);
  const options = { temperature: Number(at("temperature").value), top_p: Number(at("top_p").value), seed };
  if (at("max_tokens").value !== "") options.max_tokens = Number(at("max_tokens").value);
  if (tools.length) options.tools = tools;
  const problem = at("problem").value, { example, images } = state;
  const ours = example?.problem === problem && example.pictures.length === images.length && example.pictures.every((one, i) => one === images[i]);
  return { problem, images, n: Number(at("n").value), answer: at("answer").value.trim(), options, columns: ours ? example.columns : {} };
}

// The user's turn, images first, as a row of training has them.
function turn({ problem, images }) {
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: parts.length ? [...parts, { type: "text", text: problem }] : problem };
}

const dataUrl = (file) => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result.replace(/^data:(application\/octet-stream)?;/, "data:image/png;"));  // of no known type
  reader.onerror = () => failed(new Error(`Images: ${file.name} cannot be read.`));
  reader.readAsDataURL(file);
});

// Megabytes of files whose base64 leaves 64 KiB of a request's body for all else.
const megabytesTogether = () => Math.floor((state.limits.max_body_mb * 2 ** 20 - 2 ** 16) * 3 / 4 / 1e5) / 10;

function faultOf(files) {
  const { per_prompt, megabytes } = state.limits, large = files.find((file) => file.size > megabytes * 1e6);
  if (files.length > per_prompt) return `Images: ${files.length} are chosen, and a problem has ${per_prompt} at most.`;
  if (large) return `Images: ${large.name} has more than ${megabytes} megabytes.`;
  if (files.reduce((sum, file) => sum + file.size, 0) <= megabytesTogether() * 1e6) return null;
  return `Images: the files have more than ${megabytesTogether()} megabytes together, and a request holds no more.`;
}

// A choice that is refused, or cannot be read, leaves the images that were there. Files of one that a later choice or
// another example has overtaken are not shown.
function chooseImages(files) {
  at("error").hidden = true;
  const fault = faultOf(files);
  if (fault) {
    at("images").value = "";
    fail(fault);
    return;
  }
  at("answer").value = "";
  const read = async () => {
    try {
      const images = await Promise.all(files.map(async (file) => ({ name: file.name, url: await dataUrl(file) })));
      if (state.reading === reading) showImages(images, images.length > 0);
    } catch (error) {
      if (state.reading !== reading) return;
      at("images").value = "";
      fail(error.message);
      throw error;  // to a sample that waits for these images
    } finally {
      if (state.reading === reading) state.reading = null;
    }
  };
  const reading = read();
  state.reading = reading;
  reading.catch(() => {});  // it is told
}

function showImages(images, chosen) {
  state.images = images;
  if (!chosen) at("images").value = "";  // so that the same files can be chosen again
  at("shown").replaceChildren(...images.map((image, i) => {
    const picture = element("img", { src: image.url, alt: image.name, title: `${image.name}: leave it out` });
    const button = element("button", { type: "button", "aria-label": `leave out image ${i + 1}, ${image.name}` }, picture);
    button.onclick = () => { at("answer").value = ""; showImages(images.filter((other) => other !== image)); };
    return button;
  }));
  showCode();
}

// As a literal of Python: JSON but for three words.
function python(value) {
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${python(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

// Chosen images are read from their files: as text they would be too long for a command line. Those of an example are
// small, and in no file.
function requestCode({ images, ...form }) {
  const named = images.map(({ name, url, inline }, i) => ({ url: inline ? url : `\uE000${i}`, name, inline }));
  const files = named.filter(({ inline }) => !inline);
  const body = { model: state.model, messages: [turn({ ...form, images: named })], n: form.n, ...form.options };
  const withFiles = (text, read) => files.reduce((all, { url, name }) => all.replaceAll(JSON.stringify(url), () => read(name)), text);
  const inShell = (text) => `'${text.replaceAll("'", "'\\''")}'`, plain = JSON.stringify(body);
  const encoded = (name) => `"data:image/png;base64,$(base64 < ${inShell(name)} | tr -d '\\n')"`;
  const data = files.length ? `-d @- <<END\n${withFiles(plain.replace(/[\\`$]/g, "\\$&"), encoded)}\nEND` : `-d ${inShell(plain)}`;
  const stopping = files.length ? `cat -- ${files.map(({ name }) => inShell(name)).join(" ")} > /dev/null &&\n` : "";  // at a missing one
  const reading = files.length ? `\ndef data_url(file):\n    return "data:image/png;base64," + base64.b64encode(open(file, "rb").read()).decode()\n\n\n` : "";
  return {
    curl: `${stopping}curl ${location.origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $GRPO_PL_API_KEY" \\\n`
      + `  -H 'Content-Type: application/json' \\\n  ${data}`,
    Python: `${files.length ? "import base64\n" : ""}import os\n\nfrom openai import OpenAI\n\n${reading}`
      + `client = OpenAI(base_url="${location.origin}/v1", api_key=os.environ.get("GRPO_PL_API_KEY", "none"))\n`
      + `answer = client.chat.completions.create(\n${withFiles(Object.entries(body).map(([key, value]) => `    ${key}=${python(value)},\n`).join(""), (name) => `data_url(${JSON.stringify(name)})`)})\n`
      + `for choice in answer.choices:\n    print(choice.message.content)`,
  };
}

function showCode() {
  if (!at("code").open) return;
  let code;
  try {
    const form = asked();
    if (at("seed").value === "" && state.seed !== undefined) form.options.seed = state.seed;  // of the group on the screen
    code = requestCode(form);
  } catch (error) { return fail(error.message); }
  at("snippets").replaceChildren(...Object.entries(code).map(([name, text]) => {
    const button = element("button", { type: "button", text: `Copy as ${name}` });
    const shown = element("pre", { text, tabindex: 0, "aria-label": `the request as ${name}` });
    button.onclick = async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {  // a browser allows it on secure pages only
        getSelection().selectAllChildren(shown);
        button.textContent = "Selected: copy it with the keyboard";
      }
    };
    return element("div", { class: "snippet" }, button, shown);
  }));
}

// --- samples ---------------------------------------------------------------------------------------------------------

function newSample(index, open) {
  const parts = { number: element("span", { class: "number", text: `#${index + 1}` }), verdict: element("span", { class: "verdict" }),
    value: element("b") };
  const said = element("code", { class: "said" }), gain = element("span", { class: "gain" }), length = element("span", { class: "length" });
  const head = element("button", { type: "button", class: "head", "aria-expanded": String(open) }, ...Object.values(parts));
  const brief = element("p", { class: "brief" }, said, gain, length), turns = element("div");
  const text = element("div", { class: "text", tabindex: 0, role: "group", "aria-label": `text of sample ${index + 1}` });
  const card = element("article", { class: `card sample live${open ? " open" : ""}`, "aria-label": `sample ${index + 1}` },
    head, brief, element("div", { class: "body" }, turns, text));
  head.onclick = () => openCard(card, !card.classList.contains("open"));
  return { index, card, head, said, gain, length, turns, text, ...parts, body: card.lastChild, content: "", calls: [], messages: [], finish: null, tokens: 0 };
}

function openCard(card, open) {
  card.classList.toggle("open", open);
  card.querySelector(".head").setAttribute("aria-expanded", String(open));
  showView();
}

function showView() {
  const all = state.samples.every((s) => s.card.classList.contains("open"));
  at("view").textContent = all ? "Show tiles" : "Show all texts";
}

const callText = (call) => `${call.function.name}(${call.function.arguments})`;
const completed = (s) => s.calls.length === 0;

function showText(s) {
  s.text.replaceChildren(...marked(s.content), ...s.calls.map((call) => element("span", { class: "call", text: callText(call) })));
  const last = s.content.replace(/\s+/g, " ");
  s.said.textContent = s.calls.length ? callText(s.calls[0]) : s.finish ? answerOf(s.content) : last.slice(-40);
  s.length.textContent = `${s.tokens} tok${s.finish === "length" ? ", cut off" : ""}`;
}

function showScore(s, item, objective, largest) {
  Object.assign(s, { correct: item.correct, reward: item.value, advantage: item.advantage });
  s.verdict.textContent = verdict(s);
  s.value.textContent = item.value === null ? "" : String(+item.value.toFixed(3));
  s.gain.textContent = item.advantage === null ? "" : signed(item.advantage);
  const told = [`sample ${s.index + 1}`, verdict(s), item.value !== null && `reward ${s.value.textContent}`,
    item.advantage !== null && `advantage ${s.gain.textContent}`];
  s.head.setAttribute("aria-label", told.filter(Boolean).join(", "));
  s.card.classList.add(verdictClass(s));
  const facts = element("div", { class: "facts judged" }, chip(verdict(s)));
  facts.firstChild.classList.add("verdict");
  facts.append(element("span", {}, "reward ", element("b", { text: item.value === null ? "none" : +item.value.toFixed(3) })));
  if (item.advantage !== null) {
    facts.append(advantage(item.advantage, largest));
    if (objective) facts.append(chip(objective, "the objective that the advantage is of"));
  }
  facts.append(...rewardChips(item.rewards));
  if (item.extracted !== null) facts.append(element("span", {}, "answered ", element("code", { text: item.extracted })));
  if (item.correct === null) facts.append(element("span", { text: `could not be judged: ${words(item.status)}` }));
  s.text.after(facts);
}

// --- the group -------------------------------------------------------------------------------------------------------

function figures(...list) {
  at("group").replaceChildren(...list.map(([name, value, kind]) =>
    element("span", { class: `figure ${kind ?? ""}` }, `${name} `, element("b", { text: value }))));
}

// 1 − C(n − c, k) / C(n, k)
const passAt = (n, c, k) => 1 - Array.from({ length: k }, (_, i) => Math.max(0, n - c - i) / (n - i)).reduce((a, b) => a * b, 1);

function groupCharts(samples) {
  const judged = samples.filter((s) => s.correct === true || s.correct === false), right = judged.filter((s) => s.correct).length;
  const by = (of) => [["right", true, "good"], ["wrong", false, "bad"], [judged.length ? "not judged" : "drawn", null, "none"]]
    .map(([label, kind, shade]) => ({ label, color: shade, values: samples.filter((s) => (s.correct ?? null) === kind).map(of) }))
    .filter((group) => group.values.length);
  const charts = [];
  if (judged.length > 1) {
    const ks = [...new Set([1, 2, 4, 8, 16, 32, 64].filter((k) => k < judged.length).concat(judged.length))];
    charts.push({ kind: "line", log: true, title: "pass@k", unit: "share", x: "k", note: "", smooth: false,
      series: [{ label: "pass@k", points: ks.map((k) => [k, passAt(judged.length, right, k)]) }] });
  }
  const rewarded = by((s) => s.reward).map((group) => ({ ...group, values: group.values.filter((value) => value != null) })).filter((group) => group.values.length);
  if (rewarded.length) charts.push({ kind: "bars", title: "Rewards", unit: "samples", x: "reward", note: "", ...histogram(rewarded) });
  charts.push({ kind: "bars", title: "Lengths", unit: "samples", x: "tokens", note: "", ...histogram(by((s) => s.tokens)) });
  return charts;
}

const saying = (s) => (completed(s) ? answerOf(s.content) : callText(s.calls[0]));

// Counts, answers, figures; again after every change of a sample.
function showGroup(form, group) {
  const { samples } = state, count = (kind) => samples.filter((s) => s.correct === kind).length;
  const told = [["problem", form.problem.length > 60 ? `${form.problem.slice(0, 59)}…` : form.problem]];
  if (samples.some((s) => s.correct !== undefined)) {
    told.push(["right", count(true), "right"], ["wrong", count(false), "wrong"]);
    if (count(null)) told.push(["not judged", count(null)]);
  } else told.push(["samples", samples.length]);
  if (group?.scored) told.push(["mean reward", group.mean.toFixed(3)], ["std", group.std.toFixed(3)]);
  const calling = samples.filter((s) => !completed(s)).length;
  if (calling) told.push(["called tools", `${calling} of ${samples.length}`]);
  const tokens = samples.reduce((sum, s) => sum + s.tokens, 0);
  told.push(["tokens", `${state.promptTokens ?? "?"} + ${tokens}`], ["seed", form.options.seed]);
  if (state.weights) told.push(["weights", state.weights]);
  figures(...told);
  at("formula").textContent = group?.formula ? `Advantage (${group.objective}): ${group.formula}` : "";
  showKinds();
  showCharts(groupCharts(samples), at("figures"));
}

function showKinds() {
  const kinds = folded(state.samples, saying);
  const open = kinds.find((kind) => kind.answer === state.kind?.answer && kind.correct === state.kind?.correct) ?? null;
  at("kinds").replaceChildren(answerBars(kinds, state.samples.length, open, (kind) => { state.kind = kind; showKinds(); }));
  for (const s of state.samples) s.card.hidden = open !== null && !open.completions.includes(s);
}

function sortCards() {
  const keys = { index: (a, b) => a.index - b.index, reward: byReward, length: (a, b) => a.tokens - b.tokens,
    answer: (a, b) => saying(a).localeCompare(saying(b), undefined, { numeric: true }) };
  at("samples").append(...[...state.samples].sort((a, b) => keys[at("sort").value](a, b) || a.index - b.index).map((s) => s.card));
}

// --- drawing ---------------------------------------------------------------------------------------------------------

// The next turn of samples that have the same messages so far; they begin once the server has agreed.
async function draw(n, messages, options, signal, begin) {
  const response = await post("/v1/chat/completions", { messages, n, stream: true, return_token_ids: true, ...options }, signal);
  const samples = begin();
  for (const s of samples) Object.assign(s, { messages, content: "", calls: [], finish: null, tokens: 0 });
  const changed = new Set();
  const paint = () => { for (const s of changed) showText(s); changed.clear(); };
  for await (const event of eventsOf(response)) {
    state.weights = event.system_fingerprint ?? state.weights;
    if (event.prompt_token_ids) state.promptTokens = event.prompt_token_ids.length;
    for (const choice of event.choices) {
      const s = samples[choice.index];
      s.content += choice.delta.content ?? "";
      s.tokens += choice.token_ids?.length ?? 0;
      for (const call of choice.delta.tool_calls ?? []) s.calls[call.index] = call;
      if (choice.finish_reason) {
        s.finish = choice.finish_reason;
        s.card.classList.remove("live");
      }
      if (changed.size === 0) requestAnimationFrame(paint);
      changed.add(s);
    }
  }
  for (const s of samples) changed.add(s);
  paint();
  return samples;
}

async function score(samples, { problem, answer, columns }, group, signal) {
  if (answer === "" || samples.length === 0) return null;
  const items = samples.map((s) => ({ ...columns, completion: s.content, answer, question: problem, completion_length: s.tokens }));
  const scored = await (await post("/v1/score", { items, group }, signal)).json();
  const judged = scored.items.map((item) => ({ advantage: null, ...item }));
  const largest = Math.max(0, ...judged.map((item) => Math.abs(item.advantage ?? 0)));
  judged.forEach((item, i) => showScore(samples[i], item, scored.group?.objective, largest));
  return scored.group ?? null;
}

// Results for the calls of a sample, or else something to say to it.
function offerReply(s, form) {
  const reply = element("form", { class: "reply", "aria-label": `reply to sample ${s.index + 1}` });
  const fields = completed(s) ? [["You", ""]] : s.calls.map((call) => [`Result of ${call.function.name}`, call.id]);
  for (const [name, id] of fields) {
    const field = element("input", { "data-id": id, autocomplete: "off" });
    field.required = id === "";
    reply.append(element("label", {}, name, field));
  }
  reply.append(element("button", { text: "Go on" }));
  reply.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!state.running) start((signal) => goOn(s, form, reply, signal));
  });
  s.body.append(reply);
}

function keepTurn(s, who, text, calls) {
  s.turns.append(element("div", { class: "turn" }, element("span", { class: "who", text: who }), element("div", { class: "text" },
    ...marked(text), ...calls.map((call) => element("span", { class: "call", text: callText(call) })))));
}

async function goOn(s, form, reply, signal) {
  const given = [...reply.querySelectorAll("input")].map((field) => [field.dataset.id, field.value]);
  const said = { role: "assistant", content: s.content };
  if (!completed(s)) said.tool_calls = s.calls.map(({ id, type, function: called }) => ({ id, type, function: called }));
  const told = given.map(([id, content]) => id === "" ? { role: "user", content } : { role: "tool", tool_call_id: id, content });
  let begun = false;
  const begin = () => {
    begun = true;
    for (const old of s.body.querySelectorAll(".judged, .reply")) old.remove();
    s.card.classList.remove("right", "wrong", "not-judged");
    s.card.classList.add("live");
    s.verdict.textContent = s.value.textContent = s.gain.textContent = "";
    s.head.removeAttribute("aria-label");
    keepTurn(s, "Policy", s.content, s.calls);
    given.forEach(([id, content], i) => keepTurn(s, id === "" ? "You" : s.calls[i].function.name, content, []));
    Object.assign(s, { correct: undefined, reward: undefined, advantage: undefined });
    return [s];
  };
  try {
    await draw(1, [...s.messages, said, ...told], form.options, signal, begin);
    const ofTheProblem = s.messages.filter((message) => message.role === "user").length === 1;
    if (completed(s) && ofTheProblem) await score([s], form, false, signal);
  } finally {
    if (begun) {
      offerReply(s, form);
      showGroup(form, null);
    }
  }
}

async function sample(signal) {
  while (state.reading) await state.reading;  // other files may be chosen meanwhile
  const form = asked();
  Object.assign(state, { samples: [], kind: null, promptTokens: null, seed: form.options.seed });
  showCode();
  at("samples").replaceChildren();
  at("kinds").replaceChildren();
  at("figures").replaceChildren();
  at("formula").textContent = "";
  at("result").hidden = false;
  figures(["drawing", `${form.n} sample${form.n === 1 ? "" : "s"}`], ["seed", form.options.seed]);
  const begin = () => {
    state.samples = Array.from({ length: form.n }, (_, i) => newSample(i, form.n <= OPEN || (i === 0 && form.n <= FIRST_OPEN)));
    at("samples").replaceChildren(...state.samples.map((s) => s.card));
    showView();
    return state.samples;
  };
  const samples = await draw(form.n, [turn(form)], form.options, signal, begin);
  const group = await score(samples.filter(completed), form, samples.every(completed), signal);
  for (const s of samples) offerReply(s, form);
  sortCards();
  showGroup(form, group);
}

async function start(work) {
  at("error").hidden = true;
  state.running = new AbortController();
  at("go").textContent = "Stop";
  at("go").classList.add("stop");
  try {
    await work(state.running.signal);
    return true;
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
    return false;
  } finally {
    state.running = null;
    at("go").textContent = "Sample";
    at("go").classList.remove("stop");
    for (const card of document.querySelectorAll(".live")) card.classList.remove("live");
  }
}

function showExample(example) {
  Object.assign(state, { example, reading: null });
  at("problem").value = example.problem;
  at("answer").value = example.answer;
  showImages(example.pictures);
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (state.running) { state.running.abort(); return; }
  if (!await start(sample)) { figures(); at("result").hidden = !state.samples.length; }
});
// An answer belongs to the problem it was typed for.
at("problem").addEventListener("input", () => { at("answer").value = ""; });
at("images").addEventListener("change", () => chooseImages([...at("images").files]));
at("greedy").addEventListener("click", () => { Object.assign(at("temperature"), { value: 0 }); at("n").value = 1; at("form").requestSubmit(); });
at("another").addEventListener("click", () => showExample(state.examples[(state.examples.indexOf(state.example) + 1) % state.examples.length]));
at("form").addEventListener("input", showCode);
at("code").addEventListener("toggle", showCode);
at("sort").addEventListener("change", sortCards);
at("view").addEventListener("click", () => {
  const open = !state.samples.every((s) => s.card.classList.contains("open"));
  for (const s of state.samples) openCard(s.card, open);
});
matchMedia("(prefers-color-scheme: dark)").onchange = () => at("figures").redraw?.();

fetch("/v1/models").then((r) => r.json()).then((models) => {
  const m = models.data[0];
  Object.assign(state, { model: m.id, example: m.example ?? null, examples: m.examples ?? [], limits: m.images ?? null });
  for (const each of [state.example, ...state.examples].filter(Boolean)) {
    each.pictures = (each.images ?? []).map((url, i) => ({ name: `image ${i + 1}`, url, inline: true }));
  }
  at("pictures").hidden = !m.images;
  if (m.images) at("limits").textContent = `(up to ${m.images.per_prompt}, each of at most ${m.images.megabytes} MB and ${m.images.megapixels} million pixels, ${megabytesTogether()} MB together)`;
  at("another").hidden = state.examples.length < 2;
  const facts = [m.id, m.context_length && `context of ${m.context_length} tokens`, m.objective && `trained with ${m.objective}`];
  at("model").textContent = facts.filter(Boolean).join(" · ");
  at("max_tokens").placeholder = m.max_completion_length;
  if (m.temperature) at("temperature").value = m.temperature;
  if (m.examples) state.example = state.examples[0];
  if (state.example && at("problem").value === "") showExample(state.example);
}).catch(() => fail("the server does not answer"));
