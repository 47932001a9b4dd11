"""The native engine in a child process draws what it draws here, whatever form checkpoints hold its weights in."""

from collections.abc import Iterator

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.rollout.native.engine import NativeEngine
from tests.rollout.drawn import UNEVEN, assert_same, generate, make_keys

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def engine() -> Iterator[NativeChildEngine]:
    made = NativeChildEngine(max_batch_rows=5)
    yield made
    made.close()


def test_a_model_whose_checkpoints_hold_its_experts_apart(engine: NativeChildEngine) -> None:
    shape = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model, keys = MixtralForCausalLM(MixtralConfig(**shape, **heads, **ends, initializer_range=0.2)), make_keys(3, 2)
    for _ in range(2):
        ours, here = (
            generate(one, model, UNEVEN, keys, length=8, eos=[6]) for one in (engine, NativeEngine(max_batch_rows=5))
        )
        assert_same(ours, here, atol=0.0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        engine.update_weights(model)
    assert engine.pushes == 2


@pytest.mark.parametrize(("field", "value"), [("threads", 0), ("max_batch_rows", -1)])
def test_refuses_counts_that_are_none(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"model\.engine needs {field} >= .*got {value}"):
        NativeChildEngine(**{field: value})  # type: ignore[arg-type]
