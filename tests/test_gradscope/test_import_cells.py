"""What single cells, lines and columns become: no number is lost or doubled without a word."""

import json

import numpy as np
import pytest

import gradscope
from gradscope.importers.importing import import_run
from gradscope.importers.wording import listed, ordinal


def imported(tmp_path, content, name="log.csv", **choices):
    if isinstance(content, list):
        content = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in content)
    (tmp_path / name).write_text(content, newline="")
    made = import_run(tmp_path / name, tmp_path / "run.h5", **choices)
    return made, gradscope.open_run(tmp_path / "run.h5")


@pytest.mark.parametrize(
    "content", ["step,loss\n1,2\n2,3\n", "step;loss\n1;2,0\n2;3,0\n", "step\tloss\n1\t2\n2\t3\n"]
)
def test_separators(tmp_path, content):
    _, run = imported(tmp_path, content)
    assert run["train"]["loss"].values.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("end", ["3,0.", "3"])
def test_a_last_line_without_an_end_is_left_out(tmp_path, end):
    made, run = imported(tmp_path, f"step,loss\n1,2\n2,3\n{end}")
    assert run["train"]["step"].values.tolist() == [1, 2]
    assert any("last line has no end" in note for note in made.notes)


@pytest.mark.parametrize(("name", "content"), [("log.csv", "step,loss,loss\n1,2,3\n")])
def test_two_columns_of_one_name_are_refused(tmp_path, name, content):
    with pytest.raises(gradscope.GradscopeError, match="several columns are called loss"):
        imported(tmp_path, content, name)


def test_keys_that_the_run_file_would_call_alike_are_both_kept(tmp_path):
    rows = [{"step": s, "loss": 1.0, "a/b": 1.0 * s, "a.b": -1.0 * s} for s in (1, 2)]
    made, run = imported(tmp_path, rows, "log.jsonl")
    assert run["user"]["a.b"].values.tolist() == [1.0, 2.0]
    assert run["user"]["a.b_2"].values.tolist() == [-1.0, -2.0]
    assert any("get a number (a.b)" in note for note in made.notes)


@pytest.mark.parametrize("wrap", [False, True])
def test_numbers_as_text_count_in_json_lines(tmp_path, wrap):
    values = [{"loss": str(s / 2), "actor/grad_norm" if wrap else "grad_norm": "1.5"} for s in (1, 2)]
    rows = [{"step": str(s), **({"data": own} if wrap else own)} for s, own in enumerate(values, 1)]
    made, run = imported(tmp_path, rows, "log.jsonl")
    assert run["updates"]["grad_norm"].values.tolist() == [1.5, 1.5]
    assert any("numbers as text (" in note and "loss" in note for note in made.notes)


def test_text_between_numbers_is_told(tmp_path):
    made, run = imported(tmp_path, "step,loss,reward\n1,2,1\n2,oops,1\n")
    np.testing.assert_array_equal(run["train"]["loss"], [2.0, np.nan])
    assert any("text between numbers, which is left out (loss)" in note for note in made.notes)


def test_torn_lines_in_the_middle_are_left_out(tmp_path):
    rows = [{"step": s, "data": {"actor/grad_norm": 1.0 * s}} for s in range(1, 6)]
    made, run = imported(
        tmp_path, [*rows[:2], '{"step": 3, "da{"step": 3, "data": {}}\n', *rows[3:]], "log.jsonl"
    )
    assert run["train"]["step"].values.tolist() == [1, 2, 4, 5]
    assert any("1 line(s) are torn" in note and "(line 3)" in note for note in made.notes)


def test_a_byte_order_mark_is_no_content(tmp_path):
    _, run = imported(tmp_path, '\ufeff{"step": 1, "loss": 2.0}\n', "log.jsonl")
    assert run["train"]["loss"].values.tolist() == [2.0]


def test_columns_of_a_panel(tmp_path):
    header = '"Step","brisk-1 - train/loss","brisk-1 - train/loss__MIN","brisk-1 - train/loss__MAX"\n'
    made, run = imported(tmp_path, header + "1,0.5,0.1,0.9\n2,0.25,0.1,0.9\n")
    assert run["train"]["loss"].values.tolist() == [0.5, 0.25]
    assert made.unknown == ()
    assert any("run 'brisk-1' is taken off" in note for note in made.notes)
    (tmp_path / "two.csv").write_text("Step,a - loss,b - loss\n1,2,3\n")
    with pytest.raises(gradscope.GradscopeError, match=r"of 2 runs of a panel of W&B's \(a, b\)"):
        import_run(tmp_path / "two.csv", tmp_path / "never.h5")


def test_a_norm_whose_square_overflows_keeps_the_norm(tmp_path):
    _, run = imported(tmp_path, "step,grad_norm\n1,1e200\n2,2\n")
    assert run["updates"]["grad_norm"].values.tolist() == [1e200, 2.0]
    np.testing.assert_array_equal(run["updates"]["gram"].values.ravel(), [np.nan, 4.0])


@pytest.mark.parametrize("step", [2**60, 0.5])
def test_a_step_that_is_none_is_refused(tmp_path, step):
    with pytest.raises(gradscope.GradscopeError, match=r"log.jsonl: step .* with --step"):
        imported(tmp_path, [{"step": own, "loss": 1.0} for own in (1, step)], "log.jsonl")


BAD = {
    "deep.jsonl": (b"[" * 100_000 + b"\n", "no known format"),
    "empty.jsonl": (b"", "the file is empty"),
    "blank.jsonl": (b"\n\n \n", "nothing but blank lines"),
    "zipped.jsonl": (b"\x1f\x8b\x08\x00abc", "compressed with gzip: unpack it first"),
    "binary.jsonl": (bytes(range(256)) * 9, "it holds no text"),
    "wide.jsonl": ("{}".encode("utf-16"), "UTF-16"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log_is_named(tmp_path, name):
    content, complaint = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(gradscope.GradscopeError, match=complaint):
        import_run(tmp_path / name, tmp_path / "run.h5")


def test_names_are_shown_without_control_characters(tmp_path):
    key = "x\n\x1b[31mred"
    made, _ = imported(
        tmp_path, [{"step": s, "loss": 1.0, key: "text", "": 1.0} for s in (1, 2)], "log.jsonl"
    )
    said = " ".join(made.notes)
    assert "\x1b" not in said
    assert r"(x\n\x1b[31mred)" in said
    assert listed(["", "ö"]) == "(no name), ö"
    assert [ordinal(number) for number in (1, 2, 3, 11, 12, 22, 2.5)] == [
        "1st",
        "2nd",
        "3rd",
        "11th",
        "12th",
        "22nd",
        "2.5th",
    ]


def events(folder, values):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step, value in values:
        own = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="train/loss", simple_value=value)])
        writer.add_event(event_pb2.Event(wall_time=1.7e9, step=step, summary=own))
    writer.close()
    (file,) = (own for own in folder.iterdir() if own.is_file())
    return file


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_event_file_says_what_is_lost(tmp_path, damage):
    file = events(tmp_path / "tb", [(step, 0.5) for step in range(1, 21)])
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    if damage == "flipped":
        data[middle] ^= 0xFF
    file.write_bytes(data[:middle] if damage == "cut" else data)
    made = import_run(tmp_path / "tb", tmp_path / "run.h5")
    assert 5 <= made.num_steps < 15
    assert any(f"of {file.stat().st_size}: what was logged after that is lost" in note for note in made.notes)


def test_event_files_without_steps_or_with_folders_below(tmp_path):
    events(tmp_path / "stepless", [(0, 0.5), (0, 0.25)])
    with pytest.raises(gradscope.GradscopeError, match="all 2 values stand at step 0"):
        import_run(tmp_path / "stepless", tmp_path / "never.h5")
    events(tmp_path / "tb", [(1, 0.5), (2, 0.25)])
    events(tmp_path / "tb" / "hparams", [(0, 9.0)])
    made = import_run(tmp_path / "tb", tmp_path / "run.h5")
    assert made.num_steps == 2
    assert any("left out (hparams)" in note for note in made.notes)
