"""The two areas between a device and host memory: never written while a copy may read them.

Run on a CPU with events that are only counted; `tests/gpu/test_records_cuda.py` runs the same on CUDA.
"""

import pytest
import torch

from quire.tensors.staging import Staging

CPU = torch.device("cpu")


class OverPinned(Staging):
    """Takes every device for one that needs pinned memory."""

    def _is_host(self, device):
        return False


@pytest.fixture
def log(monkeypatch):
    noted = []

    class Event:
        def __init__(self):
            self.number = sum(each[0] == "record" for each in noted)

        def record(self):
            noted.append(("record", self.number))

        def synchronize(self):
            noted.append(("wait", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return noted


def chunk(number, count=3, size=64):
    return torch.full((count, size), number, dtype=torch.uint8)


def buffers_of(count=3, size=64):
    return [memoryview(bytearray(size)) for _ in range(count)]


@pytest.mark.parametrize("kind", [Staging, OverPinned])
def test_rows_arrive_in_their_buffers(kind, log):
    chunks = [(chunk(number), buffers_of()) for number in range(1, 6)]
    kind().fetch(iter(chunks))
    for number, (_, buffers) in enumerate(chunks, start=1):
        assert {bytes(buffer) for buffer in buffers} == {bytes([number]) * 64}


def test_a_chunk_is_packed_while_the_one_before_is_on_its_way(log):
    def chunks():
        for number in range(3):
            log.append(("pack", number))
            yield chunk(number), buffers_of()

    OverPinned().fetch(chunks())
    assert log == [
        ("pack", 0),
        ("record", 0),
        ("pack", 1),
        ("record", 1),
        ("wait", 0),
        ("pack", 2),
        ("record", 2),
        ("wait", 1),
        ("wait", 2),
    ]


@pytest.mark.parametrize("kind", [Staging, OverPinned])
def test_buffers_arrive_as_rows(kind, log):
    staging = kind()
    for number in range(1, 6):
        buffers = [memoryview(bytes([number, row]) * 8) for row in range(3)]
        rows = staging.send(buffers, CPU)
        assert rows.tolist() == [list(buffer) for buffer in buffers]


def test_an_area_is_written_again_when_its_copy_has_ended(log):
    staging = OverPinned()
    for number in range(4):
        staging.send([memoryview(bytes([number]) * 8)], CPU)
        log.append(("use", number))
    order = [("record", 0), ("use", 0), ("record", 1), ("use", 1)]
    order += [("wait", 0), ("record", 2), ("use", 2), ("wait", 1), ("record", 3), ("use", 3)]
    assert log == order


def test_reading_and_writing_in_turn_share_the_areas(log):
    staging = OverPinned()
    for number in range(1, 5):
        buffers = buffers_of(2, 32 * number)
        staging.fetch(iter([(chunk(number, 2, 32 * number), buffers)]))
        rows = staging.send(buffers, CPU)
        assert torch.equal(rows, chunk(number, 2, 32 * number))
