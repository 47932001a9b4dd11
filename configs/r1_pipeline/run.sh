#!/usr/bin/env bash
# The training sequence of DeepSeek-R1 (arXiv:2501.12948, section 2.3), on one base model and one task:
#
#   1  SFT                a cold start on a few demonstrations gives readable reasoning       fit      2-reasoning
#   2  RL                 rules for accuracy and format make it right                         fit      2-reasoning
#   3  rejection sampling the trained policy answers training problems; right ones are kept   predict  3-kept.jsonl
#   4  SFT                the *base* model learns from these, not from the old demonstrations sft      4-sft
#   5  RL                 accuracy, format and a preference beyond correctness                fit      5-all-round
#
# Stage 1 has no command of its own because its demonstrations are made by the task, as the cold start of a fit. R1
# collects them from R1-Zero, which is configs/r1_zero.yaml; for a file of them give
# --model.cold_start.demonstrations FILE. One more fit trains the reward model of stage 5 on pairs (reward-model).
#
#   bash configs/r1_pipeline/run.sh                                   the quickstart's model and task, into runs/r1
#   BASE=my.yaml OUT=runs/mine bash configs/r1_pipeline/run.sh        your own
#   SFT=sft.yaml PAIRS=pairs.yaml bash configs/r1_pipeline/run.sh     settings of stage 4; pairs (docs/preferences.md)
#   bash configs/r1_pipeline/run.sh --data.steps=20                   further options go to both fits of the policy
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
base=${BASE:-$here/../quickstart.yaml}
out=${OUT:-runs/r1}
sft=${SFT:-$here/4_sft.yaml}
pairs=${PAIRS:-$here/../reward_model.yaml} # the fit of the reward model
problems=${PROBLEMS:-3000} # training problems that the first policy answers
samples=${SAMPLES:-2}      # answers to each

if [ -e "$out" ]; then
    echo "run.sh: error: $out exists; choose another folder: OUT=runs/r1-2 bash $0" >&2
    exit 1
fi
mkdir -p "$out"

echo "--- 1, 2: SFT on demonstrations, RL for reasoning"
grpo-pl fit --config "$base" --config "$here/1_sft_and_reasoning.yaml" --runs_dir "$out" --name 2-reasoning "$@"

echo "--- 3: rejection sampling"
grpo-pl predict --model "$out/2-reasoning" --split train --prompts "$problems" --samples "$samples" \
    --keep-correct --output "$out/3-kept.jsonl"

# What stage 4 has in common with the first fit, as that has resolved it: its vocabulary holds every prompt's characters.
python - "$out/2-reasoning/config.yaml" >"$out/base.yaml" <<'PYTHON'
import sys

import yaml

COMMON = {
    "trainer": ("accelerator", "devices", "num_nodes", "strategy", "precision"),
    "model": ("policy", "template", "sampling", "max_tokens_per_microbatch", "activation_checkpointing"),
}
with open(sys.argv[1], encoding="utf-8") as file:
    fit = yaml.safe_load(file)
yaml.safe_dump({part: {name: fit[part][name] for name in names} for part, names in COMMON.items()}, sys.stdout)
PYTHON

echo "--- 4: SFT of the base model on what was kept"
grpo-pl sft --config "$out/base.yaml" --config "$sft" --data.rows.path "$out/3-kept.jsonl" \
    --runs_dir "$out" --name 4-sft

echo "--- a reward model for stage 5: pairs say which completion is the better one"
grpo-pl fit --config "$pairs" --runs_dir "$out" --name reward-model

cat >"$out/reward-model.yaml" <<YAML
model:
  rewards+:
    - class_path: grpo_pl.rewards.ModelReward
      init_args: {model: $out/reward-model/export, activation: sigmoid, weight: 0.1}
YAML

echo "--- 5: RL for more than correctness"
grpo-pl fit --config "$base" --config "$here/5_all_round.yaml" --config "$out/reward-model.yaml" "$@" \
    --model.policy.path "$out/4-sft/export" --model.policy.from_scratch null --model.cold_start null \
    --runs_dir "$out" --name 5-all-round
