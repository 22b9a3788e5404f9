"""A list of runs is one tree on the dim `run`; what a run lacks is missing; dask reads it piece by piece."""

import warnings

import numpy as np
import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, UpdateRecord, open_run, several


def write(path, *, slots, policies, steps, seed=None, model="models/Qwen3-0.6B", evaluate=False):
    config = {"workflow": {"name": "voting"}, "task": {"name": "math"}, "model": {"path": model}}
    with RunWriter(path, slots=slots, policies=policies, seed=seed, config=config) as writer:
        for step in steps:
            gram = np.full((len(slots), len(slots)), float(step))
            policy = next(iter(policies.values()))
            writer.append(step, UpdateRecord(policy, tuple(slots), gram), metrics={"loss": step / 2})
            writer.append_modules(
                step, slots=list(slots), modules=["m.0"], grad_norm=np.full((len(slots), 1), step)
            )
        if evaluate:
            writer.append_evaluation(steps[-1], num_correct=3, num_total=4, dataset="d")


@pytest.fixture
def paths(tmp_path):
    write(
        tmp_path / "one",
        slots={"g/0": "g", "a/0": "a"},
        policies={"g": "x", "a": "y"},
        steps=range(4),
        seed=3,
        evaluate=True,
    )
    write(tmp_path / "two", slots={"a/0": "a", "b/0": "b"}, policies={"a": "p", "b": "p"}, steps=range(2, 6))
    return [tmp_path / "one", tmp_path / "two"]


def check(runs):
    train = runs["train"].to_dataset()
    assert train["loss"].dims == ("run", "step")
    assert runs["run"].values.tolist() == ["one", "two"]
    assert train["step"].values.tolist() == list(range(6))
    nan = np.nan
    np.testing.assert_array_equal(train["loss"], [[0, 0.5, 1, 1.5, nan, nan], [nan, nan, 1, 1.5, 2, 2.5]])
    for name, values in {
        "workflow": ["voting", "voting"],
        "policy": ["isolated", "shared"],
        "scale": ["0.6B", "0.6B"],
        "task": ["math", "math"],
        "seed": ["3", ""],
    }.items():
        assert train[name].values.tolist() == values
        assert train[name].dims == ("run",)
        assert train[name].attrs["long_name"]
    assert runs["slot"].values.tolist() == ["g/0", "a/0", "b/0"]
    updates = runs["updates"].to_dataset()
    assert updates["gram"].dims == ("run", "update", "slot", "slot_b")
    np.testing.assert_array_equal(updates["gram"].sel(run="two", slot="a/0", slot_b="b/0"), [2, 3, 4, 5])
    assert updates["gram"].sel(run="one", slot="b/0").isnull().all()
    assert updates["policy"].sel(run="two").values.tolist() == ["p"] * 4
    assert updates["gram"].attrs["units"] == "1"
    np.testing.assert_array_equal(runs["eval/num_correct"], [[3], [nan]])
    assert runs["eval/dataset"].values.tolist() == [["d"], [""]]
    np.testing.assert_array_equal(
        runs["modules/grad_norm"].sel(slot="a/0", module="m.0"), [range(4), range(2, 6)]
    )


def test_two_runs_of_different_slots_and_steps(paths):
    check(open_run(paths))


def test_the_same_through_dask(paths):
    runs = open_run(paths, chunks={})
    for name in ("train/loss", "updates/gram", "modules/grad_norm", "eval/num_correct"):
        assert runs[name].chunks is not None, name
    assert runs["train/loss"].chunks[0] == (1, 1)
    check(runs)


def test_groups_by_cell(paths):
    runs = open_run([str(path) for path in paths])
    by_policy = runs["train"].to_dataset()["loss"].groupby("policy").mean("run").sel(step=4)
    np.testing.assert_array_equal(by_policy.sel(policy=["isolated", "shared"]), [np.nan, 2])


def test_a_run_in_progress_and_one_given_as_a_file(paths, tmp_path):
    with RunWriter(tmp_path / "live", slots={"a/0": "a"}, policies={"a": "p"}) as writer:
        writer.append(0, metrics={"loss": 7.0})
        for chunks in (None, {}):
            runs = open_run([tmp_path / "live", paths[0] / "run.h5"], chunks=chunks)
            np.testing.assert_array_equal(runs["train/loss"].sel(run="live")[:1], [7])
            np.testing.assert_array_equal(runs["train/loss"].sel(run="one")[:4], [0, 0.5, 1, 1.5])


def test_an_isolated_policy_is_one_a_role(tmp_path):
    slots = {"g/0": "g", "g/1": "g", "a/0": "a"}
    for policies, sharing in (
        ({"g": "p", "a": "p"}, "shared"),
        ({"g": "p", "a": "q"}, "isolated"),
        ({"g/0": "p", "g/1": "q", "a": "q"}, "mixed"),
        ({"g/0": "p", "g/1": "q", "a": "r"}, "mixed"),
    ):
        path = tmp_path / "-".join(policies.values())
        with RunWriter(path, slots=slots, policies=policies) as writer:
            writer.append(0)
        cell = several.cell_of(open_run(path))
        assert cell == {"workflow": "", "policy": sharing, "scale": "", "task": "", "seed": ""}


def test_what_is_refused(paths, monkeypatch):
    with pytest.raises(RunFileError, match="the list of runs is empty"):
        open_run([])
    with pytest.raises(RunFileError, match="is given twice"):
        open_run([paths[0], paths[0]])
    monkeypatch.setattr(several, "find_spec", lambda name: None)
    with pytest.raises(
        RunFileError, match=r"need the package dask, which is not installed\. Run 'pip install"
    ):
        open_run(paths, chunks={})


@pytest.mark.slow
def test_three_hundred_runs_piece_by_piece(tmp_path):
    paths = []
    for number in range(300):
        paths.append(tmp_path / f"run{number:03d}")
        write(paths[-1], slots={"a/0": "a"}, policies={"a": "p"}, steps=range(3), seed=number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = open_run(paths, chunks={})
        loss = runs["train/loss"].mean("run").compute()
        np.testing.assert_allclose(loss, [0, 0.5, 1])
        assert float(runs["modules/grad_norm"].sum().compute()) == 900
