"""Times a teacher's pass over a rollout against the reference's, of one model: by tokens and whole."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from common import MEDIUM, SMALL, Cell, interleaved, parser_of, publish, ratio, summary, surroundings

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.distillation import Distillation
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer
from grpo_pl.policy.teacher import TeacherConfig
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import Collected
from grpo_pl.training.frozen_models import EVERY_SOURCE, Teachers
from grpo_pl.training.microbatches import Scorer, TokenBudget
from grpo_pl.types import Problem, Rollout

ALONE: dict[str, Any] = {"beta": 0.0, "baseline": "none", "scale": "none"}


def rollout_of(cell: Cell) -> Samples:
    """Random tokens of full length, shared prompts."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.tensor(cell.prompt_ids()).repeat_interleave(cell.group, 0)
    completions = torch.randint(5, cell.vocabulary, (cell.rows, cell.completion_tokens), generator=generator)
    rollout = Rollout(
        group_size=cell.group,
        prompt_ids=prompts,
        prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
        completion_ids=completions,
        completion_mask=torch.ones_like(completions, dtype=torch.bool),
        sampling_logprobs=torch.zeros(completions.shape),
        finish_reasons=["length"] * cell.rows,
    )
    problems = [Problem(id=i, question="", answer="") for i in range(cell.prompts)]
    return Samples(prompts=problems, prompt_texts=[], rollout=rollout, completions=[], step=0)


def measure(cell: Cell, repetitions: int) -> dict[str, Any]:
    """Seconds of each pass, taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        reference = cell.model("cpu").requires_grad_(False)
        reference.save_pretrained(folder)
        tokenizer = load_tokenizer(PolicyConfig(from_scratch={"model_type": "qwen2"}))
        teachers = Teachers({EVERY_SOURCE: TeacherConfig(path=folder)}, tokenizer, None)
        samples = rollout_of(cell)
        collected = Collected(samples=samples, scored=ScoredBatch(rewards=[], scores=[], metrics={}), attempts=0)
        scorer = Scorer(budget=TokenBudget(configured=4096), collective=Collective(), temperature=1.0)
        rows = torch.arange(len(samples.rollout.prompt_ids))
        token = GRPOAlgorithm(**ALONE, terms={"distillation": Distillation(alone=True)})
        whole = GRPOAlgorithm(**ALONE, terms={"distillation": Distillation(divergence="reverse_kl", alone=True)})

        def taught(algorithm: GRPOAlgorithm) -> None:
            teachers.score(reference, collected, algorithm, scorer)

        arms = {
            "reference": lambda: scorer.logprobs(reference, samples.rollout, rows),
            "teacher, sampled tokens": lambda: taught(token),
            "teacher, whole distributions": lambda: taught(whole),
        }
        seconds = interleaved(arms, repetitions=repetitions, device="cpu")
    ratios = {name: ratio(seconds[name], seconds["reference"]) for name in list(arms)[1:]}
    return {"cell": cell.name, **{name: summary(each) for name, each in seconds.items()}, "to_the_reference": ratios}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    record = {"benchmark": "teacher_pass", **surroundings("cpu")}
    record["cells"] = [measure(cell, arguments.repetitions) for cell in (SMALL, MEDIUM)]
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
