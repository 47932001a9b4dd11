"""Makes small faults in the code, one at a time, and says which of them the tests notice."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common import parser_of, publish, surroundings

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 300
"""Tests that a fault keeps from ending count as having noticed it."""


@dataclass(frozen=True)
class Mutation:
    """One fault: text that is there once in the Python files under ``folder``, and what takes its place."""

    area: str
    folder: str
    old: str
    new: str
    tests: str
    """Arguments of pytest: the tests that should notice."""

    def file(self, root: Path) -> Path:
        """The file that holds the text.

        Raises:
            ValueError: it is not there, or more than once.
        """
        places = [
            (path, text.count(self.old))
            for path in sorted((root / self.folder).rglob("*.py"))
            if self.old in (text := path.read_text())
        ]
        if len(places) != 1 or places[0][1] != 1:
            found = ", ".join(f"{count} times in {path.relative_to(root)}" for path, count in places) or "nowhere"
            raise ValueError(f"{self.area}: {self.old!r} must be once under {self.folder}; it is {found}.")
        return places[0][0]

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Context manager: within it the checkout at ``root`` has the fault."""
        file = self.file(root)
        text = file.read_text()
        file.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            file.write_text(text)


def _all(area: str, folder: str, tests: str, *pairs: tuple[str, str]) -> list[Mutation]:
    return [Mutation(area, folder, old, new, tests) for old, new in pairs]


PURE = "grpo_pl/functional"
MUTATIONS = [
    *_all(
        "losses", PURE, "tests/functional/test_losses.py tests/functional/test_kl.py tests/objective/test_algorithm.py",
        ("ones / (lengths * max(num_sequences, 1))", "ones / max(num_sequences, 1)"),
        ("ones / max(num_tokens, 1)", "ones / max(num_tokens + 1, 1)"),
        ("ratio.clamp(1 - epsilon_low, 1 + epsilon_high)", "ratio.clamp(1 - epsilon_high, 1 + epsilon_low)"),
        ("torch.where(advantages < 0, torch.maximum", "torch.where(advantages > 0, torch.maximum"),
        ("value.detach() * torch.exp(log_ratio -", "value * torch.exp(log_ratio -"),
        ("ratio.detach().clamp(min=low, max=high)", "ratio.clamp(min=low, max=high)"),
        ("rho.masked_fill((rho < low) | (rho > high), 0.0)", "rho.masked_fill(rho > high, 0.0)"),
        ('{"k1": k1, "k2": k2, "k3": k3}', '{"k1": k1, "k2": k3, "k3": k2}'),
    ),
    *_all(
        "losses", "grpo_pl/objective", "tests/objective/test_algorithm.py",
        ('total + self.beta * stats["kl"]', 'total - self.beta * stats["kl"]'),
        ("total - self.entropy_coef * batch.entropy", "total + self.entropy_coef * batch.entropy"),
    ),
    *_all(
        "losses", "grpo_pl/training", "tests/training/test_update.py",
        ("if taken[-1]:\n", "if taken:\n"),
    ),
    *_all(
        "losses", "grpo_pl/training", "tests/distributed/test_episodes.py tests/distributed/test_invariance.py",
        ("backward(loss * self.collective.world, number", "backward(loss, number"),
        ("return tokens, weight * weights", "return tokens, weights"),
    ),
    *_all(
        "advantages", PURE, "tests/functional/test_advantages.py",
        ("squares / (count - ddof).clamp(min=1)", "squares / count.clamp(min=1)"),
        ("centred * count / (count - 1).clamp(min=1)", "centred * count / count.clamp(min=1)"),
        ("centred.masked_fill(all_equal(rewards, valid, dim=dim) | ~valid, 0.0)", "centred.masked_fill(~valid, 0.0)"),
        ("(lengths - (max_completion_length - cache)) / cache).clamp(0.0, 1.0)",
         "(lengths - (max_completion_length - cache)) / cache).clamp(min=0.0)"),
        ("rewards.nan_to_num(0.0), ~rewards.isnan()", "rewards.nan_to_num(0.0), torch.ones_like(rewards).bool()"),
    ),
    *_all(
        "advantages", "grpo_pl/objective", "tests/objective/test_algorithm.py",
        ("scaled = scaled.masked_fill(~keep, 0.0)", "scaled = scaled.masked_fill(~valid, 0.0)"),
        ("usable = valid & greedy_valid.unsqueeze(1)", "usable = valid"),
    ),
    *_all(
        "sampling", PURE, "tests/functional/test_sampling.py tests/functional/test_truncated_sampling.py",
        ("keys + (positions + 1) * _GOLDEN", "keys + positions * _GOLDEN"),
        ("running_sums(probabilities, probabilities.dtype) - probabilities",
         "running_sums(probabilities, probabilities.dtype)"),
        ("logits < kth", "logits <= kth"),
        ("temperature == 1.0 else logits / temperature", "temperature == 1.0 else logits * temperature"),
        ("key.step, key.attempt, key.prompt_id, key.sample)", "key.step, key.prompt_id, key.sample)"),
        ("[key.turn] if key.turn else []", "[]"),
    ),
    *_all(
        "resume", "grpo_pl/data",
        "tests/data/test_datamodule.py tests/cli/test_main.py -k 'not shipped and not mistake'",
        ("range(self.data_source.data.completed_rollouts, len", "range(0, len"),
        ('self.completed_rollouts = state_dict["completed_rollouts"]',
         'self.completed_rollouts = state_dict["completed_rollouts"] - 1'),
    ),
    *_all(
        "resume", "grpo_pl/files", "tests/files/test_checkpoints.py",
        ("folder.glob(PATTERN), key=rollouts_of, reverse=True", "folder.glob(PATTERN), key=rollouts_of"),
        ("weights_only=True, mmap=mmap", "weights_only=False, mmap=mmap"),
        ('return "it was never completed"', "return None"),
    ),
    *_all(
        "resume", "grpo_pl/callbacks", "tests/callbacks/test_checkpoint.py tests/training/test_lightning_loops.py",
        ("> 0 and completed % self.every_n_rollouts == 0", "> 0 and completed % self.every_n_rollouts == 1"),
        ("paths[-self.keep :]", "paths[: self.keep]"),
    ),
    *_all(
        "sandbox", "grpo_pl/rewards", "tests/rewards/test_trust.py",
        ('vars(kind).get("trusted") is True', 'getattr(kind, "trusted", False)'),
        ('_check(spec, trusted_rewards(), "reward")', "trusted_rewards()"),
    ),
    *_all(
        "sandbox", "grpo_pl", "tests/serve/test_security.py -k worker_started",
        ('name in passed or name.startswith("LC_")', "name != 'LC_ALL'"),
    ),
    *_all(
        "server", "serve", "tests/serve/test_life.py -k full_queue",
        ("self.waiting >= self.max_queue + max(0,", "self.waiting > self.max_queue + max(0,"),
    ),
    *_all(
        "server", "serve", "tests/serve/test_hostile.py -k key",
        ('hmac.compare_digest(given.encode("latin-1").strip(), self._key)',
         'given.encode("latin-1")[:1] == self._key[:1]'),
    ),
    *_all(
        "cli", "grpo_pl/cli", "tests/cli/test_remote_evaluation.py",
        ("max(_PAUSE_S, pause)", "min(_PAUSE_S, pause)"),
    ),
    *_all(
        "rewards", "grpo_pl/rewards",
        "tests/rewards/test_number_puzzles.py tests/rewards/test_length.py tests/rewards/test_batch.py",
        ("sorted(used) != sorted(given)", "set(used) != set(given)"),
        ("math.cos(math.pi * progress)", "math.sin(math.pi * progress)"),
        ("2.0 - length / budget", "1.0 - length / budget"),
        ('[Score(None, "unavailable", problem)]', '[Score(0.0, "unavailable", problem)]'),
        ('"return" in episode and episode["return"] is None', '"return" in episode and not episode["return"]'),
    ),
    *_all(
        "comparison", PURE, "tests/functional/test_estimates.py",
        ("min(1.0, 2 * tail /", "min(1.0, tail /"),
        ("one, two = (_resampled_means(side, resamples, generator) for side in (values, baseline))",
         "one, two = (_resampled_means(each, resamples, generator) for each in (values - baseline, baseline * 0))"),
    ),
    *_all(
        "comparison", "grpo_pl/extras/compare", "tests/extras/compare/test_paired.py",
        ("first > Fraction(1, 2), second > Fraction(1, 2)", "first >= Fraction(1, 2), second >= Fraction(1, 2)"),
        ("unpaired_difference(second, first)", "unpaired_difference(first, second)"),
        ("if each.correct is not None]", "]"),
        ("< FEW and bool(", "< 0 and bool("),
    ),
    *_all(
        "comparison", "grpo_pl/extras/compare", "tests/extras/compare/test_sides.py",
        ("(other.asked, other.answer) != (each.asked, each.answer)", "other.asked != each.asked"),
    ),
]  # fmt: skip


def _copy(folder: Path) -> Path:
    """A copy of the checkout's tracked files, and of what was compiled beside them."""
    told = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in [*told.splitlines(), *(str(path.relative_to(ROOT)) for path in ROOT.glob("grpo_pl/**/*.so"))]:
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def _tested(root: Path, tests: str) -> tuple[int, str]:
    """Exit status of the tests, 124 if they come to no end, and the first one that failed."""
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *shlex.split(tests)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return 124, "no end"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else ""


def tried(mutations: Sequence[Mutation], jobs: int) -> list[dict[str, Any]]:
    """Applies each fault in one of ``jobs`` copies of the checkout.

    Raises:
        ValueError: a fault's text is not there, or its tests fail without it.
    """
    for mutation in mutations:
        mutation.file(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copies.put(_copy(Path(folder) / str(number)))

        @contextmanager
        def a_copy() -> Iterator[Path]:
            root = copies.get()
            try:
                yield root
            finally:
                copies.put(root)

        def without(tests: str) -> tuple[int, str]:
            with a_copy() as root:
                return _tested(root, tests)

        def with_fault(mutation: Mutation) -> dict[str, Any]:
            with a_copy() as root, mutation.applied(root):
                status, by = _tested(root, mutation.tests)
            file = mutation.file(ROOT).relative_to(ROOT)
            print("caught" if status else "MISSED", mutation.area, file, repr(mutation.new), by, flush=True)
            return {"area": mutation.area, "file": str(file), "new": mutation.new, "caught": status != 0, "by": by}

        with ThreadPoolExecutor(jobs) as threads:
            suites = list(dict.fromkeys(mutation.tests for mutation in mutations))
            for tests, (status, failed) in zip(suites, threads.map(without, suites), strict=True):
                if status:
                    raise ValueError(f"pytest {tests} has status {status} without a fault: {failed}")
            return list(threads.map(with_fault, mutations))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--area", choices=sorted({mutation.area for mutation in MUTATIONS}), help="only these faults")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults that are tried at the same time")
    arguments = parser.parse_args()
    rows = tried([one for one in MUTATIONS if arguments.area in (None, one.area)], arguments.jobs)
    missed = [row for row in rows if not row["caught"]]
    record = {"benchmark": "mutations", **surroundings("cpu"), "tried": len(rows), "missed": len(missed), "rows": rows}
    publish(record, arguments.output)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
