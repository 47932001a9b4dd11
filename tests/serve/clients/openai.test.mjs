// OpenAI's client for Node, by `node --test`; GRPO_PL_SERVERS names the servers, NODE_MODULES where the client lies.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

const { OpenAI } = createRequire(`${process.env.NODE_MODULES}/`)("openai");
const servers = JSON.parse(process.env.GRPO_PL_SERVERS);
const client = new OpenAI({ baseURL: `${servers.server}/v1`, apiKey: servers.key, maxRetries: 0, timeout: 60_000 });
const asked = { model: "tiny", messages: [{ role: "user", content: "12+34=" }], max_tokens: 30, seed: 3 };
const long = { ...asked, max_tokens: 3000, n: 64, ignore_eos: true };
const tools = [{
  type: "function",
  function: {
    name: "pick",
    parameters: {
      type: "object", properties: { number: { enum: [1, 2, 3] } }, required: ["number"], additionalProperties: false,
    },
  },
}];

const chat = (change = {}, by = client) => by.chat.completions.create({ ...asked, ...change });

async function metric(name, address = servers.server) {
  const answer = await fetch(`${address}/metrics`, { headers: { Authorization: `Bearer ${servers.key}` } });
  return Number((await answer.text()).match(new RegExp(`^grpo_pl_${name} (.*)$`, "m"))[1]);
}

async function until(condition, seconds) {
  const end = Date.now() + 1000 * seconds;
  while (!await condition()) {
    assert.ok(Date.now() < end, "it did not happen in time");
    await sleep(20);
  }
}

const untilIdle = () => until(async () => await metric("running_sequences") === 0, 2);

test("a chat is answered and counted, with a seed and n", async () => {
  const [first, again] = [await chat({ n: 2 }), await chat({ n: 2 })];
  assert.equal(first.choices.length, 2);
  assert.deepEqual(first.choices, again.choices);
  assert.equal(first.usage.total_tokens, first.usage.prompt_tokens + first.usage.completion_tokens);
  assert.ok(first._request_id);
});

test("a stream has the text of the whole answer and its usage last", async () => {
  const [texts, whole] = [[], await chat()];
  let usage = null;
  for await (const piece of await chat({ stream: true, stream_options: { include_usage: true } })) {
    texts.push(piece.choices[0]?.delta.content ?? "");
    usage = piece.usage;
  }
  assert.ok(texts.length > 3);
  assert.equal(texts.join(""), whole.choices[0].message.content);
  assert.deepEqual(usage, whole.usage);
});

test("a stop ends the answer before it", async () => {
  const text = (await chat()).choices[0].message.content;
  const stop = text.slice(text.length / 2, text.length / 2 + 2);
  const [cut] = (await chat({ stop: [stop] })).choices;
  assert.ok(text.startsWith(cut.message.content + stop));
  assert.equal(cut.finish_reason, "stop");
});

test("log probabilities come with the answer", async () => {
  const answer = await chat({ logprobs: true, top_logprobs: 2, max_tokens: 5 });
  const tokens = answer.choices[0].logprobs.content;
  assert.equal(tokens.length, answer.usage.completion_tokens);
  assert.ok(tokens.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2));
});

test("a tool is called and its result answered", async () => {
  const change = { tools, parallel_tool_calls: false, max_tokens: 200 };
  const [called] = (await chat({ ...change, tool_choice: "required" })).choices;
  assert.equal(called.finish_reason, "tool_calls");
  const [call] = called.message.tool_calls;
  assert.ok([1, 2, 3].includes(JSON.parse(call.function.arguments).number));
  const messages = [...asked.messages, called.message, { role: "tool", tool_call_id: call.id, content: "2" }];
  assert.equal((await chat({ ...change, messages })).choices[0].message.role, "assistant");
});

test("the helper for streams puts a call of a tool together", async () => {
  const stream = client.chat.completions.stream({
    ...asked, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200,
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.name, "pick");
});

test("an answer follows a schema", async () => {
  const schema = {
    type: "object", properties: { right: { type: "boolean" } }, required: ["right"], additionalProperties: false,
  };
  const format = { type: "json_schema", json_schema: { name: "sum", strict: true, schema } };
  const answer = await client.chat.completions.parse({ ...asked, response_format: format, max_tokens: 200 });
  assert.equal(typeof answer.choices[0].message.parsed.right, "boolean");
});

test("models are listed", async () => {
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), ["tiny"]);
});

test("errors are of the classes of the client", async () => {
  await assert.rejects(chat({ model: "other" }), (e) => e instanceof OpenAI.NotFoundError && e.param === "model");
  await assert.rejects(chat({ temperature: -1 }), (e) => e instanceof OpenAI.BadRequestError && !!e.requestID);
  const stranger = client.withOptions({ apiKey: "wrong" });
  await assert.rejects(chat({}, stranger), (e) => e instanceof OpenAI.AuthenticationError && e.code === "invalid_api_key");
});

test("running out of time and leaving a stream leave no work behind", async () => {
  await assert.rejects(
    client.chat.completions.create(long, { timeout: 300 }), (e) => e instanceof OpenAI.APIConnectionTimeoutError);
  await untilIdle();
  const stream = await chat({ ...long, stream: true });
  for await (const piece of stream) {
    assert.equal(piece.object, "chat.completion.chunk");
    break;
  }
  await untilIdle();
  const abort = new AbortController();
  const cancelled = client.chat.completions.create(long, { signal: abort.signal });
  setTimeout(() => abort.abort(), 300);
  await assert.rejects(cancelled, (e) => e instanceof OpenAI.APIUserAbortError);
  await untilIdle();
});

test("a full server raises, and a client that retries waits for room", async () => {
  const narrow = client.withOptions({ baseURL: `${servers.narrow}/v1` });
  const taken = [];
  for (const [name, count] of [["running_sequences", 2], ["waiting_requests", 1]]) {
    const abort = new AbortController();
    taken.push(abort);
    narrow.chat.completions.create({ ...long, n: 2 }, { signal: abort.signal }).catch(() => null);
    await until(async () => await metric(name, servers.narrow) === count, 30);
  }
  await assert.rejects(chat({}, narrow), (e) => e instanceof OpenAI.RateLimitError && !!e.headers.get("retry-after"));
  setTimeout(() => taken.forEach((abort) => abort.abort()), 500);
  assert.ok((await chat({}, narrow.withOptions({ maxRetries: 8 }))).usage.completion_tokens > 0);
});
