"""The cold start: what it learns from, when it is made again, and that no half of it is ever found."""

import importlib
import json
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tables import TablePrompts
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.distributed.second_trainer import fit_beside
from grpo_pl.files.checkpoints import checkpoint_path, save_tensors
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.lora import Lora
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.training import cold_start, cold_start_fit
from grpo_pl.training.beside import Sums
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.cold_start_fit import MUON_RATE, SaveNowAndThen, StartData, StartModule, make_start
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.sft import Example
from grpo_pl.training.step_run import Rows
from grpo_pl.types import Conversation, Problem
from tests.conftest import TINY_POLICY

POLICY = PolicyConfig(
    from_scratch={
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
)
TEMPLATE = PromptTemplate()
ONE = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
"""Of one process, in whose place starts are made."""
SHORT = ColdStart(steps=3, batch_size=4, lr=1e-3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_PL_CACHE", str(tmp_path))
    return tmp_path / "cold_start"


@dataclass(kw_only=True)
class Recording(ArithmeticPrompts):
    """Remembers what it was asked to demonstrate."""

    digits: int = 1
    shown: list[Problem] = field(default_factory=list, init=False, repr=False)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        self.shown.append(prompt)
        return super().demonstration(prompt, rng)


def test_the_second_call_finds_the_first_ones_result(cache: Path) -> None:
    source = Recording()
    folder = make_start(SHORT, POLICY, TEMPLATE, source, trainer=ONE)
    assert len(source.shown) == 12  # three steps of four
    assert make_start(SHORT, POLICY, TEMPLATE, source, trainer=ONE) == folder
    assert len(source.shown) == 12
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_demonstrations_are_made_while_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "MADE_UP", 1)  # looked at before
    source, made = Recording(), list[int]()

    def learn(self: StartModule, batch: Rows[Example]) -> Sums:
        made.append(len(source.shown))
        return accumulate(self, batch)

    accumulate = StartModule.accumulate
    monkeypatch.setattr(StartModule, "accumulate", learn)
    make_start(SHORT, POLICY, TEMPLATE, source, trainer=ONE)
    assert made == [4, 8, 12]


@pytest.mark.parametrize("good", [0, 8], ids=["from the first", "late"])
def test_a_character_that_the_vocabulary_lacks_is_refused(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticked(Recording):
        def demonstration(self, prompt: Problem, rng: random.Random) -> str:
            return super().demonstration(prompt, rng) + ("✓" if len(self.shown) > good else "")

    monkeypatch.setattr(cold_start, "MADE_UP", 1)
    with pytest.raises(ValueError, match=r"lacks '✓' \(U\+2713\), in 4 of 4 demonstrations"):
        make_start(SHORT, POLICY, TEMPLATE, Ticked(), trainer=ONE)


def test_the_result_is_a_hugging_face_folder_with_trained_weights() -> None:
    folder = make_start(SHORT, POLICY, TEMPLATE, ArithmeticPrompts(digits=1), trainer=ONE)
    saved = PolicyConfig(path=str(folder))
    tokenizer = load_tokenizer(saved)
    trained, start = load_model(saved, tokenizer), load_model(POLICY, tokenizer)
    changed = [not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True)]
    assert all(changed)


def test_the_same_ingredients_give_the_same_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ArithmeticPrompts(digits=1)
    first = make_start(SHORT, POLICY, TEMPLATE, source, trainer=ONE)
    monkeypatch.setenv("GRPO_PL_CACHE", str(cache / "elsewhere"))
    torch.manual_seed(99)
    second = make_start(SHORT, POLICY, TEMPLATE, source, trainer=ONE)
    assert first != second
    assert first.name == second.name
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_micro_batches_of_the_run_change_no_bit_of_its_start(command_line: Any, tmp_path: Path) -> None:
    """Their size does not name the cache, either."""
    made = {}
    for tokens in (None, 60):
        command_line_of = replace(command_line, cold_starts=tmp_path / str(tokens))
        config = command_line_of.config("cut", model__max_tokens_per_microbatch=tokens)
        command_line_of.done("fit", "--config", config, "--data.steps=1", "--model.cold_start.steps=3")
        (folder,) = (tmp_path / str(tokens) / "cold_start").iterdir()
        made[tokens] = folder.name, (folder / "model.safetensors").read_bytes()
    assert made[60] == made[None]


def test_demonstrations_never_show_a_held_out_problem() -> None:
    source = Recording(digits=2)
    make_start(ColdStart(steps=5, batch_size=60, lr=1e-3), POLICY, TEMPLATE, source, trainer=ONE)
    held_out = {prompt.id for prompt in source.validation(900)}
    assert len({prompt.id for prompt in source.shown}) > 250
    assert not held_out & {prompt.id for prompt in source.shown}


def test_demonstrations_are_not_those_problems_that_the_first_rollouts_ask() -> None:
    source = Recording(digits=6, min_digits=6)
    make_start(ColdStart(steps=5, batch_size=8, lr=1e-3), POLICY, TEMPLATE, source, trainer=ONE)
    asked = {prompt.id for step in range(5) for prompt in source.prompts(step, count=8)}
    assert not asked & {prompt.id for prompt in source.shown}


def _variants() -> dict[str, tuple[ColdStart, PolicyConfig, PromptTemplate, PromptSource]]:
    source = ArithmeticPrompts(digits=1)
    scratch: dict[str, Any] = dict(POLICY.from_scratch or {})
    return {
        "as it is": (SHORT, POLICY, TEMPLATE, source),
        "steps": (replace(SHORT, steps=4), POLICY, TEMPLATE, source),
        "batch_size": (replace(SHORT, batch_size=5), POLICY, TEMPLATE, source),
        "lr": (replace(SHORT, lr=2e-3), POLICY, TEMPLATE, source),
        "seed": (replace(SHORT, seed=1), POLICY, TEMPLATE, source),
        "count": (replace(SHORT, count=4), POLICY, TEMPLATE, source),
        "architecture": (SHORT, replace(POLICY, from_scratch={**scratch, "hidden_size": 32}), TEMPLATE, source),
        "init_seed": (SHORT, replace(POLICY, init_seed=1), TEMPLATE, source),
        "dtype": (SHORT, replace(POLICY, dtype="bfloat16"), TEMPLATE, source),
        "tags": (SHORT, replace(POLICY, tags=["<think>"]), TEMPLATE, source),
        "characters": (SHORT, replace(POLICY, characters="0123456789+="), TEMPLATE, source),
        "system": (SHORT, POLICY, PromptTemplate(system="Add."), source),
        "user": (SHORT, POLICY, PromptTemplate(user="{question} "), source),
        "prefill": (SHORT, POLICY, PromptTemplate(prefill="<think>"), source),
        "digits": (SHORT, POLICY, TEMPLATE, ArithmeticPrompts(digits=2)),
        "scratchpad_share": (SHORT, POLICY, TEMPLATE, ArithmeticPrompts(digits=1, scratchpad_share=1.0)),
        "source's seed": (SHORT, POLICY, TEMPLATE, ArithmeticPrompts(digits=1, seed=1)),
        "source's class": (SHORT, POLICY, TEMPLATE, Recording(digits=1)),
    }


def test_the_cache_is_named_by_every_ingredient() -> None:
    folders = {name: cold.folder(*rest) for name, (cold, *rest) in _variants().items()}
    assert len(set(folders.values())) == len(folders)
    again = {name: cold.folder(*rest) for name, (cold, *rest) in _variants().items()}
    assert again == folders


def test_a_task_that_was_edited_is_taught_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "edited_task.py"
    text = (
        "from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts\n\nclass Problems(ArithmeticPrompts):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folders = []
    for written in (text, f"{text}\n    tens = 10\n", text):
        file.write_text(written)
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
        folders.append(SHORT.folder(POLICY, TEMPLATE, importlib.import_module(file.stem).Problems(digits=1)))
    assert folders[0] == folders[2] != folders[1]
    source = sys.modules[file.stem].Problems(digits=1)
    file.write_text("edited again, while the run goes on with what it imported")
    assert SHORT.folder(POLICY, TEMPLATE, source) == folders[2]
    monkeypatch.delitem(sys.modules, file.stem)


def test_rows_without_a_worked_completion_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    rows = (f"{number},{number},{'' if number % 3 else 'work'}\n" for number in range(40))
    file.write_text("question,answer,work\n" + "".join(rows))
    source = TablePrompts(path=str(file), worked="work", val_share=0.2)
    shown = [each for batch in ColdStart(steps=4, batch_size=8, lr=1e-3).made(source) for each in batch]
    assert 4 <= len(shown) < 32 and {each.completion for each in shown} == {"work"}


def test_new_rows_in_the_same_file_are_taught_again(tmp_path: Path) -> None:
    file, folders = tmp_path / "rows.csv", []
    for worked in ("first this", "first that", "first this"):
        rows = (f"{number},{number},{worked}\n" for number in range(20))
        file.write_text("question,answer,work\n" + "".join(rows))
        source = TablePrompts(path=str(file), worked="work", val_share=0.2)
        folders.append(SHORT.folder(POLICY, TEMPLATE, source))
    assert folders[0] == folders[2] != folders[1]


@dataclass(kw_only=True)
class Failing(ArithmeticPrompts):
    digits: int = 1

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        raise RuntimeError("the lights went out")


def test_a_cold_start_that_failed_leaves_nothing_to_be_found(cache: Path) -> None:
    with pytest.raises(RuntimeError, match="lights"):
        make_start(SHORT, POLICY, TEMPLATE, Failing(), trainer=ONE)
    assert not cache.exists() or not any(cache.iterdir())


@dataclass(kw_only=True)
class Overtaken(ArithmeticPrompts):
    """While this one is still training, another process finishes the same work."""

    digits: int = 1
    folder: Path | None = field(default=None, init=False)

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        if self.folder is not None and not self.folder.exists():
            self.folder.mkdir(parents=True)
            (self.folder / "made_by_another").touch()
        return super().demonstration(prompt, rng)


def test_two_processes_at_once_end_with_one_whole_result(cache: Path) -> None:
    source = Overtaken()
    source.folder = SHORT.folder(POLICY, TEMPLATE, source)
    assert make_start(SHORT, POLICY, TEMPLATE, source, trainer=ONE) == source.folder
    assert [path.name for path in source.folder.iterdir()] == ["made_by_another"]
    assert [path.name for path in cache.iterdir()] == [source.folder.name]


def _file(path: Path, *rows: tuple[str, str]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in rows))
    return str(path)


def test_a_file_of_demonstrations_is_learnt_instead_of_the_sources(tmp_path: Path) -> None:
    cold = ColdStart(steps=60, batch_size=4, lr=1e-2, demonstrations=_file(tmp_path / "a", ("2+2=", "fish")))
    folder = make_start(cold, POLICY, TEMPLATE, Mute(digits=1), trainer=ONE)  # which has none of its own
    tokenizer = load_tokenizer(POLICY)
    model = load_model(POLICY, tokenizer, str(folder))
    prompt = torch.tensor([TEMPLATE.encode("2+2=", tokenizer)])
    drawn = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert tokenizer.decode(drawn[0, prompt.shape[1] :]) == "fish<eos>"


def test_a_file_of_demonstrations_is_known_by_its_content(tmp_path: Path) -> None:
    source = ArithmeticPrompts(digits=1)

    def folder(file: str | None) -> Path:
        return replace(SHORT, demonstrations=file).folder(POLICY, TEMPLATE, source)

    first = folder(_file(tmp_path / "a", ("2+2=", "fish")))
    assert folder(_file(tmp_path / "elsewhere", ("2+2=", "fish"))) == first
    assert folder(_file(tmp_path / "a", ("2+2=", "four"))) != first
    assert folder(None) != first
    with pytest.raises(ValueError, match="no such file"):
        folder(str(tmp_path / "missing"))


def test_a_local_policy_that_was_replaced_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    source = ArithmeticPrompts(digits=1)
    policy = PolicyConfig(path=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"old")
    before = SHORT.folder(policy, TEMPLATE, source)
    assert SHORT.folder(policy, TEMPLATE, source) == before
    (tmp_path / "model.safetensors").write_bytes(b"newer")
    assert SHORT.folder(policy, TEMPLATE, source) != before


class Mute(ArithmeticPrompts):
    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        return None


def test_a_source_without_demonstrations_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"Mute has no demonstrations: remove model\.cold_start"):
        make_start(SHORT, POLICY, TEMPLATE, Mute(), trainer=ONE)


def test_demonstrations_must_begin_with_the_prefill() -> None:
    with pytest.raises(ValueError, match="does not begin with the template's prefill 'Sure: '"):
        make_start(SHORT, POLICY, PromptTemplate(prefill="Sure: "), ArithmeticPrompts(digits=1), trainer=ONE)


def test_the_prefill_is_part_of_the_prompt_and_not_learnt_again() -> None:
    template = PromptTemplate(prefill="<think>")
    source = ArithmeticPrompts(digits=1, scratchpad_share=0.0)
    folder = make_start(ColdStart(steps=30, batch_size=16, lr=1e-2), POLICY, template, source, trainer=ONE)
    tokenizer = load_tokenizer(POLICY)
    model = load_model(POLICY, tokenizer, str(folder))
    prompt = torch.tensor([template.encode("3+4=", tokenizer)])
    assert tokenizer.decode(model(prompt).logits[0, -1].argmax()) == "</think>"


@pytest.mark.parametrize("field", ["steps", "batch_size", "count"])
def test_sizes_below_one_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=rf"cold_start\.{field} must be at least 1, got 0\."):
        ColdStart(**{field: 0})


def test_of_a_source_or_a_file_only_so_many_are_shown_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[str] = []
    tokenizer = load_tokenizer(POLICY)

    def learn(self: StartModule, batch: Rows[Example]) -> Sums:
        taught.extend(tokenizer.decode([*each.prompt, *each.completion]) for each in batch)
        return accumulate(self, batch)

    accumulate = StartModule.accumulate
    monkeypatch.setattr(StartModule, "accumulate", learn)
    few = ColdStart(steps=5, batch_size=4, lr=1e-3, count=5)
    make_start(few, POLICY, TEMPLATE, Recording(digits=3), trainer=ONE)
    assert len(taught) == 20 and {taught.count(text) for text in taught} == {4}  # four passes over five
    taught.clear()
    file = _file(tmp_path / "shown.jsonl", *((f"{i}+1=", str(i + 1)) for i in range(9)))
    make_start(replace(few, demonstrations=file), POLICY, TEMPLATE, Mute(digits=1), trainer=ONE)
    assert sorted(set(taught)) == [f"{i}+1={i + 1}<eos>" for i in range(5)]


def test_adapters_are_taught_where_adapters_are_trained(tmp_path: Path) -> None:
    """The weights that nothing adapts, embedding and head, stay as they are, and the adapters are added to the rest."""
    pytest.importorskip("peft", reason="needs peft: pip install 'grpo_pl[lora]'")
    tokenizer = load_tokenizer(POLICY)
    load_model(POLICY, tokenizer).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    policy = PolicyConfig(path=str(tmp_path / "base"), lora=Lora(rank=2))
    folder = make_start(SHORT, policy, TEMPLATE, ArithmeticPrompts(digits=1), trainer=ONE)
    whole = replace(policy, lora=None)
    assert folder != SHORT.folder(whole, TEMPLATE, ArithmeticPrompts(digits=1))
    base, taught = load_model(whole, tokenizer), load_model(whole, tokenizer, str(folder))
    changes = {name: taught.get_parameter(name).detach() - weight.detach() for name, weight in base.named_parameters()}
    moved = {name for name, change in changes.items() if change.abs().max() > 0}
    assert moved == {name for name in changes if "_proj.weight" in name}
    assert all(torch.linalg.matrix_rank(changes[name], rtol=1e-3) == 2 for name in moved)
    start = load_model(policy, tokenizer, str(folder))  # RL goes on with new adapters, which change nothing yet
    ids = torch.tensor([TEMPLATE.encode("3+4=", tokenizer)])
    torch.testing.assert_close(start(ids).logits, taught(ids).logits)


def test_muon_moves_inner_matrices_by_orthogonal_updates_and_the_rest_as_adamw_does() -> None:
    """The first update: every singular value of a matrix is 3 · 0.2 · √(longest side) · rate, roughly, which five
    Newton-Schulz steps leave within a third; AdamW moves every weight by the rate, whatever its gradient."""
    ids = [5, 6, 7, 8, 9, 10]
    example = Example(ids[:3], ids[3:], [True] * 3)
    module = StartModule(PolicyConfig(from_scratch=TINY_POLICY), TEMPLATE, Optimization(lr=1e-3), optimizer="muon")
    fit_beside(ONE, module, StartData(1, 1, lambda first: iter([[example]])))
    first = load_model(module.policy_config, module.tokenizer).state_dict()
    moved = {name: weight.detach() - first[name] for name, weight in module.policy.named_parameters()}
    inner = {
        name: change for name, change in moved.items() if change.ndim == 2 and "embed" not in name and "lm" not in name
    }
    assert inner
    for name, change in inner.items():
        values = torch.linalg.svdvals(change) / (1e-3 * MUON_RATE * 0.2 * max(change.shape) ** 0.5)
        assert values.max() < 1.35, name
        assert values[0] > 0.6, name
    rest = torch.cat([change.flatten() for name, change in moved.items() if name not in inner])
    sizes = rest[rest != 0].abs()
    assert sizes.median() == pytest.approx(1e-3, rel=0.05)


def test_more_demonstrations_than_are_shown_are_refused() -> None:
    assert ColdStart(steps=2, batch_size=4, count=8).count == 8
    with pytest.raises(ValueError, match=r"cold_start\.count is 9, but 2 steps of 4 show 8 only"):
        ColdStart(steps=2, batch_size=4, count=9)


def test_demonstrations_may_be_asked_for_with_a_text_that_the_policy_does_not_see_later() -> None:
    source = ArithmeticPrompts(digits=2, solutions=True)
    text = PrivilegedText(user="{privileged}|{question}")
    start = replace(SHORT, privileged=text)
    shown, plain = start.from_source(source, None, 0), SHORT.from_source(source, None, 0)
    problems = source.prompts(-1, count=4)
    assert [each.question for each in shown] == [f"{p.columns['solution']}|{p.question}" for p in problems]
    assert [each.completion for each in shown] == [each.completion for each in plain]
    assert list(start.asked(source, 4)) == [p.question for p in problems]  # which must not be held out
    assert start.folder(POLICY, TEMPLATE, source) != SHORT.folder(POLICY, TEMPLATE, source)
    with pytest.raises(ValueError, match=r"has nothing for \['\{solution\}'\] \(its columns: none\)"):
        start.from_source(ArithmeticPrompts(digits=2), None, 0)
    with pytest.raises(ValueError, match="privileged is for demonstrations of the source"):
        ColdStart(demonstrations="shown.jsonl", privileged=text)


class _Conversations(ArithmeticPrompts):
    """Sums asked in messages, with a column of texts that is called ``images``."""

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        found = super().prompts(step, attempt, count=count)
        return [replace(p, messages=_asked(p.question), columns={"images": ["a.png"]}) for p in found]


def _asked(question: str) -> Conversation:
    return ({"role": "system", "content": "Add."}, {"role": "user", "content": question})


def test_a_column_called_images_that_is_not_read_changes_no_demonstration() -> None:
    plain = SHORT.from_source(ArithmeticPrompts(digits=2), None, 0)
    shown = SHORT.from_source(_Conversations(digits=2), None, 0)
    assert [(each.question, each.completion) for each in shown] == [(p.question, p.completion) for p in plain]


# --- a process that was killed in its middle ---


class Killed(BaseException):
    """In the place of a signal."""


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start_fit, "SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(cold_start_fit, "LARGEST_SHARE", float("inf"))


def _weights(start: ColdStart, cache: Path, *, killed_at: tuple[int, ...] = ()) -> tuple[bytes, list[int]]:
    """The result, and the steps that were done for it."""
    done: list[int] = []
    source: PromptSource = ArithmeticPrompts(digits=1)
    for last in (*killed_at, start.steps):

        def report(step: int, total: int, *, loss: float, lr: float, last: int | None = last) -> None:
            done.append(step)
            if step == last != total:
                raise Killed  # the checkpoint of this step is not written

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRPO_PL_CACHE", str(cache))
            try:
                folder = make_start(start, POLICY, TEMPLATE, source, trainer=ONE, bar=False, report=report)
            except Killed:
                continue
    return (folder / "model.safetensors").read_bytes(), done


@pytest.mark.usefixtures("each_step")
@pytest.mark.parametrize("kind", ["source", "muon", "count", "file"])
def test_what_is_killed_twice_ends_bit_for_bit_like_what_is_not(tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"muon": {"optimizer": "muon"}, "count": {"count": 6}}.get(kind, {})
    if kind == "file":
        changes["demonstrations"] = _file(tmp_path / "shown", *((f"{n}+1=", str(n + 1)) for n in range(9)))
    start = ColdStart(steps=8, batch_size=4, lr=1e-2, **changes)
    whole, once = _weights(start, tmp_path / "a")
    resumed, steps = _weights(start, tmp_path / "b", killed_at=(3, 6))
    assert once == list(range(1, 9))
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8]  # a step whose checkpoint was not written is done again
    assert resumed == whole
    assert [file.suffix for file in (tmp_path / "b/cold_start").iterdir()] == [""]


def test_a_checkpoint_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    saved = SaveNowAndThen(tmp_path)
    checkpoint_path(tmp_path, 2).write_bytes(b"not a checkpoint")
    assert saved.newest(ONE) is None
    save_tensors({"state_dict": {}}, checkpoint_path(tmp_path, 1))
    assert saved.newest(ONE) == checkpoint_path(tmp_path, 1)


def test_checkpoints_are_written_at_intervals(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [0.0], list[list[str]]()
    monkeypatch.setattr(cold_start_fit.time, "monotonic", lambda: now[0])

    def report(done: int, total: int, *, loss: float, lr: float) -> None:  # before the checkpoint of this step
        written.append([path.name for path in cache.glob("*.steps/*")])
        now[0] = 20.0 * done

    make_start(replace(SHORT, steps=10), POLICY, TEMPLATE, ArithmeticPrompts(digits=1), trainer=ONE, report=report)
    assert written == [[f"rollout-{step:06d}.ckpt"] if step else [] for step in (0, 0, 0, 3, 3, 3, 6, 6, 6, 9)]
    assert [path.suffix for path in cache.iterdir()] == [""]  # the result alone
