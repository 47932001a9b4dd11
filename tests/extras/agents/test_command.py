"""``grpo-pl agent`` with an export: who judges the session, and what the export does not tell."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.extras.agents.command import agent
from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ExactReward
from grpo_pl.types import SamplingParams

CHAT = f"{Path(__file__).parents[2] / 'plugins' / 'user_agents.py'}:chat"


@pytest.fixture
def export(tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    paid = AgentEnvironment(agent=CHAT, rewarded_by="agent", variables={"SEARCH_KEY": "secret"})
    export_policy(
        tmp_path / "export",
        TrainedWith(
            template=PromptTemplate(),
            rewards=[ExactReward(correctness=True).spec()],
            sampling=SamplingParams(max_completion_length=4),
            environment=paid.spec(),
        ),
        model=tiny_policy,
        tokenizer=tokenizer,
    )
    return tmp_path / "export"


def test_a_session_is_judged_as_in_the_training_or_as_is_asked_for(export: Path, capsys: Any) -> None:
    assert "variables" not in (export / "grpo_pl.json").read_text()
    agent(try_=CHAT, model=str(export), question="1+2=", answer="3", max_turns=2, device="cpu")
    assert "reward 2, ended by turns" in capsys.readouterr().out  # the agent counts its answers
    agent(try_=CHAT, model=str(export), question="1+2=", answer="3", max_turns=2, device="cpu", rewarded_by="rewards")
    told = capsys.readouterr().out
    assert "ended by turns; the rewards of" in told and "\n  exact: 0 (" in told


def test_each_conversation_is_printed_as_a_row(export: Path, capsys: Any) -> None:
    agent(try_=CHAT.replace(":chat", ":branching"), model=str(export), max_turns=7, device="cpu")
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.startswith("segment ")]
    assert [row.split(":")[0] for row in rows] == [f"segment {number}" for number in range(5)]
    assert rows[0].startswith("segment 0: 4 prompt tokens, then") and " observation " in rows[0]
    assert "call 0, segment 0: '1+2='" in told and "reward 7, ended by environment" in told
