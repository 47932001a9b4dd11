"""The loss and its gradient against TRL's own ``GRPOTrainer`` on the same model and the same tokens."""

import importlib
from importlib.util import find_spec

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_pl.functional.divergence import divergence
from grpo_pl.functional.logprobs import (
    TaughtTokens,
    compared_logprobs,
    head_scores,
    token_entropy,
    token_logprobs,
)
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.self_distillation import SelfDistillation
from tests.losses import loss_of_tokens

pytestmark = pytest.mark.skipif(
    find_spec("trl") is None, reason="TRL is a development dependency: pip install 'grpo_pl[dev]'"
)

B, S, T, VOCAB, MAX_LENGTH = 8, 3, 5, 16, 7
EPSILON = {"epsilon_low": 0.1, "epsilon_high": 0.15}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A real trainer around a tiny model in float64; tests set the attributes that its arguments would set."""
    from datasets import Dataset

    words = {f"w{i}": i for i in range(VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w1")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).double()  # fmt: skip
    import trl

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), per_device_train_batch_size=B, num_generations=4,
            max_completion_length=MAX_LENGTH, report_to=[], use_cpu=True, bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3 w4"] * B}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.fixture(scope="module")
def inputs(trainer):
    """Tokens of ragged completions, with an old and a reference policy near the model."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (B, S + T), generator=generator)
    mask = torch.arange(T) < torch.tensor([5, 1, 3, 2, 4, 5, 2, 3]).unsqueeze(1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids).logits[:, S - 1 : -1]
        now = logits.log_softmax(-1).gather(-1, ids[:, S:].unsqueeze(-1)).squeeze(-1)
    return {
        "prompt_ids": ids[:, :S],
        "prompt_mask": torch.ones(B, S, dtype=torch.int64),
        "completion_ids": ids[:, S:],
        "completion_mask": mask.long(),
        "advantages": torch.randn(B, generator=generator, dtype=torch.float64),
        "old_per_token_logps": now + 0.2 * torch.randn(B, T, generator=generator, dtype=torch.float64),
        "ref_per_token_logps": now + 0.2 * torch.randn(B, T, generator=generator, dtype=torch.float64),
        "num_items_in_batch": mask.sum(),
    }


def heads(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Hidden states with a gradient, a head, and a teacher's logits, which the identity as its head returns."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B * T, 6), (40, 6), (B * T, 40))
    hidden, weight, taught = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)
    return [hidden.requires_grad_(), weight, taught]


def configure(trainer, settings, monkeypatch):
    defaults = {"beta": 0.3, "importance_sampling_level": "token", "use_bias_correction_kl": False, **EPSILON}
    for name, value in (defaults | settings).items():
        monkeypatch.setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)


def gradient(loss: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def ours(algorithm: GRPOAlgorithm, model, inputs):
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    logits = model(input_ids=ids).logits[:, S - 1 : -1]
    logprobs = token_logprobs(logits, inputs["completion_ids"]).double()
    mask = inputs["completion_mask"].bool()
    output = loss_of_tokens(
        algorithm,
        logprobs=logprobs,
        old_logprobs=inputs["old_per_token_logps"],
        advantages=inputs["advantages"].unsqueeze(1),
        mask=mask,
        weights=algorithm.token_weights(
            mask,
            num_sequences=B,
            num_tokens=int(mask.sum()),
            max_completion_length=MAX_LENGTH,
            dtype=torch.float64,
        ),
        ref_logprobs=inputs["ref_per_token_logps"],
        sampling_logprobs=inputs["old_per_token_logps"] if algorithm.needs.sampling_logprobs else None,
        entropy=token_entropy(logits),
    )
    return output, gradient(output.loss, model)


CASES = {
    "grpo": ({"loss_type": "grpo"}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    "dapo": ({"loss_type": "dapo"}, {"aggregation": "token_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "constant"}),
    "sapo": ({"loss_type": "sapo"}, {"surrogate": "sapo"}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"surrogate": "cispo_capped", "cispo_cap": 1.1, "aggregation": "token_mean"},
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"ratio_level": "sequence", "aggregation": "sequence_sum"},
    ),
    "vespo": ({"loss_type": "vespo", "beta": 0.0}, {"surrogate": "vespo", "aggregation": "token_mean", "beta": 0.0}),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"ratio_level": "sequence"}),
    "dual clip": ({"loss_type": "grpo", "delta": 1.2}, {"dual_clip": 1.2}),
    "k3 weighted": ({"loss_type": "grpo", "use_bias_correction_kl": True}, {"kl_estimator": "k3_weighted"}),
    "off-policy mask": ({"loss_type": "grpo", "off_policy_mask_threshold": 0.05}, {"off_policy_mask": 0.05}),
    "no kl": ({"loss_type": "grpo", "beta": 0.0}, {"beta": 0.0}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(trainer, inputs, case, monkeypatch):
    settings, choices = CASES[case]
    configure(trainer, settings, monkeypatch)
    loss = trainer._compute_loss(trainer.model, inputs)
    algorithm = GRPOAlgorithm(**({"beta": 0.3, **EPSILON} | choices))
    output, own = ours(algorithm, trainer.model, inputs)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)  # its log-probabilities are float32
    theirs = gradient(loss, trainer.model)
    assert ((own - theirs).norm() / theirs.norm()).item() <= 1e-5


@pytest.mark.parametrize("case", ["grpo", "cispo"])
def test_metrics_are_those_of_trl(trainer, inputs, case, monkeypatch):
    settings, choices = CASES[case]
    configure(trainer, settings, monkeypatch)
    trainer._metrics["train"].clear()
    trainer._compute_loss(trainer.model, inputs)
    output, _ = ours(GRPOAlgorithm(**({"beta": 0.3, **EPSILON} | choices)), trainer.model, inputs)
    shared = set(output.stats) & set(trainer._metrics["train"])
    expected = {
        "grpo": {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"},
        "cispo": {"cispo_clip_ratio"},
    }
    assert shared == {"kl", "entropy"} | expected[case]
    for name in shared:
        total, count = output.stats[name]
        assert (total / count).item() == pytest.approx(trainer._metrics["train"][name][-1], rel=1e-5), name


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_from_a_teacher_is_that_of_gkd(beta, temperature):
    """Value and gradient, by the chunked head in float32, against ``GKDTrainer.generalized_jsd_loss``."""
    from trl.experimental.gkd import GKDTrainer

    hidden, weight, theirs = heads(1)
    ids, teacher = torch.zeros(B * T, dtype=torch.int64), TaughtTokens(theirs, torch.eye(40), None, beta)
    ours = head_scores(hidden, weight, ids, teacher=teacher, temperature=temperature).divergence
    labels = torch.zeros(1, B * T, dtype=torch.int64)
    loss = GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.t()).unsqueeze(0), theirs.unsqueeze(0), labels, beta=beta, temperature=temperature
    )
    assert ours.mean().item() == pytest.approx(loss.item(), abs=1e-6)
    (mine,), (expected,) = torch.autograd.grad(ours.mean(), hidden), torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("trainer_of", ["sdft", "sdpo"])
def test_self_distillation_has_the_loss_of_trl_on_whole_distributions(trainer_of, alpha):
    """Value and gradient, by the chunked head, against what TRL's trainers call with ``full_logits``."""
    theirs = importlib.import_module(f"trl.experimental.{trainer_of}.loss_utils")
    hidden, weight, taught = heads(2)
    teacher = TaughtTokens(taught, torch.eye(40), None, alpha)
    mine = head_scores(hidden, weight, torch.zeros(B * T, dtype=torch.int64), teacher=teacher).divergence
    other = theirs.compute_full_logit_self_distillation_loss(hidden @ weight.t(), taught, distillation_alpha=alpha)
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    found, expected = torch.autograd.grad(mine.mean(), hidden), torch.autograd.grad(other.mean(), hidden)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)


def test_self_distillation_of_sampled_tokens_has_the_loss_of_trl():
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    generator = torch.Generator().manual_seed(3)
    logits, taught = (torch.randn(B, T, 40, generator=generator, dtype=torch.float64) for _ in range(2))
    ids = torch.randint(0, 40, (B, T), generator=generator)
    logits.requires_grad_()
    other = compute_sampled_token_self_distillation_loss(logits, taught, ids, distillation_alpha=1.0)
    own = SelfDistillation(weights="live", alone=True)
    algorithm = GRPOAlgorithm(surrogate="reinforce", beta=0.0, baseline="none", scale="none", terms={"own": own})
    mask = torch.ones(B, T, dtype=torch.bool)
    loss = loss_of_tokens(
        algorithm,
        logprobs=token_logprobs(logits, ids),
        old_logprobs=None,
        advantages=torch.zeros(B, 1, dtype=torch.float64),
        mask=mask,
        weights=torch.full((B, T), 1 / (B * T), dtype=torch.float64),
        teacher_logprobs=token_logprobs(taught, ids),
        taught=mask[:, :1],
    ).loss
    assert loss.item() == pytest.approx(other.mean().item(), abs=1e-12)
    found, expected = torch.autograd.grad(loss, logits), torch.autograd.grad(other.mean(), logits)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [2, 10, 40])
def test_self_distillation_has_the_loss_of_trl_on_the_likeliest_tokens(alpha, top_k):
    """Against ``topk_logits`` without a tail, the default of TRL's SDFT; in float64, one chunk of the head after the
    other, and from the logits of a model that keeps them."""
    from trl.experimental.sdft.loss_utils import compute_topk_self_distillation_loss

    hidden, weight, taught = heads(4, torch.float64)
    teacher = TaughtTokens(taught, torch.eye(40, dtype=torch.float64), None, alpha, top_k)
    mine = head_scores(hidden, weight, torch.zeros(B * T, dtype=torch.int64), teacher=teacher).divergence
    own, target, _ = compared_logprobs(hidden @ weight.t(), taught, top_k=top_k)
    other = compute_topk_self_distillation_loss(
        hidden @ weight.t(), taught, distillation_topk=top_k, distillation_alpha=alpha, distillation_add_tail=False
    )
    expected = torch.autograd.grad(other.mean(), hidden)[0]
    for found in (mine, divergence(own, target, mix=alpha)):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.autograd.grad(found.mean(), hidden)[0], expected, rtol=0, atol=1e-10)
