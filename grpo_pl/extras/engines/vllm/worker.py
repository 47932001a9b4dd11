"""``VLLMWorker``: vLLM inside an engine's child process."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as RowParams
from vllm.sampling_params import RequestOutputKind

from grpo_pl.extras.engines.vllm.engine import SECOND_RUNNER
from grpo_pl.extras.engines.vllm.keyed_draws import DRAW, KEY, TOP, KeyedDraws, SlotDraws
from grpo_pl.extras.engines.vllm.memory import cache_memory
from grpo_pl.rollout.decoding import DecodeMonitor, assemble, pad_left, row_keys
from grpo_pl.rollout.engine import ProgressFn
from grpo_pl.types import NO_TOKEN, GenerateRequest, Rollout


class VLLMWorker:
    """One vLLM engine with the architecture of ``config`` and, until the first push, made-up weights.

    Args:
        config: the policy's ``transformers`` config as plain values.
        dtype, max_tokens, max_batch_rows: see `VLLMEngine`.
        context: most tokens that the policy itself can attend to, if its config says.
        memory: arguments of `cache_memory` that do not depend on the GPU.
        sleep: `sleep` will be asked for.
        engine_args: further arguments of vLLM's.

    Raises:
        ValueError: vLLM cannot run such a policy, or there is no such argument.
    """

    def __init__(
        self,
        *,
        config: dict[str, Any],
        dtype: str,
        max_tokens: int,
        context: int | None,
        max_batch_rows: int,
        memory: Mapping[str, Any],
        sleep: bool,
        engine_args: dict[str, Any],
    ) -> None:
        known = {field.name for field in fields(EngineArgs)}
        for name in engine_args.keys() - known:
            near = get_close_matches(name, known, n=1)
            raise ValueError(
                f"model.engine: vLLM has no argument {name!r}{f'; did you mean {near[0]}?' if near else '.'}"
            )
        self._max_tokens, self._context, self._asleep = max_tokens, context, False
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (None, None)
        cache, share = cache_memory(**memory, free=free, total=total)
        of_device = {} if share is None else {"gpu_memory_utilization": share}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            arguments = EngineArgs(
                model=folder,
                dtype=dtype,  # type: ignore[arg-type]
                max_model_len=max_tokens,
                max_num_seqs=max_batch_rows,
                kv_cache_memory_bytes=cache,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",  # the policy's own defaults are not ours
                logits_processors=[SlotDraws if os.environ.get(SECOND_RUNNER) == "1" else KeyedDraws],
                logprobs_mode="processed_logits",
                worker_extension_cls="grpo_pl.extras.engines.vllm.worker.Reload",
                async_scheduling=False,  # which draws before it has written the last token down
                max_logprobs=-1,  # no limit
                enable_sleep_mode=sleep,
                **{"enable_prefix_caching": True, "disable_log_stats": True, "seed": 0, **of_device, **engine_args},
            )
            try:
                self._engine = LLMEngine.from_engine_args(arguments)
                self._vocabulary = int(self._engine.model_config.get_vocab_size())
                # two tokens show at once what this machine's kernels cannot do
                params = RowParams(temperature=0.0, max_tokens=2, logprobs=0, output_kind=RequestOutputKind.DELTA)
                for _ in self._steps(self._add([[0]], [params]), lambda: None):
                    pass
            except Exception as error:
                line = " ".join(str(error).split())
                raise ValueError(
                    f"vLLM cannot run this policy ({config.get('model_type')}, {max_tokens} tokens, {dtype}): {line}"
                ) from error

    def sleep(self) -> None:
        """Gives weights and cache back to the GPU; `load` brings others."""
        self._engine.sleep(level=2)  # the first level keeps a copy of the weights, which are old after the update
        self._asleep = True

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False
        self._engine.collective_rpc("take_weights", args=(weights,))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop the keys and values of the former weights.")

    @torch.inference_mode()
    def generate(self, request: GenerateRequest, *, progress: ProgressFn, should_stop: Callable[[], bool]) -> Rollout:
        longest = max(map(len, request.prompt_ids)) + request.sampling.max_completion_length
        # turns of episodes may ask for more than the context holds, and take what fits
        if longest > self._max_tokens and self._max_tokens != self._context:
            raise ValueError(
                f"a prompt and its completion may have {longest} tokens, the engine's limit is {self._max_tokens}: "
                "raise model.engine.init_args.max_tokens."
            )
        owners = torch.arange(len(request.prompt_ids)).repeat_interleave(request.group_size)  # (B,)
        monitor = DecodeMonitor(request, progress=progress, should_stop=should_stop)
        prompts = [list(request.prompt_ids[owner]) for owner in owners.tolist()]
        drawn = self._draw(prompts, row_keys(request.keys), monitor)
        ids, mask = pad_left(request.prompt_ids, request.pad_token_id)
        return assemble(monitor, prompt_ids=ids[owners], prompt_mask=mask[owners], drawn=drawn)

    def _draw(
        self, prompts: Sequence[list[int]], names: Sequence[int], monitor: DecodeMonitor
    ) -> list[tuple[Tensor, Tensor]]:
        """Tokens and log-probabilities of each row, both (1, T)."""
        sampling = monitor.sampling
        asked = zip(monitor.request.row_limits, prompts, strict=True)
        limits = [min(limit, self._max_tokens - len(prompt)) for limit, prompt in asked]
        draw = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        top = sampling.top_logprobs if sampling.temperature > 0.0 else 0
        # all are added before the first step, so that a rollout depends on nothing but its request
        params = [
            RowParams(
                temperature=0.0,
                max_tokens=limit,
                ignore_eos=True,
                stop_token_ids=sorted(monitor.eos),
                logprobs=min(top + 1, self._vocabulary) if top else 0,  # the drawn one may come on top of them
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={KEY: name, DRAW: draw, TOP: top},
            )
            for name, limit in zip(names, limits, strict=True)
        ]
        requests = self._add(prompts, params)
        room, lengths = torch.tensor(limits), torch.zeros(len(requests), dtype=torch.int64)
        tokens = torch.full((len(requests), max(limits)), monitor.request.pad_token_id)
        logprobs = torch.zeros(tokens.shape)
        for index, new_tokens, new_logprobs, told in self._steps(requests, monitor.check_stop):
            tokens[index, lengths[index]], logprobs[index, lengths[index]] = new_tokens, new_logprobs
            if top:
                monitor.record_top(index, lengths[index], *_likeliest(told, new_tokens, min(top, self._vocabulary)))
            lengths[index] += 1
            ended = []
            for last in (False, True):
                some = (lengths[index] == room[index]) == last
                alive = monitor.alive(new_tokens[some], index[some], last=last)
                finished = index[some][~torch.tensor(alive, dtype=torch.bool)]
                ended += [requests[row] for row in finished.tolist()]
            self._engine.abort_request(ended, internal=True)  # a stop string may have ended them
        return [
            (tokens[row : row + 1, :length], logprobs[row : row + 1, :length])
            for row, length in enumerate(lengths.tolist())
        ]

    def _add(self, prompts: Sequence[list[int]], params: Sequence[RowParams]) -> list[str]:
        """vLLM's own names of new requests, whose outputs bear their row's number."""
        return [
            str(self._engine.add_request(str(row), {"prompt_token_ids": prompt}, how))
            for row, (prompt, how) in enumerate(zip(prompts, params, strict=True))
        ]

    def _steps(
        self, requests: Sequence[str], check_stop: Callable[[], None]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, list[dict[int, float]]]]:
        """Rows, tokens and log-probabilities, all (rows,), of what each step of vLLM's draws, and what `KeyedDraws`
        told of each row, by token."""
        try:
            while self._engine.has_unfinished_requests():
                check_stop()
                # an output without a token is that of a row whose prompt is still being read
                outputs = [(int(o.request_id), o.outputs[0]) for o in self._engine.step() if o.outputs[0].token_ids]
                tokens = [output.token_ids[0] for _, output in outputs]
                told = [{token: one.logprob for token, one in output.logprobs[0].items()} for _, output in outputs]
                logprobs = [-values[token] for token, values in zip(tokens, told, strict=True)]
                rows = torch.tensor([row for row, _ in outputs], dtype=torch.int64)
                yield rows, torch.tensor(tokens, dtype=torch.int64), torch.tensor(logprobs), told
        finally:
            self._engine.abort_request(list(requests), internal=True)  # all, where the rollout was told to stop


def _likeliest(told: Sequence[dict[int, float]], tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities (rows, count) of the likeliest tokens, of what `KeyedDraws` told of each row."""
    ids = torch.full((len(told), count), NO_TOKEN, dtype=torch.int32)
    logprobs = torch.full(ids.shape, -torch.inf)
    for row, (token, values) in enumerate(zip(tokens.tolist(), told, strict=True)):
        found = {one: value for one, value in values.items() if value > -torch.inf}
        found[token] = -found[token]
        if len(found) > count:  # it is not among them
            del found[token]
        ranked = sorted(found.items(), key=lambda pair: -pair[1])
        ids[row, : len(ranked)] = torch.tensor([one for one, _ in ranked], dtype=torch.int32)
        logprobs[row, : len(ranked)] = torch.tensor([value for _, value in ranked])
    return ids, logprobs


class Reload:
    """Mixed into vLLM's worker by ``worker_extension_cls``: takes new weights, including those that it has packed."""

    def take_weights(self: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Every weight of the model anew. On CPUs layers compute with packed copies, two kinds of which vLLM's own
        reload leaves old: those of experts, which it packs with their kernel, and of a head that is tied to the
        embedding, which is not loaded itself."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        modules = list(self.get_model().modules())
        on_cpu = self.device.type == "cpu"
        for module in modules:
            if on_cpu and getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None  # so that it is made again
        self.reload_weights(weights_iterator=weights)
        for module in modules:
            if on_cpu and isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
