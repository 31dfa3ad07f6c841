"""CUDA graphs of the tests' calls."""

import torch


def captured(call, warm_up=0):
    """(graph, result) of a captured call; warm_up: calls before it on a stream of their own, of which the first may compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
