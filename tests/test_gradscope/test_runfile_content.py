"""A run file whose content was changed is refused in one line that names the variable."""

import subprocess
import sys

import h5py
import numpy as np
import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"a/0": "a", "b/0": "b"}
NUM_STEPS = 5


@pytest.fixture
def run(tmp_path):
    """A whole run of five steps, closed."""
    with RunWriter(tmp_path, slots=SLOTS, policies={"a": "p", "b": "p"}, config={"x": 1}) as writer:
        for step in range(NUM_STEPS - 1):
            record = UpdateRecord("p", tuple(SLOTS), np.eye(2), counts={"num_rows": np.ones(2)})
            writer.append(step, record, metrics={"loss": 0.5})
        with pytest.warns(UserWarning, match="mine"):
            writer.append(NUM_STEPS - 1, record, metrics={"loss": 0.5, "mine": 2.0})
        writer.append_evaluation(1, num_correct=1, num_total=2, dataset="d")
        writer.append_rows(1, row_id=["r"], sketch=[[1.0, 2.0]])
    return tmp_path


def put(place, value):
    def change(file):
        del file[place]
        file[place] = value

    return change


def remove(place):
    return lambda file: file.__delitem__(place)


def garbled(file):
    """Text that is no UTF-8."""
    del file["train/loss"], file["eval/dataset"]
    file["eval/dataset"] = np.array([b"\xff\xfe"], dtype="S2")


EXPECTED_GRAM = "expected f8 on (update: 5, slot: 2, slot_b: 2)."
CHANGES = {
    "a Gram without slots": (
        put("updates/gram", np.ones((30, 3))),
        f"variable '/updates/gram' has shape (30, 3) and dtype float64, {EXPECTED_GRAM}",
    ),
    "a Gram of too many slots": (
        put("updates/gram", np.ones((5, 3, 3))),
        f"has shape (5, 3, 3) and dtype float64, {EXPECTED_GRAM}",
    ),
    "a text for a Gram": (
        put("updates/gram", "x"),
        f"variable '/updates/gram' has shape () and dtype str, {EXPECTED_GRAM}",
    ),
    "complex numbers": (
        put("train/loss", np.ones(5, complex)),
        "'/train/loss' has shape (5,) and dtype complex128, expected f8 on (step: 5).",
    ),
    "steps that are no whole numbers": (
        put("train/step", np.arange(5.0)),
        "'/train/step' has shape (5,) and dtype float64, expected i8 on (step).",
    ),
    "too few losses": (put("train/loss", np.ones(4)), "variable '/train/loss' has shape (4,)"),
    "numbers for names": (
        put("eval/dataset", np.ones(1)),
        "'/eval/dataset' has shape (1,) and dtype float64, expected texts on (evaluation: 1).",
    ),
    "no step of the updates": (
        remove("updates/step"),
        "variable '/updates/step' is absent, expected i8 on (update: 5).",
    ),
    "no policy of the updates": (
        remove("updates/policy"),
        "variable '/updates/policy' is absent, expected texts on (update: 5).",
    ),
    "no number of the updates": (
        remove("updates/update"),
        "variable '/updates/update' is absent, expected i8 on (update).",
    ),
    "a group for a variable": (
        lambda file: (remove("train/loss")(file), file.create_group("train/loss")),
        "variable '/train/loss' is a group, expected f8",
    ),
    "a dataset for a group": (put("train", 1.0), "'/train' is a dataset, expected a group."),
    "no roles of the slots": (
        remove("slot_role"),
        "variable '/slot_role' is absent, expected texts on (slot: 2).",
    ),
    "a slot of no role": (
        lambda file: file["slot_role"].__setitem__(0, "z"),
        "variable '/slot_role' has 'z', expected names in '/role': a, b.",
    ),
    "a slot twice": (lambda file: file["slot"].__setitem__(0, "b/0"), "variable '/slot' has 'b/0' twice"),
    "no slots": (remove("slot"), "variable '/slot' is absent, expected texts on (slot)."),
    "a policy too many": (
        put("slot_policy", ["p", "p", "p"]),
        "'/slot_policy' has shape (3,) and dtype str, expected texts on (slot: 2).",
    ),
    "a sketch without length": (
        put("sketch_dim", 1),
        "'/sketch_dim' has shape () and dtype int64, expected i8 on (sketch_dim).",
    ),
    "too few values of one's own": (
        lambda file: file["user/mine"].resize(0, axis=0),
        "'/user/mine' has shape (0,) and dtype float64, expected f8 on (step: 1).",
    ),
    "a name that is no text": (garbled, "variable '/eval/dataset' cannot be read ("),
    "a sequence that is no number": (
        lambda file: file.attrs.__setitem__("journal_sequence", "x"),
        "attribute 'journal_sequence' is 'x', expected the number of the last record",
    ),
    "a version that is none": (
        lambda file: file.attrs.__setitem__("schema_version", "1..0"),
        "without the attribute schema_version",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_content_is_refused_in_one_line(name, run):
    change, message = CHANGES[name]
    with h5py.File(run / "run.h5", "r+") as file:
        change(file)
    with pytest.raises(RunFileError) as caught:
        open_run(run)
    text = str(caught.value)
    assert text.startswith(f"{run}/run.h5: ")
    assert message in text
    assert "\n" not in text
    assert "cut short" not in text


def test_the_same_holds_for_what_a_resume_left_behind(run):
    with RunWriter(run, slots=SLOTS, policies={"a": "p", "b": "p"}, resume_from_step=2):
        pass
    with h5py.File(run / "run.h5", "r+") as file:
        put("superseded/segment_000/train/loss", np.ones(9))(file)
    with pytest.raises(RunFileError, match="'/superseded/segment_000/train/loss' has shape"):
        open_run(run)


def test_files_of_other_writers_may_hold_other_number_types(run):
    with h5py.File(run / "run.h5", "r+") as file:
        put("train/loss", np.arange(5, dtype="i2"))(file)
        put("train/step", np.arange(5, dtype="u4"))(file)
        put("eval/dataset", np.array([b"d"]))(file)
        file.attrs["schema_version"] = np.bytes_(b"1.0")
    opened = open_run(run)
    assert opened["train"]["loss"].values.tolist() == [0, 1, 2, 3, 4]
    assert opened["eval"]["dataset"].values.tolist() == ["d"]


def test_an_opened_run_is_called_as_its_folder_or_file(run, monkeypatch):
    (run / "run.h5").rename(run / "lr3.h5")
    assert open_run(run / "lr3.h5").name == "lr3"
    (run / "lr3.h5").rename(run / "run.h5")
    monkeypatch.chdir(run)
    assert open_run(run).name == open_run("run.h5").name == open_run(".").name == run.name


AS_NOBODY = """
import os, sys
from gradscope.errors import RunFileError
from gradscope.runfile.reader import open_run
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.seteuid(65534)
try:
    open_run(sys.argv[2])
except RunFileError as error:
    print(error)
"""


def refusal_to_another_user(folder, path="run"):
    folder.chmod(0o755)
    command = [sys.executable, "-c", AS_NOBODY, str(folder), path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize("name", ["run.h5", "run.h5.wal.000000"])
def test_a_file_without_permission(name, tmp_path):
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run" / name).write_bytes(b"x")
    (tmp_path / "run" / name).chmod(0)
    assert refusal_to_another_user(tmp_path) == (
        f"run/{name}: cannot be read (Permission denied). Expected files and folders that this user may "
        "read. Change their permissions, or read a copy."
    )


def test_a_folder_without_permission(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run").chmod(0)
    assert refusal_to_another_user(tmp_path).startswith("run: cannot be read (Permission denied).")
    (tmp_path / "run").chmod(0o700)


@pytest.mark.parametrize("name", ["run.h5", "run.h5.wal.000008"])
def test_a_directory_in_the_place_of_a_file(name, run):
    (run / "run.h5").rename(run / "away.h5")
    (run / name).mkdir()
    with pytest.raises(RunFileError) as caught:
        open_run(run)
    assert str(caught.value) == (
        f"{run}/{name}: is a directory; expected a file that RunWriter wrote. Move the directory away."
    )
