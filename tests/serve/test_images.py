"""Chats with images through the real ``openai`` client, and what is refused."""

import base64
import io
import json
import subprocess
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from grpo_pl.callbacks.record import examples_of
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.shapes import ShapePrompts
from grpo_pl.extras.images.chat import LIMITS
from grpo_pl.files.runs import RunFolder
from grpo_pl.openai_format.messages import Message
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.inputs import encode_prompt
from grpo_pl.policy.loading import load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import find_model
from grpo_pl.rewards import MathReward
from grpo_pl.rollout.decoding import sample_keys
from grpo_pl.rollout.engine import generate_request
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import SamplingParams
from serve.prompts import Prompts
from tests.browser import Browser, needs_browser, until
from tests.docs.pages import blocks, page
from tests.images import SMOLVLM_CHAT, image_policy, picture
from tests.serve.bodies import CHAT, COMPLETIONS, EVALUATE, on_a_loop, post, streamed

TASK = ShapePrompts(questions=("count",))
SHOWN = (picture(0), picture(1, 40, 20))
SAMPLING = SamplingParams(max_completion_length=12)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*urls: str, text: str = "How many?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part, urls), {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a policy that reads images."""
    folder, policy = tmp_path_factory.mktemp("images") / "seeing" / "export", image_policy()
    tokenizer = load_tokenizer(policy)
    trained = TrainedWith(template=PromptTemplate(prefill="<think>"), rewards=[MathReward().spec()], sampling=SAMPLING)
    export_policy(folder, trained, model=load_model(policy, tokenizer), tokenizer=tokenizer)
    RunFolder(folder.parent).record.write_text(json.dumps({"examples": examples_of(RolloutDataModule(TASK, steps=1))}))
    return folder


@pytest.fixture(scope="module")
def server(seeing: Path, start: Callable[..., Any]) -> Any:
    return start("--deadline", "60", model=seeing)


def drawn(export: Path, *, seed: int, n: int, shown: Any = SHOWN, text: str = "How many?") -> list[str]:
    """The texts that the training engine draws with the keys of the server."""
    model = find_model(export)
    prompt = encode_prompt(text, {"images": shown}, model.template, model.tokenizer)
    policy = model.load_policy("cpu")
    request = generate_request(
        policy,
        model.tokenizer,
        prompt_ids=[prompt.ids],
        keys=[sample_keys(prompt.ids, seed=seed, n=n)],
        sampling=SAMPLING,
        prefix=model.template.prefill,
        inputs=[prompt.inputs],
    )
    rollout = NativeEngine().generate(policy, request)
    rows = zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True)
    return [model.template.completion_text(row[:length], model.tokenizer) for row, length in rows]


def test_a_chat_with_images_is_what_the_training_engine_draws(server: Any, seeing: Path) -> None:
    client, urls = server.openai(), [each.data_url() for each in SHOWN]
    answer = client.chat.completions.create(model="seeing", messages=asked(*urls), n=4, seed=7)
    assert [choice.message.content for choice in answer.choices] == drawn(seeing, seed=7, n=4)
    assert answer.usage.prompt_tokens == 2 * 7 + len("How many?") + 1  # each image takes 7 tokens, the prefill one
    turned = client.chat.completions.create(model="seeing", messages=asked(*urls[::-1]), n=4, seed=7)
    assert [choice.message.content for choice in turned.choices] == drawn(seeing, seed=7, n=4, shown=SHOWN[::-1])
    assert [choice.message.content for choice in turned.choices] != drawn(seeing, seed=7, n=4)
    events = client.chat.completions.create(model="seeing", messages=asked(*urls), n=4, seed=7, stream=True)
    assert streamed(events, 4) == drawn(seeing, seed=7, n=4)


def test_the_page_asks_a_server_as_it_says(
    server: Any, seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shapes.png").write_bytes(picture(0).png)
    code = next(text for text in blocks(page("images"), "python") if "OpenAI" in text)
    exec(code.replace("http://127.0.0.1:8000", server.address).replace('model="shapes"', 'model="seeing"'), {})
    messages = asked(picture(0).data_url(), text="count red")
    answer = server.openai().chat.completions.create(model="seeing", messages=messages, temperature=0)
    assert capsys.readouterr().out == answer.choices[0].message.content + "\n"


@pytest.fixture
def shown_page(server: Any, browser: Browser, tmp_path: Path) -> Browser:
    """The page, and the two images beside each other in files."""
    for file, shown in zip(("one.png", "it's two.png"), SHOWN, strict=True):
        (tmp_path / file).write_bytes(shown.png)
    browser.show_at(1280)
    browser.console()  # an earlier page's
    browser.open(server.address + "/")
    until(lambda: "seeing" in browser.text("#model"))
    return browser


def _choose(page: Browser, *files: Path) -> None:
    page.fill("images", "\n".join(map(str, files)))


def _shown(page: Browser) -> list[str]:
    return list(page.run("return [...document.querySelectorAll('#shown img')].map(e => e.src)"))


def _answer(page: Browser) -> str:
    return str(page.run("return document.getElementById('answer').value"))


def _error(page: Browser) -> str:
    return page.text("#error:not([hidden])")


def _texts(page: Browser) -> list[str]:
    page.click("#go")
    until(lambda: "tokens" in page.text("#group") or _error(page))
    assert _error(page) == ""
    return page.texts("article .body > .text")


@needs_browser
def test_a_person_asks_about_images_on_the_page(
    shown_page: Browser,
    seeing: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = shown_page
    limits = (LIMITS.per_prompt, f"{LIMITS.megabytes:g} MB", f"{LIMITS.megapixels:g} million pixels")
    assert all(str(limit) in page.text("#limits") for limit in limits)
    _choose(page, tmp_path / "one.png", tmp_path / "it's two.png")
    until(lambda: page.count("#shown img") == 2)
    for field, value in {"problem": "How many?", "n": "4", "seed": "7"}.items():
        page.fill(field, value)
    assert _texts(page) == drawn(seeing, seed=7, n=4)
    page.open_details("#code")
    curl, python = page.texts(".snippet pre")
    monkeypatch.chdir(tmp_path)
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, check=True).stdout
    assert [choice["message"]["content"] for choice in json.loads(answer)["choices"]] == drawn(seeing, seed=7, n=4)
    exec(python, {})
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in drawn(seeing, seed=7, n=4))
    (tmp_path / "it's two.png").unlink()
    stopped = subprocess.run(["bash", "-c", curl], capture_output=True, text=True)
    assert stopped.returncode != 0 and stopped.stdout == "" and "it's two.png" in stopped.stderr
    assert (page.low_contrasts(), page.nameless(), page.overflow(), page.console()) == ([], [], 0, [])
    page.click("#shown button")
    assert _texts(page) == drawn(seeing, seed=7, n=4, shown=SHOWN[1:])
    page.show_at(390)
    assert page.overflow() == 0


@needs_browser
def test_the_page_begins_with_an_image_of_the_models_own_task(
    shown_page: Browser,
    seeing: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, (first, second, *_) = shown_page, TASK.validation(3)
    value = "return [...document.querySelectorAll('#problem, #answer, #shown img')].map(e => e.value ?? e.src)"
    assert page.run(value) == [first.question, first.answer, first.columns["images"][0].data_url()]
    page.fill("n", "2")
    page.fill("seed", "3")
    shown = first.columns["images"]
    assert _texts(page) == drawn(seeing, seed=3, n=2, shown=shown, text=first.question)
    assert page.count(".judged") == 2
    page.open_details("#code")
    curl, python = page.texts(".snippet pre")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # there is no file of the image
    answer = subprocess.run(["bash", "-c", curl], capture_output=True, check=True).stdout
    texts = drawn(seeing, seed=3, n=2, shown=shown, text=first.question)
    assert [choice["message"]["content"] for choice in json.loads(answer)["choices"]] == texts
    exec(python, {})
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)
    page.click("#another")
    assert page.run(value) == [second.question, second.answer, second.columns["images"][0].data_url()]


@needs_browser
@pytest.mark.parametrize(
    ("count", "content", "says", "stay"),
    [
        (LIMITS.per_prompt + 1, b"", f"Images: {LIMITS.per_prompt + 1} are chosen", True),
        (1, bytes(10_000_001), "Images: 0.png has more than 10 megabytes", True),
        (2, bytes(7_000_000), "Images: the files have more than 12.5 megabytes together", True),
        (1, b"no image", "Image 1: the image is no image that can be read", False),
    ],
)
def test_the_page_says_what_is_wrong_with_images(
    shown_page: Browser, seeing: Path, tmp_path: Path, count: int, content: bytes, says: str, stay: bool
) -> None:
    page, files = shown_page, [tmp_path / f"{number}.png" for number in range(count)]
    for file in files:
        file.write_bytes(content)
    earlier = [each.data_url() for each in SHOWN]
    _choose(page, tmp_path / "one.png", tmp_path / "it's two.png")
    until(lambda: _shown(page) == earlier)
    for field, value in {"problem": "How many?", "n": "2", "seed": "7", "answer": "3"}.items():
        page.fill(field, value)
    _choose(page, *files)
    until(lambda: _error(page) or _shown(page) != earlier)
    if not stay:
        page.click("#go")
        until(lambda: _error(page))
    assert _error(page).startswith(says)
    assert _shown(page) == (earlier if stay else [encoded(content)])
    assert _answer(page) == ("3" if stay else "")
    if stay:  # a refused choice changes nothing
        assert page.run("return document.getElementById('images').files.length") == 0
        assert _texts(page) == drawn(seeing, seed=7, n=2)


@needs_browser
def test_images_up_to_the_limits_that_are_told_are_sent(shown_page: Browser, seeing: Path, tmp_path: Path) -> None:
    assert "12.5 MB together" in shown_page.text("#limits")
    for number in (0, 1):
        (tmp_path / f"{number}.png").write_bytes(picture(0).png.ljust(6_250_000, b"\0"))
    _choose(shown_page, tmp_path / "0.png", tmp_path / "1.png")
    until(lambda: shown_page.count("#shown img") == 2)
    for field, value in {"problem": "How many?", "n": "2", "seed": "7"}.items():
        shown_page.fill(field, value)
    assert _texts(shown_page) == drawn(seeing, seed=7, n=2, shown=(picture(0), picture(0)))


@pytest.fixture
def slow_page(shown_page: Browser, tmp_path: Path) -> Browser:
    """A page where a file of the name slow.png is chosen, whose read waits for ``readSlow()``."""
    (tmp_path / "slow.png").write_bytes(picture(5).png)
    shown_page.run(
        "const read = FileReader.prototype.readAsDataURL;"
        "FileReader.prototype.readAsDataURL = function (file) {"
        "  if (file.name !== 'slow.png') return read.call(this, file);"
        "  window.readSlow = (done) => {"
        "    this.addEventListener('loadend', () => setTimeout(done)); read.call(this, file);"
        "  };"
        "}"
    )
    for field, value in {"problem": "How many?", "n": "2", "seed": "7", "answer": "3"}.items():
        shown_page.fill(field, value)
    _choose(shown_page, tmp_path / "slow.png")
    return shown_page


def _read_slow(page: Browser) -> None:
    page.wait_for("readSlow(arguments[0])")


@needs_browser
def test_of_two_choices_of_images_the_later_one_counts(slow_page: Browser, seeing: Path, tmp_path: Path) -> None:
    page = slow_page
    at_once = _answer(page)
    page.click("#go")  # waits for the images, whichever they are
    _choose(page, tmp_path / "one.png", tmp_path / "it's two.png")
    quick = [each.data_url() for each in SHOWN]
    until(lambda: _shown(page) == quick)
    page.fill("answer", "4")
    _read_slow(page)
    assert _shown(page) == quick
    until(lambda: "tokens" in page.text("#group") or _error(page))
    assert page.texts("article .body > .text") == drawn(seeing, seed=7, n=2)
    assert at_once == "" and _answer(page) == "4"  # the one before was of other images
    assert _texts(page) == drawn(seeing, seed=7, n=2)


@needs_browser
def test_another_problem_comes_with_its_own_image_while_files_are_read(slow_page: Browser) -> None:
    page, second = slow_page, TASK.validation(2)[1]
    page.click("#another")
    _read_slow(page)
    value = "return document.getElementById('problem').value"
    assert (page.run(value), _answer(page)) == (second.question, second.answer)
    assert _shown(page) == [each.data_url() for each in second.columns["images"]]


@needs_browser
@pytest.mark.parametrize("sampled", [True, False])
def test_nothing_is_sent_for_a_file_that_cannot_be_read(
    slow_page: Browser, seeing: Path, tmp_path: Path, sampled: bool
) -> None:
    page, earlier = slow_page, TASK.validation(1)[0].columns["images"]
    if sampled:
        page.click("#go")
    (tmp_path / "slow.png").unlink()
    _read_slow(page)
    until(lambda: page.text("#go") == "Sample")
    assert _error(page) == "Images: slow.png cannot be read."
    chats = "return performance.getEntriesByType('resource').filter(e => e.name.endsWith('/chat/completions')).length"
    assert page.run(chats) == 0 and _shown(page) == [each.data_url() for each in earlier]
    assert _texts(page) == drawn(seeing, seed=7, n=2, shown=earlier)
    _choose(page, tmp_path / "one.png")
    until(lambda: _shown(page) == [SHOWN[0].data_url()])


def test_a_policy_of_text_is_not_asked_about_images(narrow: Any, server: Any) -> None:
    assert "images" not in narrow.call("GET", "/v1/models")[1]["data"][0]
    limits = server.call("GET", "/v1/models")[1]["data"][0]["images"]
    assert limits == {"megabytes": 10, "megapixels": 16, "per_prompt": 8, "max_body_mb": 16}


def test_a_smaller_body_is_told_among_the_limits_of_images(seeing: Path, start: Callable[..., Any]) -> None:
    server = start("--max-body-mb", "1", model=seeing)
    assert server.call("GET", "/v1/models")[1]["data"][0]["images"]["max_body_mb"] == 1
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {(1 << 20) + 1}\r\n\r\n"
    assert server.exchange(head.encode()).startswith(b"HTTP/1.1 413")


def test_chats_with_and_without_images_are_answered_side_by_side(server: Any, seeing: Path) -> None:
    def ask(number: int) -> list[str]:
        messages = asked(*([picture(number).data_url()] if number else []))
        return [
            choice.message.content
            for choice in client.chat.completions.create(model="seeing", messages=messages, n=3, seed=number).choices
        ]

    client, numbers = server.openai(), [1, 0, 2, 1, 3, 0, 4, 2]
    alone = {number: ask(number) for number in set(numbers)}
    assert alone[1] == drawn(seeing, seed=1, n=3, shown=(picture(1),))
    with ThreadPoolExecutor(len(numbers)) as threads:
        assert list(threads.map(ask, numbers)) == [alone[number] for number in numbers]
    assert server.is_idle()


def test_an_image_stands_where_its_message_has_it(server: Any, seeing: Path) -> None:
    def tokens(*content: Any) -> list[int]:
        messages = [{"role": "user", "content": each} for each in content]
        return server.ask("/tokenize", {"messages": messages})["tokens"]

    tokenizer, url = find_model(seeing).tokenizer, picture(0).data_url()
    image, before, behind = (tokenizer.convert_tokens_to_ids(each) for each in ("<image>", "1", "2"))
    texts = [{"type": "text", "text": "1"}, {"type": "input_text", "text": "2"}]
    whole = tokens([texts[0], part(url), texts[1]])
    assert whole[0] == before and whole[8] == behind and whole[1:8].count(image) == 4
    assert tokens([part(url), *texts])[7:9] == [before, behind] == tokens([*texts, part(url)])[:2]
    joined = tokens([part(url)], "1")  # messages of one role are one
    assert joined[:7] == whole[1:8] and joined[7:] == tokenizer("\n\n1<think>", add_special_tokens=False).input_ids


@on_a_loop
async def test_turns_go_through_the_chat_template_with_their_images_and_texts(seeing: Path) -> None:
    async def read(*messages: dict[str, Any]) -> str:
        prompt = await Prompts(model).from_messages([Message.model_validate(each) for each in messages])
        return str(model.tokenizer.decode(prompt.ids)).replace("<fake_token_around_image>", "|")

    model = find_model(seeing)
    model.tokenizer.chat_template = SMOLVLM_CHAT
    (shown,) = asked(picture(0).data_url(), text="1")
    turns = ({"role": "assistant", "content": "2"}, {"role": "user", "content": "3"})
    image = "|<global-img>" + 4 * "<image>" + "|"
    told = await read({"role": "developer", "content": "Be brief."}, shown, *turns)
    assert told == f"System: Be brief.\nUser:{image}1\nAssistant: 2\nUser: 3\nAssistant:<think>"
    without = await read({"role": "user", "content": "1"}, *turns)
    assert without == "User: 1\nAssistant: 2\nUser: 3\nAssistant:<think>"


def encoded(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def file_of(width: int, height: int, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, kind, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many pixels that is no longer than a text."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    chunks = [b"IHDR" + head, b"IDAT" + zlib.compress(bytes(1000)), b"IEND"]
    sized = [(len(c) - 4).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(sized)


FILM = file_of(2, 2, "GIF", save_all=True, append_images=[Image.new("RGB", (2, 2), "red")])
PHOTO = picture(0, 64, 64).png


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/a.png", "nothing is fetched"),
        ("http://127.0.0.1:8000/metrics", "nothing is fetched"),
        ("ftp://example.org/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("/etc/passwd", "nothing is fetched"),
        ("", "nothing is fetched"),
        ("data:text/html;base64,PGI+", "no data: URL of an image"),
        ("data:image/png,abc", "no data: URL of an image"),
        ("data:image/png;base64,???", "not in base64"),
        ("data:image/png;base64,", "is empty"),
        (encoded(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "no image that can be read"),
        (encoded(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "png"), "no image that can be read"),
        (encoded(PHOTO[: len(PHOTO) // 2]), "cannot be decoded"),
        (encoded(FILM, "gif"), "several frames"),
        (encoded(bomb(30_000, 30_000)), "million pixels: the server's limit of megapixels"),
        (encoded(bomb(4001, 4000)), "4001x4000"),
        (encoded(bytes(10_000_001)), "the server's limit of megabytes"),
    ],
)  # fmt: skip
def test_what_is_no_image_within_the_limits_is_refused_by_its_field(server: Any, url: str, says: str) -> None:
    error = server.refusal(CHAT, {"messages": asked(picture(0).data_url(), url)})
    assert error["param"] == "messages.0.content.1.image_url.url" and says in error["message"]
    assert "data.source" not in error["message"] and "\n" not in error["message"]


def test_a_conversation_has_so_many_images(server: Any) -> None:
    urls = [picture(number).data_url() for number in range(LIMITS.per_prompt + 1)]
    error = server.refusal(CHAT, {"messages": asked(*urls)})
    assert error["param"] == f"messages.0.content.{LIMITS.per_prompt}.image_url.url"
    assert server.ask(CHAT, {"messages": asked(*urls[1:]), "max_tokens": 1})["usage"]["completion_tokens"] == 1


def test_an_image_as_large_as_the_limit_fits_into_a_body(server: Any) -> None:
    content = file_of(8, 8)
    padded = content + bytes(10_000_000 - len(content))
    assert server.ask(CHAT, {"messages": asked(encoded(padded)), "max_tokens": 1})["usage"]["prompt_tokens"] > 0
    head = post(CHAT, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % (17 << 20))
    refused = server.exchange(head)
    assert b" 413 " in refused.partition(b"\r\n")[0] and b"--max-body-mb" in refused


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": asked(text="<image>How many?")}, "prompt"),
        (CHAT, {"messages": asked(picture(0).data_url(), text="<image>")}, "messages"),
        (COMPLETIONS, {"prompt": "<image>"}, "prompt"),
        (EVALUATE, {"items": [{"problem": "<image>", "answer": "1"}]}, "items.0.problem"),
        (EVALUATE, {"items": [{"problem": "1", "answer": "1", "image": "a.png"}]}, "items.0.problem"),
        (CHAT, {"messages": asked(picture(0).data_url()), "tools": [{"type": "function", "function": {"name": "a"}}]},
         "tools"),
        (CHAT, {"messages": [{"role": "system", "content": [part(picture(0).data_url())]}, *asked()]},
         "messages.0.content"),
        (CHAT, {"messages": asked(picture(0).data_url(), text="1" * 160)}, "messages"),
        (CHAT, {"messages": asked(picture(0).data_url(), text="\N{GREEK SMALL LETTER PI}")}, "messages"),
        (CHAT, {"messages": [*asked(picture(0).data_url()), {"role": "assistant", "content": "1"}, *asked()]},
         "messages"),
    ],
)  # fmt: skip
def test_what_would_be_read_otherwise_than_asked_is_refused(server: Any, path: str, body: Any, param: str) -> None:
    assert server.refusal(path, body)["param"] == param


def test_the_token_of_an_image_is_no_token_of_a_prompt(server: Any, seeing: Path) -> None:
    image = find_model(seeing).tokenizer.convert_tokens_to_ids("<image>")
    assert server.refusal(COMPLETIONS, {"prompt": [image]})["param"] == "prompt"


def test_a_policy_of_text_refuses_images_in_one_line(narrow: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        narrow.openai().chat.completions.create(model="tiny", messages=asked(picture(0).data_url()))
    assert refused.value.param == "messages.0.content.0.image_url"
    assert "reads text" in refused.value.message and "\n" not in refused.value.message
