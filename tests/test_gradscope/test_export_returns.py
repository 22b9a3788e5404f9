"""What an export takes along comes back; what it leaves out is said."""

import json

import numpy as np
import pytest

import gradscope
from gradscope.exporters.exporting import export_run
from gradscope.exporters.rows import Rows
from gradscope.importers.importing import import_run
from gradscope.runfile import RunWriter, UpdateRecord

SLOTS = {"a/0": "a", "a/1": "a", "b/0": "b"}


@pytest.fixture
def foreign(tmp_path):
    """A run file of a TRL log, with keys that nobody knows."""
    entries = [
        {"step": s, "grad_norm": 1.0 * s, "loss": 0.5, "num_tokens": 9.0, "x/y": 0.25} for s in range(1, 9)
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    return import_run(tmp_path / "trainer_state.json", tmp_path / "foreign.h5")


def test_an_imported_run_goes_round_twice_and_stays_the_same(foreign, tmp_path):
    before, path = gradscope.open_run(foreign.path), foreign.path
    for turn in range(2):
        made = export_run(path, "parquet", out=tmp_path / f"{turn}.parquet")
        assert made.notes == ()
        back = import_run(tmp_path / f"{turn}.parquet", tmp_path / f"{turn}.h5")
        assert set(foreign.limits) <= set(back.limits)
        path = back.path
    after = gradscope.open_run(path)
    assert set(after["user"].data_vars) == set(before["user"].data_vars)
    assert after["user"]["x.y"].attrs["long_name"] == "x/y"
    np.testing.assert_array_equal(after["updates"]["gram"], before["updates"]["gram"])
    assert set(gradscope.diagnose(before).limits) == set(gradscope.diagnose(after).limits)


def test_a_csv_says_that_the_limits_stay_behind(foreign, tmp_path):
    made = export_run(foreign.path, "csv", out=tmp_path / "run.csv")
    assert made.notes == (
        "left out: the 3 sentences on what the imported log cannot answer. Parquet keeps them.",
    )
    back = import_run(tmp_path / "run.csv", tmp_path / "back.h5")
    assert any("angles between gradients" in limit for limit in back.limits)


def write_run(path):
    """Two policies; evaluations before the first step and after the last; attribution, flags and events."""
    with RunWriter(path, slots=SLOTS, policies={"a": "p", "b": "q"}) as writer:
        writer.append_evaluation(0, num_correct=3, num_total=8, dataset="x")
        for step in (1, 2, 3):
            first = UpdateRecord(
                "p", ("a/0", "a/1"), np.array([[4.0, 1.0], [1.0, 2.0]]) * step,
                scalars={"grad_norm": 2.0 * step, "skipped": float(step == 2)}, update_gram=np.eye(3),
            )  # fmt: skip
            second = UpdateRecord("q", ("b/0",), np.array([[9.0]]), scalars={"grad_norm": 3.0})
            writer.append(step, [first, second], metrics={"reward_mean": dict.fromkeys(SLOTS, 0.5)})
        writer.append_event(3, "alarm", "something")


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_flags_come_back_and_what_does_not_is_said(tmp_path, to):
    write_run(tmp_path / "run")
    made = export_run(tmp_path / "run", to, out=tmp_path / f"t.{to}")
    assert made.notes == (
        "left out, since rows of scalars have no place for it: /events, /updates/update_gram.",
    )
    import_run(tmp_path / f"t.{to}", tmp_path / "back.h5")
    before, after = gradscope.open_run(tmp_path / "run"), gradscope.open_run(tmp_path / "back.h5")
    for name in ("skipped", "grad_norm", "gram"):
        np.testing.assert_array_equal(before["updates"][name], after["updates"][name])
    assert after["train"]["step"].values.tolist() == [1, 2, 3]


def test_our_own_metrics_file_names_policies_but_invents_no_slot(tmp_path):
    slots = {"a/0": "a", "a/1": "a", "b/0": "b"}
    with RunWriter(tmp_path / "run", slots=slots, policies={"a": "shared", "b": "shared"}) as writer:
        for step in (1, 2, 3):
            record = UpdateRecord("shared", tuple(slots), np.eye(3), scalars={"grad_norm": 3.0})
            writer.append(step, record, metrics={"reward_mean": dict.fromkeys(slots, 0.5)})
    made = import_run(tmp_path / "run" / "metrics.jsonl", tmp_path / "back.h5")
    back = gradscope.open_run(tmp_path / "back.h5")
    assert (made.roles, back["slot"].values.tolist()) == (("a", "b"), list(slots))
    assert set(back["slot_policy"].values.tolist()) == {"shared"}
    assert back["updates"]["grad_norm"].values.tolist() == [3.0] * 3
    assert "gram" not in back["updates"] or back["updates"]["gram"].isnull().all()
    assert any("holds no evaluations" in note for note in made.notes)
    assert "signal" in gradscope.diagnose(back).skipped


def test_separate_policies_of_our_own_metrics_file_are_those_of_their_roles(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(gradscope.GradscopeError, match="does not say which of the policies p, q the slots"):
        import_run(tmp_path / "run" / "metrics.jsonl", tmp_path / "never.h5")
    text = (tmp_path / "run" / "metrics.jsonl").read_text().replace("updates/p", "updates/a")
    (tmp_path / "log.jsonl").write_text(text.replace("updates/q", "updates/b"))
    import_run(tmp_path / "log.jsonl", tmp_path / "back.h5")
    back = gradscope.open_run(tmp_path / "back.h5")
    assert back["slot_policy"].values.tolist() == ["a", "a", "b"]
    b = back["updates"]["gram"].sel(slot="b/0", slot_b="b/0").values
    assert np.nanmax(b) == 9.0
    assert back["updates"]["gram"].sel(slot="a/0").isnull().all()


def test_the_time_of_an_evaluation_is_none_of_a_training_step():
    rows = Rows()
    rows.add(0, {"eval/x/sampled/num_correct": 1.0}, 1.7e9)
    rows.add(1, {"train/loss": 1.0}, 1.8e9)
    assert rows.rows == [
        {"step": 0, "eval/x/sampled/num_correct": 1.0},
        {"step": 1, "train/wall_time": 1.8e9, "train/loss": 1.0},
    ]
