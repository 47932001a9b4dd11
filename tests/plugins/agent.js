// The tool loop of user_agents.py in Node, with nothing but its standard library.
const { readFileSync } = require("node:fs");

const task = JSON.parse(readFileSync(0, "utf8"));
const TOOL = {
  type: "function",
  function: {
    name: "calc",
    description: "Works an arithmetic expression out.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string", description: "Numbers with + - * /." } },
      required: ["expression"],
    },
    return: { type: "string" },
  },
};

async function main() {
  const messages = [{ role: "user", content: task.question }];
  for (;;) {
    const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
      body: JSON.stringify({ model: "policy", messages, tools: [TOOL] }),
    });
    const { message } = (await response.json()).choices[0];
    messages.push(message);
    for (const call of message.tool_calls ?? []) {
      const { expression } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: `got ${expression}` });
    }
    if (!message.tool_calls) return;
  }
}

main();
