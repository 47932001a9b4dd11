"""``report.html``: whole, self-contained, and safe whatever the policy wrote; opened in a real browser where there is
one (Debian: ``apt-get install chromium chromium-driver``)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.extras.images.picture import Picture
from grpo_pl.extras.report.page import build_page, write_comparison, write_report
from grpo_pl.files.runs import RunFolder
from tests.browser import Browser, needs_browser, until
from tests.extras.report.runs import HOSTILE, held_out_row, sample_row, write_run, write_samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = write_run(tmp_path_factory.mktemp("runs") / "<b>demo")
    write_report(folder)
    return folder


def _data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found and "<" not in found[1]
    return json.loads(found[1])


def test_the_page_needs_nothing_from_outside(run: RunFolder) -> None:
    page = run.report.read_text()
    assert not re.search(r"(src|href)=\"(?!#|data:,\")", page)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
    without_data = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert set(re.findall(r"https?://[^\"\s]+", without_data)) == {"http://www.w3.org/2000/svg"}  # a name, not a page


def test_what_the_policy_wrote_cannot_end_the_element_it_stands_in(run: RunFolder) -> None:
    page = run.report.read_text()
    assert page.count("</script>") == 2 and "onerror=" in page
    assert _data(page)["samples"][0]["groups"][0]["completions"][1]["completion"] == HOSTILE
    assert "<title>&lt;b&gt;demo" in page


def test_the_head_says_what_was_run(run: RunFolder) -> None:
    facts = dict(_data(build_page(run))["facts"][1:])
    assert facts["parameters"] == "1.5 M, 500.0 k of them trained"
    assert facts["data"] == "Sums, digest 0123abcd; held out: val 2"
    assert (facts["command"], facts["objective"]) == ("grpo-pl fit --config mine.yaml", "grpo")
    assert facts["started"] == "2026-11-22 06:00:00 UTC"


def test_a_run_of_an_older_version_still_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old")
    for file in (run.held_out, run.record, run.completions, run.config):
        file.unlink()
    data = _data(build_page(run))
    assert (data["facts"], data["samples"], data["config"]) == ([["fact", "value"]], [], "")
    assert [chart["title"] for chart in data["held_out"]["charts"]] == ["Held-out problems"]


def test_a_long_file_of_completions_is_thinned_out_evenly(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it takes in the page, where ``<`` is six bytes."""
    sizes = [len(json.dumps(one).replace("<", "\\u003c")) for one in _data(build_page(run))["samples"]]
    monkeypatch.setattr("grpo_pl.extras.report.page.LARGEST_SAMPLES", sum(sizes) * 0.75)
    assert [rollout["step"] for rollout in _data(build_page(run))["samples"]] == [1, 21]


@pytest.mark.parametrize(
    ("file", "lacks"), [("run.json", "model"), ("completions.jsonl", "step"), ("held_out.jsonl", "step")]
)
def test_a_file_that_is_of_no_run_is_named_with_what_it_lacks(tmp_path: Path, file: str, lacks: str) -> None:
    with pytest.raises(ValueError, match=r"holds no metrics\.csv"):
        write_report(RunFolder(tmp_path))
    (tmp_path / "metrics.csv").write_text("step,reward\n1,0.5\n")
    (tmp_path / file).write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=f"{file}'? has no field '{lacks}'"):
        write_report(RunFolder(tmp_path))


def test_a_number_has_the_same_digits_everywhere(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val/pass@1\n0,0.30000001192092896\n40,0.9325000047683716\n")
    data = _data(build_page(RunFolder(tmp_path)))
    assert data["tiles"] == [{"label": "pass@1, sampled", "first": 0.300000012, "value": 0.932500005}]
    assert data["held_out"]["charts"][0]["series"][0]["points"] == [[0, 0.300000012], [40, 0.932500005]]


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def page(browser: Browser, run: RunFolder) -> Browser:
    browser.show_at(1280)
    browser.open(run.report.as_uri())
    return browser


@needs_browser
def test_the_browser_draws_every_chart_and_runs_nothing_that_was_written(page: Browser) -> None:
    held_out = ["Held-out problems share", "pass@k share", "Problems share", "Hardness problems"]
    assert page.texts("#held-out-charts h3") == held_out
    training = ["Reward reward", "KL to the reference nats", "Learning rate per step", "Time per rollout seconds"]
    training += ["Statuses: math share", "Not judged share", "Lengths of right and wrong completions"]
    assert page.texts("#charts h3") == training
    drawn = "return [...document.querySelectorAll('#charts svg')].map(s => s.querySelectorAll(arguments[0]).length)"
    assert page.run(drawn, ".curve, .area, .fill") == [1, 1, 1, 2, 2, 1, 2]
    assert page.count("#held-out-charts .band") == 3  # of pass@1, and of pass@k before and after
    assert page.run("return document.querySelectorAll('path[d*=NaN], [cx=NaN], text[x=NaN], rect[y=NaN]').length") == 0
    assert page.run("return document.title") == "<b>demo – grpo-pl"
    assert page.count("img, body script:not(#data)") == 1  # the page's own
    assert HOSTILE in page.texts(".completion .text")
    assert page.texts("h1") == ["<b>demo"]
    loaded = "performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))"
    assert page.run(f"return {loaded}") == []
    assert page.console() == []


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_any_screen(browser: Browser, run: RunFolder, scheme: str) -> None:
    browser.show_at(1280, scheme=scheme)
    browser.open(run.report.as_uri())
    browser.open_details()
    for width in (1280, 390, 360):
        browser.show_at(width, scheme=scheme)
        browser.run("document.querySelectorAll('.plot')[0].focus()")
        browser.press("Right")
        assert browser.low_contrasts() == []
        assert browser.overflow() <= 0
        assert browser.nameless() == []


@needs_browser
@pytest.mark.parametrize(("width", "most"), [(1280, 3), (900, 2)])
def test_no_chart_is_alone_beside_an_empty_place(page: Browser, width: int, most: int) -> None:
    """For every number of charts: rows are full, or the last of three has two."""
    page.show_at(width)
    rows_of = """
        const holder = document.createElement("div"); holder.className = "charts";
        document.querySelector("main").append(holder); const found = [];
        for (let n = 1; n <= 14; n += 1) {
          holder.append(document.createElement("div"));
          const rows = new Map();
          for (const one of holder.children) {
            const box = one.getBoundingClientRect();
            rows.set(box.top, [...(rows.get(box.top) ?? []), box.width]);
          }
          const sum = (widths) => widths.reduce((a, b) => a + b);
          found.push([...rows.values()].map((widths) => [widths.length, sum(widths) / holder.clientWidth]));
        }
        holder.remove();
        return found;
    """
    for number, rows in enumerate(page.run(rows_of), 1):
        assert sum(count for count, _ in rows) == number and max(count for count, _ in rows) <= most
        assert all(count > 1 or share > 0.95 for count, share in rows), (number, rows)
    page.show_at(1280)


@needs_browser
def test_ticks_fit_tell_values_apart_and_never_repeat(page: Browser) -> None:
    labels = (
        "return [...document.querySelectorAll('#charts svg')].map(s => "
        "[...s.querySelectorAll('text[text-anchor=end]:not(.axis-name)')].map(t => t.textContent))"
    )
    for marks in page.run(labels):
        assert len(set(marks)) == len(marks) >= 2
    rate = page.run(labels)[2]
    assert rate[0] == "0" and rate[-1] == "1.0e-6"
    outside = (
        "return [...document.querySelectorAll('.chart')].flatMap(c => { const box = c.getBoundingClientRect();"
        "return [...c.querySelectorAll('svg text')].map(t => t.getBoundingClientRect())"
        ".filter(t => t.left < box.left || t.right > box.right + 1) }).length"
    )
    assert page.run(outside) == 0
    shown = page.run("return [tickLabels([0, 0.5, 1]), tickLabels([1e6, 2e6]), tickLabels([0.0010, 0.0015, 0.0020])]")
    assert shown == [["0.0", "0.5", "1.0"], ["1e6", "2e6"], ["1.0e-3", "1.5e-3", "2.0e-3"]]


@needs_browser
def test_every_chart_has_a_table_of_its_numbers(page: Browser) -> None:
    assert page.count(".chart") == page.count(".chart details.numbers") == 11
    page.open_details("details.numbers")
    tables = (
        "return [...document.querySelectorAll('.chart')].map(c => [c.querySelector('caption').textContent,"
        " ...[...c.querySelectorAll('tr')].map(r => [...r.cells].map(x => x.textContent).join('|'))])"
    )
    found = page.run(tables)
    assert found[0][:3] == [
        "Held-out problems, share",
        "rollout|pass@1|pass@1, low|pass@1, high|greedy",
        "0|0.100|0.025|0.225|0.200",
    ]
    hostile = f"problem 2: {HOSTILE[:60]}|0|0"
    assert found[2][1:] == ["problem|rollout 0|rollout 30", hostile, "problem 1: 2+2|0.250|1.000"]
    assert found[4][-1] == "30|0.750"
    assert page.run("return [...document.querySelectorAll('th')].every(t => t.scope)")


@needs_browser
def test_one_stalled_rollout_does_not_press_the_others_flat(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [f"{step},{100.0 if step == 7 else 1.0},0.5" for step in range(1, 31)]
    folder.metrics.write_text("\n".join(["step,time/rollout,time/backward", *rows]) + "\n")
    browser.open(write_report(folder).as_uri())
    marks = [float(text) for text in browser.texts("svg text[text-anchor=end]:not(.axis-name)")]
    assert 1.5 < max(marks) <= 3.5
    browser.run("document.querySelector('.plot').focus()")
    browser.press(*["Right"] * 7)
    assert browser.texts(".tooltip") == ["rollout 7rollout100backward0.500"]  # the number stays the measured one


@needs_browser
def test_charts_are_read_by_arrow_keys_or_a_pointer_and_told_to_a_screen_reader(page: Browser) -> None:
    page.run("document.querySelectorAll('#charts .plot')[0].focus()")
    page.press("Left")
    assert page.texts(".tooltip") == ["rollout 30reward0.750"]
    told = "return document.activeElement.getAttribute('aria-valuetext')"
    assert page.run(told) == "rollout 30: reward 0.750"
    page.press("Left")
    assert page.run(told) == "rollout 29: reward 0.725"
    assert page.count("#charts .cursor") == 6  # in all charts over rollouts at once
    page.press("Escape")
    assert page.texts(".tooltip") == []
    page.run(
        "const plot = document.querySelectorAll('#charts .plot')[0], box = plot.getBoundingClientRect();"
        "plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 13, clientY: box.top + 50}))"
    )
    assert page.texts(".tooltip") == ["rollout 30reward0.750"]
    page.run("document.querySelectorAll('#charts .plot')[0].dispatchEvent(new PointerEvent('pointerleave'))")
    assert page.texts(".tooltip") == []
    page.run("document.querySelector('.plot.map').focus()")
    page.press("Right")
    assert page.run(told) == f"problem 2: {HOSTILE[:60]}: rollout 0 0, rollout 30 0"


@needs_browser
def test_held_out_answers_stand_side_by_side_before_and_after(page: Browser) -> None:
    assert page.texts("#answers summary .counts") == ["1/4 → 4/4", "0/1 → 0/1"]  # those that changed most first
    assert page.texts(".problem[open] h4") == ["rollout 0", "rollout 30"]
    kinds = (
        "return [...document.querySelectorAll('.problem[open] .side')].map(s => "
        "[...s.querySelectorAll('.kind')].map(k => k.innerText.replace(/\\s+/g, ' ').trim()))"
    )
    assert page.run(kinds) == [["9 wrong ×3", "4 right ×1"], ["4 right ×4"]]
    page.run("document.querySelectorAll('.problem')[1].querySelector('summary').focus()")
    page.press("Enter")
    until(lambda: page.texts(".problem:nth-of-type(2) .completion .text")[:1] == [HOSTILE])


@needs_browser
def test_tile_and_legend_say_the_same_number(browser: Browser, tmp_path: Path) -> None:
    """Python rounds the first to 0.812, and JavaScript to 0.813."""
    for value, shown in (("0.8125", "0.813"), ("0.9524999856948853", "0.952")):
        (tmp_path / "metrics.csv").write_text(f"step,val/pass@1\n0,0.0625\n40,{value}\n")
        browser.open(write_report(RunFolder(tmp_path)).as_uri())
        assert browser.texts(".tile .value") == browser.texts("#held-out-charts .legend b") == [shown]
        assert browser.texts(".tile .note") == ["from 0.063"]


@needs_browser
def test_the_browser_of_samples_walks_through_rollouts_problems_and_verdicts(page: Browser) -> None:
    """It opens on a group whose rewards differ: in the last rollout, problem 1 got one reward for all."""
    assert page.texts("#rollout-label") == ["rollout 21"]
    assert page.texts("#groups button") == ["problem 1: 1/2 all equal", "problem 2: 1/2"]
    assert page.texts("#groups button[aria-pressed=true]") == ["problem 2: 1/2"]
    page.run("document.getElementById('previous').focus()")
    page.press("Enter")
    assert page.texts("#rollout-label") == ["rollout 11"]
    assert "<think>s10p1</think>\\boxed{4}" in page.texts(".completions .completion .text")
    page.run("document.querySelectorAll('#groups button')[1].focus()")
    page.press("Space")
    assert page.texts("#groups button[aria-pressed=true]") == ["problem 2: 1/2"]
    assert page.texts("#problem .gold b") == ["4"]
    assert page.texts("#filters button") == ["all 2", "right 1", "wrong 1"]
    page.run("document.querySelectorAll('#filters button')[2].click()")
    assert page.texts("#completions .text") == [HOSTILE]
    page.run("document.getElementById('rollout').focus()")
    page.press("Left")
    assert page.texts("#rollout-label") == ["rollout 1"]


@needs_browser
def test_each_completion_has_the_command_that_explains_it(page: Browser, run: RunFolder) -> None:
    """In the words of a shell, for a folder whose name it would not read as it stands."""
    page.run("document.querySelectorAll('#groups button')[1].click()")
    path = f"'{run.path}'"
    assert page.texts("#completions .why code") == [
        f"grpo-pl why {path} --step 20 --prompt 2 --sample {sample}" for sample in (0, 1)
    ]
    assert page.run("return getComputedStyle(document.querySelector('.why code')).userSelect") == "all"
    assert page.texts("#answers .why") == []  # held-out answers are of no step


def test_the_id_of_a_prompt_is_a_text_since_a_script_rounds_numbers_of_64_bits(tmp_path: Path) -> None:
    """Word problems, reasoning-gym's tasks and mixtures have such ids."""
    run = write_run(tmp_path / "hashed")
    write_samples(run, [sample_row(0, -4934428914534442802, sample, "4", float(sample)) for sample in (0, 1)])
    ((group,),) = (rollout["groups"] for rollout in _data(build_page(run))["samples"])
    assert group["prompt_id"] == "-4934428914534442802"


def test_a_run_that_cannot_be_replayed_has_no_such_command(run: RunFolder, tmp_path: Path) -> None:
    assert _data(build_page(run))["why"].startswith("grpo-pl why ")
    other = write_run(tmp_path / "old")
    other.record.unlink()
    assert _data(build_page(other))["why"] == ""


@needs_browser
def test_equal_answers_are_folded_with_their_number(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("step,reward\n1,0.5\n")
    texts = [r"a \boxed{4}", r"b \boxed{4}", r"a \boxed{4}", r"\boxed{\frac{1}{2}}", "<answer>7</answer>"]
    texts += ["x\nseven", r"\boxed{?}"]
    values: list[float | None] = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None]
    rows = [sample_row(0, 1, i, text, value) for i, (text, value) in enumerate(zip(texts, values, strict=True))]
    write_samples(folder, rows)
    browser.open(write_report(folder).as_uri())
    shown = browser.run("return [...document.querySelectorAll('#kinds .kind')].map(k => k.innerText)")
    kinds = [" ".join(text.split()) for text in shown]
    assert kinds == ["4 right ×3", r"\frac{1}{2} wrong ×1", "7 wrong ×1", "seven wrong ×1", "? not judged ×1"]
    browser.run("document.querySelector('#kinds .kind').click()")
    assert browser.texts("#completions .text") == [r"a \boxed{4}", r"b \boxed{4}"]
    assert "2 equal texts" in browser.text("#completions .completion")
    assert browser.texts("#filters button") == ["all 7", "right 3", "wrong 3", "not judged 1"]


def _turn(action: str, observation: Any, reward: float, advantage: float, **more: Any) -> dict[str, Any]:
    turn = {"action": action, "observation": observation, "reward": reward, "advantage": advantage}
    return {**turn, "invalid_action": False, "finish_reason": "stop", **more}


@needs_browser
def test_episodes_are_shown_turn_by_turn(browser: Browser, tmp_path: Path) -> None:
    won = [
        _turn("right", "S@FF\nFFFG", 0.0, 0.25),
        _turn(HOSTILE, [{"role": "tool", "content": "<b>84"}], 0.5, -0.5, invalid_action=True, finish_reason="length"),
        _turn("down", "", 1.0, 0.75),
    ]
    episode = {"return": 1.5, "status": "ok", "detail": "", "finish_reason": "environment", "observation": "@FFF\nFFFG"}
    lost = {**episode, "return": None, "status": "timeout", "detail": "30 s", "turns": won[:1]}
    rows = [sample_row(0, 1, 0, "down", 1.0), {**sample_row(0, 1, 1, "right", 0.0), "finish_reason": "turns"}]
    rows[0]["episode"], rows[1]["episode"] = {**episode, "turns": won}, lost
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("step,reward\n1,0.5\n2,0.6\n")
    write_samples(folder, [{**row, "answer": ""} for row in rows])
    browser.open(write_report(folder).as_uri())
    assert browser.texts(".completion:first-child .exchange li > .text") == ["right", HOSTILE, "down"]
    assert browser.texts(".completion:first-child .observation") == ["S@FF\nFFFG", "tool: <b>84"]
    facts = ["advantage +0.25", "reward 0.5advantage −0.50invalid actioncut off", "reward 1advantage +0.75"]
    assert browser.texts(".completion:first-child li .facts") == facts
    assert browser.texts(".completion .length") == ["3 turns, 5 tokens", "1 turn, 5 tokens, out of turns"]
    assert "environment: timeout" in browser.texts(".completion:last-child .chip")
    assert browser.texts("#problem .gold") == []  # nothing to compare with
    assert browser.run("return document.title") == f"{tmp_path.name} – grpo-pl"


@needs_browser
def test_a_run_without_signal_says_so_first(browser: Browser, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text("step,frac_reward_zero_std\n" + "".join(f"{s},1.0\n" for s in range(1, 12)))
    browser.open(write_report(folder).as_uri())
    told = "No learning signal: the rewards of every group were equal from rollout 1"
    assert browser.text("main > *").startswith(told)


@needs_browser
def test_on_paper_everything_is_open(page: Browser) -> None:
    page.devtools("Emulation.setEmulatedMedia", media="print")
    page.run("window.dispatchEvent(new Event('beforeprint'))")
    assert page.run("return [...document.querySelectorAll('.problem, #config')].every(d => d.open)")
    assert page.run("return getComputedStyle(document.querySelector('.controls')).display") == "none"
    assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(246, 246, 244)"  # never dark
    page.devtools("Emulation.setEmulatedMedia", media="")


@needs_browser
def test_the_map_of_problems_is_drawn_in_its_colours(page: Browser) -> None:
    assert page.count(".plot.map image") == 1
    assert held_out_row(0, 1)["problems"]["val"] == {"1": [1, 4], "2": [0, 4]}
    pixels = page.wait_for(
        "const done = arguments[0], image = new Image();"
        "image.onload = () => { const c = document.createElement('canvas');"
        "c.width = image.width; c.height = image.height; const b = c.getContext('2d'); b.drawImage(image, 0, 0);"
        "const at = (x, y) => [...b.getImageData(x, y, 1, 1).data];"
        "done([image.width, image.height, at(1, 1), at(0, 0)]) };"
        "image.src = document.querySelector('.plot.map image').getAttribute('href')"
    )
    assert pixels == [2, 2, [0xF2, 0xE3, 0x94, 255], [0x23, 0x30, 0x4A, 255]]  # all right after, none before


def _with_images(folder: Path, names: list[list[str]]) -> RunFolder:
    run = write_run(folder)
    write_samples(run, [{**sample_row(0, i, 0, "4", 1.0), "images": each} for i, each in enumerate(names)])
    return run


def test_samples_have_their_thumbnails_as_far_as_the_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    red, gone = Picture.of(bytes([255, 0, 0]), 1, 1), "0" * 64
    run = _with_images(tmp_path / "seen", [[red.sha256, gone], [], ["../../secret"], [red.sha256]])
    run.images.mkdir()
    (run.images / f"{red.sha256}.png").write_bytes(red.png)
    (tmp_path / "secret.png").write_bytes(red.png)
    (run.images / f"{'1' * 64}.png").write_bytes(b"<svg onload=alert(1)>")
    data = _data(build_page(run))
    assert data["images"] == {red.sha256: red.data_url()}
    assert [group["images"] for group in data["samples"][0]["groups"]][:2] == [[red.sha256, gone], []]
    monkeypatch.setattr("grpo_pl.extras.report.page.LARGEST_IMAGES", len(red.png) - 1)
    assert _data(build_page(run))["images"] == {}
    assert _data(build_page(write_run(tmp_path / "text")))["images"] == {}


def test_a_file_that_is_no_png_is_not_shown(tmp_path: Path) -> None:
    run = _with_images(tmp_path / "seen", [["1" * 64]])
    run.images.mkdir()
    (run.images / f"{'1' * 64}.png").write_bytes(b"<svg onload=alert(1)>")
    assert _data(build_page(run))["images"] == {}


def test_held_out_answers_have_thumbnails_of_one_run_and_of_several(tmp_path: Path) -> None:
    pictures = [Picture.of(bytes([shade, 0, 0]), 1, 1) for shade in (1, 2)]
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    for run, picture in zip(runs, pictures, strict=True):
        rows = [held_out_row(step, 1) for step in (0, 30)]
        for each in (each for row in rows for each in row["answers"]):
            each["images"] = [picture.sha256]
        run.held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.held_out_images.mkdir(parents=True)
        (run.held_out_images / f"{picture.sha256}.png").write_bytes(picture.png)
    assert _data(build_page(runs[0]))["images"] == {pictures[0].sha256: pictures[0].data_url()}
    page = write_comparison(runs, tmp_path / "both.html").read_text()
    assert _data(page)["images"] == {picture.sha256: picture.data_url() for picture in pictures}
    shown = [problem["images"] for problem in _data(page)["held_out"]["answers"]["problems"]]
    assert sorted(map(str, shown)) == sorted(str([picture.sha256]) for picture in pictures for _ in range(2))


@needs_browser
def test_the_browser_shows_thumbnails_and_placeholders(browser: Browser, tmp_path: Path) -> None:
    red = Picture.of(bytes([255, 0, 0] * 4), 2, 2)
    run = _with_images(tmp_path / "seen", [[red.sha256, "0" * 64]])
    run.images.mkdir()
    (run.images / f"{red.sha256}.png").write_bytes(red.png)
    browser.open(write_report(run).as_uri())
    loaded = "return [...document.querySelectorAll('#problem img')].map(i => [i.alt, i.naturalWidth])"
    until(lambda: browser.run(loaded) == [["image 1", 2]])
    assert browser.texts("#problem .gone") == ["image 2 is not kept"]
