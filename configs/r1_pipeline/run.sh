#!/usr/bin/env bash
# The training sequence of DeepSeek-R1 (arXiv:2501.12948, section 2.3), on one base model and one task:
#
#   1  SFT                a cold start on a few demonstrations gives readable reasoning       1-reasoning
#   2  RL                 rules for accuracy and format make it right                         1-reasoning
#   3  rejection sampling the trained policy answers training problems; right ones are kept   2-kept.jsonl
#   4  SFT                the *base* model learns from these, not from the old demonstrations 3-all-round
#   5  RL                 accuracy, format and a preference beyond correctness                3-all-round
#
# A fit does its cold start first, so two fits and one predict are all five stages; one more fit trains the reward model
# of stage 5 on pairs (reward-model). The demonstrations that R1 collects
# from R1-Zero are here those of the task; R1-Zero itself is configs/r1_zero.yaml.
#
#   bash configs/r1_pipeline/run.sh                                   the quickstart's model and task, into runs/r1
#   BASE=my.yaml OUT=runs/mine bash configs/r1_pipeline/run.sh        your own
#   PAIRS=pairs.yaml bash configs/r1_pipeline/run.sh                  pairs of your own (docs/preferences.md)
#   bash configs/r1_pipeline/run.sh --data.steps=20                   further options go to both fits
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
base=${BASE:-$here/../quickstart.yaml}
out=${OUT:-runs/r1}
pairs=${PAIRS:-$here/../reward_model.yaml} # the fit of the reward model
problems=${PROBLEMS:-3000} # training problems that the first policy answers
samples=${SAMPLES:-2}      # answers to each

if [ -e "$out" ]; then
    echo "run.sh: error: $out exists; choose another folder: OUT=runs/r1-2 bash $0" >&2
    exit 1
fi
mkdir -p "$out"

echo "--- 1, 2: SFT on demonstrations, RL for reasoning"
grpo-pl fit --config "$base" --config "$here/1_sft_and_reasoning.yaml" \
    --runs_dir "$out" --name 1-reasoning "$@"

echo "--- 3: rejection sampling"
grpo-pl predict --model "$out/1-reasoning" --split train --prompts "$problems" --samples "$samples" \
    --keep-correct --output "$out/2-kept.jsonl"

echo "--- a reward model for stage 5: pairs say which completion is the better one"
grpo-pl fit --config "$pairs" --runs_dir "$out" --name reward-model

cat >"$out/reward-model.yaml" <<YAML
model:
  rewards+:
    - class_path: grpo_pl.rewards.ModelReward
      init_args: {model: $out/reward-model/export, activation: sigmoid, weight: 0.1}
YAML

echo "--- 4, 5: SFT of the base model on what was kept, RL for more than correctness"
grpo-pl fit --config "$base" --config "$here/3_sft_and_all_round.yaml" \
    --config "$out/reward-model.yaml" \
    --model.cold_start.demonstrations "$out/2-kept.jsonl" \
    --runs_dir "$out" --name 3-all-round "$@"
