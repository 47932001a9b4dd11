"""Where CUDA graphs have their memory, told by a stand-in for them, as there may be no GPU."""

from contextlib import nullcontext

import torch

from grpo_pl.extras.kernels import graph_decoder
from grpo_pl.extras.kernels.graph_decoder import GraphDecoder
from tests.rollout.drawn import build_model


def test_all_graphs_take_their_memory_from_one_pool(monkeypatch):
    """Else each rollout leaves that of its graphs behind until memory runs out, in another process of the card too."""
    pools, open_pools = [], []

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            pools.append(pool)

        def capture_end(self):
            pass

    class Pool:
        def __init__(self):
            open_pools.append(self)
            self.id = (0, len(open_pools))

        def __del__(self):
            open_pools.clear()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(GraphDecoder, "_beside", lambda self, work: work())
    monkeypatch.setattr(GraphDecoder, "_advance", lambda self: self._found)
    graph_decoder._pool.cache_clear()
    model, prompt = build_model("qwen2"), torch.tensor([[5, 9]])
    for _ in range(2):  # rollouts, with two captures each, as rows end
        decoder = GraphDecoder(model, rows=2)
        for _ in range(2):
            decoder._found = decoder.start(prompt, prompt > 0, torch.tensor([0, 0]), room=4)
            decoder._capture()
            assert decoder._captures and decoder._graph is not None
        del decoder
    assert pools == [(0, 1)] * 4 and len(open_pools) == 1  # which is kept: a pool without graphs cannot be taken again
    graph_decoder._pool.cache_clear()
