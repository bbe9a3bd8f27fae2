"""Calls that share a GPU: two streams at a time, and a graph."""

from __future__ import annotations

import torch


def check_streams_and_graph(op, calls, rounds=30):
    """`op(*arguments)` for each of `calls`, two lists of arguments: in streams of different
    priority at the same time, and captured one after the other, the bits that each has alone."""
    expected = [op(*given) for given in calls]
    streams = [torch.cuda.Stream(priority=p) for p in (0, -1)]
    torch.cuda.synchronize()
    for _ in range(rounds):
        results = []
        for stream, given in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                results.append(op(*given))
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [op(*given) for given in calls]
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))
