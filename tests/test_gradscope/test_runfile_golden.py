"""The sample of each schema version is read for ever, with the values that it was made with."""

import importlib.util
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import xarray as xr

from gradscope import schema
from gradscope.runfile import RunWriter, open_run


@pytest.fixture(scope="module")
def golden(root):
    """The module that made the samples, which knows what is in them."""
    place = root / "tests" / "data" / "make_golden.py"
    spec = importlib.util.spec_from_file_location("make_golden", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sample(root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden") / "run"
    shutil.copytree(root / "tests" / "data" / "run-1.0", folder)
    return folder


def expected(golden, table, variable, rows, layout):
    """Returns a variable as it was written at these rows."""
    whole = np.full((len(rows), *(layout[dim] for dim in variable.dims[1:])), np.nan)
    for at, row in enumerate(rows):
        num_slots = 4 if row >= golden.STORED and table in ("train", "updates") else 3
        own = {"slot": num_slots, "slot_b": num_slots}
        shape = tuple(own.get(dim, layout[dim]) for dim in variable.dims[1:])
        values = golden.numbers(table, variable.name, row, shape)
        whole[(at, *(slice(length) for length in shape))] = values
    return whole


def test_every_value_of_version_1_0(golden, sample):
    run = open_run(sample)
    assert run.attrs["schema_version"] == "1.0"
    assert "damage" not in run.attrs
    assert run["slot"].values.tolist() == [*golden.SLOTS, golden.LATE]
    layout = {dim: run.sizes[dim] for dim in run.dims}
    steps = list(range(golden.STEPS))
    assert run["train"]["step"].values.tolist() == steps
    assert run["train"]["segment"].values.tolist() == [0] * 5 + [1] * 4
    assert run["updates"]["step"].values.tolist() == steps
    num = 0
    for table in ("train", "updates", "modules"):
        set_apart = (
            "segment",
            "num_updates",
            "wall_time",
            "minibatch",
            "seconds",
            "policy",
            "step",
            "update",
        )
        for variable in schema.TABLES[table].variables:
            if variable.name in run[table].data_vars and variable.name not in set_apart:
                values = expected(golden, table, variable, steps, layout)
                if variable.name == "loss":
                    values[2] = np.nan
                np.testing.assert_array_equal(run[table][variable.name], values, err_msg=variable.name)
                num += 1
    assert num >= 43
    np.testing.assert_array_equal(run["user"]["own"], np.arange(golden.STEPS) * 1.5)
    rows = run["rows"].to_dataset()
    assert rows["row_id"].values.tolist() == [f"r{step}" for step in steps]
    np.testing.assert_array_equal(rows["sketch"], [golden.numbers("rows", "sketch", s, (4,)) for s in steps])
    evaluations = run["eval"].to_dataset()
    assert evaluations["step"].values.tolist() == [0, 2, 4, 6, 8]
    np.testing.assert_array_equal(evaluations["greedy"], [0, 0, 1, 0, 0])
    assert "Schritt 8: gespeichert" in run["events"]["message"].values
    assert run["superseded/segment_000/train"]["step"].values.tolist() == [5]


def test_it_can_be_resumed_and_compacted(golden, sample, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sample, run)
    last = golden.STEPS - 1
    with RunWriter(run, slots=golden.SLOTS, policies=golden.POLICIES, resume_from_step=last) as writer:
        writer.append(last + 1, metrics={"loss": 0.5})
    again, before = open_run(run), open_run(sample)
    assert again["train"]["step"].values.tolist() == [*range(golden.STEPS), last + 1]
    for place in (
        "train/loss",
        "updates/gram",
        "modules/gram",
        "rows/sketch",
        "superseded/segment_000/train/loss",
    ):
        values = before[place].values
        np.testing.assert_array_equal(again[place].values[: len(values)], values, err_msg=place)


def axes_of(file):
    found = []

    def visit(name, node):
        if isinstance(node, h5py.Dataset):
            found.append((name, node))

    file.visititems(visit)
    return found


def test_every_axis_has_a_scale_and_every_dataset_says_what_it_is(sample):
    with h5py.File(sample / "run.h5") as file:
        found = axes_of(file)
        assert len(found) > 100
        for name, dataset in found:
            assert {"units", "long_name"} <= set(dataset.attrs), name
            if dataset.is_scale:
                continue
            assert all(len(scales) == 1 for scales in dataset.dims), name
            if dataset.dtype != object:
                assert dataset.attrs["_FillValue"].dtype == dataset.dtype, name
        assert any("superseded" in name for name, _ in found)


def test_plain_xarray_opens_the_whole_tree(golden, sample):
    with xr.open_datatree(sample / "run.h5", engine="h5netcdf") as tree:
        assert tree["train"]["loss"].dims == ("step",)
        gram = tree["updates"]["gram"].sel(slot="generator/1", slot_b="judge/0").values
        np.testing.assert_array_equal(
            gram, [golden.value("updates", "gram", s, 1, 2) for s in range(golden.STORED)]
        )
        assert tree["superseded/segment_000/train"]["step"].values.tolist() == [5]


def test_h5dump_reads_it(sample):
    if shutil.which("h5dump") is None:
        pytest.skip("h5dump is not installed (Debian: hdf5-tools)")
    command = ["h5dump", "-d", "/train/loss", str(sample / "run.h5")]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    assert "H5T_IEEE_F64LE" in out
    assert "NaN" in out or "nan" in out


def test_a_sample_is_never_made_twice(root):
    command = [sys.executable, str(root / "tests" / "data" / "make_golden.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    assert "is there and stays as it is" in done.stderr
