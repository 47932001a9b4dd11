"""Every kernel compiles for an H100, which needs none, and attention fits into the shared memory of smaller GPUs; in a
process of its own, since tests may interpret them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
KERNELS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from grpo_pl.extras.kernels import decoding, gated, head, race
from grpo_pl.functional.sampling import NOISE

INTEGERS = {"stride", "vocabulary", "columns", "capacity", "width", "size"}
WIDE = {"keys", "token", "token_ids", "starts", "column", "positions"}
NARROW = {"logits", "heads", "cache", "keys", "values", "mixed", "gate_up", "gate", "up", "grad", "to_gate", "to_up"}


def compiled(kernel, narrow, *, wide=WIDE, warps=4, stages=3, target=90, **constants):
    def kind(name):
        if name in constants:
            return "constexpr"
        if name in INTEGERS:
            return "i32"
        if name in ("temperature", "scale", "eps"):
            return "fp32"
        return "*i64" if name in wide else f"*{narrow}" if name in NARROW else "*fp32"

    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": warps, "num_stages": stages}
    found = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    assert found.asm["cubin"] and found.metadata.shared <= 99 * 1024, (kernel, constants, found.metadata.shared)


noise = dict(zip(("SPREAD", "LOW_1", "LOW_2", "UNIT"), NOISE))
shape = {"KEYS": 2, "SIZE": 64}
for narrow in ("bf16", "fp32"):
    for greedy in (True, False):
        compiled(race._race_part, narrow, warps=8, GREEDY=greedy, BLOCK=4096, **noise)
    compiled(head._score, narrow, warps=8, BLOCK=4096)
    compiled(head._slope, narrow, warps=8, BLOCK=4096)
    for size in (16, 64, 128, 256):
        columns, stages = decoding.tile(size, 2 if narrow == "bf16" else 4)
        blocks = {"KEYS": 2, "SIZE": size, "GROUP": 7, "GROUP_BLOCK": 16, "SIZE_BLOCK": size, "COLUMNS": columns}
        for target in (80, 90):
            compiled(decoding._attend, narrow, wide={"starts", "column"}, stages=stages, target=target, **blocks)
    compiled(decoding._rotate_and_store, narrow, warps=1, QUERIES=14, PAIRS=32, NORMED=True, **shape)
    for kernel in (decoding._gated, gated._forward, gated._backward):
        compiled(kernel, narrow, BLOCK=1024)
"""


def test_every_kernel_compiles_in_both_types() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
