"""What goes into a RunWriter comes out of open_run bit for bit, before and after compaction."""

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest
import xarray as xr

from gradscope import schema
from gradscope.runfile import RunWriter, UpdateRecord, open_run

SLOTS = {"generator/0": "generator", "generator/1": "generator", "aggregator/0": "aggregator"}
POLICIES = {"generator": "first", "aggregator": "second"}
NAMES = tuple(SLOTS)
TRAIN = schema.TABLES["train"].variables
SLOT_METRICS = [v for v in TRAIN if v.dims == ("step", "slot")]
STEP_METRICS = [v for v in TRAIN if v.dims == ("step",) and v.name not in ("step", "segment", "num_updates")]
UPDATE_SCALARS = [
    v
    for v in schema.TABLES["updates"].variables
    if v.dims == ("update",) and v.name not in ("update", "step", "segment", "policy")
]
UPDATE_COUNTS = [v for v in schema.TABLES["updates"].variables if v.dims == ("update", "slot")]


def draw(rng, variable, shape=()):
    """Random values as the variable stores them, some missing, some zero, some infinite."""
    if variable.dtype.startswith("i"):
        values = rng.integers(0, 100, shape).astype(float)
    else:
        values = rng.normal(size=shape) * 10.0 ** rng.integers(-12, 12, shape)
        values = np.where(rng.random(shape) < 0.1, np.inf, values)
    values = np.where(rng.random(shape) < 0.2, 0.0, values)
    return np.where(rng.random(shape) < 0.2, np.nan, values)


def make_record(rng, policy):
    mine = np.array([POLICIES[role] == policy for role in SLOTS.values()])
    gram = np.where(mine[:, None] & mine, rng.normal(size=(3, 3)), np.nan)
    return UpdateRecord(
        policy,
        NAMES,
        gram,
        counts={v.name: draw(rng, v, 3) for v in UPDATE_COUNTS},
        scalars={v.name: float(draw(rng, v)) for v in UPDATE_SCALARS},
        gram_cross=rng.normal(size=(3, 3)),
        update_gram=rng.normal(size=(4, 4)),
        effect=rng.normal(size=(2, 4)),
    )


def make_metrics(rng):
    metrics = {v.name: float(draw(rng, v)) for v in STEP_METRICS}
    metrics |= {v.name: dict(zip(NAMES, draw(rng, v, 3).tolist(), strict=True)) for v in SLOT_METRICS}
    return {**metrics, "seconds": {"rollout": rng.random(), "update": rng.random()}}


def write_all(path, num_steps, *, seed=0):
    """Writes every variable of /train and /updates at random; returns writer and what was written."""
    rng = np.random.default_rng(seed)
    written = []
    writer = RunWriter(path, slots=SLOTS, policies=POLICIES, config={"workflow": "voting"}, seed=7)
    for step in range(num_steps):
        records = [make_record(rng, policy) for policy in ("first", "second")]
        metrics = make_metrics(rng)
        writer.append(step * 2, records, metrics=metrics)
        written.append((step * 2, records, metrics))
    return writer, written


def check_all(run, written):
    train, updates = run["train"], run["updates"]
    assert train["step"].values.tolist() == [step for step, _, _ in written]
    for position, (step, records, metrics) in enumerate(written):
        for variable in STEP_METRICS:
            np.testing.assert_array_equal(train[variable.name].values[position], metrics[variable.name])
        for variable in SLOT_METRICS:
            expected = [metrics[variable.name][slot] for slot in NAMES]
            np.testing.assert_array_equal(train[variable.name].sel(step=step, slot=list(NAMES)), expected)
        seconds = train["seconds"].sel(step=step)
        assert {name: seconds.sel(phase=name).item() for name in metrics["seconds"]} == metrics["seconds"]
        for order, record in enumerate(records):
            row = updates.to_dataset().sel(update=2 * position + order)
            assert row["step"].item() == step
            assert row["policy"].item() == record.policy
            for name in ("gram", "gram_cross", "update_gram", "effect"):
                np.testing.assert_array_equal(row[name].values, getattr(record, name))
            for name, value in record.scalars.items():
                np.testing.assert_array_equal(row[name].values, value)
            for name, value in record.counts.items():
                np.testing.assert_array_equal(row[name].values, value)


def test_bit_equal_from_journal_file_and_both(tmp_path):
    writer, written = write_all(tmp_path / "run", 12)
    assert not (tmp_path / "run" / "run.h5").exists()
    check_all(open_run(tmp_path / "run"), written)
    writer.compact(wait=True)
    check_all(open_run(tmp_path / "run"), written)
    writer.append(1000, metrics=written[0][2])
    check_all(open_run(tmp_path / "run"), [*written, (1000, [], written[0][2])])
    writer.close()
    check_all(open_run(tmp_path / "run" / "run.h5"), [*written, (1000, [], written[0][2])])
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "run.h5"]


def test_bit_equal_through_automatic_compactions(tmp_path):
    writer, written = write_all(tmp_path / "run", 150)
    writer.close()
    check_all(open_run(tmp_path / "run"), written)


def test_many_compactions_do_not_swell_the_file(tmp_path):
    for name, every in (("often", 2), ("once", 1000)):
        with RunWriter(tmp_path / name, slots=SLOTS, policies=POLICIES, fsync="never") as writer:
            rng = np.random.default_rng(0)
            largest = 0
            for step in range(80):
                writer.append(step, make_record(rng, "first"))
                if step % every == every - 1:
                    writer.compact(wait=True)
                    largest = (tmp_path / name / "run.h5").stat().st_size
        assert (tmp_path / name / "run.h5").stat().st_size >= 0.4 * largest
    sizes = [(tmp_path / name / "run.h5").stat().st_size for name in ("often", "once")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)


def test_plain_xarray_opens_the_file_and_sees_the_same(tmp_path):
    writer, _ = write_all(tmp_path / "run", 5)
    writer.append_evaluation(4, num_correct=3, num_total=10, dataset="held_out")
    writer.append_event(4, "checkpoint", "saved")
    with pytest.warns(UserWarning, match="/user/mine"):
        writer.append(20, metrics={"mine": 1.0})
    writer.close()
    run = open_run(tmp_path / "run")
    with xr.open_datatree(tmp_path / "run" / "run.h5", engine="h5netcdf") as plain:
        assert {node.path for node in plain.subtree} == {node.path for node in run.subtree}
        for node in plain.subtree:
            for name, values in node.to_dataset().variables.items():
                own = run[node.path].to_dataset()[name]
                assert own.dims == values.dims
                assert own.attrs == values.attrs
                np.testing.assert_array_equal(own.values, values.values)


def test_every_dataset_in_the_file_says_what_it_is(tmp_path):
    writer, _ = write_all(tmp_path / "run", 3)
    writer.append_evaluation(4, num_correct=3, num_total=10, dataset="d", role_accuracy={"generator": 0.5})
    writer.append_rows(4, row_id=["a"], sketch=[[1.0, 2.0]])
    writer.append_modules(4, slots=NAMES, modules=["layers.3.q_proj"], grad_norm=np.ones((3, 1)))
    writer.close()
    with h5py.File(tmp_path / "run" / "run.h5") as file:
        datasets = []
        file.visititems(lambda _, node: datasets.append(node) if isinstance(node, h5py.Dataset) else None)
        assert len(datasets) > 60
        for dataset in datasets:
            assert "long_name" in dataset.attrs, dataset.name
            assert "units" in dataset.attrs, dataset.name
            if dataset.is_scale:
                continue
            assert all(len(scales) == 1 for scales in dataset.dims), dataset.name
            if not h5py.check_string_dtype(dataset.dtype):
                assert dataset.attrs["_FillValue"].dtype == dataset.dtype, dataset.name


def test_missing_is_nan_and_zero_is_zero(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        counts = {"num_rows": np.array([8, np.nan, 0])}
        writer.append(0, UpdateRecord("first", NAMES, np.full((3, 3), np.nan), counts=counts))
        writer.append(1, metrics={"num_tokens": {"generator/0": 0}})
    run = open_run(tmp_path)
    np.testing.assert_array_equal(run["updates"]["num_rows"][0], [8, np.nan, 0])
    np.testing.assert_array_equal(run["train"]["num_tokens"].sel(step=1), [0, np.nan, np.nan])
    np.testing.assert_array_equal(run["train"]["num_updates"], [1, np.nan])
    assert run["updates"]["step"].dtype == np.int64
    assert "loss" not in run["train"]
    assert "eval" not in run.children


def test_evaluations_events_rows_and_modules(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(5, UpdateRecord("first", NAMES, np.eye(3)))
        writer.append_evaluation(
            5,
            num_correct=41,
            num_total=100,
            dataset="held_out",
            temperature=0.7,
            role_accuracy={"generator": 0.3},
        )
        writer.append_evaluation(2, num_correct=4, num_total=100, dataset="held_out", greedy=True)
        writer.append_event(5, "checkpoint", "saved")
        writer.append_rows(
            5, row_id=["r1", "r2"], slot=["generator/0", "aggregator/0"], problem=["p", "p"], episode=[0, 1],
            grad_norm=[1.5, np.nan], advantage=[-1.0, 0.0], num_tokens=[7, 8], update=0, sketch=np.eye(2),
        )  # fmt: skip
        writer.append_modules(
            5,
            slots=NAMES,
            modules=["layers.0.q_proj", "layers.11.v_proj"],
            grad_norm=np.arange(6.0).reshape(3, 2),
        )
    run = open_run(tmp_path)
    evaluation = run["eval"].to_dataset()
    assert evaluation["step"].values.tolist() == [2, 5]  # by step, whatever the order of writing
    np.testing.assert_array_equal(evaluation["greedy"], [1, 0])
    np.testing.assert_array_equal(evaluation["temperature"], [np.nan, 0.7])
    np.testing.assert_array_equal(evaluation["role_accuracy"].sel(role="generator"), [np.nan, 0.3])
    assert run["events"]["kind"].values.tolist() == ["checkpoint"]
    rows = run["rows"].to_dataset()
    assert rows["row_slot"].values.tolist() == ["generator/0", "aggregator/0"]
    np.testing.assert_array_equal(rows["grad_norm"], [1.5, np.nan])
    np.testing.assert_array_equal(rows["sketch"], np.eye(2))
    modules = run["modules"].to_dataset()
    assert modules["grad_norm"].sel(module="layers.11.v_proj", slot="generator/1").item() == 3
    assert modules["update"].item() == 0
    assert run["module_layer"].values.tolist() == [0, 11]
    assert run["module_kind"].values.tolist() == ["q_proj", "v_proj"]


def test_root_attributes(tmp_path):
    with RunWriter(
        tmp_path, slots=SLOTS, policies=POLICIES, config={"train": {"steps": 3}}, seed=11
    ) as writer:
        writer.append(0)
        assert "finished_at" not in open_run(tmp_path).attrs
    attributes = open_run(tmp_path).attrs
    assert set(attributes) == set(schema.ROOT_ATTRIBUTES)
    assert attributes["schema_version"] == "1.0"
    assert json.loads(attributes["config_json"]) == {"train": {"steps": 3}}
    assert attributes["seed"] == 11
    assert json.loads(attributes["packages_json"])["numpy"] == np.__version__


def test_a_configuration_too_long_for_an_attribute_is_in_the_segments(tmp_path):
    config = {"text": "x" * 100_000}
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, config=config) as writer:
        writer.append(0)
    run = open_run(tmp_path)
    assert json.loads(run.attrs["config_json"]) == {"too_long_for_an_attribute_see": "/segments/config_json"}
    assert json.loads(run["segments"]["config_json"].item()) == config


def test_writing_loads_no_xarray_and_reading_no_torch(tmp_path):
    program = (
        "import sys\n"
        "from gradscope.runfile import RunWriter\n"
        f"with RunWriter({str(tmp_path)!r}, slots={{'a/0': 'a'}}, policies={{'a': 'p'}}) as w: w.append(0)\n"
        "assert 'xarray' not in sys.modules and 'torch' not in sys.modules\n"
        "from gradscope.runfile import open_run\n"
        f"open_run({str(tmp_path)!r})\n"
        "assert 'torch' not in sys.modules and 'scipy.stats' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_run_opens_while_others_have_its_file_open(tmp_path):
    with RunWriter(tmp_path / "run", slots={"a/0": "a"}, policies={"a": "p"}) as writer:
        writer.append(1, metrics={"loss": 0.5})
    file = tmp_path / "run" / "run.h5"
    with xr.open_datatree(file, engine="h5netcdf") as plain, h5py.File(file, "r"):
        assert float(open_run(tmp_path / "run")["train"]["loss"][0]) == 0.5
        assert float(plain["train"]["loss"][0]) == 0.5


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**64), 2**127 + 5])
def test_seeds_of_any_size_come_back(tmp_path, seed):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, seed=seed) as writer:
        writer.append(0)
        journals = open_run(tmp_path).attrs["seed"]
    stored = open_run(tmp_path).attrs["seed"]
    assert stored == journals
    assert int(stored) == seed
    assert isinstance(stored, str) == (not -(2**63) <= seed < 2**63)
    assert not list(tmp_path.glob("run.h5.wal.*"))
