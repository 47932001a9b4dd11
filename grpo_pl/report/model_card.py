"""The model card of an export, ``README.md``: what was trained, on what, with which figures and configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import yaml

import grpo_pl
from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.files.runs import RunFolder

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_HELD_OUT = re.compile(r"val(/.+)?/(greedy|pass@\d+|maj@\d+)")
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

    config = yaml.safe_load(run.config.read_text(encoding="utf-8")) if run.config.is_file() else {}
    curves = read_curves(run.metrics) if run.metrics.is_file() else {}
    curves = {key: points for key, all_ in curves.items() if (points := _until(all_, rollouts))}
    base, inherited = _base(config)
    source = (config.get("data") or {}).get("source") or {}
    data = ModelCardData(
        base_model=base,
        datasets=_dataset(source),
        eval_results=_results(curves, source) or None,
        library_name="transformers",
        license=license or inherited,
        model_name=name,
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning", "grpo_pl"],
    )
    body = [
        f"# {name}",
        _summary(base or _named(config), source, curves),
        _usage(name),
        _held_out(curves),
        _training(curves, config, rewards, _parameters(run)),
        _licence(license or inherited, base or _named(config)),
        _configuration(run),
    ]
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, body)) + "\n"))


def _until(points: Points, rollouts: int | None) -> Points:
    return [point for point in points if rollouts is None or point[0] <= rollouts]


def _base(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The base model's name on the hub and its licence, as far as they are known."""
    from huggingface_hub import ModelCard

    path = ((config.get("model") or {}).get("policy") or {}).get("path")
    readme = Path(path or "") / "README.md"
    if path and readme.is_file():
        told = ModelCard.load(readme, ignore_metadata_errors=True).data.to_dict()
        return told.get("base_model"), told.get("license")
    return (path, None) if path and not Path(path).exists() and _HUB_NAME.fullmatch(path) else (None, None)


def _named(config: Mapping[str, Any]) -> str | None:
    """The name of a base model that is not on the hub: its file or folder, and no path of a machine."""
    path = ((config.get("model") or {}).get("policy") or {}).get("path")
    return f"`{PurePath(path).name}`" if path else None


def _parameters(run: RunFolder) -> str | None:
    """The number of parameters, as the run recorded it."""
    noted = json.loads(run.record.read_text(encoding="utf-8")) if run.record.is_file() else {}
    return f"{noted['parameters']:,}" if noted.get("parameters") else None


def _dataset(source: Mapping[str, Any]) -> str | None:
    path = str((source.get("init_args") or {}).get("path") or "")
    return path if _HUB_NAME.fullmatch(path) and not Path(path).exists() else None


def _problems(source: Mapping[str, Any]) -> str:
    """The name of the problems."""
    return _dataset(source) or str(source.get("class_path") or "problems").rpartition(".")[2]


def _results(curves: Mapping[str, Points], source: Mapping[str, Any]) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=_dataset(source) or "custom",
            dataset_name=f"{_problems(source)}, held out",
            metric_type="accuracy" if key.endswith("greedy") else key.rpartition("/")[2],
            metric_name=key.removeprefix("val/"),
            metric_value=round(points[-1][1], 4),
        )
        for key, points in curves.items()
        if _HELD_OUT.fullmatch(key)
    ]


def _summary(base: str | None, source: Mapping[str, Any], curves: Mapping[str, Points]) -> str:
    trained = f"{base}, trained" if base else "A language model, trained"
    rollouts = f" over {_last_step(curves)} rollouts" if curves else ""
    return f"{trained} with GRPO by grpo_pl {grpo_pl.__version__} on {_problems(source)}{rollouts}."


def _last_step(curves: Mapping[str, Points]) -> int:
    return max(points[-1][0] for points in curves.values())


def _usage(name: str) -> str:
    return (
        "## Use\n\nThe folder holds the prompt template and the rewards of the training (`grpo_pl.json`); prompts "
        "must be written with it, as `grpo-pl` does:\n\n"
        f"```bash\ngrpo-pl serve --model {name}\ngrpo-pl evaluate --model {name} --data problems.jsonl\n```"
    )


def _held_out(curves: Mapping[str, Points]) -> str:
    rows = [
        f"| {key.removeprefix('val/')} | {points[0][1]:.3f} | {points[-1][1]:.3f} | {points[-1][0]} |"
        for key, points in curves.items()
        if _HELD_OUT.fullmatch(key)
    ]
    heading = "## Held-out problems\n\n| metric | before | after | at rollout |\n|---|---|---|---|\n"
    return heading + "\n".join(rows) if rows else ""


def _training(
    curves: Mapping[str, Points],
    config: Mapping[str, Any],
    rewards: Sequence[Mapping[str, Any]],
    parameters: str | None,
) -> str:
    model, data = config.get("model") or {}, config.get("data") or {}
    sampling, algorithm = model.get("sampling") or {}, model.get("algorithm") or {}
    facts = {
        "parameters": parameters,
        "rollouts": _last_step(curves) if curves else None,
        "problems per rollout": data.get("prompts_per_step"),
        "completions per problem": (algorithm.get("init_args") or algorithm).get("group_size"),
        "longest completion": sampling.get("max_completion_length"),
        "learning rate": (model.get("optimization") or {}).get("lr"),
        "seed": config.get("seed_everything"),
        "reward at the end": f"{curves['reward'][-1][1]:.3f}" if "reward" in curves else None,
        "rewards": ", ".join(f"`{spec['class_path'].rpartition('.')[2]}`" for spec in rewards) or None,
    }
    rows = [f"| {fact} | {value} |" for fact, value in facts.items() if value is not None]
    return "## Training\n\n| | |\n|---|---|\n" + "\n".join(rows)


def _licence(license: str | None, base: str | None) -> str:
    if license:
        return f"## Licence\n\n{license}"
    return f"## Licence\n\nNot stated{f'; that of {base} applies to what was taken from it' if base else ''}."


def _configuration(run: RunFolder) -> str:
    if not run.config.is_file():
        return ""
    text = run.config.read_text(encoding="utf-8").strip()
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}\n# … {len(text) - _LONGEST} more characters"
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 3)
    return f"## Configuration\n\n<details><summary>config.yaml</summary>\n\n{fence}yaml\n{text}\n{fence}\n\n</details>"
