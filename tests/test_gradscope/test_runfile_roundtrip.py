"""What goes into a RunWriter comes out of open_run bit for bit, before and after compaction."""

import json
import subprocess
import sys
import warnings

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


def test_records_may_hold_some_slots_in_any_order(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        gram = np.array([[1.0, 2.0], [2.0, 5.0]])
        writer.append(0, UpdateRecord("first", ("aggregator/0", "generator/0"), gram))
    got = open_run(tmp_path)["updates"]["gram"][0]
    np.testing.assert_array_equal(got, [[5, np.nan, 2], [np.nan] * 3, [2, np.nan, 1]])


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


def test_new_labels_extend_the_file_with_missing_before(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(
            0, UpdateRecord("first", NAMES, np.eye(3)), metrics={"reward_mean": {"generator/0": 1.0}}
        )
        writer.compact(wait=True)
        more = (*NAMES, "judge/0")
        writer.append(
            1, UpdateRecord("third", more, 2 * np.eye(4)), metrics={"reward_mean": {"generator/2": 3.0}}
        )
        early = open_run(tmp_path)
        writer.compact(wait=True)
        writer.append(2, metrics={"reward_mean": {"judge/0": 4.0}, "seconds": {"late": 1.0}})
    for run in (early.sel(), open_run(tmp_path)):
        assert run["slot"].values.tolist() == [*NAMES, "judge/0", "generator/2"]
        assert run["slot_role"].values.tolist()[3:] == ["judge", "generator"]
        assert run["slot_policy"].values.tolist()[3:] == ["third", "first"]
        assert run["policy"].values.tolist() == ["first", "second", "third"]
        assert run["role"].values.tolist() == ["generator", "aggregator", "judge"]
        gram = run["updates"]["gram"]
        np.testing.assert_array_equal(gram[0].sel(slot=list(NAMES), slot_b=list(NAMES)), np.eye(3))
        assert gram[0].sel(slot="judge/0").isnull().all()
        assert gram[1].sel(slot="judge/0", slot_b="judge/0").item() == 2
        reward = run["train"]["reward_mean"].sel(slot="generator/2")
        np.testing.assert_array_equal(reward[:2], [np.nan, 3])


def test_unknown_names_are_kept_with_one_warning(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        record = UpdateRecord("first", NAMES, np.eye(3), scalars={"trust": 0.5})
        metrics = {
            "reward_men": {"generator/0": 1.0}, "advantage": {"generator": 2.0}, "note": "text", "a/b": 3,
            "deep": {"x": {"y": 4.0}}, "reward_mean": 0.25, "step": 9, "slot": 8,
        }  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer.append(0, record, metrics=metrics)
        messages = [str(warning.message) for warning in caught]
        assert (
            "'reward_men' is not in the schema; it is kept as /user/reward_men. Did you mean 'reward_mean'?"
            in messages
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.append(1, record, metrics=metrics)
    user = open_run(tmp_path)["user"].to_dataset()
    np.testing.assert_array_equal(user["reward_men"].sel(slot="generator/0"), [1, 1])
    np.testing.assert_array_equal(user["advantage"].sel(role="generator"), [2, 2])
    assert user["note"].values.tolist() == ["text", "text"]
    assert user["a.b"].attrs["long_name"] == "a/b"
    np.testing.assert_array_equal(user["deep.x.y"], [4, 4])
    np.testing.assert_array_equal(user["reward_mean"], [0.25, 0.25])
    np.testing.assert_array_equal(user["step_of_step"], [9, 9])
    np.testing.assert_array_equal(user["slot_of_step"], [8, 8])
    np.testing.assert_array_equal(user["trust"].values, [0.5, 0.5])
    assert user["trust"].dims == ("update",)


def test_numbers_of_updates_given_as_metrics_go_to_the_records(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        records = [UpdateRecord(policy, NAMES, np.eye(3)) for policy in ("first", "second")]
        writer.append(0, records, metrics={"learning_rate": 0.1, "grad_norm": {"second": 3.0}})
    updates = open_run(tmp_path)["updates"]
    np.testing.assert_array_equal(updates["learning_rate"], [0.1, 0.1])
    np.testing.assert_array_equal(updates["grad_norm"], [np.nan, 3])


def test_data_never_raises(tmp_path):
    torch_like = np.array([0.5])
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        bad = UpdateRecord("first", NAMES, np.eye(2), counts={"num_rows": np.array([1.0, 2.0])})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer.append(0, bad, metrics={"loss": torch_like, "epoch": None, "seconds": [1, 2], "odd": {}})
            writer.append(1, metrics={"odd": object(), "loss": "high"})
            writer.append_rows(1, row_id=["a", "b"], slot=["generator/0"])
        messages = [str(warning.message) for warning in caught]
        assert any("'gram' has shape (2, 2), expected (3, 3)" in message for message in messages)
        assert any("'row_slot' has 1 entries for 2 rows" in message for message in messages)
    run = open_run(tmp_path)
    assert run["train"]["loss"].values[0] == 0.5
    assert "gram" not in run["updates"]
    assert run["rows"]["row_id"].values.tolist() == ["a", "b"]


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


def test_parameters_outside_the_gram_are_told_once(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        for step in range(3):
            writer.append(step, UpdateRecord("first", NAMES, np.eye(3), coverage=("lm_head.weight",)))
    events = open_run(tmp_path)["events"]
    assert events["kind"].values.tolist() == ["coverage"]
    assert "lm_head.weight" in events["message"].item()


@pytest.mark.filterwarnings("ignore:'kl_old")
def test_metrics_mirror(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        record = UpdateRecord("first", NAMES, np.eye(3), scalars={"grad_norm": 2.0})
        writer.append(
            3, record, metrics={"loss": 0.5, "reward_mean": {"generator/0": np.nan}, "kl_old": {"a": np.inf}}
        )
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 3, "loss": 0.5, "kl_old/a": None, "updates/first/grad_norm": 2.0}
    ]


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
