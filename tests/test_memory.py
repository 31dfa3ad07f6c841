"""Memory that is prepared, and memory that is used again."""

import gc
import threading

import torch

from bitline import memory


def test_a_dropped_tensor_s_memory_is_used_again():
    memory.release()
    first = memory.passing(1000, 2000, dtype=torch.uint8)
    at = first.data_ptr()
    assert first.shape == (1000, 2000) and first.is_contiguous()
    view = first[3:].view(-1)
    del first
    second = memory.passing(1000, 2000, dtype=torch.uint8)
    assert second.data_ptr() != at  # a view holds it
    second.fill_(7)
    view.fill_(9)
    assert (second == 7).all()
    del view
    third = memory.passing(500, 1000, dtype=torch.int32)
    assert third.data_ptr() == at and third.dtype == torch.int32 and third.shape == (500, 1000)
    third.fill_(-1)
    assert (second == 7).all()


def test_only_the_largest_is_kept():
    memory.release()
    tensors = [memory.passing(size, dtype=torch.uint8) for size in (1 << 20, 5 << 20, 2 << 20)]
    largest = tensors[1].data_ptr()
    del tensors
    assert len(memory._spare) == 1 and len(memory._spare[0]) == 5 << 20
    again = memory.passing(1 << 20, dtype=torch.uint8)
    assert again.data_ptr() == largest and not memory._spare
    bigger = memory.passing(6 << 20, dtype=torch.uint8)
    del again, bigger
    assert len(memory._spare[0]) == 6 << 20
    memory.release()
    assert not memory._spare


def test_small_and_empty_tensors():
    memory.release()
    for shape in ((0, 5), (3,), (1, 1)):
        assert memory.passing(*shape, dtype=torch.int16).shape == shape
        assert memory.empty(*shape, dtype=torch.int16).shape == shape
    assert not memory._spare
    large = memory.empty(3000, 4096, dtype=torch.uint8)
    assert (large.fill_(7) == 7).all()


def test_a_tensor_outlives_its_name_in_other_threads():
    """Tensors made and dropped by several threads at once never share memory."""

    def work(seed, wrong):
        for i in range(30):
            x = memory.passing(400_000 + 1000 * i, dtype=torch.uint8)
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
    assert not wrong and len(memory._spare) == 1
    memory.release()
