"""Times rollouts of vLLM; ``rollout.py`` runs it in an environment with vLLM, so it imports nothing of grpo_pl."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    request = json.load(sys.stdin)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(request["threads"]))
    import vllm  # type: ignore[import-not-found]

    longest = len(request["prompts"][0]) + max(request["lengths"])
    engine = vllm.LLM(
        model=request["model"],
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        enable_prefix_caching=True,  # the prompt of a group is prefilled once, as in the native engine
        max_model_len=longest + 1,
        max_num_seqs=len(request["lengths"]),
    )
    rows = [{"prompt_token_ids": ids} for ids in request["prompts"] for _ in range(request["group"])]
    sampling = [
        vllm.SamplingParams(
            max_tokens=length, min_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        for length in request["lengths"]
    ]
    seconds = []
    for repetition in range(request["repetitions"] + 1):
        engine.reset_prefix_cache()  # the weights have changed in between, in training
        start = time.perf_counter()
        outputs = engine.generate(rows, sampling, use_tqdm=False)
        if repetition:
            seconds.append(time.perf_counter() - start)
        drawn = [len(output.outputs[0].token_ids) for output in outputs]
        assert drawn == request["lengths"], f"vLLM drew {drawn} tokens"
    print(json.dumps({"version": vllm.__version__, "seconds": seconds}))


if __name__ == "__main__":
    main()
