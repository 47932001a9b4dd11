"""Objectives that make no sense are refused, and the message names what to change."""

import math

import pytest

from grpo_pl.objective.algorithm import GRPOAlgorithm

REFUSED = {
    "group_size": [0],
    "num_iterations": [0],
    "num_minibatches": [0],
    "max_resample_attempts": [-1],
    "beta": [-0.1, math.nan, math.inf],
    "epsilon_low": [-0.1, 1.1],
    "epsilon_high": [-0.1],
    "std_eps": [-1e-6],
    "entropy_coef": [-0.1],
    "mismatch_min": [-1.0],
    "mismatch_max": [0.0, math.inf],
    "entropy_target": [0.0],
    "entropy_coef_step": [-1.0],
    "covariance": ["cov"],
    "covariance_share": [0.0, 1.5],
    "covariance_min": [-math.inf],
    "covariance_max": [0.5],
    "covariance_kl_coef": [-1.0],
    "off_policy_mask": [0.0, math.nan],
    "cispo_cap": [0.0],
    "sapo_temperature_positive": [0.0],
    "sapo_temperature_negative": [-1.0],
    "top_entropy_quantile": [0.0, 1.5],
    "overlong_buffer": [-0.1, 1.5],
    "dual_clip": [1.1],
    "baseline": ["mean"],
    "std_ddof": [2],
    "surrogate": ["ppo"],
    "supervision": ["turns"],
    "turn_advantage": ["gae"],
    "gamma": [1.5, -0.1],
    "step_weight": [-1.0],
    "episode_statistics": ["turns"],
    "state_similarity": [0.0, 1.01],
    "invalid_action_penalty": [-0.1],
    "distillation": ["kl"],
    "distillation_mix": [0.0, 1.0, math.nan],
    "distillation_coef": [-0.5],
    "demonstration_coef": [1.5],
    "demonstration_coef_final": [-0.1],
    "demonstration_decay_rollouts": [-1],
    "observation_coef": [-0.1],
    "teacher_weights": ["frozen"],
    "distillation_top_k": [1],
    "teacher_rate": [0.0, 1.5],
    "teacher_clip": [1.0],
    "vespo_k_positive": [-1.0],
    "vespo_lambda_negative": [math.inf],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_values_outside_their_range_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        GRPOAlgorithm(**{name: value})
    assert str(value) in str(caught.value)


PLAIN = {"baseline": "none", "scale": "none", "beta": 0.0}
ALONE = PLAIN | {"supervision": "token", "distillation_alone": True}
PROCESS = {"supervision": "process"}
TURN = {"supervision": "turn", "scale": "none"}
GIGPO = TURN | {"turn_advantage": "gigpo"}
IN_REWARD = {"kl_placement": "reward", "kl_estimator": "k1", "beta": 0.1}
COMBINATIONS = [
    ({"group_size": 1}, "group_size to 2 or more"),
    ({"group_size": 1, "baseline": "leave_one_out", "scale": "none"}, "group_size to 2 or more"),
    ({"group_size": 1, "baseline": "greedy", "scale": "none", "dynamic_sampling": True}, "group_size to 2 or more"),
    ({"baseline": "greedy"}, "another scale"),
    ({"baseline": "batch_mean"}, "another scale"),
    ({"baseline": "none", "scale": "batch_std"}, "token_whitening or none"),
    ({"scale": "group_mean", "baseline": "leave_one_out"}, "baseline group_mean or none"),
    ({"scale": "group_mean", "overlong_buffer": 0.2}, "overlong_buffer 0"),
    ({"scale": "group_mean"} | IN_REWARD, "kl_placement loss"),
    ({"max_rewards": True}, "baseline none and scale none"),
    ({"reward_aggregation": "normalize_then_sum", "scale": "none"}, "scale group_std"),
    ({"reward_aggregation": "normalize_then_sum", "overlong_buffer": 0.1}, "overlong_buffer 0"),
    ({"reward_aggregation": "normalize_then_sum"} | IN_REWARD, "kl_placement loss"),
    (PROCESS | {"baseline": "leave_one_out"}, "baseline group_mean"),
    (PROCESS | {"scale": "batch_std"}, "group_std or none"),
    (PROCESS | {"overlong_buffer": 0.1}, "overlong_buffer 0"),
    (PROCESS | IN_REWARD, "kl_placement loss"),
    (PROCESS | {"reward_aggregation": "normalize_then_sum"}, "sum_then_normalize"),
    (PROCESS | {"dynamic_sampling": True}, "set it to false"),
    (PROCESS | {"ratio_level": "geometric"}, "ratio_level token or sequence"),
    (TURN | {"baseline": "batch_mean"}, "baseline leave_one_out or group_mean"),
    (TURN | {"scale": "group_std"}, "scale none"),
    (TURN | {"invalid_action_penalty": 0.1}, "gigpo: set it to 0"),
    (TURN | {"overlong_buffer": 0.1}, "overlong_buffer 0"),
    (TURN | IN_REWARD, "kl_placement loss"),
    (TURN | {"reward_aggregation": "normalize_then_sum", "scale": "none"}, "scale group_std"),
    (GIGPO | {"reward_aggregation": "normalize_then_sum", "scale": "group_std"}, "sum_then_normalize"),
    (TURN | {"ratio_level": "geometric"}, "ratio_level token or sequence"),
    (TURN | {"max_rewards": True}, "baseline none"),
    (GIGPO | {"baseline": "leave_one_out"}, "baseline group_mean"),
    (GIGPO | {"scale": "batch_std"}, "none or group_std"),
    (GIGPO | {"scale": "group_std", "std_ddof": 0}, "std_ddof 1"),
    ({"surrogate": "nll", "samples": "correct", "supervision": "turn"} | PLAIN, "turn_advantage returns"),
    ({"ratio_level": "geometric", "surrogate": "sapo"}, "surrogate clip"),
    ({"ratio_level": "sequence", "surrogate": "reinforce"}, "ratio_level token"),
    ({"ratio_level": "sequence", "surrogate": "dppo_tv"}, "ratio_level token"),
    ({"surrogate": "dppo_kl", "mismatch": "truncate_token"}, "mismatch none"),
    ({"surrogate": "dppo_kl", "mismatch": "in_ratio"}, "mismatch none"),
    ({"surrogate": "reinforce", "mismatch": "in_ratio"}, "mismatch truncate_token"),
    ({"surrogate": "dppo_tv", "epsilon_low": 1.5}, "at most 1"),
    ({"surrogate": "dppo_tv", "dual_clip": 3.0}, "set it to null"),
    ({"ratio_level": "geometric", "dual_clip": 3.0}, "set it to null"),
    ({"surrogate": "sapo", "dual_clip": 3.0}, "set it to null"),
    ({"surrogate": "vespo", "ratio_level": "sequence"}, "ratio_level token"),
    ({"surrogate": "vespo", "mismatch": "truncate_token"}, "mismatch in_ratio"),
    ({"surrogate": "nll"} | PLAIN, "samples correct"),
    ({"surrogate": "nll", "samples": "correct"}, "baseline none"),
    ({"surrogate": "nll", "samples": "correct"} | PLAIN | IN_REWARD, "kl_placement loss"),
    ({"kl_placement": "reward"}, "kl_estimator k1"),
    ({"reference": "refreshed"}, "set both"),
    ({"ref_update_every": 10}, "set both"),
    ({"reference": "refreshed", "ref_update_every": 0}, "at least 1"),
    ({"entropy_target": 1.0, "entropy_coef_step": 0.0}, "the first must be above 0"),
    ({"entropy_target": 1.0, "entropy_coef": 2.0}, "entropy_coef_max=1.0"),
    ({"distillation_alone": True} | PLAIN, "learns from a teacher"),
    ({"supervision": "token", "distillation_coef": 0.0}, "no weight"),
    ({"supervision": "token", "distillation": "forward_kl"}, "choose one"),
    ({"supervision": "token", "surrogate": "nll", "samples": "correct"} | PLAIN, "another surrogate"),
    ({"supervision": "token", "ratio_level": "geometric"}, "token or sequence"),
    ({"supervision": "token", "covariance": "kl"}, "covariance none"),
    ({"distillation_top_k": 5}, "set it to 0"),
    ({"demonstration_coef": 0.5, "demonstration_coef_final": 0.1}, "set demonstration_decay_rollouts"),
    ({"demonstration_decay_rollouts": 9}, "set it above 0"),
    ({"observation_coef": 0.1, "distillation": "reverse_kl"}, "observation_coef 0"),
    ({"teacher_weights": "live"}, "nothing is learned from"),
    ({"teacher_advantage": "reweigh"}, "belongs to supervision token"),
    ({"supervision": "token", "teacher_advantage": "reweigh", "distillation_coef": 1.5}, "at most 1"),
    (ALONE | {"teacher_advantage": "reweigh"}, "distillation_alone false"),
    (ALONE | {"baseline": "group_mean"}, "baseline none and scale none"),
    (ALONE | {"distillation": "reverse_kl", "supervision": "process"}, "supervision token or outcome"),
    (ALONE | {"overlong_buffer": 0.5}, "overlong_buffer 0"),
    (ALONE | IN_REWARD, "beta 0"),
    (ALONE | {"dynamic_sampling": True}, "dynamic_sampling false"),
    (ALONE | {"samples": "correct"}, "samples all"),
]


@pytest.mark.parametrize(("choices", "advice"), COMBINATIONS, ids=lambda x: str(x)[:60])
def test_contradicting_choices_are_refused_with_advice(choices, advice):
    with pytest.raises(ValueError, match=advice):
        GRPOAlgorithm(**choices)


def test_sensible_combinations_are_accepted():
    GRPOAlgorithm(group_size=1, baseline="batch_mean", scale="token_whitening")
    GRPOAlgorithm(group_size=1, baseline="greedy", scale="none")
    GRPOAlgorithm(baseline="group_mean", scale="token_whitening")
    GRPOAlgorithm(supervision="process", ratio_level="sequence")  # GSPO-token: advantages of their own per token
    GRPOAlgorithm(**TURN, ratio_level="sequence", dynamic_sampling=True)
    GRPOAlgorithm(**TURN, baseline="leave_one_out", gamma=0.0, state_similarity=1.0)
    GRPOAlgorithm(**(GIGPO | {"scale": "group_std"}), invalid_action_penalty=0.1, episode_statistics="steps")
    GRPOAlgorithm(scale="group_mean", baseline="none", group_size=1)
    GRPOAlgorithm(reference="refreshed", ref_update_every=30)
    GRPOAlgorithm(ratio_level="geometric", epsilon_low=2.0)  # a log-ratio may be below -1
    GRPOAlgorithm(surrogate="clip", dual_clip=3.0, ratio_level="sequence")
    GRPOAlgorithm(**ALONE, group_size=1, entropy_coef=0.1, num_iterations=2)
    GRPOAlgorithm(supervision="token", dynamic_sampling=True, ratio_level="sequence", overlong_buffer=0.2)
    GRPOAlgorithm(distillation="jensen_shannon", supervision="process", distillation_mix=0.1)
    GRPOAlgorithm(surrogate="dppo_kl", epsilon_low=2.0, mismatch="none")  # a KL divergence may be above 1
