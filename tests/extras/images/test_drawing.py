"""Completions of prompts with images: the engines draw equal samples, in any batch."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from grpo_pl.data.tasks.shapes import ShapePrompts
from grpo_pl.policy.inputs import encode_prompt
from grpo_pl.policy.loading import PolicyConfig, end_token_ids, load_model, load_tokenizer
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.decoding import join_rollouts, row_keys
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.groups import join_samples, select_groups
from grpo_pl.rollout.native import slots, weights
from grpo_pl.rollout.native.continuous import ContinuousBatch, SequenceOptions
from grpo_pl.rollout.native.decoder_choice import choose_decoder
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.types import Problem, SampleKey, SamplingParams
from tests.images import FAMILIES, SMOLVLM, image_policy, picture

PROBLEMS = [
    Problem(id=0, question="How many?", answer="", columns={"images": (picture(0),)}),
    Problem(id=1, question="How many?", answer="", columns={"images": (picture(1),)}),
    Problem(id=2, question="1+1=", answer=""),
    Problem(id=3, question="Which?", answer="", columns={"images": (picture(2, 30, 50), picture(0))}),
]
SAMPLING = SamplingParams(max_completion_length=10)


def _sampler(family: str, engine: RolloutEngine) -> tuple[Any, CompletionSampler]:
    policy = image_policy(family)
    tokenizer = load_tokenizer(policy)
    return load_model(policy, tokenizer), CompletionSampler(
        engine=engine, template=PromptTemplate(), tokenizer=tokenizer
    )


def _draw(family: str, engine: RolloutEngine, problems: list[Problem] = PROBLEMS, **sampling: Any) -> Any:
    model, sampler = _sampler(family, engine)
    params = replace(SAMPLING, **sampling)
    return model, sampler.sample(model, problems, group_size=3, sampling=params, seed=5, split="train")


def _native(decoder: str | None) -> NativeEngine:
    engine = NativeEngine()
    engine.decoder = decoder
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_the_native_decoders_draw_what_transformers_draws(family: str) -> None:
    _, plain = _draw(family, PlainEngine())
    for engine in (_native(None), _native("torch")):
        _, drawn = _draw(family, engine)
        assert torch.equal(drawn.rollout.completion_ids, plain.rollout.completion_ids)
        assert drawn.completions == plain.completions
        assert (drawn.rollout.sampling_logprobs - plain.rollout.sampling_logprobs).abs().max() < 1e-4
        assert drawn.rollout.inputs.keys == plain.rollout.inputs.keys
        assert "generate" not in engine.describe()


@pytest.mark.parametrize("family", ["smolvlm", "llava"])
@pytest.mark.parametrize("decoder", [None, "torch"])
def test_a_sample_is_the_same_in_any_batch_and_scores_as_it_was_drawn(family: str, decoder: str | None) -> None:
    model, whole = _draw(family, _native(decoder))
    rows = torch.arange(12)
    with torch.no_grad():
        scored, _ = completion_logprobs(model, **rollout_rows(whole.rollout, rows), temperature=1.0)
    assert (scored - whole.rollout.sampling_logprobs).abs().max() < 1e-4
    for number, problem in enumerate(PROBLEMS):
        _, alone = _draw(family, _native(decoder), [problem])
        assert list(alone.completions) == list(whole.completions[3 * number : 3 * number + 3])
    _, turned = _draw(family, _native(decoder), PROBLEMS[::-1])
    assert list(turned.completions[-3:]) == list(whole.completions[:3])


def test_images_tell_samples_apart_and_no_placeholder_is_drawn() -> None:
    model, drawn = _draw("smolvlm", NativeEngine(), max_completion_length=40, temperature=3.0)
    first = replace(PROBLEMS[0], columns={"images": (picture(7),)})
    _, other = _draw("smolvlm", NativeEngine(), [first], max_completion_length=40, temperature=3.0)
    assert list(other.completions) != list(drawn.completions[:3])
    assert not (drawn.rollout.completion_ids == model.config.image_token_id).any()
    assert drawn.prompt_texts[3] == "<image><image>Which?"


def test_inputs_go_with_their_rows_where_groups_are_chosen_and_joined() -> None:
    _, drawn = _draw("smolvlm", NativeEngine())
    chosen = select_groups(drawn, [3, 0])
    keys = drawn.rollout.inputs.keys
    assert chosen.rollout.inputs.keys == keys[9:] + keys[:3]
    _, text = _draw("smolvlm", NativeEngine(), PROBLEMS[2:3])
    assert text.rollout.inputs is None
    joined = join_samples([chosen, text, drawn], 0)
    assert joined.rollout.inputs.keys == [*keys[9:], *keys[:3], None, None, None, *keys]
    assert join_rollouts([text.rollout, text.rollout], 0).inputs is None


def test_a_thought_is_continued_with_its_images() -> None:
    sampling: dict[str, Any] = {"thinking_budget": 4, "max_completion_length": 24}
    model, drawn = _draw("smolvlm", NativeEngine(), **sampling)
    _, plain = _draw("smolvlm", PlainEngine(), **sampling)
    assert drawn.completions == plain.completions
    with torch.no_grad():
        scored, _ = completion_logprobs(model, **rollout_rows(drawn.rollout, torch.arange(12)), temperature=1.0)
    written = drawn.rollout.action_mask
    assert (scored - drawn.rollout.sampling_logprobs)[written].abs().max() < 1e-4


def test_a_request_is_split_with_its_inputs() -> None:
    model, sampler = _sampler("smolvlm", NativeEngine())
    asked: list[Any] = []

    class Watched(NativeEngine):
        def generate(self, model: Any, request: Any, **watching: Any) -> Any:
            asked.append(request)
            return super().generate(model, request, **watching)

    watched = replace(sampler, engine=Watched())
    whole = watched.sample(model, PROBLEMS, group_size=3, sampling=SAMPLING, seed=5, split="train").rollout
    parts = [NativeEngine().generate(model, part) for part in asked[0].split(3)]
    joined = join_rollouts(parts, 0)
    assert joined.inputs is not None and whole.inputs is not None and joined.inputs.keys == whole.inputs.keys
    assert torch.equal(joined.completion_ids, whole.completion_ids)


@dataclass(kw_only=True)
class Asked(ShapePrompts):
    """Shapes in the middle of a message."""

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        found = super().prompts(step, attempt, count=count)
        parts = [{"type": "text", "text": "Look: "}, {"type": "image"}]
        return [
            replace(p, messages=({"role": "user", "content": [*parts, {"type": "text", "text": p.question}]},))
            for p in found
        ]


@pytest.mark.parametrize("kind", [ShapePrompts, Asked])
def test_a_demonstration_has_the_prompt_of_a_rollout(kind: type[ShapePrompts]) -> None:
    _, sampler = _sampler("smolvlm", NativeEngine())
    start, source = ColdStart(steps=2, batch_size=3, lr=1.0), kind()
    (examples, _) = start.batches(sampler.template, source, sampler.tokenizer, None)
    for example, problem in zip(examples, source.prompts(-1, count=3), strict=True):
        prompt = sampler.encode(problem)
        assert example.prompt == prompt.ids and example.inputs is not None and prompt.inputs is not None
        assert example.inputs.key == prompt.inputs.key
        assert (sampler.tokenizer.decode(prompt.ids[:6]) == "Look: ") == (kind is Asked)


def test_a_prompt_that_does_not_fit_is_refused_by_its_number() -> None:
    model, sampler = _sampler("smolvlm", NativeEngine())
    many = replace(PROBLEMS[0], id=7, columns={"images": tuple(map(picture, range(22)))})
    with pytest.raises(ValueError, match="prompt 7 has 163 tokens"):
        sampler.sample(model, [PROBLEMS[2], many], group_size=1, sampling=SAMPLING, seed=0, split="val")


def test_an_engine_that_reads_text_alone_is_refused() -> None:
    class Texts(PlainEngine):
        supports_inputs = False

    model, sampler = _sampler("smolvlm", Texts())
    with pytest.raises(ValueError, match="Texts draws from text"):
        sampler.sample(model, PROBLEMS, group_size=1, sampling=SAMPLING, seed=0, split="val")
    text = sampler.sample(model, PROBLEMS[2:3], group_size=1, sampling=SAMPLING, seed=0, split="val")
    assert text.rollout.inputs is None


def test_the_language_model_is_read_where_it_is() -> None:
    model, _ = _sampler("smolvlm", NativeEngine())
    before = copy.deepcopy(model.state_dict())
    prompt = encode_prompt("a", {"images": (picture(0),)}, PromptTemplate(), load_tokenizer(image_policy()))
    assert prompt.inputs is not None
    _draw("smolvlm", NativeEngine())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoder", [None, "torch", "transformers"])
def test_a_running_batch_draws_what_a_rollout_draws_whenever_a_prompt_joins(
    family: str, decoder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rollout = _draw(family, _native(None))
    tokenizer = load_tokenizer(image_policy(family))
    monkeypatch.setattr(weights, "_KEPT_ROWS", 5)  # so that rows are forgotten and used again
    if decoder == "transformers":
        monkeypatch.setattr(slots, "refuse_llama_family", lambda model, length: "in a test")
    kernel = decoder or choose_decoder(model, SAMPLING, stop_strings=False, recorded=None)[0]
    batch = ContinuousBatch(
        model,
        eos_token_ids=end_token_ids(model, tokenizer, SAMPLING),
        max_rows=20,
        decoder="torch" if decoder else kernel,
    )
    options, drawn, owners = SequenceOptions(sampling=SAMPLING), dict[int, list[int]](), dict[int, tuple[int, int]]()
    for turn in range(24):
        if turn < 8:  # each twice: some while others draw, the last two at once, then all again
            for number in {6: [], 7: [3, 0]}.get(turn, [turn % 4]):
                problem = PROBLEMS[number]
                prompt = encode_prompt(problem.question, problem.columns, PromptTemplate(), tokenizer)
                names = [
                    SampleKey(seed=5, split="train", step=0, attempt=0, prompt_id=problem.id, sample=i)
                    for i in range(3)
                ]
                count = 3 if turn < 4 else 1
                added = batch.add(prompt.ids, row_keys([names[:count]]), options, inputs=prompt.inputs)
                owners |= {sequence: (number, i) for i, sequence in enumerate(added)}
        for step in batch.step():
            drawn.setdefault(step.sequence, []).extend(step.tokens)
    assert len(drawn) == len(owners) == 12 + 2 + 2 and not len(batch)
    for sequence, (number, i) in owners.items():
        row = 3 * number + i
        length = int(rollout.rollout.completion_mask[row].sum())
        assert drawn[sequence] == rollout.rollout.completion_ids[row, :length].tolist(), (number, i)


def test_a_running_batch_of_a_text_policy_refuses_images() -> None:
    prompt = encode_prompt("?", {"images": (picture(0),)}, PromptTemplate(), load_tokenizer(image_policy()))
    policy = PolicyConfig(from_scratch=SMOLVLM["text_config"])
    batch = ContinuousBatch(load_model(policy, load_tokenizer(policy)), eos_token_ids=[0], max_rows=1)
    with pytest.raises(ValueError, match="reads text"):
        batch.add(prompt.ids, [1], SequenceOptions(sampling=SAMPLING), inputs=prompt.inputs)
    assert not len(batch)
