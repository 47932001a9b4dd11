"""The page of an explanation: one HTML file without external resources, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from grpo_pl.extras.replay.explanation import Explanation, Token, conclusions
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun
from grpo_pl.extras.report.charts import Chart, chart
from grpo_pl.extras.report.page import whole_page
from grpo_pl.files.writing import staged


def page_file(run: RecordedRun, given: Path | None, name: str) -> Path:
    """Where the page goes: beside the run folder, unless a file is given.

    Raises:
        CannotReplay: it is a folder, or inside the run folder, into which nothing is written.
    """
    file = run.path.absolute().parent / f"{name}.html" if given is None else given
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise CannotReplay(f"--page {file}: name a file in a folder that is there.")
    if file.resolve().is_relative_to(run.path.resolve()):
        raise CannotReplay(f"--page {file} is inside the run folder, which is never changed: name another place.")
    return file


def write_page(found: Explanation, file: Path) -> None:
    """Writes the page of an explanation, atomically."""
    with staged(file) as staging:
        staging.write_text(build_page(found), encoding="utf-8", errors="replace")


def build_page(found: Explanation) -> str:
    """The HTML text of the page."""
    title = f"{Path(found.run).resolve().name}, rollout {found.step + 1}, sample {found.sample} of {found.prompt_id}"
    data = {
        "title": title,
        "explanation": found.as_json(),
        "conclusions": conclusions(found),
        "charts": _charts([(place, token) for place, token in enumerate(found.tokens) if token.written]),
    }
    page, style, script = (
        resources.files("grpo_pl.extras.replay").joinpath(f"why.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
    return whole_page(page, title=f"{title} – grpo-pl", style=style, script=script, data=data)


def _charts(written: Sequence[tuple[int, Token]]) -> list[Chart]:
    """The curves over the tokens that the policy wrote, by their places; none where it wrote nothing."""
    if not written:
        return []
    before = [(at, token.logprob) for at, token in written if token.logprob is not None]
    after = [(at, token.after) for at, token in written if token.after is not None]
    entropy = [(at, token.entropy) for at, token in written if token.entropy is not None]
    note = "of each token, before the update of the step and after it"
    return [
        chart("Log-probability", note, "nats", {"before": before, "after": after}, x="token"),
        chart("Entropy", "of what each token was drawn from", "nats", {"entropy": entropy}, x="token"),
    ]
