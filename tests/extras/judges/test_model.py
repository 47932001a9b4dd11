import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from grpo_pl.rewards import ModelReward
from tests.rewards.tiny_models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier without a padding token."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3, "initializer_range": 1.0}
    folder = tmp_path_factory.mktemp("reward_model")
    return save_tiny(folder, "LlamaForSequenceClassification", width=16, special="eos", **shape)


def reference(folder: Path, text: str) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = 0
    with torch.inference_mode():
        return model(**AutoTokenizer.from_pretrained(folder)([text], return_tensors="pt")).logits[0]


def test_each_value_is_the_logit_of_its_own_text_whatever_the_batch(folder: Path) -> None:
    prompts, completions = ["1+1=", "", "a much longer prompt "], ["2", "short", "and more"]
    scores = ModelReward(model=str(folder), label=1, batch_size=2)(completions, [""] * 3, {"prompt": prompts})
    expected = [reference(folder, p + c)[1].item() for p, c in zip(prompts, completions, strict=True)]
    assert [s.value for s in scores] == pytest.approx(expected, abs=1e-4)
    assert [s.status for s in scores] == ["ok" if v >= 1 else "wrong" for v in expected]


def test_activations(folder: Path) -> None:
    logits = reference(folder, "x")
    for activation, expected in [("sigmoid", logits.sigmoid()[2]), ("softmax", logits.softmax(0)[2])]:
        reward = ModelReward(model=str(folder), label=2, activation=activation)  # type: ignore[arg-type]
        assert reward(["x"], [""], {})[0].value == pytest.approx(expected.item(), abs=1e-5)


def test_a_long_text_loses_its_beginning(folder: Path) -> None:
    reward = ModelReward(model=str(folder), max_length=4)
    values = [s.value for s in reward(["zzzzabcd", "abcd", "abcdzzzz"], [""] * 3, {})]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert values[2] != pytest.approx(values[1], abs=1e-3)


def test_senseless_options_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="activation"):
        ModelReward(model=str(folder), activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size"):
        ModelReward(model=str(folder), batch_size=0)
    with pytest.raises(ValueError, match="label 3"):
        ModelReward(model=str(folder), label=3)(["x"], [""], {})


def test_a_pickle_does_not_carry_the_model(folder: Path) -> None:
    reward = ModelReward(model=str(folder))
    before = reward(["x"], [""], {})[0].value
    data = pickle.dumps(reward)
    assert len(data) < 2000
    assert pickle.loads(data)(["x"], [""], {})[0].value == pytest.approx(before)


def test_weights_in_a_pickle_are_refused(folder: Path, tmp_path: Path) -> None:
    """Reading them could run code of whoever wrote the model."""
    model = ModelReward(model=str(folder)).loaded[0]
    shutil.copytree(folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        ModelReward(model=str(tmp_path / "pickled"))(["a"], [""], {})


def test_threads_that_call_it_at_once_share_one_model_and_do_not_disturb_each_other(folder: Path) -> None:
    """As in the server, which scores eight requests at a time."""
    threads, texts = 8, [["x" * (1 + (7 * i + k) % 40) for k in range(24)] for i in range(8)]
    alone = ModelReward(model=str(folder), batch_size=4)
    expected = [[score.value for score in alone(part, [""] * 24, {})] for part in texts]
    reward, start = ModelReward(model=str(folder), batch_size=4), threading.Barrier(threads)

    def call(part: list[str]) -> tuple[object, list[float | None]]:
        start.wait()
        model = reward.loaded[0]
        return model, [score.value for _ in range(10) for score in reward(part, [""] * 24, {})]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(call, texts))
    assert len({id(model) for model, _ in found}) == 1
    for (_, values), right in zip(found, expected, strict=True):
        assert values == pytest.approx(right * 10, abs=1e-4)


def test_no_text_has_no_score_alone_and_among_others(folder: Path) -> None:
    reward = ModelReward(model=str(folder))
    alone, among = reward([""], [""], {})[0], reward(["", "x"], ["", ""], {})
    assert (alone.value, alone.status) == (among[0].value, among[0].status) == (None, "unavailable")
    assert among[1].value == pytest.approx(reward(["x"], [""], {})[0].value, abs=1e-4)
