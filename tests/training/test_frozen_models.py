"""Teachers score the policy's own samples; loss and gradient are those of the whole distributions written out."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.distributed.collective import Collective
from grpo_pl.functional.divergence import divergence
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.distillation import Distillation
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.logprobs import use_forward_mode
from grpo_pl.policy.teacher import TeacherConfig
from grpo_pl.rewards import ExactReward
from grpo_pl.training.experience import Experience
from grpo_pl.training.frozen_models import Teachers, check_sources, check_teachers, teacher_configs
from grpo_pl.training.microbatches import Scorer, TokenBudget
from grpo_pl.types import Problem, PromptBatch
from tests import gradient_step

Make, Teach = Callable[..., Experience], Callable[..., Teachers]
LIMIT = 6
TEXTS = {1: ["7", "77", "712345678"], 2: ["55", "555", "5"], 3: ["6", "?", "x6"]}
ALONE: dict[str, Any] = {
    "group_size": 3,
    "beta": 0.0,
    "baseline": "none",
    "scale": "none",
    "aggregation": "token_mean",
}
TOKEN = GRPOAlgorithm(**ALONE, surrogate="unclipped", terms={"distillation": Distillation(alone=True)})
WHOLE = GRPOAlgorithm(**ALONE, terms={"distillation": Distillation(divergence="jensen_shannon", mix=0.3, alone=True)})
BATCH = PromptBatch(
    step=0,
    prompts=[Problem(id=i, question="?" * i, answer="7", source="odd" if i % 2 else "even") for i in (1, 2, 3)],
    valid=[True] * 3,
)
SHAPES = {
    "big": {"hidden_size": 48, "num_hidden_layers": 2, "init_seed": 1},
    "small": {"hidden_size": 16, "num_hidden_layers": 1, "init_seed": 2, "vocabulary": 12},  # padded embeddings
}


@pytest.fixture(scope="module")
def folders(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two teachers of other shapes than the policy's, the second with rows of padding in its embedding."""
    found = {}
    for name, given in SHAPES.items():
        shape = dict(given)
        seed, padding = shape.pop("init_seed"), shape.pop("vocabulary", 0)
        sizes = {"max_position_embeddings": 64, "initializer_range": 0.3, "vocab_size": len(tokenizer) + padding}
        settings = {"model_type": "qwen2", **gradient_step.SHAPE, **sizes, **shape}
        found[name] = tmp_path_factory.mktemp(name)
        load_model(PolicyConfig(from_scratch=settings, init_seed=seed), tokenizer).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


@pytest.fixture
def teach(folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase) -> Teach:
    """``teach(source=name)``: the teacher of each source, or of all as ``every``."""

    def made(**by_source: str) -> Teachers:
        configs = {
            "" if source == "every" else source: TeacherConfig(path=str(folders[name]))
            for source, name in by_source.items()
        }
        return Teachers(configs, tokenizer, None)

    return made


@pytest.fixture
def make(make_experience: Make) -> Make:
    given = {"batch": BATCH, "rewards": [ExactReward(correctness=True)], "max_completion_length": LIMIT}
    return lambda algorithm, **more: make_experience(TEXTS, algorithm=algorithm, **{**given, **more})


def _logits(model: PreTrainedModel, experience: Experience, row: int) -> torch.Tensor:
    """(tokens, V) that predict the completion of a row, without padding."""
    rollout = experience.rollout
    prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
    completion = rollout.completion_ids[row][rollout.completion_mask[row]]
    logits: torch.Tensor = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
    return logits[len(prompt) - 1 : -1]


def _models(folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase) -> dict[str, PreTrainedModel]:
    return {name: load_model(PolicyConfig(path=str(path)), tokenizer).eval() for name, path in folders.items()}


@pytest.mark.parametrize("max_tokens", [20, 1000])
def test_each_row_is_scored_by_the_teacher_of_its_source(
    make: Make, teach: Teach, folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> None:
    experience = make(TOKEN, teachers=teach(odd="big", even="small"), max_tokens=max_tokens)
    models = _models(folders, tokenizer)
    assert experience.teacher.logprobs is not None
    assert list(experience.teacher.owners) == ["odd"] * 3 + ["even"] * 3 + ["odd"] * 3
    assert not experience.teacher.logprobs.requires_grad
    assert experience.seconds["teacher"] > 0
    for row in range(9):
        mask = experience.rollout.completion_mask[row]
        with torch.no_grad():
            logits = _logits(models["small" if 3 <= row < 6 else "big"], experience, row)
        ids = experience.rollout.completion_ids[row][mask]
        expected = logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(experience.teacher.logprobs[row][mask], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("mode", "max_tokens", "by_source"),
    [
        ("packed", 20, {"odd": "big", "even": "small"}),
        ("packed", 1000, {"every": "small"}),
        ("chunked", 20, {"every": "small"}),
        ("chunked", 1000, {"odd": "big", "even": "small"}),
        ("materialised", 1000, {"odd": "big", "even": "small"}),
    ],
)
def test_a_step_on_the_divergence_is_one_on_whole_distributions(
    make: Make,
    teach: Teach,
    folders: dict[str, Path],
    tokenizer: PreTrainedTokenizerBase,
    tiny_policy: PreTrainedModel,
    by_source: dict[str, str],
    max_tokens: int,
    mode: Any,
) -> None:
    experience = make(WHOLE, teachers=teach(**by_source), max_tokens=max_tokens)
    models, ours = _models(folders, tokenizer), copy.deepcopy(tiny_policy)
    total, tokens = torch.zeros(()), 0
    for row, owner in enumerate(["odd"] * 3 + ["even"] * 3 + ["odd"] * 3):
        teacher = models[by_source.get("every", by_source.get(owner, ""))]
        shared = len(tokenizer)
        with torch.no_grad():
            target = _logits(teacher, experience, row)[:, :shared].log_softmax(-1)
        logits = _logits(tiny_policy, experience, row)
        total = total + divergence(logits.log_softmax(-1), target, mix=0.3).sum()
        tokens += len(logits)
    gradient = gradient_step.gradient(total / tokens, tiny_policy)
    use_forward_mode(ours, mode)
    result = gradient_step.update(ours, experience, WHOLE, longest=LIMIT, max_tokens=max_tokens)
    moved = gradient_step.weights(ours) - gradient_step.weights(tiny_policy)
    assert gradient_step.relative(-moved, gradient) < 1e-5
    assert result.losses == pytest.approx([(total / tokens).item()], rel=1e-5)
    summed, count = result.sums["teacher/divergence"]
    assert (summed / count).item() == pytest.approx((total / tokens).item(), rel=1e-5)
    assert count == tokens


def test_a_step_on_sampled_tokens_lifts_those_that_the_teacher_finds_likelier(
    make: Make, teach: Teach, tiny_policy: PreTrainedModel
) -> None:
    """The gradient is that of the mean of gap · log π, with the gap held fixed."""
    experience = make(TOKEN, teachers=teach(every="big"))
    assert experience.teacher.logprobs is not None
    mask, ids, theirs = (
        experience.rollout.completion_mask,
        experience.rollout.completion_ids,
        experience.teacher.logprobs,
    )

    def own(policy: PreTrainedModel) -> torch.Tensor:
        tables = [_logits(policy, experience, row).log_softmax(-1) for row in range(len(ids))]
        return torch.cat([table.gather(1, ids[i][mask[i]].unsqueeze(1)) for i, table in enumerate(tables)]).flatten()

    logprobs = own(tiny_policy)
    gap = theirs[mask] - logprobs.detach()
    gradient = gradient_step.gradient((gap * logprobs).mean(), tiny_policy)
    moved, result = gradient_step.moved(tiny_policy, experience, TOKEN, longest=LIMIT)
    total, count = result.sums["teacher/kl"]
    assert gradient_step.relative(moved, gradient) < 1e-5
    assert (total.item(), count) == (pytest.approx(-gap.sum().item(), rel=1e-4), mask.sum())


@pytest.mark.parametrize("algorithm", [TOKEN, WHOLE], ids=["sampled tokens", "whole distributions"])
def test_a_teacher_s_distribution_is_not_truncated_with_the_policy_s(
    make: Make, teach: Teach, tiny_policy: PreTrainedModel, algorithm: GRPOAlgorithm
) -> None:
    teachers = teach(every="small")
    experience = make(algorithm, teachers=teachers)
    ids = experience.rollout.completion_ids
    support = torch.stack([ids, torch.full_like(ids, 3)], dim=2).int()
    samples = replace(experience.samples, rollout=replace(experience.rollout, support=support))
    scorer = Scorer(budget=TokenBudget(configured=1000), collective=Collective(), temperature=1.0)
    scores = teachers.score(tiny_policy, replace(experience, samples=samples), algorithm, scorer)
    if algorithm is TOKEN:
        assert scores.logprobs is not None and experience.teacher.logprobs is not None
        torch.testing.assert_close(scores.logprobs, experience.teacher.logprobs)
    else:
        torch.testing.assert_close(list(scores.states), list(experience.teacher.states))


def test_teachers_take_no_gradient_and_one_model_teaches_several_sources(teach: Teach) -> None:
    models = teach(odd="big", even="big")._models
    assert models["odd"] is models["even"]
    assert not any(parameter.requires_grad for parameter in models["odd"].parameters())
    assert not models["odd"].training


def test_a_sample_that_is_longer_than_a_teacher_reads_is_refused(
    make: Make, tokenizer: PreTrainedTokenizerBase, folders: dict[str, Path], tmp_path: Path
) -> None:
    model = load_model(PolicyConfig(path=str(folders["big"])), tokenizer)
    model.config.max_position_embeddings = 5
    model.save_pretrained(tmp_path)
    teachers = Teachers({"": TeacherConfig(path=str(tmp_path))}, tokenizer, None)
    with pytest.raises(ValueError, match="reads 5 tokens, and a prompt with its completion has"):
        make(TOKEN, teachers=teachers)


def test_a_teacher_whose_logits_are_more_than_a_head_s_is_refused_for_whole_distributions(
    make: Make, teach: Teach
) -> None:
    teachers = teach(every="big")
    use_forward_mode(teachers._models[""], "materialised")
    with pytest.raises(ValueError, match="divergence: none"):
        make(WHOLE, teachers=teachers)
    make(TOKEN, teachers=teachers)


SERVED = TeacherConfig(path="a", url="http://localhost:1/v1")


@pytest.mark.parametrize(
    ("configs", "algorithm", "temperature", "match"),
    [
        ({}, TOKEN, 1.0, "set model.teacher.path"),
        ({"": SERVED}, WHOLE, 1.0, "gives those of single tokens"),
        ({"": SERVED}, TOKEN, 0.7, "at temperature 1"),
    ],
)
def test_an_objective_without_the_teacher_that_it_needs_is_refused(
    configs: dict[str, TeacherConfig], algorithm: GRPOAlgorithm, temperature: float, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        check_teachers(configs, algorithm, temperature=temperature)
    check_teachers(configs, GRPOAlgorithm(), temperature=temperature)  # another objective does not ask


def test_one_teacher_or_one_for_every_source() -> None:
    one, other = TeacherConfig(path="a"), TeacherConfig(path="b")
    assert teacher_configs(one, None) == {"": one}
    assert teacher_configs(None, {"odd": one, "even": {"path": "b"}}) == {"odd": one, "even": other}
    assert teacher_configs(None, None) == {}
    with pytest.raises(ValueError, match="give one of two"):
        teacher_configs(one, {"odd": other})
    check_sources({"": one}, ["odd", "even"])
    check_sources({"odd": one, "even": other}, ["even", "odd"])
    with pytest.raises(ValueError, match="names odd; the parts of the mixture are even, odd"):
        check_sources({"odd": one}, ["odd", "even"])
    with pytest.raises(ValueError, match=r"no mixture: set model\.teacher"):
        check_sources({"odd": one}, [""])
