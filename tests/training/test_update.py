"""The update against a naive loss, in every split; what is skipped; what a step that is not finite leaves alone."""

import copy
import ctypes
import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy import logprobs as scoring
from grpo_pl.training.experience import Experience
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.update import UpdateResult
from grpo_pl.types import Rollout
from tests import gradient_step
from tests.gradient_step import relative, weights

ROOT = Path(__file__).parents[2]
PAD, LIMIT, GROUP = 0, 8, 4
PROMPT_LENGTHS = (3, 1, 5)
LENGTHS = (1, 8, 3, 5, 2, 7, 4, 4, 6, 8, 1, 3)
REWARDS = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, torch.nan]]  # one even group, one unknown
PLAIN = GRPOAlgorithm(group_size=GROUP, beta=0.0)


def _model(seed: int) -> PreTrainedModel:
    return gradient_step.qwen(seed, vocab_size=19, initializer_range=0.4).double()


@pytest.fixture(scope="module")
def start() -> PreTrainedModel:
    return _model(0)


@pytest.fixture(scope="module")
def padded_start() -> PreTrainedModel:
    """A model with ALiBi is given padded rows, each whole; in a packed batch they could not be told apart."""
    config = BloomConfig(vocab_size=19, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.4)
    config.hidden_dropout = config.attention_dropout = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BloomForCausalLM(config)


def _rows() -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of each completion; no token is the padding."""
    generator = torch.Generator().manual_seed(3)

    def draw(length: int) -> list[int]:
        return torch.randint(1, 19, (length,), generator=generator).tolist()

    prompts = [draw(length) for length in PROMPT_LENGTHS]
    return [(prompts[i // GROUP], draw(length)) for i, length in enumerate(LENGTHS)]


def _experience(
    algorithm: GRPOAlgorithm = PLAIN,
    *,
    groups: Sequence[int] = (0, 1, 2),
    old: PreTrainedModel | None = None,
    reference: PreTrainedModel | None = None,
    written: Callable[[Tensor], Tensor] = torch.ones_like,
) -> Experience:
    """``written`` makes of (B, T) positions which of the tokens there the policy wrote."""
    rows = [_rows()[g * GROUP + i] for g in groups for i in range(GROUP)]
    values = torch.tensor([REWARDS[g] for g in groups], dtype=torch.float64)
    rollout = gradient_step.rollout_of(*zip(*rows, strict=True), group_size=GROUP)
    positions = torch.arange(LIMIT).expand(len(rows), LIMIT)[:, : rollout.completion_ids.shape[1]]
    rollout = replace(rollout, action_mask=rollout.completion_mask & written(positions).bool())
    old_logprobs, ref_logprobs = (None if model is None else _table(model, rows) for model in (old, reference))
    return gradient_step.experience_of(
        rollout, algorithm, values, longest=LIMIT, step=5, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs
    )


def _table(model: PreTrainedModel, rows: Sequence[tuple[list[int], list[int]]]) -> Tensor:
    with torch.no_grad():
        table = torch.zeros(len(rows), LIMIT, dtype=torch.float64)
        for i, row in enumerate(rows):
            table[i, : len(row[1])] = _logprobs(model, *row)
    return table


def _logprobs(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    """Of one completion, without any padding."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(completion)), completion]


def _run(
    model: PreTrainedModel, experience: Experience, algorithm: GRPOAlgorithm = PLAIN, **options: Any
) -> UpdateResult:
    return gradient_step.update(model, experience, algorithm, longest=LIMIT, **options)


def _step(
    start: PreTrainedModel, experience: Experience, algorithm: GRPOAlgorithm = PLAIN, **options: Any
) -> tuple[Tensor, UpdateResult]:
    return gradient_step.moved(start, experience, algorithm, longest=LIMIT, **options)


def _naive_loss(
    model: PreTrainedModel,
    algorithm: GRPOAlgorithm,
    old: PreTrainedModel,
    reference: PreTrainedModel | None = None,
    written: Callable[[Tensor], Tensor] = torch.ones_like,
) -> Tensor:
    """GRPO written out: a completion at a time, clipped ratio, k3, mean over tokens and then over completions."""
    rows, advantages = _rows(), []
    for group in REWARDS:
        known = torch.tensor([r for r in group if r == r])
        advantages += [((r - known.mean()) / (known.std() + 1e-5)).item() if r == r else None for r in group]
    total, kept = torch.zeros((), dtype=torch.float64), 0
    for row, advantage in zip(rows, advantages, strict=True):
        if advantage is None:
            continue
        kept += 1
        logprobs = _logprobs(model, *row)
        with torch.no_grad():
            before = _logprobs(old, *row)
            target = None if reference is None else _logprobs(reference, *row)
        ratio = (logprobs - before).exp()
        low, high = 1 - algorithm.epsilon_low, 1 + algorithm.epsilon_high
        token_loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if target is not None:
            token_loss = token_loss + algorithm.beta * ((target - logprobs).exp() - (target - logprobs) - 1)
        total = total + token_loss[written(torch.arange(len(token_loss))).bool()].mean()
    return total / kept


def test_gradient_and_its_norm_are_those_of_the_naive_loss(start: PreTrainedModel) -> None:
    gradient = gradient_step.gradient(_naive_loss(start, PLAIN, old=start), start)
    move, result = _step(start, _experience())
    assert relative(-move, gradient) < 1e-6  # token weights and advantages pass through float32
    assert result.grad_norms == pytest.approx([gradient.norm().item()], rel=1e-6)


def test_two_passes_with_clipping_and_kl_are_two_steps_on_the_naive_loss(start: PreTrainedModel) -> None:
    algorithm = GRPOAlgorithm(group_size=GROUP, beta=0.1, num_iterations=2, epsilon_low=0.05, epsilon_high=0.1)
    reference, model = _model(1), copy.deepcopy(start)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = _naive_loss(model, algorithm, start, reference)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ours = copy.deepcopy(start)
    experience = _experience(algorithm, old=start, reference=reference)
    result = _run(ours, experience, algorithm, optimizer=torch.optim.SGD(ours.parameters(), lr=0.05))
    assert relative(weights(ours) - weights(start), weights(model) - weights(start)) < 1e-6
    assert result.losses == pytest.approx(losses, rel=1e-6)
    clipped, tokens = result.sums["clip_ratio/region_mean"]
    assert 0 < clipped < tokens  # the clip took part


def _own(positions: Tensor) -> Tensor:
    """Actions of two tokens, observations of one between them."""
    return positions % 3 != 2


@pytest.mark.parametrize("max_tokens", [1000, 20])
def test_observations_have_no_part_in_the_loss_nor_in_any_of_its_figures(
    start: PreTrainedModel, max_tokens: int
) -> None:
    algorithm = GRPOAlgorithm(group_size=GROUP, beta=0.1, num_iterations=2, epsilon_low=0.05, epsilon_high=0.1)
    reference, model = _model(1), copy.deepcopy(start)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)  # the policy has moved since: ratios are not 1
    loss = _naive_loss(model, algorithm, start, reference, _own)
    gradient = gradient_step.gradient(loss, model)
    once = replace(algorithm, num_iterations=1)
    experience = _experience(once, old=start, reference=reference, written=_own)
    experience = experience.with_tokens(  # what stands at observations must not matter
        old_logprobs=experience.old_logprobs.masked_fill(~experience.rollout.action_mask, torch.nan),
        ref_logprobs=experience.ref_logprobs.masked_fill(~experience.rollout.action_mask, torch.nan),
    )
    move, result = _step(model, experience, once, max_tokens=max_tokens)
    assert relative(-move, gradient) < 1e-6
    assert result.losses == pytest.approx([loss.item()], rel=1e-6)
    tokens = sum(length - length // 3 for i, length in enumerate(LENGTHS) if i != 11)  # one has no reward
    assert {count.item() for _, count in result.sums.values()} == {tokens}


@pytest.mark.parametrize("aggregation", ["token_mean", "constant"])
def test_aggregation_counts_what_the_policy_wrote(start: PreTrainedModel, aggregation: Any) -> None:
    algorithm = replace(PLAIN, aggregation=aggregation, skip_zero_advantage=False)
    experience = _experience(algorithm, written=_own)
    _, result = _step(start, experience, algorithm)
    kept = [(i, length - length // 3) for i, length in enumerate(LENGTHS) if i != 11]
    total = sum(tokens * experience.advantages[i].item() for i, tokens in kept)
    divisor = sum(tokens for _, tokens in kept) if aggregation == "token_mean" else len(kept) * LIMIT
    assert result.losses == pytest.approx([-total / divisor], rel=1e-5)  # every ratio is 1


@pytest.mark.parametrize("max_tokens", [13, 20, 40])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant"])
def test_micro_batches_do_not_change_the_gradient(start: PreTrainedModel, aggregation: Any, max_tokens: int) -> None:
    algorithm = replace(PLAIN, aggregation=aggregation)
    whole, result = _step(start, _experience(algorithm), algorithm)
    split, split_result = _step(start, _experience(algorithm), algorithm, max_tokens=max_tokens)
    assert relative(split, whole) < 1e-10
    assert split_result.losses == pytest.approx(result.losses, rel=1e-10)
    assert {k: v[0].item() for k, v in split_result.sums.items()} == pytest.approx(
        {k: v[0].item() for k, v in result.sums.items()}, rel=1e-10
    )


def test_micro_batches_do_not_change_the_weights_after_several_adam_steps(start: PreTrainedModel) -> None:
    algorithm = GRPOAlgorithm(group_size=GROUP, beta=0.1, num_iterations=2, num_minibatches=2)
    experience = _experience(algorithm, old=start, reference=_model(1))
    ends = []
    for size in (13, 30, 1000):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        _run(model, experience, algorithm, optimizer=optimizer, max_tokens=size, max_grad_norm=0.5)
        ends.append(weights(model))
    for end in ends[1:]:
        assert relative(end, ends[0]) < 1e-10


def test_the_order_of_the_groups_does_not_change_the_gradient(start: PreTrainedModel) -> None:
    move, _ = _step(start, _experience())
    permuted, _ = _step(start, _experience(groups=(2, 0, 1)))
    assert relative(permuted, move) < 1e-10


def test_rows_with_zero_advantage_are_not_forwarded_and_the_gradient_stays(
    start: PreTrainedModel, padded_start: PreTrainedModel
) -> None:
    forwarded = {}
    moves = []
    for skip in (True, False):
        algorithm = replace(PLAIN, skip_zero_advantage=skip)
        model = copy.deepcopy(padded_start)
        counts = _count_rows(model)
        _run(model, _experience(algorithm), algorithm, max_tokens=30)
        forwarded[skip] = len(counts)
        moves.append(_step(start, _experience(algorithm), algorithm, max_tokens=30)[0])
    assert relative(moves[0], moves[1]) < 1e-10
    assert forwarded == {True: 7, False: 11}  # of 12, one has no reward and four an advantage of 0


def _count_rows(model: PreTrainedModel) -> Counter[tuple[int, ...]]:
    """Counts how often each row passes through the model; a row is told by its tokens."""
    counts: Counter[tuple[int, ...]] = Counter()

    ours = {tuple(prompt + completion) for prompt, completion in _rows()}

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        rows = [tuple(row[row != PAD].tolist()) for row in inputs[0]]
        counts.update(row for row in rows if row in ours)  # a probe of the model's head is none of them

    model.get_input_embeddings().register_forward_hook(note)
    return counts


@pytest.mark.parametrize("minibatches", [1, 2, 3, 5])
def test_every_pass_covers_every_row_once(padded_start: PreTrainedModel, minibatches: int) -> None:
    algorithm = replace(PLAIN, num_iterations=2, num_minibatches=minibatches, skip_zero_advantage=False)
    model = copy.deepcopy(padded_start)
    counts = _count_rows(model)
    result = _run(model, _experience(algorithm, old=padded_start), algorithm, max_tokens=20)
    expected = [tuple(p + c) for i, (p, c) in enumerate(_rows()) if i != 11]  # the row without a reward stays out
    assert counts == Counter({row: 2 for row in expected})
    assert len(result.losses) == 2 * minibatches


def test_rows_of_a_prompt_lie_side_by_side_in_a_minibatch(
    start: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = replace(PLAIN, num_minibatches=2, skip_zero_advantage=False)
    minibatches, cut = [], TokenBudget.cut

    def noted(self: TokenBudget, rollout: Rollout, rows: Tensor, policy: PreTrainedModel) -> list[Tensor]:
        minibatches.append(rows.tolist())
        return cut(self, rollout, rows, policy)

    monkeypatch.setattr(TokenBudget, "cut", noted)
    _run(copy.deepcopy(start), _experience(algorithm, old=start), algorithm)
    first, second = minibatches
    assert sorted(first + second) == list(range(11)) and first != list(range(len(first)))  # drawn at random
    assert first == sorted(first) and second == sorted(second)


def test_minibatches_differ_between_passes_and_follow_seed_and_step(start: PreTrainedModel) -> None:
    algorithm = replace(PLAIN, num_iterations=2, num_minibatches=3, skip_zero_advantage=False)

    def losses(experience: Experience) -> list[float]:
        model = copy.deepcopy(start)
        return _run(model, experience, algorithm, optimizer=torch.optim.SGD(model.parameters(), lr=1e-12)).losses

    experience = _experience(algorithm, old=start)
    first = losses(experience)
    assert losses(experience) == first
    assert first[:3] != pytest.approx(first[3:], abs=1e-6)  # the weights hardly moved: other rows
    assert losses(replace(experience, samples=replace(experience.samples, step=6))) != pytest.approx(first, abs=1e-6)


def test_the_ratio_of_a_single_update_is_exactly_one(start: PreTrainedModel) -> None:
    _, result = _step(start, _experience())
    total, count = result.sums["ratio/mean"]
    assert total.item() == count.item() == sum(LENGTHS[:4]) + sum(LENGTHS[8:11])


def test_without_any_advantage_no_step_is_taken(start: PreTrainedModel) -> None:
    move, result = _step(start, _experience(groups=(1,)))
    assert not move.any()
    assert (result.losses, result.grad_norms, result.skipped) == ([], [], 0)


def test_the_reported_norm_is_that_before_clipping(start: PreTrainedModel) -> None:
    _, result = _step(start, _experience())
    clipped, clipped_result = _step(start, _experience(), max_grad_norm=0.01)
    assert clipped_result.grad_norms == result.grad_norms
    assert result.grad_norms[0] > 0.01
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(start: PreTrainedModel, fault: str) -> None:
    model, experience = copy.deepcopy(start), _experience()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    if fault == "loss":
        advantages = experience.advantages.clone().index_fill_(0, torch.tensor([2]), torch.nan)
        experience = replace(experience, advantages=advantages)
    else:
        next(model.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    result = _run(model, experience, optimizer=optimizer)
    assert result.skipped == 1
    assert torch.equal(weights(model), weights(start))
    assert not optimizer.state  # its moments have not seen the bad gradient
    assert all(p.grad is None for p in model.parameters())


def test_a_skipped_step_does_not_stop_the_next(start: PreTrainedModel) -> None:
    algorithm = replace(PLAIN, num_iterations=3)
    passes = iter([torch.nan, 1.0, 1.0])
    model = copy.deepcopy(start)
    result = _run(
        model,
        _experience(algorithm, old=start),
        algorithm,
        backward=lambda loss, last: (loss * next(passes)).backward(),
    )
    assert (result.skipped, len(result.losses)) == (1, 3)
    assert weights(model).isfinite().all()
    assert not torch.equal(weights(model), weights(start))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _large_update(headroom: int, file: Path) -> None:
    """Saves the weights' move in an update of 12 long completions, with so many bytes of memory left or as many as it
    likes (0); and its budget."""
    model = gradient_step.qwen(
        vocab_size=19, hidden_size=64, intermediate_size=1024, num_hidden_layers=4, max_position_embeddings=1024
    )
    start = weights(model)
    small = _experience()
    longer = replace(
        small.rollout,
        completion_ids=small.rollout.completion_ids.repeat(1, 64).clamp(min=1),
        completion_mask=small.rollout.completion_mask.new_ones(12, 64 * LIMIT),
        action_mask=None,
        sampling_logprobs=torch.zeros(12, 64 * LIMIT),
    )
    experience = replace(small, samples=replace(small.samples, rollout=longer), lengths=small.lengths * 0 + 64 * LIMIT)
    scoring.shares_prompts(model, 1)  # tried with memory at hand
    if headroom:
        ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + headroom, resource.RLIM_INFINITY))
    budget = TokenBudget(configured=10_000)
    result = gradient_step.update(model, experience, PLAIN, longest=64 * LIMIT, budget=budget)
    torch.save({"tokens": budget.tokens, "move": weights(model) - start, "losses": result.losses}, file)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory the way Linux does")
def test_an_update_that_runs_out_of_memory_goes_on_with_half_and_loses_nothing(tmp_path: Path) -> None:
    _large_update(0, tmp_path / "whole.pt")
    command = [sys.executable, __file__, str(250 * 2**20), str(tmp_path / "limited.pt")]
    subprocess.run(command, check=True, timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT)})
    whole, limited = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "limited.pt")
    assert whole["tokens"] == 10_000 and limited["tokens"] < 5_000
    assert relative(limited["move"], whole["move"]) < 1e-5
    assert limited["losses"] == pytest.approx(whole["losses"], abs=1e-6)


if __name__ == "__main__":  # a process of its own for the limit on memory
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # oneDNN crashes where memory runs out inside it
    _large_update(int(sys.argv[1]), Path(sys.argv[2]))
