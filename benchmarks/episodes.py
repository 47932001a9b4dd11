"""Episodes of eight turns: keys and values kept against contexts computed anew, memory over steps, and TRL's loop."""

from __future__ import annotations

import gc
import json
import logging
import re
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import (
    BARE_TRL,
    MEDIUM,
    SMALL,
    Cell,
    interleaved,
    keys_of,
    memory_in_use,
    parser_of,
    publish,
    ratio,
    request_of,
    summary,
    surroundings,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.environment import Environment
from grpo_pl.extras.agents import EnvironmentPool
from grpo_pl.extras.agents.episode_rows import Episode
from grpo_pl.extras.agents.episodes import run_episodes
from grpo_pl.extras.agents.trl_factory import TRLEnvironment
from grpo_pl.policy.dialogue import Dialogue, PlainTurns
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import Problem, Rollout, SamplingParams

TURNS, ACTION, OBSERVATION = 8, 8, 48
"""Turns of an episode, and tokens of an action and of an observation."""


@dataclass(kw_only=True)
class Echo(Environment):
    """Answers every action with the same number of characters, at once."""

    isolation: Any = "thread"
    length: int = OBSERVATION

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        return "x" * self.length, 0.0, False, False, {}


@dataclass(kw_only=True)
class Anew(NativeEngine):
    """The native engine without what it keeps between turns."""

    def continuing(self, model: PreTrainedModel, *, rows: int) -> RolloutEngine:
        return self


@dataclass(kw_only=True)
class Clocked(NativeEngine):
    """Remembers how long each turn took to draw."""

    seconds: list[float] = field(default_factory=list)

    def continuing(self, model: PreTrainedModel, *, rows: int) -> RolloutEngine:
        engine = super().continuing(model, rows=rows)
        draw = engine.generate

        def generate(*args: Any, **kwargs: Any) -> Rollout:
            start = time.perf_counter()
            drawn = draw(*args, **kwargs)
            self.seconds.append(time.perf_counter() - start)
            return drawn

        engine.generate = generate  # type: ignore[method-assign]
        return engine


@dataclass
class Task:
    """Episodes whose actions all have the same number of tokens: nothing that the policy may draw ends one."""

    cell: Cell
    turns: int

    def __post_init__(self) -> None:
        self.model = self.cell.model("cpu")
        self.model.generation_config.eos_token_id = None
        tokenizer = character_tokenizer([f"<{i}>" for i in range(self.cell.vocabulary - 99)])
        tokenizer.eos_token = None
        assert len(tokenizer) == self.cell.vocabulary
        template, turns = PromptTemplate(user="{question}"), PlainTurns(observation="{observation}")
        self.dialogue = Dialogue(template=template, tokenizer=tokenizer, plain=turns)
        self.problems = [
            Problem(id=p, question=f"{p:0{self.cell.prompt_tokens}d}", answer="") for p in range(self.cell.prompts)
        ]
        self.pool = EnvironmentPool(Echo())

    def play(self, engine: RolloutEngine, step: int = 0) -> Rollout:
        rollout, _ = run_episodes(
            engine,
            self.model,
            dialogue=self.dialogue,
            pool=self.pool,
            problems=self.problems,
            keys=keys_of(self.cell.prompts, self.cell.group, step=step),
            sampling=SamplingParams(max_completion_length=ACTION),
            limits=EpisodeSettings(max_turns=self.turns),
        )
        expected = self.turns * ACTION
        assert rollout.action_lengths.tolist() == [expected] * self.cell.rows, "an action had another length"
        assert rollout.lengths.tolist() == [expected + (self.turns - 1) * OBSERVATION] * self.cell.rows
        return rollout


def kept_against_anew(cell: Cell, repetitions: int) -> dict[str, Any]:
    """Whole steps of episodes; every arm draws the same tokens up to near-ties."""
    task = Task(cell, TURNS)
    engines = {"kept": NativeEngine(), "anew_native": Anew(), "anew_generate": PlainEngine()}
    drawn = {name: task.play(engine).completion_ids for name, engine in engines.items()}
    equal = {name: float((ids == drawn["kept"]).double().mean()) for name, ids in drawn.items()}
    arms = {name: (lambda engine=engine: task.play(engine)) for name, engine in engines.items()}  # type: ignore[misc]
    seconds = interleaved(arms, repetitions=repetitions, device="cpu")
    tokens = cell.rows * TURNS * ACTION
    return {
        "equal_tokens": {name: round(share, 4) for name, share in equal.items()},
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "tokens_per_second": {name: round(tokens / summary(values)["median"]) for name, values in seconds.items()},
        "ratio_vs_anew_generate": ratio(seconds["anew_generate"], seconds["kept"]),
        "ratio_vs_anew_native": ratio(seconds["anew_native"], seconds["kept"]),
    }


def last_turn(cell: Cell, repetitions: int) -> dict[str, Any]:
    """Seconds of a generated token in the last turn, and in single turns whose prompts are as long."""
    task, clocked = Task(cell, TURNS), Clocked()
    rollout = task.play(NativeEngine())
    begin = (TURNS - 1) * (ACTION + OBSERVATION)
    contexts = torch.cat([rollout.prompt_ids, rollout.completion_ids[:, :begin]], dim=1).tolist()
    shared = request_of(contexts[:: cell.group], cell.group, ACTION)
    apart = replace(shared, prompt_ids=contexts, keys=[[key] for group in shared.keys for key in group])
    arms = {
        "episodes": lambda: task.play(clocked),
        "single_turn_shared": lambda: NativeEngine().generate(task.model, shared),
        "single_turn_apart": lambda: NativeEngine().generate(task.model, apart),
    }
    seconds = interleaved(arms, repetitions=repetitions, device="cpu")
    last = clocked.seconds[TURNS - 1 :: TURNS][1:]  # the first repetition warms up
    turns = {"last_turn": last, **{name: seconds[name] for name in ("single_turn_shared", "single_turn_apart")}}
    each = 1e6 / (cell.rows * ACTION)
    return {
        "context_tokens": len(contexts[0]),
        "microseconds_per_token": {name: round(each * summary(took)["median"], 1) for name, took in turns.items()},
        **{f"last_turn_over_{name}": round(1 / ratio(turns[name], last), 2) for name in list(turns)[1:]},
    }


def memory(cell: Cell, steps: int) -> dict[str, Any]:
    """Resident memory while steps follow each other, each with keys of its own."""
    task, resident = Task(cell, TURNS), list[float]()
    for step in range(steps):
        task.play(NativeEngine(), step)
        gc.collect()
        resident.append(memory_in_use("cpu"))
    quarter = max(1, steps // 4)
    return {
        "cell": cell.name,
        "steps": steps,
        "resident_mib": [round(resident[i]) for i in range(0, steps, quarter)] + [round(resident[-1])],
        "growth_mib_after_first_quarter": round(max(resident[quarter:]) - max(resident[:quarter]), 1),
    }


class Lookout:
    """An environment as TRL's ``environment_factory`` takes it."""

    answer = ""

    def reset(self, **_: Any) -> None:
        return None

    def look(self, place: str) -> str:
        """Tells what is there.

        Args:
            place: Where to look.
        """
        return self.answer


CALL = (
    "<tool_call>\n",
    '{"name": ',
    '"look", ',
    '"arguments": ',
    '{"place": "',
    "{place}",
    '"}}\n</tool_call>',
    "<|im_end|>",
)
"""The tokens of an action; each follows from the one before, so that little has to be learnt."""


def chat_tokenizer(schemas: Sequence[Mapping[str, Any]], chat_template: str) -> PreTrainedTokenizerBase:
    """Characters, the pieces of a call, and the words of the template's own text as single tokens."""

    def build(words: Sequence[str]) -> PreTrainedTokenizerBase:
        pieces = [piece for piece in CALL if piece not in ("{place}", "<|im_end|>")]
        tokenizer = character_tokenizer([*pieces, "<|im_start|>", "<tool_response>", "</tool_response>", *words])
        tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
        tokenizer.chat_template = chat_template
        return tokenizer

    template = PromptTemplate()
    told = template.render("Q", build([]), tools=schemas)
    words = {word for word in re.findall(r"[^\s<>{}]+ ?", told) if len(word) > 2}
    return build(sorted(words - {*CALL}))


def calling_policy(dialogue: Dialogue, cell: Cell, steps: int) -> PreTrainedModel:
    """A policy that has learnt to call the tool in every turn, at a place of its choice."""
    tokenizer, model = dialogue.tokenizer, cell.model("cpu").train()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    observation = dialogue.observation_ids([{"role": "tool", "name": "look", "content": Lookout.answer}], None)[1:]
    for _ in range(steps):
        rows, labels = [], []
        for place in torch.randint(10, (2, TURNS), generator=generator).tolist():
            row = dialogue.prompt_ids(question(place[0]))
            label = [-100] * len(row)
            for digit in place:
                call = action_ids(tokenizer, digit)
                row, label = row + call + observation, label + call + [-100] * len(observation)
            rows.append(row)
            labels.append(label)
        loss = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def action_ids(tokenizer: PreTrainedTokenizerBase, place: int) -> list[int]:
    ids = tokenizer("".join(CALL).replace("{place}", str(place)), add_special_tokens=False).input_ids
    assert len(ids) == ACTION
    return list(ids)


def question(number: int) -> str:
    return f"Where is it? {number}"


def against_trl(cell: Cell, repetitions: int, learning_steps: int) -> dict[str, Any]:
    """TRL's ``environment_factory`` loop and ours: one exported policy, the same environment, prompts and lengths."""
    import trl
    from datasets import Dataset
    from transformers import Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    environment = TRLEnvironment(factory=Lookout, isolation="thread")
    schemas = environment.tool_schemas
    dialogue = Dialogue(template=PromptTemplate(), tokenizer=chat_tokenizer(schemas, chat_template), tools=schemas)
    spare = OBSERVATION - len(dialogue.observation_ids([{"role": "tool", "name": "look", "content": ""}], None))
    Lookout.answer = "." * (spare + 1)  # the end of the action's turn is the action's own
    questions = [question(p) for p in range(cell.prompts)]
    problems = [Problem(id=p, question=text, answer="") for p, text in enumerate(questions)]
    with tempfile.TemporaryDirectory() as folder, EnvironmentPool(environment) as pool:
        calling_policy(dialogue, cell, learning_steps).save_pretrained(folder)
        dialogue.tokenizer.save_pretrained(folder)
        policy = Qwen2ForCausalLM.from_pretrained(folder)
        trainer = GRPOTrainer(
            model=Qwen2ForCausalLM.from_pretrained(folder),
            processing_class=load_tokenizer(PolicyConfig(path=folder)),
            reward_funcs=[lambda completions, **_: [float(len(completion)) for completion in completions]],
            environment_factory=Lookout,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in questions]}),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=cell.rows,
                num_generations=cell.group,
                max_completion_length=TURNS * (ACTION + OBSERVATION),
                max_tool_calling_iterations=TURNS - 1,
                max_steps=1,
                beta=0.0,
                use_cpu=True,
                bf16=False,
                **BARE_TRL,
            ),
        )
        theirs, measured = trainer._generate, dict[str, Any]()

        def ours() -> tuple[Rollout, list[Episode]]:
            return run_episodes(
                NativeEngine(),
                policy,
                dialogue=dialogue,
                pool=pool,
                problems=problems,
                keys=keys_of(cell.prompts, cell.group),
                sampling=SamplingParams(max_completion_length=2 * ACTION),
                limits=EpisodeSettings(max_turns=TURNS),
            )

        def both(prompts: list[Any]) -> Any:
            """Stands in for TRL's loop, so that it runs as its trainer has prepared it; ours takes turns with it."""
            last = dict[str, Any]()
            arms = {"trl": lambda: last.update(trl=theirs(prompts)), "ours": lambda: last.update(ours=ours())}
            measured["seconds"] = interleaved(arms, repetitions=repetitions, device="cpu")
            drawn, (rollout, episodes) = last["trl"], last["ours"]
            measured["turns"] = {
                "ours": sum(len(episode.turns) for episode in episodes) / len(episodes),
                "trl": sum(m["role"] == "assistant" for c in drawn[3] for m in c) / len(drawn[3]),
            }
            measured["action_tokens"] = {
                "ours": int(rollout.action_lengths.sum()),
                "trl": sum(map(sum, drawn[2])),
            }
            measured["row_tokens"] = {
                "ours": int(rollout.prompt_mask.sum() + rollout.lengths.sum()),
                "trl": sum(map(len, [*drawn[0], *drawn[1]])),
            }
            return drawn

        trainer._generate = both
        trainer.train()
    seconds = measured.pop("seconds")
    return {
        **measured,
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "ratio_vs_trl": ratio(seconds["trl"], seconds["ours"]),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="steps over which memory is watched")
    parser.add_argument("--learning-steps", type=int, default=120, help="of the policy that calls tools")
    parser.add_argument("--parts", default="kept,last_turn,memory,trl")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {"benchmark": "episodes", **surroundings("cpu")}
    record |= {"turns": TURNS, "action_tokens": ACTION, "observation_tokens": OBSERVATION, "rows": MEDIUM.rows}
    parts = {
        "kept": lambda: kept_against_anew(MEDIUM, args.repetitions),
        "last_turn": lambda: last_turn(MEDIUM, args.repetitions),
        "memory": lambda: memory(SMALL, args.steps),
        "trl": lambda: against_trl(MEDIUM, args.repetitions, args.learning_steps),
    }
    for part in args.parts.split(","):
        record[part] = parts[part]()
        print(part, json.dumps(record[part]), flush=True)
    publish(record, args.output)


if __name__ == "__main__":
    main()
