"""What a training loop hands in finds its place: new labels, unknown names, odd values, the mirror."""

import json
import warnings

import numpy as np
import pytest

from gradscope.runfile import RunWriter, UpdateRecord, open_run
from gradscope.runfile.intake import KEPT_AS_USER

SLOTS = {"generator/0": "generator", "generator/1": "generator", "aggregator/0": "aggregator"}
POLICIES = {"generator": "first", "aggregator": "second"}
NAMES = tuple(SLOTS)


def test_records_may_hold_some_slots_in_any_order(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        gram = np.array([[1.0, 2.0], [2.0, 5.0]])
        writer.append(0, UpdateRecord("first", ("aggregator/0", "generator/0"), gram))
    got = open_run(tmp_path)["updates"]["gram"][0]
    np.testing.assert_array_equal(got, [[5, np.nan, 2], [np.nan] * 3, [2, np.nan, 1]])


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


def test_texts_that_hdf5_cannot_hold_are_mended(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append_event(0, "alarm", "nul \0, half a pair \ud83d, whole \U0001f600")
        writer.append(0, metrics={"seconds": {"roll\0out": 1.0}} if False else None)
    message = open_run(tmp_path)["events"]["message"].item()
    assert message == "nul \ufffd, half a pair \ufffd\ufffd\ufffd, whole \U0001f600"


@pytest.mark.parametrize(
    "values", [[0.1, -0.0, 3.5], [np.nan, np.inf, 1e300], [1, True, 2.5], [None, 2.0, "x"]]
)
def test_values_in_the_order_of_the_file_are_stored_as_those_in_any_order(tmp_path, values):
    """The former take a way of their own through the writer."""
    counts = np.array([3.0, np.nan, 2.0**60])
    for name, order in (("same", [0, 1, 2]), ("other", [2, 0, 1])):
        names = tuple(NAMES[k] for k in order)
        metrics = {"reward_mean": {NAMES[k]: values[k] for k in order}, 'a "null" \\u0000': 1.0}
        record = UpdateRecord("first", names, np.eye(3), counts={"num_tokens": counts[order]})
        with (
            RunWriter(tmp_path / name, slots=SLOTS, policies=POLICIES) as writer,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            writer.append(0, record, metrics=metrics)
            writer.append_event(0, "note", "null")
    same, other = (open_run(tmp_path / name) for name in ("same", "other"))
    np.testing.assert_array_equal(same["train"]["reward_mean"], other["train"]["reward_mean"])
    np.testing.assert_array_equal(same["updates"]["num_tokens"], other["updates"]["num_tokens"])
    assert same["updates"]["num_tokens"].values[0].tolist()[::2] == [3.0, 2.0**60]
    assert same["events"]["message"].values.tolist() == ["null"]


def test_none_is_missing_and_never_a_text(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{KEPT_AS_USER}")
        record = UpdateRecord("first", NAMES, np.eye(3), scalars={"trust": None, "grad_norm": None})
        empty = {"kl": None, "loss": None, "deep": {"x": None}, "reward_mean": {"generator/0": None}}
        writer.append(0, record, metrics=empty)
        full = {"kl": 0.5, "loss": 1.5, "deep": {"x": 2.5}, "reward_mean": {"generator/0": 3.5}}
        writer.append(1, metrics=full)
        writer.append(2, metrics=empty)
    run = open_run(tmp_path)
    np.testing.assert_array_equal(run["user"]["kl"], [0.5])
    np.testing.assert_array_equal(run["user"]["deep.x"], [2.5])
    assert run["user"]["step"].values.tolist() == [1]
    assert set(run["user"].data_vars) == {"kl", "deep.x"}
    np.testing.assert_array_equal(run["train"]["loss"], [np.nan, 1.5, np.nan])
    np.testing.assert_array_equal(run["train"]["reward_mean"].sel(slot="generator/0"), [np.nan, 3.5, np.nan])


def test_numbers_after_a_text_are_told_of_once(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        with pytest.warns(UserWarning, match=KEPT_AS_USER):
            writer.append(0, metrics={"kl": "high"})
        with pytest.warns(UserWarning, match="'kl' was logged as text first") as told:
            writer.append(1, metrics={"kl": 0.5})
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.append(2, metrics={"kl": 0.25})
    assert open_run(tmp_path)["user"]["kl"].values.tolist() == ["high", "0.5", "0.25"]
