"""The front page: true to its configurations, and its Python runs as it is written, on a small stand-in."""

import csv
import re
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_pl.policy.tokenizer import character_tokenizer
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
    (code,) = blocks(README, "python")
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
