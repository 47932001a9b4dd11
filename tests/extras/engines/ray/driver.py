"""``driver.py ADDRESS CPUS actor|raylet|none``: draws in a process of its own, and kills that in the middle of it."""

import logging
import sys
from contextlib import suppress

import child_engines
import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_pl.extras.engines.ray import RayEngine
from grpo_pl.rollout.engine import EngineDied
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams

logging.basicConfig(format="%(message)s")
torch.manual_seed(0)
shape = {"vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
model = Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2, max_position_embeddings=4096))
request = GenerateRequest(
    prompt_ids=[[1]],
    keys=[[SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=0, sample=0)]],
    sampling=SamplingParams(max_completion_length=40),
    eos_token_ids=[],
    pad_token_id=0,
)
victims = [{"actor": "EngineActor", "raylet": "raylet/raylet"}[name] for name in sys.argv[3:] if name != "none"]


def kill(tokens: int, finished: int) -> None:
    while tokens and victims:
        victim = victims.pop()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                family = " ".join(" ".join(one.cmdline()) for one in [process, *process.parents()[:1]])
                if victim in " ".join(process.cmdline()) and sys.argv[1] in family:  # a raylet is told the address
                    process.kill()


worker = child_engines.NativeInChild(threads=1, pause_s=0.05)
engine = RayEngine(engine=worker, address=sys.argv[1], cpus=float(sys.argv[2]))
try:
    print("drawn", tuple(engine.generate(model, request, progress=kill).completion_ids.shape), flush=True)
except (ValueError, EngineDied) as error:
    print(error)
engine.close()
