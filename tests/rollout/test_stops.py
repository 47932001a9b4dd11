"""Strings and tokens that end a completion: by every engine alike, each a prefix of what would have been drawn."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.decoding import row_keys
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.continuous import ContinuousBatch, SequenceOptions
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.native.llama_family import LlamaFamilyDecoder
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.rollout.sampler import CompletionSampler, Samples
from grpo_pl.types import Problem, SamplingParams, StopStrings
from tests.conftest import TINY_POLICY
from tests.rollout.drawn import make_keys, rows_of

SAMPLING = SamplingParams(max_completion_length=40)
PROMPTS = [Problem(id=i, question=f"{i}+{i}=", answer=str(2 * i)) for i in range(3)]
ENGINES = [NativeEngine(), PlainEngine(), NativeEngine(max_batch_rows=5), PlainEngine(max_batch_rows=5)]


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Near to uniform over a hundred tokens, so that one of a few characters turns up within forty."""
    return load_model(PolicyConfig(from_scratch={**TINY_POLICY, "initializer_range": 0.02}), tokenizer)


@pytest.fixture
def draw(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Samples]:
    """Four completions of each of ``PROMPTS``."""

    def samples(engine: RolloutEngine, sampling: SamplingParams = SAMPLING) -> Samples:
        sampler = CompletionSampler(engine=engine, template=PromptTemplate(prefill="ab"), tokenizer=tokenizer)
        return sampler.sample(policy, PROMPTS, group_size=4, sampling=sampling, seed=0, split="train")

    return samples


def _rows(samples: Samples) -> list[tuple[list[int], str]]:
    return list(zip(rows_of(samples.rollout), samples.rollout.finish_reasons, strict=True))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: f"{type(e).__name__}-{e.max_batch_rows}")
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(
    draw: Any, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    whole = draw(PlainEngine())
    free = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in _rows(whole)]
    pair = next(text[5:7] for text in free if len(text) > 10)  # a string of two tokens that one row is sure to write
    stops = ("x", pair)
    stopped = draw(engine, replace(SAMPLING, stop=stops))
    found = 0
    for (ids, reason), (all_ids, why) in zip(_rows(stopped), _rows(whole), strict=True):
        texts = ["ab" + tokenizer.decode(all_ids[:n], skip_special_tokens=True) for n in range(1, len(all_ids) + 1)]
        end = next((n for n, text in enumerate(texts, start=1) if any(stop in text for stop in stops)), None)
        assert (ids, reason) == ((all_ids, why) if end is None else (all_ids[:end], "stop"))
        found += end is not None
    assert 0 < found < len(free)
    for text, (ids, _) in zip(stopped.completions, _rows(stopped), strict=True):
        assert text == "ab" + tokenizer.decode(ids, skip_special_tokens=True)  # rewards read the stop string as well
    found, mask = stopped.rollout.sampling_logprobs, stopped.rollout.completion_mask
    expected = whole.rollout.sampling_logprobs[:, : mask.shape[1]] * mask
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_stop_string_at_the_last_place_counts(draw: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    whole = _rows(draw(PlainEngine()))
    row, (ids, _) = next((i, r) for i, r in enumerate(whole) if len(r[0]) > 6 and min(r[0][3:6]) > 2)  # all are text
    last = tokenizer.decode(ids[3:6])
    for engine in (NativeEngine(), PlainEngine()):
        short = replace(SAMPLING, max_completion_length=6, stop=(last,))
        assert _rows(draw(engine, short))[row] == (ids[:6], "stop")


def test_a_stop_string_may_begin_in_the_prefill(draw: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    whole = _rows(draw(PlainEngine()))
    first = tokenizer.decode(whole[0][0][:1])
    for engine in (NativeEngine(), PlainEngine()):
        stopped = _rows(draw(engine, replace(SAMPLING, stop=("b" + first,))))
        assert stopped[0] == (whole[0][0][:1], "stop")


@pytest.mark.parametrize("engine", ENGINES[:2], ids=lambda e: type(e).__name__)
def test_further_end_tokens_end_a_completion(draw: Any, engine: RolloutEngine) -> None:
    whole = _rows(draw(PlainEngine()))
    end = whole[0][0][4]
    stopped = _rows(draw(engine, replace(SAMPLING, stop_token_ids=(end,))))
    for (ids, reason), (all_ids, why) in zip(stopped, whole, strict=True):
        assert (ids, reason) == ((all_ids[: all_ids.index(end) + 1], "stop") if end in all_ids else (all_ids, why))


def test_the_continuous_batch_ends_at_the_same_tokens(
    draw: Any, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    sampling = replace(SAMPLING, stop=("x", "7"))
    expected = _rows(draw(PlainEngine(), sampling))
    template = PromptTemplate(prefill="ab")
    stops = StopStrings.of(sampling, tokenizer, "ab")
    batch = ContinuousBatch(policy, eos_token_ids=[tokenizer.eos_token_id], max_rows=12, stops=stops)
    drawn: dict[int, list[int]] = {}
    finish: dict[int, str] = {}
    for prompt in PROMPTS:
        (keys,) = make_keys(1, 4, step=0, prompt_id=prompt.id)
        options = SequenceOptions(sampling=SAMPLING)
        batch.add(template.encode(prompt.question, tokenizer), row_keys([keys]), options)
    while len(batch):
        for one in batch.step(4):
            drawn.setdefault(one.sequence, []).extend(one.tokens)
            if one.finish is not None:
                finish[one.sequence] = one.finish
    assert [(drawn[i], finish[i]) for i in range(12)] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": ("",)}, "stop must hold texts"),
        ({"stop": (7,)}, "stop must hold texts"),
        ({"stop_token_ids": (-1,)}, "must not be negative"),
    ],
)
def test_what_cannot_end_a_completion_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)
    assert SamplingParams(stop=["a"]) == SamplingParams(stop="a") == SamplingParams(stop=("a",))  # type: ignore[arg-type]


def test_a_special_token_is_no_text(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"'<eos>' is a special token: set stop_token_ids: \[1\]"):
        StopStrings.of(SamplingParams(stop=("<eos>",)), tokenizer, "")


def test_a_run_trains_validates_exports_and_predicts_with_its_stop_strings(command_line: Any, tmp_path: Path) -> None:
    from grpo_pl.cli.commands.evaluate import evaluate
    from grpo_pl.cli.commands.predict import predict
    from grpo_pl.policy.trained import find_model

    config = command_line.config(
        "stops", model__sampling={"max_completion_length": 32, "stop": ["}"]}, data__steps=1, data__prompts_per_step=2
    )
    command_line.done("fit", f"--config={config}", "--model.sampling.stop_token_ids=[40]")
    run = command_line.runs / "stops"
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    ended = [row["completion"] for row in rows if "}" in row["completion"]]
    assert ended and all(text.endswith("}") and text.count("}") == 1 for text in ended)
    generation = json.loads((run / "export" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 40]
    for place in (run, run / "checkpoints" / "last.ckpt"):
        trained = find_model(place)
        assert (trained.sampling.stop, trained.sampling.stop_token_ids) == (("}",), (40,))
        file = tmp_path / "predicted.jsonl"
        predict(model=str(place), output=str(file), prompts=4, samples=4, device="cpu", config=str(config))
        texts = [json.loads(line)["completion"][0]["content"] for line in file.read_text().splitlines()]
        assert any("}" in text for text in texts) and all("}" not in text[:-1] for text in texts)
    data, results = tmp_path / "data.jsonl", tmp_path / "evaluation.jsonl"
    data.write_text("".join(json.dumps({"problem": f"{i}+2=", "answer": str(i + 2)}) + "\n" for i in range(4)))
    evaluate(data=str(data), model=str(run), n=4, output=str(results), device="cpu")
    samples = [s for line in results.read_text().splitlines() for s in json.loads(line)["samples"]]
    stopped = [s for s in samples if "}" in s["completion"]]
    assert stopped and all(s["completion"].endswith("}") and s["finish_reason"] == "stop" for s in stopped)
    refused = command_line("fit", f"--config={config}", "--model.sampling.stop_token_ids=[4000]", "--name=none")
    assert refused.status == 1 and "there is no token 4000" in refused.err


def test_a_decoder_that_looks_ahead_reads_each_row_once_a_look(
    draw: Any, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where 16 tokens are drawn between two looks."""
    stopped = replace(SAMPLING, stop=("x", "79"), stop_token_ids=(40,))
    calls, decode = 0, type(tokenizer).decode

    def counting(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return decode(self, *arguments, **options)

    monkeypatch.setattr(LlamaFamilyDecoder, "lookahead", 16)
    for sampling in (replace(SAMPLING, stop=("never written",)), stopped):
        monkeypatch.setattr(type(tokenizer), "decode", decode)
        whole = draw(PlainEngine(), sampling)
        monkeypatch.setattr(type(tokenizer), "decode", counting)
        calls = 0
        ours = draw(NativeEngine(), sampling)
        assert _rows(ours) == _rows(whole)
        assert torch.equal(ours.rollout.completion_mask, whole.rollout.completion_mask)
        if sampling is not stopped:
            drawn = sum(len(ids) for ids, _ in _rows(ours))
            assert calls - len(_rows(ours)) < drawn / 2  # of a special token's look all; two for each token before
