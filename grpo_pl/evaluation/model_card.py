"""The model card of an export, ``README.md``: base model, problems, metrics, settings and configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import grpo_pl
from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.files.runs import RunFolder, flat_settings, read_settings
from grpo_pl.policy.pretrained import VERIFIED

_HELD_OUT = re.compile(r"val(/.+)?/(greedy|pass@\d+|maj@\d+|reward)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LONGEST = 20_000  # characters of a configuration in the card


def model_card(
    run: RunFolder, *, name: str, rewards: Sequence[Mapping[str, Any]], rollouts: int | None = None, license: str = ""
) -> str:
    """The text of the card: YAML that the hub reads, then Markdown.

    Args:
        run: the run's folder; what it does not hold is left out.
        name: the model's name.
        rewards: ``class_path`` and ``init_args`` of each reward.
        rollouts: the rollout whose weights these are, if they are not the run's last.
        license: identifier of the licence, such as ``apache-2.0``; by default that of a base model in a local folder.
    """
    from huggingface_hub import ModelCard, ModelCardData

    text = run.config.read_text(encoding="utf-8") if run.config.is_file() else ""
    config = flat_settings(read_settings(text) or {})
    curves = read_curves(run.metrics) if run.metrics.is_file() else {}
    if rollouts is not None:
        curves = {name: [point for point in points if point[0] <= rollouts] for name, points in curves.items()}
    curves = {name: points for name, points in curves.items() if points}
    held_out = {name.removeprefix("val/"): points for name, points in curves.items() if _HELD_OUT.fullmatch(name)}
    path = str(config.get("data.source.init_args.path") or "")
    dataset = path if _is_on_hub(path) else None
    problems = dataset or str(config.get("data.source.class_path") or "problems").rpartition(".")[2]
    local = config.get("model.policy.path")
    base, inherited = _base(local)
    license = license or inherited or ""
    data = ModelCardData(
        base_model=base,
        datasets=dataset,
        eval_results=_results(held_out, dataset, problems) or None,
        library_name="transformers",
        license=license or None,
        model_name=name,
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", "grpo_pl"],
    )
    begun = base or (f"`{PurePath(local).name}`" if local else None)  # its file or folder, and no path of a machine
    last = max((points[-1][0] for points in curves.values()), default=None)
    rows = [f"| {key} | {of[0][1]:.3f} | {of[-1][1]:.3f} | {of[-1][0]} |" for key, of in held_out.items()]
    heading = "## Held-out problems\n\n| metric | before | after | at rollout |\n|---|---|---|---|\n"
    kept = f"; that of {begun} applies to what was taken from it" if begun else ""
    body = [
        f"# {name}",
        f"{begun or 'A language model'}, trained with GRPO by grpo_pl {grpo_pl.__version__} on {problems}"
        f"{'' if last is None else f' over {last} rollouts'}.",
        "## Use\n\nThe folder holds the prompt template and the rewards of the training (`grpo_pl.json`); prompts "
        "must be written with it, as `grpo-pl` does:\n\n"
        f"```bash\ngrpo-pl serve --model {name}\ngrpo-pl evaluate --model {name} --data problems.jsonl\n```",
        heading + "\n".join(rows) if rows else "",
        _training(run, config, curves, rewards, last),
        _proof(run, last),
        f"## Licence\n\n{license}" if license else f"## Licence\n\nNot stated{kept}.",
        _configuration(text.strip()),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, body)) + "\n"))


def sft_card(run: RunFolder) -> str:
    """The card of a policy that `grpo-pl sft` trained: what it was made of, its last losses and its configuration."""
    from huggingface_hub import ModelCard, ModelCardData

    text = run.config.read_text(encoding="utf-8") if run.config.is_file() else ""
    config = flat_settings(read_settings(text) or {})
    curves = read_curves(run.metrics) if run.metrics.is_file() else {}
    local, rows = config.get("model.policy.path"), str(config.get("data.rows.path") or "")
    base, inherited = _base(local)
    name, begun = run.path.name, base or (f"`{PurePath(local).name}`" if local else "A language model")
    dataset = rows if _is_on_hub(rows) else None
    data = ModelCardData(
        base_model=base,
        datasets=dataset,
        library_name="transformers",
        license=inherited,
        model_name=name,
        pipeline_tag="text-generation",
        tags=["sft", "grpo_pl"],
    )
    shown = {key: curves[key][-1][1] for key in ("loss", "val/loss") if curves.get(key)}
    figures = "\n".join(f"| {key} at the end | {value:.4f} |" for key, value in shown.items())
    body = [
        f"# {name}",
        f"{begun}, fine-tuned on demonstrations ({dataset or PurePath(rows).name}) by grpo_pl {grpo_pl.__version__}.",
        f"## Use\n\nPrompts must be written with the template in `grpo_pl.json`, as `grpo-pl` does:\n\n```bash\n"
        f"grpo-pl serve --model {name}\n```",
        f"## Training\n\n| | |\n|---|---|\n| steps | {config.get('data.steps')} |\n{figures}",
        f"## Licence\n\n{inherited or 'Not stated'}.",
        _configuration(text.strip()),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, body)) + "\n"))


def _results(held_out: Mapping[str, Points], dataset: str | None, problems: str) -> list[Any]:
    """The last value of each held-out metric, as the hub reads it."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset or "custom",
            dataset_name=f"{problems}, held out",
            metric_type="accuracy" if metric.endswith("greedy") else metric.rpartition("/")[2],
            metric_name=metric,
            metric_value=round(points[-1][1], 4),
        )
        for metric, points in held_out.items()
        if not metric.endswith("reward")  # which no other model's can be compared with
    ]


def _is_on_hub(path: str) -> bool:
    return _HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def _base(path: str | None) -> tuple[str | None, str | None]:
    """The base model's name on the hub and its licence, as far as they are known."""
    from huggingface_hub import ModelCard

    if path and (readme := Path(path) / "README.md").is_file():
        told = ModelCard.load(readme, ignore_metadata_errors=True).data.to_dict()
        return told.get("base_model"), told.get("license")
    return (path, None) if path and _is_on_hub(path) else (None, None)


def _training(
    run: RunFolder,
    config: Mapping[str, Any],
    curves: Mapping[str, Points],
    rewards: Sequence[Mapping[str, Any]],
    last: int | None,
) -> str:
    record = json.loads(run.record.read_text(encoding="utf-8")) if run.record.is_file() else {}
    group_size = config.get("model.algorithm.group_size", config.get("model.algorithm.init_args.group_size"))
    facts = {
        "parameters": f"{record['parameters']:,}" if record.get("parameters") else None,
        "rollouts": last,
        "problems per rollout": config.get("data.prompts_per_step"),
        "completions per problem": group_size,
        "longest completion": config.get("model.sampling.max_completion_length"),
        "learning rate": config.get("model.optimization.lr"),
        "seed": config.get("seed_everything"),
        "reward at the end": f"{curves['reward'][-1][1]:.3f}" if "reward" in curves else None,
        "weights in the run (SHA-256)": f"`{digest}`" if (digest := run.weights_digests().get(last or 0)) else None,
        "rewards": ", ".join(f"`{spec['class_path'].rpartition('.')[2]}`" for spec in rewards) or None,
    }
    rows = [f"| {fact} | {value} |" for fact, value in facts.items() if value is not None]
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(rows)


def _proof(run: RunFolder, rollouts: int | None) -> str:
    """What ``grpo-pl verify`` has found of an export with the weights of this one."""
    file = run.export / VERIFIED
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if not told.get("proved") or told["weights"] != run.weights_digests().get(rollouts or 0):
        return ""
    found = "\n".join(f"- {check['what']}: {check['told']}" for check in told["checks"])
    there = ", ".join(f"{name} {value}" for name, value in told["surroundings"].items())
    return f"## Proof\n\n`grpo-pl verify` repeated parts of the run on {told['when']} ({there}):\n\n{found}"


def _configuration(text: str) -> str:
    if not text:
        return ""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}\n# … {len(text) - _LONGEST} more characters"
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
    return f"## Configuration\n\n<details><summary>config.yaml</summary>\n\n{fence}yaml\n{text}\n{fence}\n\n</details>"
