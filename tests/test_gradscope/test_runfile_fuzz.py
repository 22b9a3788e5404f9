"""Journals with anything done to them: no crash, no wrong value accepted, every whole record recovered."""

import shutil
import warnings

import h5py
import numpy as np
import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, UpdateRecord, batch, frames
from gradscope.runfile.load import load

SLOTS = {"a/0": "a", "a/1": "a"}
POLICIES = {"a": "p"}
STORED, NUM = 6, 24
JOURNAL = "run.h5.wal.000001"


def value(step):
    return np.random.default_rng(step).normal(size=(2, 2))


def make_run(path):
    """A run of a killed writer: `STORED` steps in the file, the rest in a journal whose layout grows once."""
    with RunWriter(path / "live", slots=SLOTS, policies=POLICIES) as writer:
        for step in range(NUM):
            gram = value(step)
            metrics = {"loss": gram[0, 0], "seconds": {"late" if step > NUM // 2 else "early": 1.0}}
            writer.append(step, UpdateRecord("p", tuple(SLOTS), gram), metrics=metrics)
            if step == STORED - 1:
                writer.compact(wait=True)
        shutil.copytree(path / "live", path / "dead")
    return path / "dead"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Bytes of a journal of another run, of the same labels and step numbers but other values."""
    path = tmp_path_factory.mktemp("foreign")
    with RunWriter(path, slots=SLOTS, policies=POLICIES) as writer:
        for step in range(NUM):
            metrics = {"loss": -1.0, "seconds": {"early": 1.0, "late": 1.0}}
            writer.append(step, UpdateRecord("p", tuple(SLOTS), np.full((2, 2), -1.0)), metrics=metrics)
        return (path / "run.h5.wal.000000").read_bytes()


def check(folder, original, data, *, is_sound=False):
    """Reads the run with `data` as its journal."""
    (folder / JOURNAL).write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load(folder)
    tables = loaded.content.tables
    for step, loss in zip(tables["train"]["step"], tables["train"]["loss"], strict=True):
        assert loss == value(step)[0, 0]
    for step, gram in zip(tables["updates"]["step"], tables["updates"]["gram"], strict=True):
        np.testing.assert_array_equal(gram, value(step))
    steps = tables["train"]["step"].tolist()
    assert steps == sorted(set(steps))
    assert set(whole_steps(original, data)) <= set(steps)
    assert set(range(STORED)) <= set(steps)
    if not is_sound:
        assert loaded.journals[0].damages or loaded.journals[0].num_foreign


def whole_steps(original, data):
    """Yields the steps of records that stand whole in `data`, their layout told there or in the file."""
    known = {layout_of_file(original)}
    for frame in original:
        is_whole = frames.encode(frame) in data
        if frame.kind == frames.HEADER_KIND:
            known |= {layout_after(original, frame)} if is_whole else set()
        elif is_whole and batch.layout_identity(frame.payload) in known and frame.sequence > 1:
            yield from batch.decode(frame.payload)["train"]["step"].tolist()


def layout_of_file(original):
    return batch.layout_identity(original[1].payload)


def layout_after(original, header):
    following = original[original.index(header) + 1]
    return batch.layout_identity(following.payload)


def flipped(data, rng):
    data = bytearray(data)
    for bit in rng.integers(0, 8 * len(data), rng.integers(1, 9)):
        data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def zeroed(data, rng):
    start, stop = sorted(rng.integers(0, len(data), 2))
    return data[:start] + bytes(stop - start + 1) + data[stop + 1 :]


def with_garbage(data, rng):
    at = rng.integers(0, len(data) + 1)
    return data[:at] + rng.bytes(rng.integers(1, 2000)) + data[at:]


def with_hole(data, rng):
    start, stop = sorted(rng.integers(0, len(data), 2))
    return data[:start] + data[stop + 1 :]


def with_doubled_tail(data, rng):
    return data + data[rng.integers(1, len(data)) :]


def with_swapped_blocks(data, rng):
    size = int(rng.choice([512, 4096]))
    blocks = [data[at : at + size] for at in range(0, len(data), size)]
    one, other = rng.choice(len(blocks) - 1, 2, replace=False)
    blocks[one], blocks[other] = blocks[other], blocks[one]
    return b"".join(blocks)


CHANGES = [flipped, zeroed, with_garbage, with_hole, with_doubled_tail, with_swapped_blocks]


def fuzz(run, foreign, folder, num, *, seed, every):
    """Reads the run with `num` changed journals and with one cut at each `every`th byte."""
    shutil.copytree(run, folder)
    data = (folder / JOURNAL).read_bytes()
    original, damages = frames.scan(data)
    assert not damages
    assert len(original) == NUM - STORED + 2  # a header, a record a step, the header of the late label
    rng = np.random.default_rng(seed)
    check(folder, original, data, is_sound=True)
    for number in range(num):
        change = CHANGES[number % len(CHANGES)]
        changed = change(data, rng)
        pieces = (frames.encode(frame) for frame in frames.scan(changed)[0])
        check(folder, original, changed, is_sound=b"".join(pieces) == changed)
    ends = set(np.cumsum([0, *(len(frames.encode(frame)) for frame in original)]).tolist())
    for cut in range(0, len(data), every):
        check(folder, original, data[:cut], is_sound=cut in ends)
    for _ in range(num // 10):
        start, stop = sorted(rng.integers(0, len(foreign), 2))
        at = rng.integers(0, len(data))
        mixed = data[:at] + foreign[start:stop] + data[at:]
        check(folder, original, mixed, is_sound=mixed == data)


def test_a_hundred_and_fifty_journals(run, foreign, tmp_path):
    fuzz(run, foreign, tmp_path / "run", 90, seed=0, every=331)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_journals(run, foreign, tmp_path):
    fuzz(run, foreign, tmp_path / "run", 2000, seed=1, every=53)


@pytest.mark.slow
def test_a_real_journal_cut_at_every_byte_gives_back_its_whole_records(run):
    data = (run / JOURNAL).read_bytes()
    written, _ = frames.scan(data)
    ends = np.cumsum([len(frames.encode(frame)) for frame in written])
    for cut in range(len(data)):
        assert frames.scan(data[:cut])[0] == written[: int(np.sum(ends <= cut))]


def foreign_files(folder, foreign):
    """Yields contents that a file of a journal's name may have."""
    yield b""
    yield b"\0"
    yield b"not a journal at all\n" * 50
    yield frames.MAGIC
    yield frames.MAGIC * 100
    yield np.random.default_rng(0).bytes(5000)
    with h5py.File(folder / "other.h5", "w") as file:
        file["x"] = np.arange(100)
    yield (folder / "other.h5").read_bytes()
    for payload in (b"", b"{}", b"[1]", b"\xff", b'{"layout": 3, "attributes": {}}', b"\xff\xff\xff\xff{}"):
        for kind in (frames.HEADER_KIND, frames.ROWS_KIND, 9):
            for tag in (0, frames.run_tag("None")):
                yield frames.encode(frames.Frame(kind, 1, tag, payload))
    found, _ = frames.scan(foreign)
    yield b"".join(frames.encode(frame) for frame in found if frame.kind == frames.ROWS_KIND)


def test_files_of_others_in_the_place_of_a_journal(run, foreign, tmp_path):
    for number, data in enumerate(foreign_files(tmp_path, foreign)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / JOURNAL).write_bytes(data)
        with pytest.raises(RunFileError):
            load(folder)
        shutil.copy(run / "run.h5", folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert load(folder).content.tables["train"]["step"].tolist() == list(range(STORED))


def test_a_whole_journal_of_another_run_is_refused(run, foreign, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / JOURNAL).write_bytes(foreign)
    with pytest.raises(RunFileError, match="expected files of one run"):
        load(tmp_path / "run")
