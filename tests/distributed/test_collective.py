"""The exchanges between ranks: nothing alone, exact on two processes over gloo."""

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from grpo_pl.distributed.collective import Collective


def _on_two_ranks(work: Callable[[Collective], Any]) -> list[Any]:
    """Runs ``work`` on two forked processes and returns what each came to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=_rank, args=(rank, port, work, pipes[rank][1])) for rank in range(2)]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        results = [receiver.recv() if receiver.poll(60) else "no answer" for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    for result in results:
        assert not isinstance(result, str), result
    return results


def _rank(rank: int, port: int, work: Callable[[Collective], Any], sender: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        sender.send(work(Collective(rank=rank, world=2)))
        dist.destroy_process_group()
    except Exception:
        sender.send(traceback.format_exc())


def _exchanges(collective: Collective) -> dict[str, Any]:
    mine = collective.rank + 1
    values = torch.arange(3.0 * mine) if mine == 2 else torch.tensor([7.0])
    own = torch.tensor([float(mine), 10.0 * mine])
    summed = collective.sum(own)
    return {
        "rows": collective.gather_rows(torch.full((2, 1), mine)).tolist(),
        "values": collective.gather_values(values).tolist(),
        "none": collective.gather_values(torch.tensor([4.0])[: collective.rank]).tolist(),
        "objects": collective.gather_objects({"rank": collective.rank}),
        "sum": summed.tolist(),
        "own": own.tolist(),
        "max": collective.max(5 - collective.rank, torch.device("cpu")),
        "ratios": collective.ratios(
            {
                "kl": (torch.tensor(3.0 * mine), torch.tensor(mine)),
                "nothing": (torch.tensor(0.0), torch.tensor(0)),
                "here": (torch.tensor(float(collective.rank)), torch.tensor(4 * collective.rank)),
            }
        ),
    }


def test_two_ranks_see_the_same_totals() -> None:
    first, second = _on_two_ranks(_exchanges)
    assert first.pop("own") == [1.0, 10.0]  # what was summed stays as it was
    assert second.pop("own") == [2.0, 20.0]
    assert first == second
    assert first == {
        "rows": [[1], [1], [2], [2]],
        "values": [7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "none": [4.0],
        "objects": [{"rank": 0}, {"rank": 1}],
        "sum": [3.0, 30.0],
        "max": 5,
        "ratios": {"kl": 3.0, "here": 0.25},
    }


def test_alone_every_exchange_is_the_identity() -> None:
    alone, rows = Collective(), torch.tensor([[1.0, 2.0]])
    assert alone.gather_rows(rows) is rows
    assert alone.sum(rows) is rows
    assert torch.equal(alone.gather_values(rows[0]), rows[0])
    assert alone.gather_objects("x") == ["x"]
    assert alone.max(3, torch.device("cpu")) == 3


def test_a_ratio_of_totals_is_no_mean_of_ratios_and_nothing_is_left_out() -> None:
    sums = {"kl": (torch.tensor(6.0), torch.tensor(4)), "empty": (torch.tensor(0.0), torch.tensor(0))}
    assert Collective().ratios(sums) == {"kl": 1.5}
    assert Collective().ratios({}) == {}
