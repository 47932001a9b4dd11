"""Own decoding forward pass for Llama, Mistral, Qwen2 and Qwen3: fused weights, preallocated keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_pl.policy.quantization import is_quantized, plain
from grpo_pl.policy.weights import whole
from grpo_pl.rollout.native.kernels import Adapted, Linear, Matrix, Packed, attend
from grpo_pl.rollout.native.shared_prompts import SharedPrompts, worth_sharing
from grpo_pl.rollout.native.weights import base_of, decoded_part, fused_linear, low_rank_parts

_PREFILL_TOKENS = 16_384  # prompt tokens per forward pass: bounds the activations of the prefill

Store = Callable[[Tensor, Tensor], object]
"""Puts into the cache of a layer the keys and values (2, rows, key heads, D) of one token a row."""
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Stores the tokens' keys and values (2, P, key heads, S, D) in the cache of a layer, and gives what their queries
(P, query heads, S, D) find there, of the same shape."""


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape[-1:], self.weight, self.eps)


@dataclass(frozen=True)
class _Layer:
    """Weights of one decoder layer. ``qkv`` yields query, key and value heads side by side, rotated pairs adjacent."""

    attention_norm: _Norm
    qkv: Linear
    head_norms: tuple[Tensor, float] | None  # weight (query and key heads, head size) and eps
    output: Linear
    mlp_norm: _Norm
    gate_up: Linear
    down: Linear


class LlamaFamilyDecoder:
    """Reads the weights of ``model`` once and decodes with them; made afresh for every rollout, so never stale.

    Prompts end at column S of the cache, so that all rows write their next key and value at one column. The rotary
    embedding is one complex product: the outputs of the query and key projections are reordered so that the members of
    each rotated pair are neighbours, which no dot product of a query with a key can see.

    LoRA adapters are merged into weights that are read in float32 or float64, where that rounds nothing of note, and
    elsewhere stay beside them. Weights in 4 bits stay packed.

    Args:
        embedding: what the tokens of prompts are read as, where that is more than the model's own table.
    """

    lookahead = 1  # tokens between two looks at which rows have ended

    def __init__(self, model: Any, *, rows: int, embedding: Tensor | None = None) -> None:
        model = decoded_part(model)
        trunk = model.model
        attention = trunk.layers[0].self_attn
        self._embedding = whole(trunk.embed_tokens.weight) if embedding is None else embedding
        device = self._embedding.device
        autocast = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type) if autocast else self._embedding.dtype
        self._head_size, self._scale = attention.head_dim, attention.scaling
        self._key_heads = model.config.num_key_value_heads
        self._query_heads = model.config.num_attention_heads
        self._activation: Callable[[Tensor], Tensor] = trunk.layers[0].mlp.act_fn
        self._pairs = torch.arange(self._head_size, device=device).view(2, -1).t().flatten()  # 0, D/2, 1, D/2 + 1, …
        turned, values = self._query_heads + self._key_heads, self._key_heads * self._head_size
        heads = torch.arange(turned, device=device).unsqueeze(-1) * self._head_size
        self._order = torch.cat(
            [(heads + self._pairs).flatten(), torch.arange(values, device=device) + turned * self._head_size]
        )
        self._layers = [self._read_layer(layer, rows) for layer in trunk.layers]
        self._norm = self._read_norm(trunk.norm)
        self._head = self._linear([model.lm_head], rows)
        self._rotary_embedding = trunk.rotary_emb
        self._shared: SharedPrompts | None = None

    # ---- reading the weights -------------------------------------------------------------------------------------

    def _read_layer(self, layer: Any, rows: int) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        pairs, order = self._pairs, self._order
        head_norms = None
        if hasattr(attention, "q_norm"):
            by_head = [whole(attention.q_norm.weight)[pairs]] * self._query_heads
            by_head += [whole(attention.k_norm.weight)[pairs]] * self._key_heads
            head_norms = torch.stack(by_head), attention.q_norm.variance_epsilon
        return _Layer(
            attention_norm=self._read_norm(layer.input_layernorm),
            qkv=self._linear([attention.q_proj, attention.k_proj, attention.v_proj], rows, order),
            head_norms=head_norms,
            output=self._linear([attention.o_proj], rows),
            mlp_norm=self._read_norm(layer.post_attention_layernorm),
            gate_up=self._linear([mlp.gate_proj, mlp.up_proj], rows),
            down=self._linear([mlp.down_proj], rows),
        )

    @staticmethod
    def _read_norm(norm: Any) -> _Norm:
        return _Norm(whole(norm.weight), norm.variance_epsilon)

    def _linear(self, modules: list[Any], rows: int, order: Tensor | None = None) -> Linear:
        """Several linear layers with one input as one product; ``order`` permutes its outputs."""
        bases = [base_of(module) for module in modules]
        if any(is_quantized(base.weight) for base in bases):
            weights = [partial(plain, base.weight) for base in bases]
            biases = [None if base.bias is None else base.bias.to(self._dtype) for base in bases]
            return Packed(weights, biases, low_rank_parts(modules), order, dtype=self._dtype, rows=rows)
        merge = self._dtype.itemsize >= 4
        weight, bias = fused_linear(modules, merge=merge)
        adapters = None if merge else low_rank_parts(modules)
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        weight, bias = weight.to(self._dtype), None if bias is None else bias.to(self._dtype)
        if adapters is None:
            return Matrix(weight, bias, rows=rows)
        down, up = adapters
        return Adapted(weight, bias, down, up if order is None else up[order], rows=rows)

    # ---- decoding ------------------------------------------------------------------------------------------------

    def start(self, prompt_ids: Tensor, prompt_mask: Tensor, owners: Tensor, *, room: int) -> Tensor:
        """Prefills every prompt once and hands its keys and values to the rows that continue it.

        Args:
            prompt_ids: (P, S), left-padded.
            prompt_mask: Likewise.
            owners: (B,) index of each row's prompt, ascending.
            room: most tokens that will be fed to `step` for any row.

        Returns:
            Logits (B, V) of each row's first completion token.
        """
        prompts, width = prompt_ids.shape
        rows, device = len(owners), prompt_ids.device
        self._shared = None
        if worth_sharing(self._dtype, prompt_ids, rows=rows):
            self._shared = SharedPrompts([self._empty(prompts, width) for _ in self._layers], prompt_mask, owners)
        self._column = 0 if self._shared is not None else width
        self._cache = [self._empty(rows, self._column + room) for _ in self._layers]
        self._rotary = self._rotations(width + room)  # (columns, D/2)
        lengths = prompt_mask.sum(dim=1)
        self._positions = lengths[owners]  # (B,) position of the next token
        self._bias = None
        if self._shared is None and not prompt_mask.all():
            hidden = F.pad(~prompt_mask, (0, room))[owners]  # (B, columns)
            self._bias = torch.zeros(hidden.shape, dtype=self._dtype, device=device).masked_fill_(hidden, -torch.inf)
        per_pass = max(1, _PREFILL_TOKENS // width)
        last = [
            self._prefill(prompt_ids[i : i + per_pass], prompt_mask[i : i + per_pass], owners, first=i)
            for i in range(0, prompts, per_pass)
        ]
        return self._logits(torch.cat(last))[owners]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row with so many columns: its keys and values, and its logits three times in float32."""
        token = 2 * len(self._layers) * self._key_heads * self._head_size * self._dtype.itemsize
        return columns * token + 3 * 4 * len(self._embedding)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (rows, V) after feeding one token to each of the live rows."""
        rows, column = len(tokens), self._column
        rotary = self._rotary[self._positions].unsqueeze(1)  # (rows, 1, D/2)
        bias = None if self._bias is None else self._bias[:rows, None, None, : column + 1]

        def store(cache: Tensor, stored: Tensor) -> None:
            cache[:, :rows, :, column] = stored

        logits = self._feed(tokens, rotary, bias, column + 1, store)
        self._column += 1
        self._positions += 1
        return logits

    def _empty(self, sequences: int, columns: int) -> Tensor:
        """Room for the keys and values of a layer, (2, sequences, key heads, columns, D)."""
        shape = (2, sequences, self._key_heads, columns, self._head_size)
        return torch.empty(shape, dtype=self._dtype, device=self._embedding.device)

    def _feed(self, tokens: Tensor, rotary: Tensor, bias: Tensor | None, columns: int, store: Store) -> Tensor:
        """Logits (rows, V) after one token a row, which attends to ``columns`` of the cache."""
        x = F.embedding(tokens, self._embedding)  # (rows, H)
        for i, (layer, cache) in enumerate(zip(self._layers, self._cache, strict=True)):
            heads = self._project(layer, x, rotary)  # (rows, heads, D)
            queries, stored = heads.split((self._query_heads, 2 * self._key_heads), dim=1)
            store(cache, stored.unflatten(1, (2, -1)).transpose(0, 1))
            keys, values = cache[:, : len(tokens), :, :columns]
            grouped = queries.unflatten(1, (self._key_heads, -1))  # a group shares its key head
            if self._shared is None:
                mixed = attend(grouped, keys, values, bias, scale=self._scale)
            else:
                mixed = self._shared.attend(i, grouped, keys, values, scale=self._scale)
            layer.output.add_to(x, mixed)
            self._feed_forward(layer, x)
        return self._logits(x)

    def keep(self, alive: Sequence[bool]) -> list[int]:
        """Removes the rows that are not alive and returns, for each that is left, the number it had before."""
        order = self._compact(alive, self._bias, self._column)
        self._positions = self._positions[order]
        if self._shared is not None:
            self._shared.keep(order)
        return order

    def _compact(
        self, alive: Sequence[bool], bias: Tensor | None, columns: int, *, exchange: bool = False
    ) -> list[int]:
        """Live rows from the end take the places of those that have ended, so that only they are copied; `keep`.

        Args:
            exchange: those that have ended take the places of the live ones in turn, and are in the order as well.
        """
        kept = sum(alive)
        holes = [i for i in range(kept) if not alive[i]]
        movers = [i for i in range(kept, len(alive)) if alive[i]]  # as many as there are holes
        order = list(range(len(alive)))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole], order[mover] = mover, hole
        if holes:
            moves = [holes + movers, movers + holes] if exchange else [holes, movers]
            to, source = torch.tensor(moves, device=self._embedding.device)
            for cache in self._cache:
                cache[:, to, :, :columns] = cache[:, source, :, :columns]
            if bias is not None:
                bias[to] = bias[source]
        return order if exchange else order[:kept]

    def _prefill(self, ids: Tensor, mask: Tensor, owners: Tensor, *, first: int) -> Tensor:
        """Last hidden states (prompts, H) of one slice of the prompts, whose rows get their keys and values."""
        prompts, width = ids.shape
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        rotary = self._rotary[positions.flatten()].unsqueeze(1)
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # padding sees itself: no empty softmax
        visible = (causal & mask.unsqueeze(1) | itself).unsqueeze(1)  # (prompts, 1, S, S)
        if self._shared is not None:
            rows, mine = slice(first, first + prompts), torch.arange(prompts)
        else:
            begin, end = torch.searchsorted(owners, owners.new_tensor([first, first + prompts])).tolist()
            rows, mine = slice(begin, end), owners[begin:end] - first
        return self._read(ids, rotary, rows, mine, visible)[:, -1]

    def _read(self, ids: Tensor, rotary: Tensor, rows: slice, owners: Tensor, visible: Tensor | None = None) -> Tensor:
        """Last hidden states (P, S, H) of prompts (P, S).

        Args:
            rows, owners: these rows of the cache, or of that of shared prompts, get the keys and values of these
                prompts.
            visible: (P, 1, S, S) what each token attends to; by default all up to itself.
        """

        def mix(cache: Tensor, queries: Tensor, stored: Tensor) -> Tensor:
            cache[:, rows, :, : ids.shape[1]] = stored[:, owners]
            keys, values = stored.repeat_interleave(self._query_heads // self._key_heads, dim=2)
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible, is_causal=visible is None, scale=self._scale
            )

        return self._through(ids, rotary, mix)

    def _through(self, ids: Tensor, rotary: Tensor, mix: Mix) -> Tensor:
        """Last hidden states (P, S, H) of tokens (P, S)."""
        x = F.embedding(ids.flatten(), self._embedding)  # (P · S, H)
        caches = self._cache if self._shared is None else self._shared.cache
        for layer, cache in zip(self._layers, caches, strict=True):
            heads = self._project(layer, x, rotary).unflatten(0, ids.shape).transpose(1, 2)  # (P, heads, S, D)
            queries, stored = heads.split((self._query_heads, 2 * self._key_heads), dim=1)
            mixed = mix(cache, queries, stored.unflatten(1, (2, -1)).transpose(0, 1))
            layer.output.add_to(x, mixed.transpose(1, 2).reshape(len(x), -1))
            self._feed_forward(layer, x)
        return x.unflatten(0, ids.shape)

    def _project(self, layer: _Layer, x: Tensor, rotary: Tensor) -> Tensor:
        """Query, key and value heads (rows, heads, D); queries and keys normed where the family does, and rotated."""
        heads = layer.qkv(layer.attention_norm(x).to(self._dtype)).unflatten(-1, (-1, self._head_size))
        turned = heads[:, : self._query_heads + self._key_heads]
        rotated = turned
        if layer.head_norms is not None:
            weight, eps = layer.head_norms
            rotated = F.rms_norm(rotated, rotated.shape[-1:], None, eps) * weight
        pairs = torch.view_as_complex(rotated.to(rotary.real.dtype).unflatten(-1, (-1, 2)))
        turned.copy_(torch.view_as_real(pairs * rotary).flatten(-2))
        return heads

    def _feed_forward(self, layer: _Layer, x: Tensor) -> None:
        gate, up = layer.gate_up(layer.mlp_norm(x).to(self._dtype)).chunk(2, dim=-1)
        layer.down.add_to(x, self._activation(gate).mul_(up))

    def _logits(self, x: Tensor) -> Tensor:
        return self._head(self._norm(x).to(self._dtype))

    def _rotations(self, columns: int) -> Tensor:
        """exp(i · angle) for every position and frequency, (columns, D/2); from the model's own rotary embedding."""
        wide = torch.promote_types(self._dtype, torch.float32)
        probe = torch.empty(1, dtype=wide, device=self._embedding.device)
        cos, sin = self._rotary_embedding(probe, torch.arange(columns, device=probe.device).unsqueeze(0))
        half = self._head_size // 2
        return torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
