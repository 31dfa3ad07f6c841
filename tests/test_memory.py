"""Prefaulted memory, and the pool of short-lived tensors' memory."""

import gc
import threading

import torch

from bitline import memory


def test_a_dropped_tensor_s_memory_is_reused():
    memory.release()
    first = memory.empty_pooled(1000, 2000, dtype=torch.uint8)
    at = first.data_ptr()
    assert first.shape == (1000, 2000) and first.is_contiguous()
    view = first[3:].view(-1)
    del first
    second = memory.empty_pooled(1000, 2000, dtype=torch.uint8)
    assert second.data_ptr() != at  # a view holds it
    second.fill_(7)
    view.fill_(9)
    assert (second == 7).all()
    del view
    third = memory.empty_pooled(500, 1000, dtype=torch.int32)
    assert third.data_ptr() == at and third.dtype == torch.int32 and third.shape == (500, 1000)
    third.fill_(-1)
    assert (second == 7).all()


def test_only_the_largest_region_is_pooled():
    memory.release()
    tensors = [memory.empty_pooled(size, dtype=torch.uint8) for size in (1 << 20, 5 << 20, 2 << 20)]
    largest = tensors[1].data_ptr()
    del tensors
    assert len(memory._pool) == 1 and len(memory._pool[0]) == 5 << 20
    again = memory.empty_pooled(1 << 20, dtype=torch.uint8)
    assert again.data_ptr() == largest and not memory._pool
    bigger = memory.empty_pooled(6 << 20, dtype=torch.uint8)
    del again, bigger
    assert len(memory._pool[0]) == 6 << 20
    memory.release()
    assert not memory._pool


def test_small_and_empty_tensors():
    memory.release()
    for shape in ((0, 5), (3,), (1, 1)):
        assert memory.empty_pooled(*shape, dtype=torch.int16).shape == shape
        assert memory.empty(*shape, dtype=torch.int16).shape == shape
    assert not memory._pool
    large = memory.empty(3000, 4096, dtype=torch.uint8)
    assert (large.fill_(7) == 7).all()


def test_tensors_of_concurrent_threads_share_no_memory():
    """Tensors are allocated and dropped by several threads at once."""

    def work(seed, wrong):
        for i in range(30):
            x = memory.empty_pooled(400_000 + 1000 * i, dtype=torch.uint8)
            x.fill_(seed)
            y = x[17:]
            del x
            if not bool((y == seed).all()):
                wrong.append(seed)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(seed, wrong)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong and len(memory._pool) == 1
    memory.release()
