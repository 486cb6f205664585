"""Memory shared with other processes: what is written is read there, and nothing is left when its owner ends."""

import multiprocessing
import os
import signal

import numpy as np
import pytest

from qurl_ray.transfer.shared_memory import SharedBuffer, opened


def array_at(memory, place) -> np.ndarray:
    name, shape, start = place
    dtype = np.dtype(name)
    return memory[start : start + dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)


def read(pipe) -> None:
    """Answer each address and its places with the sums of the arrays, until None comes."""
    while (asked := pipe.recv()) is not None:
        address, places = asked
        memory = opened(address)
        pipe.send([(array_at(memory, place).dtype.name, float(array_at(memory, place).sum())) for place in places])


@pytest.fixture
def reader():
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=read, args=(theirs,))
    process.start()
    yield pipe
    pipe.send(None)
    process.join(30)


def test_another_process_reads_what_was_written_last(reader):
    buffer = SharedBuffer()
    for count in (3, 1000, 10):  # it grows, and stays
        arrays = [np.full(count, 7, np.uint8), np.empty((0, 4), np.float32), np.full((count, 2), 0.5, np.float32)]
        reader.send(written(buffer, arrays))
        assert reader.recv() == [("uint8", 7.0 * count), ("float32", 0.0), ("float32", count)]
    buffer.close()


def written(buffer, arrays):
    places = buffer.write(arrays)
    return buffer.address, places


def test_arrays_that_are_not_contiguous_arrive_in_their_order():
    buffer, values = SharedBuffer(), np.arange(12, dtype=np.float32).reshape(3, 4).T
    (place,) = buffer.write([values])
    np.testing.assert_array_equal(array_at(opened(buffer.address), place), values)


def hold(pipe) -> None:
    buffer = SharedBuffer()
    pipe.send(written(buffer, [np.arange(5)]))
    signal.pause()


def test_a_killed_owner_leaves_no_name_and_what_was_opened_stays_readable():
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,))
    process.start()
    address, (place,) = pipe.recv()
    memory = opened(address)
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    np.testing.assert_array_equal(array_at(memory, place), np.arange(5))
    with pytest.raises(FileNotFoundError):
        opened(address)
