"""Verbs of ``grpo-pl`` that need no Trainer, one file each."""

from __future__ import annotations

TRAINER_VERBS: dict[str, str] = {
    "fit": "Trains a policy as a configuration says, into a run folder of its own.",
    "sft": "Fine-tunes a policy on demonstrations of a file or the hub, before RL or instead of it.",
    "doctor": "Looks at a configuration's problems, rewards and first rollouts, and says what will hinder learning.",
    "validate": "Answers the held-out problems with the policy of a configuration or checkpoint.",
}
"""Verbs of Lightning's command line."""
VERBS: dict[str, str] = {
    "agent": "Plays one session of a program that speaks OpenAI's API, and prints what a training would record.",
    "bisect": "Finds the step of a run that taught it the right answer to a question, and the groups that did.",
    "compare": "Answers the same held-out problems with two runs or exports: which is better, on what, and how surely.",
    "demo": "Trains a tiny policy before your eyes: one held-out problem, answered again and again.",
    "evaluate": "Answers the problems of a file, in process or through a server, and says how many are right.",
    "export": "Writes a checkpoint's policy as a Hugging Face folder, with its prompt template and rewards.",
    "filter": "Keeps the training problems that a policy solves now and then, with the rates it measured.",
    "new": "Writes the folder of a task of your own: source, reward, configuration and tests, ready to train.",
    "plan": "Says whether a configuration fits into the memory of so many GPUs, and how large a micro-batch may be.",
    "predict": "Writes completions of a trained policy with their rewards, or the right ones as demonstrations.",
    "report": "Writes report.html for a run, or one page for several: curves, and what the policies wrote.",
    "score": "Scores the completions of a file with the rewards of a configuration; tests rewards, too.",
    "serve": "Serves a trained policy over HTTP, with the rewards it was trained on.",
    "verify": "Proves an export: draws, scores and updates parts of its run again, and compares every bit.",
    "why": "Explains one completion of a run: its tokens, rewards, advantage, what its update did, and later weights.",
}
"""Verb -> what it does, in one line. The module of a verb, see `module_of`, holds a function of that name; its typed
arguments become options and its docstring becomes their help. It returns an exit status or None for success."""
EXTRAS: dict[str, str] = {
    "agent": "grpo_pl.extras.agents.command",
    "bisect": "grpo_pl.extras.replay.bisect_command",
    "compare": "grpo_pl.extras.compare.command",
    "demo": "grpo_pl.extras.live.command",
    "doctor": "grpo_pl.extras.doctor.command",
    "new": "grpo_pl.extras.scaffold.command",
    "plan": "grpo_pl.extras.plan.command",
    "report": "grpo_pl.extras.report.command",
    "reward model": "grpo_pl.extras.preferences.command",  # `fit`, where a configuration names `model.classifier`
    "verify": "grpo_pl.extras.replay.command",
    "why": "grpo_pl.extras.replay.why_command",
}
"""Verb that no training needs -> its module, imported when the verb is called."""
BRANCH = "grpo_pl.extras.replay.branch"
"""The module of ``fit --branch``."""


def module_of(verb: str) -> str:
    """The module of a verb; of those that the core has, ``commands/<verb>.py``."""
    return EXTRAS.get(verb, f"grpo_pl.cli.commands.{verb}")


def check_at_least(least: int, **options: int | None) -> None:
    """Refuses options that are given and below ``least``."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}.")
