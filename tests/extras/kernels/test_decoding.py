"""What decoding one token computes on GPUs, on one where there is one, else interpreted on the CPU: as torch does."""

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.extras.kernels import decoding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("queries", "key_heads", "size"), [(4, 4, 8), (6, 2, 12), (14, 2, 64), (3, 1, 80)])
def test_attention_reads_the_columns_of_a_row(queries, key_heads, size):
    rows, columns, column = 3, 150, 140
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(rows, queries + 2 * key_heads, size, generator=generator)
    cache = torch.randn(2, rows + 2, key_heads, columns, size, generator=generator)  # room for two more rows
    starts = torch.tensor([0, 7, 139])
    visible = (torch.arange(columns) >= starts.unsqueeze(1)) & (torch.arange(columns) <= column)
    keys, values = cache[:, :rows].repeat_interleave(queries // key_heads, dim=2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        heads[:, :queries].unsqueeze(2), keys, values, attn_mask=visible[:, None, None], scale=0.3
    )
    arguments = (heads.flatten(1), cache, starts, torch.tensor(column))
    found = decoding.attend_to_columns(*(each.to(DEVICE) for each in arguments), scale=0.3)
    torch.testing.assert_close(found.cpu(), expected.reshape(rows, -1), atol=1e-5, rtol=1e-5)


def test_gated_is_silu_times_up():
    gate, up = torch.randn(2, 3, 1500, generator=torch.Generator().manual_seed(0))
    found = decoding.gated(torch.cat([gate, up], dim=1).to(DEVICE))
    torch.testing.assert_close(found.cpu(), torch.nn.functional.silu(gate) * up, atol=1e-6, rtol=1e-5)
