"""Tools through the real ``openai`` client: a policy that calls a calculator, and answers that are held to calls."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch

from grpo_pl.extras.agents.calculator import calc
from grpo_pl.extras.agents.tool_calls import Result, TagCalls
from grpo_pl.extras.agents.tools import ToolEnvironment, schema
from grpo_pl.policy.dialogue import Dialogue, PlainTurns
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.pretrained import MANIFEST
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import MathReward
from grpo_pl.types import SamplingParams
from tests.serve.conftest import ROOT, SHAPE


def tool(name: str, properties: dict[str, Any], **further: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), **further}
    return {"type": "function", "function": {"name": name, "parameters": {"additionalProperties": False, **parameters}}}


CALC, LOOK = tool("calc", {"expression": {"enum": ["12*7"]}}), tool("look", {"at": {"type": "string", "maxLength": 4}})
EPISODES = {"12*7=": ["12*7", "84"], "9*9+1=": ["9*9", "81", "81+1", "82"], "2+2=": []}
"""What the policy has learnt by heart: expressions that it has worked out, with the results; then the answer."""
QUESTION = [{"role": "user", "content": "12*7="}]


@pytest.fixture(scope="module")
def calculator(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of a policy that learnt a few episodes with a calculator in tags, without a chat template."""
    policy = PolicyConfig(
        from_scratch={**SHAPE, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.02}
    )
    tokenizer, template = load_tokenizer(policy), PromptTemplate()
    model = load_model(policy, tokenizer)
    dialogue = Dialogue(template=template, tokenizer=tokenizer, plain=PlainTurns(observation="[{observation}]"))
    rows = []
    for question, steps in EPISODES.items():
        ids = dialogue.prompt_ids(question)
        for expression, value in zip(steps[::2], steps[1::2], strict=True):
            ids += [*tokenizer(f"<calc>{expression}</calc>").input_ids, tokenizer.eos_token_id]
            ids += dialogue.observation_ids(TagCalls().observation([Result("calc", value)]), ids[-1])
        rows.append(torch.tensor(ids + tokenizer(steps[-1] if steps else "4").input_ids + [tokenizer.eos_token_id]))
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(300):
        loss = model(input_ids=batch.clamp(min=0), attention_mask=(batch >= 0).long(), labels=batch).loss
        if loss.item() < 0.15:  # the first characters of questions cannot be known
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("calculator") / "calculator" / "export"
    sampling = SamplingParams(max_completion_length=40, temperature=0.01)
    trained = TrainedWith(template=template, rewards=[MathReward().spec()], sampling=sampling)
    export_policy(folder, trained, model=model, tokenizer=tokenizer)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["environment"] = ToolEnvironment(tools=[calc], parser=TagCalls()).spec()
    manifest["episodes"] = {"plain_turns": {"observation": "[{observation}]", "tools": ""}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return start(model=folder)


def run_loop(client: openai.OpenAI, question: str, **options: Any) -> list[Any]:
    """Makes the calls that the policy asks for until it answers."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(4):
        answer = client.chat.completions.create(
            model="calculator", messages=messages, tools=[schema(calc)], temperature=0, **options
        )
        (choice,) = answer.choices
        messages.append(choice.message)
        assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
        if not choice.message.tool_calls:
            return messages
        for call in choice.message.tool_calls:
            text = calc(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    raise AssertionError(messages)


@pytest.mark.parametrize("question", EPISODES)
def test_a_loop_that_makes_the_calls_ends_with_the_answer(calculator: Any, question: str) -> None:
    steps = EPISODES[question]
    messages = run_loop(calculator.openai(), question)
    assert messages[-1].content == (steps[-1] if steps else "4")
    said = [m for m in messages if not isinstance(m, dict)]
    assert [json.loads(m.tool_calls[0].function.arguments)["expression"] for m in said[:-1]] == steps[::2]
    assert all(m.content is None and m.tool_calls[0].function.name == "calc" for m in said[:-1])


def test_the_example_of_the_docs_runs(calculator: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "tool_calls" in block]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(example.replace("http://127.0.0.1:8000", calculator.address), "serving.md", "exec"), {})
    assert out.getvalue() == "84\n"


def test_a_stream_of_calls_adds_up_to_them(calculator: Any) -> None:
    client = calculator.openai()
    options = {"model": "calculator", "messages": QUESTION, "tools": [CALC], "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    for one, other in zip(whole.choices, final.choices, strict=True):
        assert (one.finish_reason, one.message.content or None) == (other.finish_reason, other.message.content or None)
        (mine,), (streamed,) = one.message.tool_calls, other.message.tool_calls
        assert mine.function.arguments == streamed.function.arguments == '{"expression": "12*7"}'
        assert mine.function.name == streamed.function.name and streamed.id.startswith("call_")


def test_without_tools_the_same_is_text(calculator: Any) -> None:
    client = calculator.openai()
    for options in ({}, {"tools": [CALC], "tool_choice": "none"}, {"tools": [LOOK]}):
        (choice,) = client.chat.completions.create(
            model="calculator", messages=QUESTION, temperature=0, **options
        ).choices
        assert choice.message.content == "<calc>12*7</calc>" and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_a_malformed_call_is_text(calculator: Any) -> None:
    """A bias keeps the policy from ending the tag: what it writes is no call."""
    client = calculator.openai()
    slash = str(calculator.post("/tokenize", {"prompt": "/", "add_special_tokens": False})[1]["tokens"][0])
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="calculator", messages=QUESTION, tools=[CALC], temperature=0, max_tokens=20, logit_bias={slash: -100},
            stream=stream,
        )  # fmt: skip
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            text, calls = "".join(c.delta.content or "" for c in chunks), [c for c in chunks if c.delta.tool_calls]
        else:
            text, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls or []
        assert text.startswith("<calc>12*7<") and calls == []


def test_a_tool_that_tags_cannot_call_is_refused(calculator: Any) -> None:
    body = {"messages": QUESTION, "tools": [tool("add", {"a": {}, "b": {}})]}
    error = calculator.refusal("/v1/chat/completions", body)
    assert error["param"] == "tools" and "'add' needs 2" in error["message"]


# ---------------------------------------------------------------- a policy of random weights, in Hermes' form


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_has_to_call_does(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": [CALC, LOOK], "seed": 1}
    for chosen in ("required", {"type": "function", "function": {"name": "calc"}}):
        for several in (True, False):
            asked = options | {"tool_choice": chosen, "parallel_tool_calls": several, "max_tokens": 400}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    (choice,) = events.get_final_completion().choices
            else:
                (choice,) = client.chat.completions.create(**asked).choices
            calls = choice.message.tool_calls
            assert calls and not choice.message.content and choice.finish_reason == "tool_calls"
            assert several or len(calls) == 1
            for call in calls:
                assert call.function.name in ("calc", "look")
                if call.function.name == "calc":
                    assert json.loads(call.function.arguments) == {"expression": "12*7"}
            if chosen != "required":
                assert {call.function.name for call in calls} == {"calc"}


def test_the_only_call_ends_an_answer_at_the_same_token(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": [CALC], "tool_choice": "required"}
    answers = [
        client.chat.completions.create(**options, seed=5, parallel_tool_calls=False, max_tokens=200, logprobs=True)
        for _ in range(3)
    ]
    spent = {answer.usage.completion_tokens for answer in answers}
    told = {len(answer.choices[0].logprobs.content) for answer in answers}
    assert len(spent) == 1 and spent == told
    text = "".join(entry.token for entry in answers[0].choices[0].logprobs.content)
    assert text.endswith("</tool_call>") and text.count("</tool_call>") == 1


def test_results_go_back_into_the_conversation(server: Any, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "tools": [CALC], "seed": 1}
    call = client.chat.completions.create(
        **options, messages=QUESTION, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    ).choices[0].message  # fmt: skip
    messages = [*QUESTION, call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "84"}]
    options |= {"tool_choice": "none", "max_tokens": 3, "extra_body": {"ignore_eos": True}}
    final = client.chat.completions.create(**options, messages=messages)
    assert final.choices[0].finish_reason == "length" and final.usage.completion_tokens == 3
    assert final.choices[0].message.content.startswith("<think>")
    told = [messages[0], call.model_dump(exclude_none=True), messages[2]]
    ids = server.post("/tokenize", {"messages": told, "tools": [CALC]})[1]["tokens"]
    text = server.post("/detokenize", {"tokens": ids})[1]["prompt"]
    assert text.startswith(f"Tools:\n{json.dumps(CALC)}\n")
    assert text.endswith(
        '12*7=<tool_call>{"name": "calc", "arguments": {"expression": "12*7"}}</tool_call><eos>\n84\n<think>'
    )
