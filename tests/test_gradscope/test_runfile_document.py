"""docs/run-file.md suffices: a reader written from that document alone says what open_run says."""

import json
import struct
import zlib

import h5py
import numpy as np
import pytest

from gradscope import schema

# The reader below knows the document and nothing else: no gradscope, only the standard library, numpy, h5py.
MAGIC = bytes.fromhex("9E47534A0D0A1A01")


def frames_of(data):
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        if at + 29 <= len(data):
            kind, sequence, run, length = struct.unpack_from("<BQII", data, at + 8)
            end = at + 25 + length
            if end + 4 <= len(data) and zlib.crc32(data[at:end]) == struct.unpack_from("<I", data, end)[0]:
                yield kind, sequence, run, data[at + 25 : end]
                at = end + 4
                continue
        at += 1


def rows_of(payload):
    """Returns the layout's name and table to columns."""
    (length,) = struct.unpack_from("<I", payload)
    head = json.loads(payload[4 : 4 + length])
    at = 4 + length
    tables = {}
    for table, columns in head["tables"].items():
        tables[table] = {}
        for name, kind, shape in columns:
            if kind == "str":
                tables[table][name] = np.array(shape, dtype=object)
            else:
                num = int(np.prod(shape, dtype=int))
                values = np.frombuffer(payload, "<" + kind, num, at)
                tables[table][name] = values.reshape(shape)
                at += values.nbytes
    return head["layout"], tables


def fill_of(kind):
    return {"f": np.nan, "i": -1, "s": ""}[kind[0]]


def stack(pieces, names_of_rows):
    """Returns columns on top of one another, missing where one lacks them or their labels."""
    columns = {}
    for name in dict.fromkeys(name for piece in pieces for name in piece):
        parts = [piece[name] for piece in pieces if name in piece]
        shape = np.max([part.shape[1:] for part in parts], axis=0).astype(int) if parts[0].ndim > 1 else ()
        kind = "s" if parts[0].dtype == object else parts[0].dtype.kind
        num = [len(piece[names_of_rows]) for piece in pieces]
        whole = np.full((sum(num), *shape), fill_of(kind), dtype=parts[0].dtype)
        at = 0
        for piece, count in zip(pieces, num, strict=True):
            if name in piece:
                corner = tuple(slice(length) for length in piece[name].shape[1:])
                whole[(slice(at, at + count), *corner)] = piece[name]
            at += count
        columns[name] = whole
    return columns


def read_run(folder):
    """Returns table to columns, as stored, and the root attributes."""
    journals = [path.read_bytes() for path in sorted(folder.glob("run.h5.wal.*")) if path.suffix != ".tmp"]
    stored, attributes, dims = {}, {}, {}
    path = folder / "run.h5"
    if path.exists():
        with h5py.File(path) as file:
            attributes = dict(file.attrs)
            for group in file.values():
                if isinstance(group, h5py.Group) and "superseded" not in group.name:
                    stored[group.name[1:]] = {
                        name: node.asstr()[...] if node.dtype == object else node[...]
                        for name, node in group.items()
                    }
    records, known, pieces = {}, set(), {}
    run_id = attributes.get("run_id")
    for data in journals:
        for kind, sequence, run, payload in frames_of(data):
            if kind == 0:
                header = json.loads(payload)
                run_id = run_id or header["attributes"]["run_id"]
                known.add(header["layout"]["identity"])
                dims |= {table: own["dim"] for table, own in header["schema"].items()}
                attributes = {**header["attributes"], **attributes}
            elif kind == 1 and run == zlib.crc32(run_id.encode()):
                records[sequence] = payload
    done = int(attributes.get("journal_sequence", 0))
    for sequence in sorted(records):
        layout, tables = rows_of(records[sequence])
        if sequence > done and layout in known:
            for table, columns in tables.items():
                place = "user" if table == "user_updates" else table
                pieces.setdefault(place, [stored[place]] if place in stored else []).append(columns)
    whole = stored | {table: stack(own, dims[table]) for table, own in pieces.items()}
    return whole, attributes


# End of what the document is enough for.


def write(path, steps, **options):
    from gradscope.runfile import RunWriter, UpdateRecord

    slots = {"g/0": "g", "a/0": "a"}
    writer = RunWriter(path, slots=slots, policies={"g": "x", "a": "y"}, **options)
    for step in steps:
        rng = np.random.default_rng(step)
        names = ("g/0", "a/0") if step < 8 else ("g/0", "a/0", "g/1")
        record = UpdateRecord(
            "x", names, rng.normal(size=(len(names),) * 2), scalars={"grad_norm": rng.random()}
        )
        writer.append(step, record, metrics={"loss": rng.normal(), "entropy": {"a/0": rng.random()}})
        writer.append_modules(step, slots=["g/0"], modules=[f"m.{step // 4}"], grad_norm=[[step]])
        if step % 5 == 0:
            writer.append_evaluation(step, num_correct=step, num_total=100, dataset="held_out")
            writer.append_rows(step, row_id=[f"r{step}"], slot=["a/0"], num_tokens=[3])
            writer.append_event(step, "checkpoint", "gespeichert: ja")
    return writer


def check(folder):
    from gradscope.runfile import open_run

    mine, attributes = read_run(folder)
    run = open_run(folder)
    assert attributes["run_id"] == run.attrs["run_id"]
    num = 0
    for place, columns in mine.items():
        group = run[place].to_dataset()
        assert set(columns) == {*group.data_vars, *(set(group.coords) & set(columns))}
        for name, values in columns.items():
            expected = group[name].values
            if values.dtype.kind == "i" and expected.dtype.kind == "f":
                values = np.where(values == -1, np.nan, values)
            if name in ("start_step", "end_step"):
                continue  # filled in by compactions
            np.testing.assert_array_equal(values, expected, err_msg=f"{place}/{name}")
            num += 1
    assert set(mine) == {name for name in run.children if name != "superseded"}
    assert num > 30


def test_a_journal_alone(tmp_path):
    with write(tmp_path, range(12)):
        assert not (tmp_path / "run.h5").exists()
        check(tmp_path)


def test_a_file_alone(tmp_path):
    write(tmp_path, range(12)).close()
    check(tmp_path)


def test_a_file_and_journals(tmp_path):
    with write(tmp_path, range(6)) as writer:
        writer.compact(wait=True)
        writer.append(20, metrics={"loss": 1.0})
        writer.append_event(20, "checkpoint", "saved")
        check(tmp_path)


def test_a_resumed_run_and_a_torn_end(tmp_path):
    write(tmp_path, range(12)).close()
    with write(tmp_path, range(9, 14), resume_from_step=8):
        (journal,) = tmp_path.glob("run.h5.wal.*")
        with journal.open("ab") as file:
            file.write(MAGIC + b"\x01\x99")
        check(tmp_path)


@pytest.fixture(scope="module")
def document(root):
    return (root / "docs" / "run-file.md").read_text()


def test_the_document_names_every_table_dim_and_attribute(document):
    for table in schema.TABLES.values():
        assert f"| {table.name} | /{table.group} | {table.dim} |" in document, table.name
    for dim in (*schema.LABEL_DIMS, *schema.MIRROR_DIMS, *schema.NUMBERED_DIMS):
        assert f"`{dim}`" in document, dim
    for attribute in schema.ROOT_ATTRIBUTES:
        assert f"`{attribute}`" in document, attribute
    for variable in schema.ROOT_VARIABLES:
        assert f"`{variable.name}`" in document, variable.name


def test_the_document_says_the_bytes_and_numbers_of_the_code(document):
    from gradscope.runfile import compaction_child, frames, lock, log

    assert " ".join(f"{byte:02X}" for byte in frames.MAGIC) in document
    assert frames.MAGIC == MAGIC
    assert f"version {schema.SCHEMA_VERSION}" in document.splitlines()[0]
    assert f"{log._COMPACT_AT_LEAST} records" in document
    assert f"up to {log._MOST_WAITING // 2**20} MB" in document
    assert f"{lock.BEAT_SECONDS:.0f} seconds" in document
    assert f"{lock.WATCH_SECONDS:.0f} seconds" in document
    assert f"{compaction_child.WORTH_A_CHILD // 2**10} KiB" in document
