"""The decode kernel in C: finds the built library, packs a policy for it, and draws rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_pl.extras.kernels import library
from grpo_pl.policy.weights import whole
from grpo_pl.rollout.native.weights import decoded_part, linear_parts

MOST_ROWS = 32
"""Most rows that a thread of the kernel takes together, as in ``decoding.h``."""
_NO_MEMORY = 2


class _Matrix(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_void_p) for name in ("panels", "bias")),
        *((name, c_int32) for name in ("inputs", "outputs")),
    )


class _Layer(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Model(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_int32) for name in ("layers", "width", "intermediate", "vocabulary")),
        *((name, c_int32) for name in ("query_heads", "key_heads", "head_size")),
        *((name, c_float) for name in ("epsilon", "head_epsilon", "scale")),
        *((name, c_void_p) for name in ("embedding", "norm", "cosines", "sines")),
        ("layer", POINTER(_Layer)),
        ("head", _Matrix),
    )


Ask = CFUNCTYPE(c_int32, c_int64, c_int64)
"""Of the tokens that are drawn and the completions that are finished; not 0 ends the call."""


class _Request(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_int32) for name in ("prompts", "rows", "length", "stops", "threads")),
        ("temperature", c_float),
        *((name, c_void_p) for name in ("prompt_tokens", "prompt_starts", "owners", "keys", "limits", "stop_tokens")),
        ("ask", Ask),
        *((name, c_void_p) for name in ("tokens", "logprobs", "lengths")),
    )


@cache
def built_kernels(file: Path | None = None) -> dict[str, DecodeKernel]:
    """`library.built_kernels`, as this module uses them."""
    return {name: DecodeKernel(functions) for name, functions in library.built_kernels(file).items()}


class DecodeKernel:
    """The kernel for one instruction set."""

    def __init__(self, functions: library.Kernels) -> None:
        self._functions = functions
        self.name, self.panel, self.lanes = functions.name.decode(), int(functions.panel), int(functions.lanes)

    def product(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Callable[[], Tensor]:
        """Computes x Wᵀ + b by the kernel's product, x (rows, in) and W (out, in): for tests and benchmarks."""
        matrix = self.matrix([weight], [bias])
        y = torch.empty(len(x), self.whole_panels(len(weight)), dtype=torch.float32)
        pointers = byref(matrix.fields), _pointer(x, x.shape), len(x), _pointer(y, y.shape)

        def run(x: Tensor = x) -> Tensor:  # keeps what the pointers point to, as `matrix` keeps weights and biases
            self._functions.multiply(*pointers)
            return y[:, : matrix.fields.outputs]

        return run

    def matrix(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PackedMatrix:
        return PackedMatrix(self._functions, weights, biases)

    def whole_panels(self, n: int) -> int:
        """The least multiple of a panel's outputs or columns that holds ``n``."""
        return -(-n // self.panel) * self.panel

    def rollout(self, policy: PackedPolicy, request: _Request) -> None:
        outcome = self._functions.rollout(byref(policy.fields), byref(request))
        if outcome == _NO_MEMORY:
            rows, columns = request.rows, policy.columns
            raise MemoryError(f"keys and values of {rows} rows of up to {columns} tokens do not fit into memory.")

    def advance(self, policy: PackedPolicy, batch: Structure) -> None:
        """``advance`` of ``library.h``, with a ``struct batch``."""
        if self._functions.advance(byref(policy.fields), byref(batch)) == _NO_MEMORY:
            raise MemoryError("the decode kernel has no memory for the activations of its rows.")


class PackedMatrix:
    """Matrices (out, in) with one input, and their biases, below one another as the kernel reads them."""

    def __init__(self, kernel: library.Kernels, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
        panels = -(-outputs // kernel.panel)
        self._panels = torch.empty(panels, inputs, kernel.panel, dtype=torch.float32)
        self._bias: Tensor | None = None
        if any(bias is not None for bias in biases):
            self._bias = torch.zeros(panels * kernel.panel, dtype=torch.float32)
        first = 0
        for weight, bias in zip(weights, biases, strict=True):
            count, weight = len(weight), weight.contiguous()
            kernel.pack(_pointer(weight, (count, inputs)), first, count, inputs, self._panels.data_ptr())
            if self._bias is not None and bias is not None:
                self._bias[first : first + count] = bias
            first += count
        self.fields = _Matrix(
            self._panels.data_ptr(), None if self._bias is None else self._bias.data_ptr(), inputs, outputs
        )


class PackedPolicy:
    """The weights of a model of the Llama family, read once and packed for the kernel.

    Args:
        columns: most tokens of a prompt and its completion.
        embedding: what the tokens of prompts are read as, where that is more than the model's own table.
    """

    def __init__(self, kernel: DecodeKernel, model: Any, *, columns: int, embedding: Tensor | None = None) -> None:
        model = decoded_part(model)
        config, trunk = model.config, model.model
        attention = trunk.layers[0].self_attn
        self.vocabulary, self.columns = config.vocab_size, 0
        table = whole(trunk.embed_tokens.weight) if embedding is None else embedding
        assert len(table) >= self.vocabulary
        self._kernel, self._kept = kernel, list[Any]()  # what the structures point to
        self._rotary = trunk.rotary_emb
        width, size = config.hidden_size, attention.head_dim
        head_norms = hasattr(attention, "q_norm")
        layers = (_Layer * len(trunk.layers))(*(self._layer(layer, width, size) for layer in trunk.layers))
        self.fields = _Model(
            layers=len(layers),
            width=width,
            intermediate=config.intermediate_size,
            vocabulary=self.vocabulary,
            query_heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_size=size,
            epsilon=trunk.norm.variance_epsilon,
            head_epsilon=attention.q_norm.variance_epsilon if head_norms else 0.0,
            scale=attention.scaling,
            norm=self._vectors(trunk.norm.weight, width),
            layer=layers,
            head=self._matrix([model.lm_head], width, self.vocabulary),
        )
        self._kept.append(layers)
        self.read_from(table)
        self.reach(columns)

    def read_from(self, table: Tensor) -> None:
        """Reads tokens as rows of this table of embeddings from now on."""
        self._table, self._readable = whole(table).contiguous(), len(table)  # tokens that a prompt may have
        self.fields.embedding = _pointer(self._table, (self._readable, self.fields.width))

    def reach(self, columns: int) -> None:
        """Makes rotary embeddings for at least so many positions."""
        if columns > self.columns:
            self.columns, half = max(columns, 2 * self.columns), self.fields.head_size // 2
            positions = torch.arange(self.columns).unsqueeze(0)
            turns = self._rotary(torch.empty(1, dtype=torch.float32), positions)  # cosines, sines
            self._turns = [each[0, :, :half].contiguous() for each in turns]
            self.fields.cosines, self.fields.sines = (_pointer(each, (self.columns, half)) for each in self._turns)

    def cache_size(self, columns: int) -> int:
        """Numbers in the keys and values of so many tokens, whole panels of them, as ``decoding.h`` lays them out."""
        size = int(self.fields.head_size)
        values = -(-size // self.value_panel) * self.value_panel
        return columns * int(self.fields.layers * self.fields.key_heads) * (size + values)

    def check_tokens(self, tokens: Tensor) -> None:
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._readable:
            wrong = next(int(token) for token in tokens if not 0 <= token < self._readable)
            raise ValueError(f"a prompt has the token {wrong}, and the policy's vocabulary {self.vocabulary} tokens.")

    @property
    def value_panel(self) -> int:
        """Components of a panel of values."""
        return self._kernel.lanes if self.fields.head_size <= self._kernel.lanes else self._kernel.panel

    def _layer(self, layer: Any, width: int, size: int) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        config = attention.config
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        norms = hasattr(attention, "q_norm")
        inner = config.intermediate_size
        return _Layer(
            attention_norm=self._vectors(layer.input_layernorm.weight, width),
            mlp_norm=self._vectors(layer.post_attention_layernorm.weight, width),
            query_norm=self._vectors(attention.q_norm.weight, size) if norms else None,
            key_norm=self._vectors(attention.k_norm.weight, size) if norms else None,
            qkv=self._matrix([attention.q_proj, attention.k_proj, attention.v_proj], width, queries + 2 * keys),
            output=self._matrix([attention.o_proj], queries, width),
            gate_up=self._matrix([mlp.gate_proj, mlp.up_proj], width, 2 * inner),
            down=self._matrix([mlp.down_proj], inner, width),
        )

    def _matrix(self, modules: Sequence[Any], inputs: int, outputs: int) -> _Matrix:
        """Several linear layers with one input as one product."""
        packed = self._kernel.matrix(*linear_parts(modules))
        assert (packed.fields.outputs, packed.fields.inputs) == (outputs, inputs), (
            "the layers have other sizes than the config says"
        )
        self._kept.append(packed)
        return packed.fields

    def _vectors(self, tensor: Tensor, *shape: int) -> int:
        tensor = whole(tensor).contiguous()
        self._kept.append(tensor)
        return _pointer(tensor, shape)


def draw_rollout(
    kernel: DecodeKernel,
    policy: PackedPolicy,
    prompts: Sequence[Sequence[int]],
    *,
    owners: Tensor,
    keys: Tensor,
    limits: Tensor,
    temperature: float,
    stop_tokens: Sequence[int],
    ask: Callable[[int, int], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (B, T), their log-probabilities (B, T), zeros behind the last, and how many each row has (B,).

    The number of threads is torch's, and no bit depends on it.

    Args:
        owners: (B,) index of each row's prompt, ascending.
        keys: (B,) int64 sampling keys.
        limits: (B,) most tokens of each row.
        ask: called before, now and then, and at the end as ``ask(tokens_drawn, completions_finished)``; what it raises
            ends the rollout.

    Raises:
        MemoryError: keys and values do not fit into memory.
    """
    rows, length = len(owners), int(limits.max())
    starts = torch.tensor([0, *(len(prompt) for prompt in prompts)]).cumsum(0)
    flat = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    owners, limits, keys = owners.int().contiguous(), limits.int().contiguous(), keys.contiguous()
    _check(policy, prompts, flat, owners, keys, limits)
    stops = torch.tensor(stop_tokens, dtype=torch.int32)
    tokens, logprobs = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length, dtype=torch.float32)
    lengths = torch.zeros(rows, dtype=torch.int32)
    ask(0, 0)
    with asking(ask) as asked:
        request = _Request(
            prompts=len(prompts),
            rows=rows,
            length=length,
            stops=len(stops),
            threads=torch.get_num_threads(),
            temperature=temperature,
            prompt_tokens=flat.data_ptr(),
            prompt_starts=starts.data_ptr(),
            owners=owners.data_ptr(),
            keys=keys.data_ptr(),
            limits=limits.data_ptr(),
            stop_tokens=stops.data_ptr(),
            ask=asked,
            tokens=tokens.data_ptr(),
            logprobs=logprobs.data_ptr(),
            lengths=lengths.data_ptr(),
        )
        kernel.rollout(policy, request)
    ask(int(lengths.sum()), rows)
    return tokens, logprobs, lengths


@contextmanager
def asking(ask: Callable[[int, int], None]) -> Iterator[Any]:
    """Context manager: ``ask`` as a kernel calls it while it draws; what it raises ends the call and is raised here."""
    raised: list[BaseException] = []

    def asked(drawn: int, finished: int) -> int:
        try:
            ask(drawn, finished)
        except BaseException as error:  # cannot pass through C
            raised.append(error)
        return len(raised)

    yield Ask(asked)
    if raised:
        raise raised[0]


def _check(
    policy: PackedPolicy, prompts: Sequence[Sequence[int]], flat: Tensor, owners: Tensor, keys: Tensor, limits: Tensor
) -> None:
    """The kernel checks nothing, so all that it uses as an index or a size is checked here."""
    longest = max(len(prompt) for prompt in prompts)
    assert min(len(prompt) for prompt in prompts) > 0 and longest + int(limits.max()) <= policy.columns
    assert owners.shape == keys.shape == limits.shape and keys.dtype == torch.int64 and int(limits.min()) > 0
    assert int(owners.min()) >= 0 and int(owners.max()) < len(prompts)
    policy.check_tokens(flat)


def _pointer(tensor: Tensor, shape: Sequence[int]) -> int:
    assert tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
    assert tensor.shape == tuple(shape), (tensor.shape, shape)
    return tensor.data_ptr()
