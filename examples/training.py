"""A whole training in Python: a small model learns to add numbers of two digits, in half a minute."""

from lightning.pytorch import Trainer

import grpo_pl as g
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts

shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
module = g.GRPOModule(
    policy=g.PolicyConfig(from_scratch={"model_type": "qwen2", **shape, **heads, "initializer_range": 0.08}),
    cold_start=g.ColdStart(steps=250, batch_size=32, lr=5e-3),
    rewards=[g.rewards.MathReward(correctness=True), g.rewards.FormatReward(weight=0.1)],
    algorithm=g.GRPOAlgorithm(group_size=8, beta=0.0),
    sampling=g.SamplingParams(max_completion_length=48),
    optimization=g.Optimization(lr=3e-4),
)
data = g.RolloutDataModule(ArithmeticPrompts(digits=2), steps=12, prompts_per_step=16, val_prompts=50)

g.check_start(module, data, print)  # refuses what cannot work before it costs anything
with g.open_run("runs", "sums") as run:
    trainer = Trainer(**g.trainer_arguments(run.folder, accelerator="cpu"))
    trainer.fit(module, datamodule=data, weights_only=True)
print(f"held-out pass@1 is {module.held_out['val/pass@1'].mean:.2f}; the model is in {run.folder.export}")
