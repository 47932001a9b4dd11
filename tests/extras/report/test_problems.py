"""What a report says of single problems."""

from typing import Any

from grpo_pl.extras.report.problems import before_and_after, length_charts, problem_charts, side_by_side


def _answer(text: str, correct: bool | None) -> dict[str, Any]:
    score = {"value": None if correct is None else float(correct), "status": "ok", "detail": ""}
    return {"completion": text, "tokens": len(text), "finish_reason": "stop", "correct": correct, **score}


def _row(step: int, counts: dict[str, list[int]], *answers: dict[str, Any]) -> dict[str, Any]:
    asked = {"group": "val", "id": 1, "question": "1+1", "answer": "2", "greedy": _answer("g", True)}
    listed = [{**asked, "completions": list(answers)}] if answers else []
    return {"step": step, "problems": {"val": counts}, "answers": listed}


def test_problems_are_mapped_hardest_first_and_counted_by_their_rate() -> None:
    rows = [
        _row(0, {"1": [2, 4], "2": [0, 4], "3": [0, 0]}, _answer("x", True)),
        _row(5, {"1": [4, 4], "2": [1, 4], "3": [0, 0]}),
        _row(9, {"1": [4, 4], "2": [0, 2], "3": [0, 0]}),
    ]
    drawn, hardness = problem_charts(rows)
    assert drawn["columns"] == [0, 5, 9]
    assert [(row["label"], row["values"]) for row in drawn["rows"]] == [
        ("problem 3", [None, None, None]),
        ("problem 2", [0.0, 0.25, 0.0]),
        ("problem 1: 1+1", [0.5, 1.0, 1.0]),
    ]
    assert hardness["labels"][0] == "0" and hardness["labels"][5] == "≤0.5" and hardness["labels"][-1] == "1"
    before, after = (one["values"] for one in hardness["series"])
    assert (before[0], before[5], before[-1], sum(before)) == (1, 1, 0, 2)
    assert (after[0], after[-1], sum(after)) == (1, 1, 2)


def test_many_validations_are_thinned_and_the_last_one_stays() -> None:
    drawn, _ = problem_charts([_row(step, {"1": [0, 4]}) for step in range(101)])
    assert len(drawn["columns"]) <= 41 and drawn["columns"][0] == 0 and drawn["columns"][-1] == 100


def test_completions_stand_side_by_side_before_and_after() -> None:
    rows = [_row(0, {}, _answer("a", False)), _row(5, {}), _row(9, {}, _answer("b", True))]
    found = before_and_after(rows)
    assert found["times"] == ["rollout 0", "rollout 9"]
    (problem,) = found["problems"]
    assert [side["completions"][0]["completion"] for side in problem["sides"]] == ["a", "b"]
    assert problem["sides"][0]["completions"][0]["rewards"]["judged"]["value"] == 0.0
    assert before_and_after([])["problems"] == []


def test_one_question_about_other_images_is_another_problem() -> None:
    def row(step: int) -> dict[str, Any]:
        asked = {"group": "val", "question": "how many?", "answer": "2", "completions": [_answer(f"{step}", False)]}
        return {"step": step, "answers": [{**asked, "images": [digest]} for digest in ("a", "b")]}

    problems = before_and_after([row(0), row(9)])["problems"]
    assert [problem["images"] for problem in problems] == [["a"], ["b"]]
    assert [[side["completions"][0]["completion"] for side in problem["sides"]] for problem in problems] == [
        ["0", "9"]
    ] * 2


def test_what_was_wrong_and_became_right_stands_first() -> None:
    """Letters are completions in the order of their draws, right or wrong; a greedy one stands after a dot."""

    def row(step: int, **verdicts: str) -> dict[str, Any]:
        asked: list[dict[str, Any]] = []
        for name, said in verdicts.items():
            sampled, _, greedy = said.partition(".")
            drawn = {"completions": [_answer("x", letter == "r") for letter in sampled]}
            asked.append({"group": "val", "question": name, "answer": "2", **drawn})
            if greedy:
                asked[-1]["greedy"] = _answer("x", greedy == "r")
        return {"step": step, "answers": asked}

    before = row(0, same="rr", more="rwww", learnt="wrww", greedy="rwww.w", lost="rrrr")
    after = row(9, same="rr", more="rrrr", learnt="rrww", greedy="wwww.r", lost="wwww")
    found = before_and_after([before, after])
    assert [problem["question"] for problem in found["problems"]] == ["learnt", "greedy", "lost", "more", "same"]


def test_runs_stand_side_by_side_also_where_one_has_none() -> None:
    one, two = _row(9, {}, _answer("a", None)), _row(3, {}, _answer("b", True))
    found = side_by_side({"one": [one], "old": [], "two": [two]})
    assert found["times"] == ["one", "two"]
    assert [side["completions"][0]["correct"] for side in found["problems"][0]["sides"]] == [None, True]


def test_lengths_are_those_of_the_last_quarter_of_the_rollouts() -> None:
    rows = [{"step": step, "tokens": step, "correct": [True, False, None][step % 3]} for step in range(8)]
    (chart,) = length_charts(rows)
    assert [(group["label"], group["values"]) for group in chart["groups"]] == [("right", [6]), ("wrong", [7])]
    assert chart["note"] == "completions kept of rollouts 7 to 8"
    assert length_charts([]) == []
