"""The front page: true to its configurations, and its Python runs as it is written, on a small stand-in."""

import csv
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_pl.config.objects import read
from grpo_pl.config.shipped import CONFIGS
from grpo_pl.policy.logprobs import forward_mode
from grpo_pl.policy.lora import Lora, add_adapters, has_adapters
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rollout.native.weights import refuse_llama_family
from grpo_pl.training.module import GRPOModule
from tests.docs.pages import ROOT, blocks, changed, run

README = (ROOT / "README.md").read_text()


def test_the_algorithm_on_one_page_is_as_long_as_is_said() -> None:
    (lines,) = re.findall(r"\[GRPO in (\d+) lines\]\(examples/fabric\.py\)", README)
    assert int(lines) == len((ROOT / "examples" / "fabric.py").read_text().splitlines())


def test_every_preset_is_counted() -> None:
    (count,) = re.findall(r"(\d+) presets", README)
    assert int(count) == len(list((ROOT / "configs" / "algorithm").glob("*.yaml")))


def test_the_training_in_python_runs(tmp_path: Path) -> None:
    """The model is a tiny made-up one in a folder of the name that the hub has for the real one."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    model = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    (code,) = blocks(README, "python", "from lightning.pytorch import Trainer")
    code = f"from lightning.pytorch import Trainer\n{code}"
    smaller = {
        "steps=40": "steps=2",
        "prompts_per_step=8": "prompts_per_step=2, val_prompts=4",
        "steps=32": "steps=2",
        "cold_start=": "sampling=g.SamplingParams(max_completion_length=16), cold_start=",
    }
    (tmp_path / "script.py").write_text(changed(code, smaller))
    run("script.py", folder=tmp_path)
    with (tmp_path / "runs" / "words" / "metrics.csv").open(newline="") as file:
        assert len([row for row in csv.DictReader(file) if row["reward"]]) == 2


def test_the_reward_is_added_to_those_of_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,), (settings,) = blocks(README, "python", "# my_rewards.py"), blocks(README, "yaml")
    (tmp_path / "my_rewards.py").write_text(code)
    (tmp_path / "my_reward.yaml").write_text(settings)
    module = read([CONFIGS / "quickstart.yaml", tmp_path / "my_reward.yaml"], []).build("model", GRPOModule)
    assert [reward.name for reward in module.rewards] == ["math", "format", "brevity"]
    assert [score.value for score in module.rewards[-1](["", "a" * 50], ["", ""], {})] == [1.0, 0.5]


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_FAMILY = {
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "mixtral": {"num_local_experts": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


@pytest.mark.filterwarnings("ignore")
def test_the_table_of_models_says_what_each_family_gets() -> None:
    pytest.importorskip("peft")
    (table,) = re.findall(r"^\| family \|.*\n\|.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    ways = {"packed": "packed", "padded": "materialised"}
    seen = 0
    for families, rollouts, update, lora, _ in rows:
        for family in re.findall(r"`(\w+)`", families):
            ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "num_key_value_heads": 2}
            shape = {**SHAPE, "vocab_size": 64, "max_position_embeddings": 128, **ends, **OF_FAMILY.get(family, {})}
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape)).eval()
            assert (refuse_llama_family(model, length=64) is None) == (rollouts == "native engine"), family
            assert forward_mode(model) == ways[update], family
            add_adapters(model, Lora(rank=2), seed=0)
            assert has_adapters(model) == (lora == "yes"), family
            seen += 1
    assert seen == 12


def test_the_first_screen_is_short() -> None:
    """What stands above the first heading, without the pictures and where links lead."""
    screen = re.sub(r"!\[.*?\]\(.*?\)|\]\(.*?\)|```\w*", " ", README.split("\n## ")[0])
    assert len(screen.split()) <= 200
