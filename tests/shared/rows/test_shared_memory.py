"""Segments of rows in shared memory: a reader gets exactly the written row, or no row."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lmpool.protocol.model_info import ModelInfo
from lmpool.protocol.row import Encoding, RowBlock, encoded_size
from lmpool.rows import shared_memory
from lmpool.rows.segment import Segment, SegmentWriter, make_segment
from lmpool.rows.shared_memory import (
    Layout,
    Reference,
    RowMemory,
    SegmentReader,
    host_token,
    is_reference,
    place_of,
    split_reference,
    unpack_reference,
)
from lmpool.synthetic import synthetic_row
from tests.shared.rows.segments import (  # noqa: F401
    SLOT,
    V,
    make,
    place_fixture,
    prompt,
    put,
    reader_fixture,
    refresh,
    row_of,
    segment_fixture,
    write_row,
)


def test_a_row_is_read_by_its_reference_by_its_slot_and_by_its_digest(segment: Segment, reader: SegmentReader) -> None:
    reference = put(segment, 7)
    for row in (
        reader.read(reference, prompt(7), V),
        reader.read_at(place_of(reference.pack()), prompt(7), V),
        reader.find(prompt(7), V),
    ):
        assert row is not None
        assert row.tobytes() == row_of(7).tobytes()
        assert not row.flags.writeable
    assert (reader.counts.rows, reader.counts.lost) == (3, 0)


def test_16_bit_rows_are_read(segment: Segment, reader: SegmentReader) -> None:
    bits = (np.arange(V, dtype=np.uint32) % 7 << 7).astype(np.uint16)
    logits = (bits.astype(np.uint32) << 16).view(np.float32)
    log_z = np.float32(np.log(np.exp(logits.astype(np.float64)).sum()))
    block = RowBlock([prompt(1)], bits[None], np.array([log_z]), Encoding.BF16)
    segment.write(block.digests, block.encoded())
    put(segment, 2)
    for _ in range(2):  # Read two rows with different encoded sizes, twice.
        row, other = reader.find(prompt(1), V), reader.find(prompt(2), V)
        assert row is not None
        assert other is not None
        np.testing.assert_array_equal(row, logits - log_z)
        assert other.tobytes() == row_of(2).tobytes()


def test_a_replaced_row_is_not_found(segment: Segment, reader: SegmentReader) -> None:
    references = [put(segment, number) for number in range(100)]
    for number, reference in enumerate(references):
        row, found = reader.read(reference, prompt(number), V), reader.find(prompt(number), V)
        if number < 100 - 64:
            assert row is None
            assert found is None
            assert segment.find(prompt(number)) is None
        else:
            assert row is not None
            assert row.tobytes() == row_of(number).tobytes()
            assert found is not None


def test_each_replaced_row_is_reported_once(segment: Segment) -> None:
    replaced = []
    for number in range(140):
        put(segment, number % 70)
        replaced.append(segment.replaced())
    assert replaced == [[]] * 64 + [[prompt((number - 64) % 70)] for number in range(64, 140)]
    # A row that is written again moves to a new slot, so reusing its first slot does not replace the row.
    again = make()
    try:
        for number in [*range(63), 0]:
            put(again, number)
        put(again, 99)
        assert again.replaced() == []
        assert again.find(prompt(0)) == 64 + 63
    finally:
        again.close()


def test_a_read_with_a_wrong_prompt_number_or_model_finds_no_row(segment: Segment, reader: SegmentReader) -> None:
    reference = put(segment, 3)
    assert reader.read(reference, prompt(4), V) is None
    assert reader.read(reference._replace(number=reference.number + 64), prompt(3), V) is None
    assert reader.read(reference._replace(nonce=bytes(8)), prompt(3), V) is None
    assert reader.read(reference, prompt(3), V - 1) is None
    refresh(reader, "another")
    assert reader.find(prompt(3), V) is None
    assert not reader.has_any


def test_rows_of_other_weights_use_the_same_memory_under_another_name() -> None:
    segment, reader, later = make(), SegmentReader(), SegmentReader()
    refresh(reader)
    old = put(segment, 7), put(segment, 8)
    path, lent = segment._path, in_place(segment, [5])
    segment.rename("fp@1")
    try:
        assert not path.exists()
        refresh(later, "fp@1")
        assert (segment.find(prompt(7)), later.find(prompt(7), V)) == (None, None)
        assert segment.first_of(lent.numbers) == old[1].number + 1, "memory that was lent before keeps its slots"
        assert segment.new_rows(62, V, Encoding.F32) is None
        del lent
        assert reader.find(prompt(7), V) is not None, "readers of the old weights still have the row"
        for _ in range(62):  # The new rows overwrite the first old row, and not the second.
            new = put(segment, 7)
        assert later.find(prompt(7), V) is not None
        assert later.read(new, prompt(7), V) is not None
        assert later.find(prompt(8), V) is None
        assert later.read(old[1], prompt(8), V) is None, "no process can map the memory under the old name any more"
        assert reader.find(prompt(7), V) is None
        assert reader.read(old[0], prompt(7), V) is None
        assert reader.read(new._replace(nonce=old[0].nonce), prompt(7), V) is None
        assert reader.read(old[1], prompt(8), V) is not None
    finally:
        segment.close()


PADDING = (40, *range(57, 64))
"""Bytes of a slot that say nothing: a flag that may have any value but 0, and the end."""


@pytest.mark.parametrize("is_length_known", [False, True])
@pytest.mark.parametrize("at", [*range(0, 72, 5), 80, 100, 3000, 6079])
def test_a_row_whose_slot_has_a_wrong_byte_is_not_returned(
    segment: Segment, reader: SegmentReader, at: int, is_length_known: bool
) -> None:
    """A wrong byte in the slot simulates a processor that reorders stores: the reader must return no row."""
    segment.is_summed = True
    reference, other = put(segment, 5), put(segment, 6)
    if is_length_known:
        assert reader.read(reference, prompt(5), V) is not None
    segment._memory[segment.size - 64 * SLOT + SLOT * (reference.number % 64) + at] ^= 0x10
    assert (reader.read(reference, prompt(5), V) is None) is (at not in PADDING), "every byte except the padding"
    row = reader.read(other, prompt(6), V)
    assert row is not None
    assert row.tobytes() == row_of(6).tobytes()


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.F16])
@pytest.mark.parametrize("is_length_known", [False, True])
@pytest.mark.parametrize("is_summed", [False, True])
def test_a_row_that_is_replaced_while_it_is_copied_is_not_returned(
    segment: Segment,
    reader: SegmentReader,
    monkeypatch: pytest.MonkeyPatch,
    is_summed: bool,
    is_length_known: bool,
    encoding: Encoding,
) -> None:
    """The new row has the words of the old row in another order, and therefore the same checksum."""
    segment.is_summed = is_summed
    log_z = None if encoding is Encoding.F32 else np.zeros(1, np.float32)

    def write(name: int, row: NDArray[Any]) -> Reference:
        block = RowBlock([prompt(name)], row.astype(encoding.dtype)[None], log_z, encoding)
        (number,) = segment.write(block.digests, block.encoded())
        assert number is not None
        return Reference(host_token(), segment.nonce, number)

    reference = write(5, row_of(5))
    if is_length_known:
        assert reader.read(reference, prompt(5), V) is not None
    number_at = shared_memory._number_at

    def replace(*given: Any) -> int:
        for number in range(64):
            write(100 + number, np.roll(row_of(5), 4))
        return number_at(*given)

    monkeypatch.setattr(shared_memory, "_number_at", replace)
    assert reader.read(reference, prompt(5), V) is None


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64", "riscv64"])
def test_rows_have_checksums_on_processors_that_reorder_stores(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    segment = make()
    assert segment.is_summed is (machine not in ("x86_64", "AMD64"))
    segment.close()


def in_place(segment: Segment, names: list[int], encoding: Encoding = Encoding.F32) -> RowBlock:
    """A block whose rows were computed directly in the memory of slots."""
    rows = segment.new_rows(len(names), V, encoding)
    assert rows is not None
    for row, name in zip(rows, names, strict=True):
        row[:] = row_of(name)
    return RowBlock([prompt(name) for name in names], rows, None, encoding)


def writer_of(segment: Segment) -> SegmentWriter:
    writer = SegmentWriter(ModelInfo("m", "none", V, 1, "r", "float32"), "w", 0)
    writer.segment, writer.host = segment, host_token()
    return writer


def read_all(reader: SegmentReader, references: Mapping[bytes, bytes], names: list[int]) -> None:
    for name in names:
        reference = unpack_reference(references[prompt(name)])
        assert reference is not None
        row = reader.read(reference, prompt(name), V)
        assert row is not None
        assert row.tobytes() == row_of(name).tobytes()


@pytest.mark.parametrize("is_summed", [False, True])
def test_rows_computed_in_their_slots_are_read_like_copied_rows(
    segment: Segment, reader: SegmentReader, is_summed: bool
) -> None:
    segment.is_summed = is_summed
    writer = writer_of(segment)
    for begin in range(0, 300, 20):
        names = list(range(begin, begin + 20))
        block = in_place(segment, names)
        others = RowBlock([prompt(1000 + begin)], row_of(1000 + begin)[None], None, Encoding.F32)
        shared = writer.write(others, (), ())
        references = writer.write(block, (), ()).references
        assert block.numbers.base is not None
        read_all(reader, references, names)
        read_all(reader, shared.references, [1000 + begin])
        found = writer.find(prompt(begin))
        assert found is not None
        assert found.encode(0) == block.encode(0)
        assert found.encode(0) == RowBlock([prompt(begin)], row_of(begin)[None], None, Encoding.F32).encode(0)


def test_a_row_server_gets_whole_rows_of_its_own_segment_only(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, names = writer_of(segment), list(range(64))
    for name in names:
        put(segment, name)
    memory = memoryview(bytearray(writer.row_bytes))
    for name in names:
        row = RowBlock([prompt(name)], row_of(name)[None], None, Encoding.F32).encode(0)
        assert writer.copy_to(memory, segment.nonce + prompt(name))
        assert memory == row
        assert not writer.copy_to(memory, bytes(8) + prompt(name))
    assert not writer.copy_to(memory, segment.nonce + prompt(64))
    assert not writer.copy_to(memory[:-2], segment.nonce + prompt(63)), "a row of another encoding"
    find_row = segment.row

    def reused(number: int) -> Any:
        """A row whose slot gets another row before the row is copied."""
        put(segment, 1000)
        return find_row(number)

    monkeypatch.setattr(segment, "row", reused)
    assert not writer.copy_to(memory, segment.nonce + prompt(0))
    writer.segment = None
    assert not writer.copy_to(memory, segment.nonce + prompt(1))


def test_slots_in_use_are_not_reused(segment: Segment, reader: SegmentReader) -> None:
    writer = writer_of(segment)
    names = list(range(30))
    block = in_place(segment, names)
    more = in_place(segment, list(range(30, 60)))
    assert segment.new_rows(30, V, Encoding.F32) is None
    while write_row(segment, 99, row_of(99)) is not None:
        pass
    assert block.numbers.tobytes() == np.stack([row_of(name) for name in names]).tobytes()
    read_all(reader, writer.write(block, (), ()).references, names)
    part = block.numbers[7]
    del block
    assert segment.new_rows(10, V, Encoding.F32) is None
    assert part.tobytes() == row_of(7).tobytes()
    del part
    assert segment.new_rows(10, V, Encoding.F32) is not None
    del more
    assert segment.new_rows(30, V, Encoding.F32) is not None


def test_slots_that_rows_are_copied_to_are_not_reused(
    segment: Segment, reader: SegmentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend's thread takes slots while another thread copies rows into other slots, which must stay reserved."""
    for name in range(33):
        put(segment, name)
    block = RowBlock([prompt(100), prompt(101)], np.stack([row_of(100), row_of(101)]), None, Encoding.F32)
    write = Segment._write
    taking: list[Future[NDArray[Any] | None]] = []

    def take_before(self: Segment, *given: Any, **options: Any) -> None:
        taking.append(backend.submit(self.new_rows, 16, V, Encoding.F32))
        write(self, *given, **options)

    monkeypatch.setattr(Segment, "_write", take_before)
    with ThreadPoolExecutor(2) as backend:
        references = writer_of(segment).write(block, (), ()).references
    for taken in taking:
        rows = taken.result()
        assert rows is not None
        rows[:] = 7
    read_all(reader, references, [100, 101])


def test_a_segment_of_an_older_layout_is_not_read(segment: Segment, reader: SegmentReader) -> None:
    """A reader ignores a segment of layout 1, whose slots lack the field that marks rows with a checksum."""
    header = bytearray(segment._memory[: shared_memory.HEADER.size])
    assert Layout.read(segment._memory) is not None
    header[6:8] = (1).to_bytes(2, "little")
    segment._memory[: len(header)] = bytes(header)
    assert Layout.read(segment._memory) is None


def test_a_batch_with_more_rows_than_slots_fills_the_free_slots(segment: Segment, reader: SegmentReader) -> None:
    names = list(range(200))
    block = RowBlock([*map(prompt, names)], np.stack([*map(row_of, names)]), None, Encoding.F32)
    references = writer_of(segment).write(block, (), ()).references
    assert len(references) == 64
    read_all(reader, references, names[:64])


def test_a_row_that_redis_stores_is_not_reported_when_its_slot_is_reused(segment: Segment) -> None:
    writer = writer_of(segment)
    writer.write(in_place(segment, list(range(32))), (), ())
    writer.note_stored([prompt(1), prompt(500)])
    writer.write(in_place(segment, list(range(32, 64))), (), ())
    again = RowBlock([prompt(2), prompt(99)], np.stack([row_of(2), row_of(99)]), None, Encoding.F32)
    shared = writer.write(again, {prompt(2)}, ())
    assert set(shared.references) == {prompt(99)}
    assert shared.replaced == [prompt(0)]
    replaced = writer.write(in_place(segment, [100, 101, 102]), (), ()).replaced
    assert set(replaced) == {prompt(3)}, "the rows 1 and 2 are in Redis"


def test_rows_that_do_not_fit_get_no_slots(segment: Segment) -> None:
    assert segment.new_rows(33, V, Encoding.F32) is None
    assert segment.new_rows(0, V, Encoding.F32) is None
    assert segment.new_rows(1, V + 1, Encoding.F32) is None
    rows = segment.new_rows(32, V, Encoding.BF16)
    assert rows is not None
    assert rows.shape == (32, V)
    assert rows.dtype == np.uint16


def test_replaced_rows_are_reported_once_unless_they_were_written_again(
    segment: Segment,
) -> None:
    writer = writer_of(segment)
    writer.write(in_place(segment, list(range(32))), (), ())
    writer.write(in_place(segment, list(range(32, 64))), (), ())
    block = in_place(segment, [0, 100, 101])
    assert set(writer.write(block, (), ()).replaced) == {prompt(1), prompt(2)}
    assert writer.write(block, (), ()).replaced == []


def test_a_row_that_is_left_out_of_its_slot_is_not_found(segment: Segment, reader: SegmentReader) -> None:
    writer = writer_of(segment)
    block = in_place(segment, [1, 2])
    assert set(writer.write(block, {prompt(1)}, ()).references) == {prompt(2)}
    assert reader.find(prompt(1), V) is None
    assert reader.find(prompt(2), V) is not None


def test_rows_of_the_previous_model_are_not_found_after_the_model_changed(
    segment: Segment, reader: SegmentReader
) -> None:
    put(segment, 1)
    other = make_segment("other", V, 64 * SLOT, lambda: True)
    assert other is not None

    async def change() -> None:
        changing = asyncio.create_task(reader.refresh("other"))
        late = asyncio.create_task(reader.refresh("fp"))
        await asyncio.sleep(0)
        changing_again = asyncio.create_task(reader.refresh("other"))
        await asyncio.sleep(0)
        assert reader.find(prompt(1), V) is None
        await asyncio.gather(changing, late, changing_again)

    asyncio.run(change())
    assert reader.find(prompt(1), V) is None
    assert reader.has_any
    other.close()


def test_references_and_rows_are_distinguished() -> None:
    reference = Reference(host_token(), b"12345678", 2**40, b"worker-1")
    assert unpack_reference(reference.pack()) == reference
    assert is_reference(reference.pack())
    assert len(reference.pack()) < 50
    assert not is_reference(RowBlock([bytes(16)], row_of(1)[None], None, Encoding.F32).encode(0))
    assert not is_reference(None)
    assert not is_reference(np.zeros(encoded_size(V, Encoding.F32), np.uint8))
    packed = reference.pack()
    assert unpack_reference(packed[:20]) is None
    assert unpack_reference(packed + bytes(300)) is None
    assert unpack_reference(packed[:4] + b"\x03" + packed[5:]) is None
    direct = reference._replace(address=b"10.0.0.5:7000")
    assert unpack_reference(direct.pack()) == direct
    assert split_reference(direct.pack())[0] == packed[:4] + b"\x02" + packed[5:29]
    assert place_of(None) == bytes(16)


def test_the_rows_of_many_workers_are_found() -> None:
    several = [make() for _ in range(32)]
    reader = SegmentReader()
    try:
        for number, segment in enumerate(several):
            put(segment, number)
        refresh(reader)
        for number in range(32):
            row = reader.find(prompt(number), V)
            assert row is not None
            assert row.tobytes() == row_of(number).tobytes()
        for segment in several[:16]:
            segment.close()
        refresh(reader)
        assert [reader.find(prompt(number), V) is None for number in range(32)] == [True] * 16 + [False] * 16
    finally:
        reader.close()
        for segment in several[16:]:
            segment.close()


def test_memory_of_deleted_rows_is_reused_and_memory_of_kept_rows_is_not(
    segment: Segment, reader: SegmentReader
) -> None:
    for number in range(8):
        put(segment, number)
    kept = reader.find(prompt(0), V)
    assert kept is not None
    part = kept[10:20]
    del kept
    for number in range(1, 8):
        assert reader.find(prompt(number), V) is not None
    assert part.tobytes() == row_of(0)[10:20].tobytes()
    with pytest.raises(ValueError, match="WRITEABLE"):
        part.setflags(write=True)


def test_rows_of_a_forked_child_do_not_change_when_the_parent_reads_more(
    segment: Segment, reader: SegmentReader
) -> None:
    for number in range(2):
        put(segment, number)
    assert reader.find(prompt(1), V) is not None, "from now on it knows how long rows are"
    row = reader.find(prompt(0), V)
    assert row is not None
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(write_end)
            os.read(read_end, 1)  # Wait until the parent has read more rows.
            os._exit(0 if row.tobytes() == row_of(0).tobytes() else 1)
        finally:
            os._exit(2)
    before = row.ctypes.data
    del row
    after = reader.find(prompt(1), V)
    assert after is not None
    assert after.ctypes.data == before, "the memory has been used again"
    os.close(write_end)
    _, status = os.waitpid(child, 0)
    os.close(read_end)
    assert os.waitstatus_to_exitcode(status) == 0


def test_memory_of_a_batch_is_reused_for_batches_of_a_similar_size() -> None:
    memory = RowMemory()
    first = memory.take_writeable(1000)
    first[:] = 1
    at = first.ctypes.data
    part = first[10:20]
    del first
    other = memory.take_writeable(900)
    assert other.ctypes.data != at, "a part of it is still in use"
    other[:] = 2
    assert part.tolist() == [1] * 10
    del part
    again = memory.take_writeable(950)
    assert again.shape == (950,)
    assert again.ctypes.data == at


def test_spare_memory_stays_within_its_limit() -> None:
    memory = RowMemory()
    for size in (2**27, 2**20):
        lent = [memory.take_writeable(size) for _ in range(3)]
        del lent
        assert sum(map(len, memory._free)) == (0 if size == 2**27 else 3 * 2**20)


def test_rows_whose_size_is_no_multiple_of_a_word_are_read_whole_or_not_at_all(place: Path) -> None:
    vocab_size = V + 1
    odd = make_segment("odd", vocab_size, 64 * SLOT, lambda: True)
    assert odd is not None
    odd.is_summed = True
    reader = SegmentReader()
    row, out = synthetic_row([1], vocab_size=vocab_size), np.empty(vocab_size, np.float32)
    try:
        for number in range(2):
            block = RowBlock([prompt(number)], row[None], None, Encoding.F32)
            odd.write(block.digests, block.encoded())
        refresh(reader, "odd")
        for _ in range(2):
            found = reader.find(prompt(0), vocab_size)
            assert found is not None
            assert found.tobytes() == row.tobytes()
            assert reader.find(prompt(1), vocab_size, out) is not None
            assert out.tobytes() == row.tobytes()
        odd._memory[odd.size - 64 * SLOT + 64 + 16 + 4 * vocab_size - 1] = 0x55
        assert reader.find(prompt(0), vocab_size) is None
        assert reader.find(prompt(0), vocab_size, out) is None
        assert reader.find(prompt(1), vocab_size) is not None
    finally:
        reader.close()
        odd.close()


@pytest.mark.parametrize("size", [1000, 200_000])
def test_rows_cannot_be_made_writeable_and_share_no_memory(size: int) -> None:
    memory = RowMemory()
    array, writeable = memory.take(size)
    writeable[:] = bytes([7]) * size
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)
    assert (array == 7).all()
    other = memory.take_writeable(size)
    other[:] = 8
    assert (array == 7).all()
