"""/modules and /rows stay on the disk until asked for, and say the same as when read at once."""

import ast
import pickle
import subprocess
import sys
import warnings

import h5py
import numpy as np
import pytest
import xarray as xr

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, open_run
from gradscope.runfile.load import load
from gradscope.runfile.reader import to_datatree

SLOTS = {"a/0": "a", "a/1": "a"}
POLICIES = {"a": "p"}


def norms(step, num):
    return np.random.default_rng(step).random((2, num)).astype("f4")


def append(writer, steps, *, num=3):
    for step in steps:
        writer.append(step, metrics={"loss": step})
        modules = [f"layers.{n}.m" for n in range(num)]
        writer.append_modules(step, slots=list(SLOTS), modules=modules, grad_norm=norms(step, num))
        ids = [f"r{step}.{n}" for n in range(2)]
        writer.append_rows(
            step, row_id=ids, slot=list(SLOTS), num_tokens=[step, np.nan], sketch=np.eye(2) * step
        )


@pytest.fixture
def writer(tmp_path):
    """A writer of a run of 40 steps in the file and 10 in the journal, where more modules turn up."""
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        append(writer, range(40))
        writer.compact(wait=True)
        append(writer, range(40, 50), num=5)
        yield writer


def is_in_memory(run, name):
    return run[name].variable._in_memory


def test_large_variables_are_read_when_asked_for(writer, tmp_path):
    run = open_run(tmp_path / "run")
    large = ["modules/grad_norm", "rows/sketch", "rows/row_slot", "rows/num_tokens"]
    assert [is_in_memory(run, name) for name in large] == [False] * 4
    assert is_in_memory(run, "train/loss")
    assert run["modules/grad_norm"].shape == (50, 2, 5)
    assert not is_in_memory(run, "modules/grad_norm")
    run["modules/grad_norm"].load()
    assert is_in_memory(run, "modules/grad_norm")


def test_they_say_the_same_as_when_read_at_once(writer, tmp_path):
    lazy = open_run(tmp_path / "run")
    whole = to_datatree(load(tmp_path / "run").content)
    for group in ("modules", "rows"):
        for name, variable in whole[group].data_vars.items():
            assert lazy[group][name].dims == variable.dims
            assert lazy[group][name].attrs == variable.attrs
            np.testing.assert_array_equal(lazy[group][name].values, variable.values, err_msg=name)
    assert set(lazy["modules"].data_vars) == set(whole["modules"].data_vars)
    assert set(lazy["rows"].data_vars) == set(whole["rows"].data_vars)
    np.testing.assert_array_equal(lazy["modules/grad_norm"].values[44], norms(44, 5))
    assert np.isnan(lazy["modules/grad_norm"].values[3, :, 3:]).all()


SELECTIONS = [
    {"module_update": 7},
    {"module_update": -1, "slot": 1},
    {"module_update": slice(35, 45)},
    {"module_update": slice(None, None, 7), "module": slice(1, 4)},
    {"module_update": [48, 3, 41, 3], "module": [2, 0]},
    {"module_update": slice(45, 2, -3), "slot": 0, "module": 4},
    {"module": -1},
    {"module_update": np.arange(50)[::2], "slot": [1]},
    {"module_update": slice(0, 0)},
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
def test_any_selection_reads_what_is_selected(writer, tmp_path, selection):
    whole = to_datatree(load(tmp_path / "run").content)["modules/grad_norm"]
    lazy = open_run(tmp_path / "run")["modules/grad_norm"].isel(selection)
    np.testing.assert_array_equal(lazy.values, whole.isel(selection).values)
    assert lazy.dtype == np.float32


def test_what_was_opened_stays_what_it_was_while_the_run_goes_on(writer, tmp_path):
    run = open_run(tmp_path / "run")
    append(writer, range(50, 200), num=5)
    writer.compact(wait=True)
    assert run["modules/grad_norm"].shape[0] == 50
    np.testing.assert_array_equal(run["modules/grad_norm"].values[49], norms(49, 5))
    np.testing.assert_array_equal(run["modules/grad_norm"].values[39, :, :3], norms(39, 3))


def elsewhere(data):
    """Reads a pickled /modules in another process; returns what it says."""
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)['grad_norm'].values.tolist())"
    return subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=False)


def test_it_travels_to_another_process_and_a_longer_file(writer, tmp_path):
    data = pickle.dumps(open_run(tmp_path / "run")["modules"].to_dataset())
    append(writer, range(50, 60), num=5)
    writer.compact(wait=True)
    values = ast.literal_eval(elsewhere(data).stdout.decode().replace("nan", "None"))
    np.testing.assert_array_equal(np.array(values[49], "f4"), norms(49, 5))
    assert len(values) == 50


def test_a_run_that_was_resumed_since_is_refused_where_it_has_to_be_read_again(tmp_path):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        append(writer, range(10))
    opened = open_run(tmp_path / "run")["modules"].to_dataset()
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES, resume_from_step=4) as writer:
        append(writer, range(5, 8))
    with pytest.raises(RunFileError, match="was resumed or replaced after it was opened"):
        opened["grad_norm"].load()
    moved = open_run(tmp_path / "run")["superseded/segment_000/modules/grad_norm"]
    assert not moved.variable._in_memory
    np.testing.assert_array_equal(moved.values, [norms(step, 3) for step in range(5, 10)])


def test_a_file_that_is_gone_since_is_said_to_be_so(writer, tmp_path):
    opened = open_run(tmp_path / "run")
    (tmp_path / "run" / "run.h5").rename(tmp_path / "elsewhere.h5")
    with pytest.raises(RunFileError, match=r"run\.h5: cannot be read"):
        opened["modules/grad_norm"].load()
    (tmp_path / "elsewhere.h5").rename(tmp_path / "run" / "run.h5")
    np.testing.assert_array_equal(opened["modules/grad_norm"].values[44], norms(44, 5))


def test_other_tools_open_the_file_meanwhile(writer, tmp_path):
    run = open_run(tmp_path / "run")
    run["rows/sketch"].load()
    with xr.open_datatree(tmp_path / "run" / "run.h5", engine="h5netcdf") as plain:
        assert plain["train"].sizes["step"] == 40
        run["modules/grad_norm"].load()
    with h5py.File(tmp_path / "run" / "run.h5", "r+") as file:
        assert len(file["train/step"]) == 40


def test_a_run_of_journals_only(tmp_path):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        append(writer, range(4))
        run = open_run(tmp_path / "run")
        np.testing.assert_array_equal(run["modules/grad_norm"].values, [norms(step, 3) for step in range(4)])
        assert run["rows/row_id"].values.tolist()[:2] == ["r0.0", "r0.1"]


def test_a_lazy_variable_that_does_not_fit_is_refused_when_the_run_is_opened(tmp_path):
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        append(writer, range(4))
    with h5py.File(tmp_path / "run" / "run.h5", "r+") as file:
        del file["modules/grad_norm"]
        file["modules/grad_norm"] = np.zeros((3, 2, 3), "f4")
    with (
        warnings.catch_warnings(),
        pytest.raises(RunFileError, match=r"'/modules/grad_norm' has shape \(3, 2, 3\)"),
    ):
        open_run(tmp_path / "run")
