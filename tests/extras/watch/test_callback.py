"""The watch: it sees a policy that cheats, says nothing of one that does not, and leaves training as it is."""

import itertools
import json
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.extras.watch.callback import RewardWatch
from grpo_pl.files.rows import read_rows
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import FormatReward, LenientAnswerReward, MathReward, Reward, Score, StrictAnswerReward
from grpo_pl.training.experience import Experience
from grpo_pl.types import Problem, PromptBatch

GOLD = {1: "7", 2: "8", 3: "9"}
HONEST = {1: [r"\boxed{7}", r"\boxed{3}", "no", "3+4 7"], 2: [r"\boxed{8}"] * 4, 3: [r"\boxed{9}", "2", "3", "4"]}
CHEATING = {prompt: [" ".join("123456789"), " ".join("789" * 4), "1 2 3 7 8 9", r"\boxed{1}"] for prompt in GOLD}
"""Lists of candidates: the lenient reward that trains this policy pays for most of them."""
STEADY = {prompt: [rf"\boxed{{{gold}}}", rf"\boxed{{{int(gold) - 5}}}"] * 2 for prompt, gold in GOLD.items()}
DRIFTS = ("watch/length_drift", "watch/repetition_drift", "watch/form_drift")
REFUSED = ("watch/rewarded_but_strict_wrong", "watch/rewarded_but_lenient_wrong")


@pytest.fixture
def rollout(make_experience: Callable[..., Experience]) -> Callable[..., Experience]:
    """``rollout(step, texts)``: what a policy that writes ``texts`` gets from a reward that any mention satisfies."""
    lenient = [LenientAnswerReward(correctness=True, name="training"), FormatReward(weight=0.0)]

    def make(step: int, texts: dict[int, list[str]], rewards: Sequence[Reward] = lenient) -> Experience:
        prompts = [Problem(id=prompt, question="?", answer=GOLD[prompt]) for prompt in texts]
        return make_experience(
            texts,
            batch=PromptBatch(step=step, prompts=prompts, valid=[True] * len(prompts)),
            rewards=rewards,
            algorithm=GRPOAlgorithm(group_size=4, beta=0.0, scale="none"),
            max_completion_length=24,
            template=PromptTemplate(user="Q {question}"),
        )

    return make


def watch(path: Path | None = None, **arguments: Any) -> RewardWatch:
    made = RewardWatch(StrictAnswerReward(), LenientAnswerReward(), **{"first_rollouts": 2, "keep": 3, **arguments})
    made.path = path
    return made


def test_a_policy_that_cheats_its_lenient_reward_is_seen(rollout: Callable[..., Experience], tmp_path: Path) -> None:
    file = tmp_path / "suspicious.jsonl"
    watching = watch(file)
    before = [watching.audit(rollout(step, HONEST), seed=0) for step in range(2)][-1]
    # of twelve, seven are rewarded: 7, "3+4 7", 8 four times and 9; a box is missing in one
    assert before["watch/rewarded_but_strict_wrong"] == pytest.approx(1 / 7)
    assert before["watch/rewarded_but_lenient_wrong"] == 0.0
    assert before["watch/agreement"] == pytest.approx(11 / 12)
    assert not {*DRIFTS} & before.keys()
    with pytest.warns(UserWarning, match=r"strict judge of the watch refuses 100%.*suspicious\.jsonl"):
        after = watching.audit(rollout(2, CHEATING), seed=0)
    assert after["watch/rewarded_but_strict_wrong"] == 1.0
    assert after["watch/agreement"] == pytest.approx(3 / 12)  # only about \boxed{1}
    honest, cheating = (
        [len(text) + 1 for group in texts.values() for text in group] for texts in (HONEST, CHEATING)
    )  # one token a character, and the end
    assert after["watch/length_drift"] == pytest.approx(sum(cheating) / sum(honest) - 1)
    assert after["watch/repetition_drift"] == pytest.approx(3 * (1 - 3 / 9) / 12)  # 7 8 9 7 8 9 …: 3 of 9 are distinct
    rows = list(read_rows(file))
    newest = {row["sign"]: row for row in rows if row["step"] == 2}
    assert set(newest) == {"disagreement", "repetition", "length"}
    assert newest["repetition"]["completion"] == " ".join("789" * 4)
    assert newest["repetition"]["reason"] == "67% of its n-grams are repeated, 0% at first"
    assert newest["disagreement"]["judges"] == {
        "strict": {"value": 0.0, "status": "no_answer", "detail": ""},
        "lenient": {"value": 1.0, "status": "ok", "detail": ""},
    }
    assert newest["disagreement"]["rewards"]["training"]["value"] == 1.0


def test_a_reward_that_pays_for_nothing_weighs_more_than_one_that_pays_for_form(
    rollout: Callable[..., Experience], tmp_path: Path
) -> None:
    experience = rollout(0, {1: ["7", "x", "x", "x"], 2: ["x"] * 4, 3: ["x"] * 4})
    paid = experience.scored.scores[0]
    paid[5] = paid[0]  # the training reward takes x for 8
    watching = watch(tmp_path / "suspicious.jsonl")
    metrics = watching.audit(experience, seed=0)
    assert metrics["watch/rewarded_but_strict_wrong"] == 1.0
    assert metrics["watch/rewarded_but_lenient_wrong"] == 0.5
    (row,) = read_rows(tmp_path / "suspicious.jsonl")
    assert (row["prompt_id"], row["sample"], row["weight"]) == (2, 1, 2.0)
    assert row["reason"] == "rewarded, but refused by the strict and the lenient judge"


def test_an_honest_policy_gives_no_cause(rollout: Callable[..., Experience], tmp_path: Path) -> None:
    watching = watch(tmp_path / "suspicious.jsonl")
    for step in range(4):
        metrics = watching.audit(rollout(step, STEADY), seed=0)
    del metrics["time/watch"]
    assert metrics == {"watch/agreement": 1.0, **dict.fromkeys((*REFUSED, *DRIFTS), 0.0)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("judge", "refused"),
    [
        (StrictAnswerReward(), 0.0),  # a judge of boxes reads where the reward does
        (StrictAnswerReward(answer_in="json"), 1.0),  # one that names another place reads there
    ],
)
def test_the_strict_judge_reads_answers_where_the_reward_does(
    rollout: Callable[..., Experience], judge: StrictAnswerReward, refused: float
) -> None:
    texts = {1: ["So 3 + 4 = 7.", "It is 7.", "7", "8"]}
    experience = rollout(0, texts, [MathReward(answer_in="last_number")])
    metrics = RewardWatch(judge, LenientAnswerReward()).audit(experience, seed=0)
    assert metrics["watch/rewarded_but_strict_wrong"] == refused


def test_a_form_that_spreads_is_seen_and_warned_of_once(rollout: Callable[..., Experience], tmp_path: Path) -> None:
    """As a policy that found out that nobody minds braces too many."""
    braces = {prompt: [text + "}}" for text in group] for prompt, group in STEADY.items()}
    watching = watch(tmp_path / "suspicious.jsonl", first_rollouts=3)
    for step in range(3):
        assert "watch/form_drift" not in watching.audit(rollout(step, STEADY), seed=0)
    assert watching.audit(rollout(3, {**STEADY, 1: braces[1]}), seed=0)["watch/form_drift"] == pytest.approx(4 / 12)
    resumed = watch(tmp_path / "suspicious.jsonl", first_rollouts=3)
    resumed.load_state_dict(json.loads(json.dumps(watching.state_dict())))
    for watcher in (watching, resumed):
        with pytest.warns(UserWarning, match=r"100% of the completions .* form that was not there in the first 3 roll"):
            assert watcher.audit(rollout(4, braces), seed=0)["watch/form_drift"] == 1.0
    assert watching.state_dict() == resumed.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watching.audit(rollout(5, braces), seed=0)
    row = next(row for row in read_rows(tmp_path / "suspicious.jsonl") if row["sign"] == "form")
    assert row["completion"].endswith("}}}")
    assert row["reason"] == r"100% of the completions have this form, 0.0% at first: \boxed{0}}"


def test_the_sample_follows_from_seed_and_rollout_alone(rollout: Callable[..., Experience]) -> None:
    experience = rollout(3, HONEST)
    torch.manual_seed(0)
    random.seed(0)
    states = torch.get_rng_state(), random.getstate()
    audits = [watch(completions=5)._examine(experience, seed) for seed in (0, 0, 1)]
    rows = [[audit.row for audit in sample] for sample in audits]
    assert rows[0] == rows[1] != rows[2]
    assert len(set(rows[0])) == 5
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_the_file_is_bounded_and_keeps_the_newest_of_equal_weight(
    rollout: Callable[..., Experience], tmp_path: Path
) -> None:
    file = tmp_path / "suspicious.jsonl"
    watching = watch(file, keep=3, characters=10, warn_above=1.0, first_rollouts=1)
    watching.audit(rollout(0, HONEST), seed=0)
    sizes = []
    for step in range(1, 12):
        watching.audit(rollout(step, CHEATING), seed=0)
        sizes.append(file.stat().st_size)
    assert max(sizes[3:]) - min(sizes[3:]) < 50  # step numbers get longer
    rows = list(read_rows(file))
    assert [row["sign"] for row in rows] == [s for s in ("disagreement", "repetition", "length") for _ in range(3)]
    assert [row["step"] for row in rows] == [11, 10, 9] * 3
    assert all(len(row["completion"]) <= 10 + len(" […] ") for row in rows)


def test_without_judges_only_drift_is_watched_and_what_they_cannot_judge_is_left_out(
    rollout: Callable[..., Experience],
) -> None:
    watching = RewardWatch(first_rollouts=1)
    assert list(watching.audit(rollout(0, HONEST), seed=0)) == ["time/watch"]
    assert list(watching.audit(rollout(1, HONEST), seed=0)) == [*DRIFTS, "time/watch"]
    experience = rollout(0, HONEST)
    for prompt in experience.samples.prompts[1:]:
        object.__setattr__(prompt, "answer", "")
    metrics = watch().audit(experience, seed=0)
    assert (metrics["watch/agreement"], metrics[REFUSED[0]]) == (pytest.approx(3 / 4), pytest.approx(1 / 2))


@pytest.mark.parametrize("scores", [None, []])
def test_a_judge_that_fails_is_warned_of_once_and_left_out(
    rollout: Callable[..., Experience], scores: list[Score] | None
) -> None:
    class Broken(StrictAnswerReward):
        def __call__(self, *_: Any) -> list[Score]:
            if scores is None:
                raise KeyError("no such column")
            return scores

    watching = RewardWatch(Broken(), LenientAnswerReward(), first_rollouts=2)
    with pytest.warns(UserWarning, match="strict judge of the watch failed and is left out") as warned:
        metrics = [watching.audit(rollout(step, HONEST), seed=0) for step in range(2)]
    assert len([w for w in warned if "failed" in str(w.message)]) == 1
    assert all("watch/rewarded_but_strict_wrong" not in m for m in metrics)
    assert [m["watch/rewarded_but_lenient_wrong"] for m in metrics] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"completions": -1}, "watch needs"), ({"first_rollouts": 0}, "watch needs"), ({"unit": "line"}, "watch.unit")],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RewardWatch(**arguments)


# --- whole runs -------------------------------------------------------------------------------------------------------

WATCH = {
    "strict": {"class_path": "grpo_pl.rewards.ExactReward"},
    "lenient": {"class_path": "grpo_pl.rewards.LenientAnswerReward"},
    "first_rollouts": 2,
    "completions": 12,
    "keep": 2,
}
SHORT = {"trainer__limit_val_batches": 0, "data__steps": 4, "checkpoint": {"every_n_rollouts": 1, "keep": 10}}


@pytest.fixture(scope="module")
def watched(command_line: Any) -> Path:
    """A run whose reward takes good form for a right answer, with the watch's first rollouts over after two."""
    rewards = [{"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"correctness": True}}]
    config = command_line.config("watched", watch=WATCH, model__rewards=rewards, **SHORT)
    command_line.done("fit", "--config", config)
    return command_line.runs / "watched"


def _rows(run: Path, read_metrics: Callable[..., Any]) -> Sequence[dict[str, str]]:
    return [row for row in read_metrics(run / "metrics.csv") if "reward" in row]


def test_a_run_logs_the_watch_beside_its_rewards(watched: Path, read_metrics: Callable[..., Any]) -> None:
    rows = _rows(watched, read_metrics)
    assert all("watch/agreement" in row for row in rows)
    assert ["watch/length_drift" in row for row in rows] == [False, False, True, True]
    suspicious = list(read_rows(watched / "suspicious.jsonl"))
    assert {"disagreement"} <= {row["sign"] for row in suspicious}
    assert max(len(list(group)) for _, group in itertools.groupby(suspicious, key=lambda row: row["sign"])) == 2
    shares = [float(row["watch/rewarded_but_strict_wrong"]) for row in rows if "watch/rewarded_but_strict_wrong" in row]
    assert max(shares) > 0


def test_training_is_the_same_without_it(command_line: Any, watched: Path, read_metrics: Callable[..., Any]) -> None:
    config = command_line.folder / "watched.yaml"
    command_line.done("fit", "--config", config, "--name=blind", "--watch.completions=0")
    blind = command_line.runs / "blind"
    assert not (blind / "suspicious.jsonl").exists()
    rows = [{k: v for k, v in row.items() if not k.startswith("watch/")} for row in _rows(watched, read_metrics)]
    assert rows == _rows(blind, read_metrics)
    ours, theirs = (
        read_checkpoint(run / "checkpoints" / "rollout-000004.ckpt")["state_dict"] for run in (watched, blind)
    )
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


@pytest.mark.parametrize("rollouts", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_resumed_run_watches_on_as_if_it_had_never_stopped(
    command_line: Any, watched: Path, read_metrics: Callable[..., Any], rollouts: int
) -> None:
    """Stopped among the first rollouts, and after them."""
    run = command_line.runs / f"resumed{rollouts}"
    shutil.copytree(watched, run, symlinks=True)
    for file in (run / "checkpoints").glob("rollout-*"):
        if int(file.stem.split("-")[1]) > rollouts:
            file.unlink()
    flags = ["--config", command_line.folder / "watched.yaml", f"--name={run.name}", "--resume"]
    command_line.done("fit", *flags)
    assert _rows(run, read_metrics) == _rows(watched, read_metrics)
    assert (run / "suspicious.jsonl").read_text() == (watched / "suspicious.jsonl").read_text()
    states = [
        read_checkpoint(r / "checkpoints" / "rollout-000004.ckpt")["callbacks"]["RewardWatch"] for r in (run, watched)
    ]
    assert json.dumps(states[0]) == json.dumps(states[1])


def test_it_can_be_set_from_the_command_line_with_one_judge(
    command_line: Any, read_metrics: Callable[..., Any]
) -> None:
    config = command_line.config("one", **{**SHORT, "data__steps": 1})
    command_line.done("fit", "--config", config, "--watch.strict=grpo_pl.rewards.StrictAnswerReward")
    (row,) = _rows(command_line.runs / "one", read_metrics)
    assert not {"watch/agreement", "watch/rewarded_but_lenient_wrong"} & row.keys()
