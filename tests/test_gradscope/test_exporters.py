"""Runs go out and come back: equal where the format holds what the run holds, in values where it does not."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

import gradscope
from gradscope import cli, derive, synthetic
from gradscope.exporters.exporting import export_run
from gradscope.exporters.names import gradient_values, train_values, update_values
from gradscope.importers.importing import import_run
from gradscope.runfile import RunWriter, UpdateRecord

SLOTS = {"solver/0": "solver", "solver/1": "solver", "judge/0": "judge"}
POLICIES = {"solver": "both", "judge": "both"}


@pytest.fixture
def run(tmp_path):
    """A run with two updates in a step, a step without any, gaps, repeats of an evaluation, and a resume."""
    rng = np.random.default_rng(1)
    slots = tuple(SLOTS)
    with RunWriter(tmp_path / "run", slots=SLOTS, policies=POLICIES) as writer:
        for step in range(1, 8):
            vectors = rng.normal(size=(2, 3, 5))
            records = [
                UpdateRecord(
                    "both",
                    slots,
                    own @ own.T,
                    counts={"num_rows": np.array([4.0, 4.0, np.nan]), "loss_weight": rng.random(3)},
                    scalars={"grad_norm": float(np.linalg.norm(own)), "learning_rate": 1e-3 / 3},
                    gram_cross=(own @ own.T) / 7,
                )
                for own in vectors
            ]
            rewards = {"solver/0": rng.random(), "judge/0": rng.random()}
            metrics = {"loss": rng.normal(), "reward_mean": rewards, "seconds": {"generate": 1.25}}
            writer.append(step, records if step != 4 else None, metrics=metrics)
        for step, right in ((0, 40), (5, 41), (5, 44), (7, 43)):
            writer.append_evaluation(
                step, num_correct=right, num_total=97, dataset="a/b", temperature=0.7,
                role_accuracy={"solver": right / 97}, role_tokens_mean={"judge": 12.5},
            )  # fmt: skip
        writer.append_evaluation(7, num_correct=50, num_total=97, dataset="a/b", greedy=True)
    return tmp_path / "run"


def assert_same_numbers(before, after, group):
    old, new = before[group].to_dataset(), after[group].to_dataset()
    for name, variable in old.data_vars.items():
        if variable.dtype.kind == "f" and variable.isnull().all():
            continue
        assert name in new, name
        assert variable.dims == new[name].dims
        np.testing.assert_array_equal(variable.values, new[name].values, err_msg=name)


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_a_table_reads_back_to_an_equal_run(run, tmp_path, to):
    made = export_run(run, to, out=tmp_path / f"table.{to}")
    assert made.num_rows == 12
    back = import_run(tmp_path / f"table.{to}", tmp_path / "back" / "run.h5")
    assert (back.dialect, back.unknown, back.num_segments) == ("own", (), 1)
    before, after = gradscope.open_run(run), gradscope.open_run(tmp_path / "back" / "run.h5")
    for name in ("slot", "slot_role", "slot_policy", "role"):
        assert before[name].values.tolist() == after[name].values.tolist()
    for group in ("train", "updates", "eval"):
        assert_same_numbers(before, after, group)


def test_a_synthetic_run_is_judged_alike_after_a_round_trip(tmp_path):
    synthetic.write_run(tmp_path / "run", "capture", seed=1, num_steps=60, num_evaluations=12)
    export_run(tmp_path / "run", "csv", out=tmp_path / "run.csv")
    import_run(tmp_path / "run.csv", tmp_path / "back.h5")
    before, after = (gradscope.diagnose(path).to_dict() for path in (tmp_path / "run", tmp_path / "back.h5"))
    assert before["findings"] == after["findings"]
    assert before["not_found"] == after["not_found"]


def test_a_long_name_of_the_callers_own_comes_back(tmp_path):
    (tmp_path / "log.csv").write_text("step,train/grad_norm,rewards/exact/mean\n1,2.5,0.1\n2,2.25,0.2\n")
    import_run(tmp_path / "log.csv", tmp_path / "first.h5")
    export_run(tmp_path / "first.h5", "csv", out=tmp_path / "second.csv")
    import_run(tmp_path / "second.csv", tmp_path / "second.h5")
    run = gradscope.open_run(tmp_path / "second.h5")
    assert run["updates"]["grad_norm"].values.tolist() == [2.5, 2.25]
    assert any("rewards" in name for name in run["user"].data_vars)


def read_scalars(folder):
    """Every scalar in event files, read by TensorBoard's own accumulator: tag to steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_what_we_write(run, tmp_path):
    export_run(run, "tensorboard", out=tmp_path / "events")
    found = read_scalars(tmp_path / "events")
    opened = gradscope.open_run(run)
    loss = dict(found["train/loss"])
    np.testing.assert_allclose([loss[step] for step in range(1, 8)], opened["train"]["loss"], rtol=1e-6)
    norms = derive.role_norms(opened, "both")
    own = dict(found["grad/solver/both/norm"])
    for step in (1, 2, 3, 5, 6, 7):
        assert own[step] == pytest.approx(norms.sel(step=step, role="solver").item(), rel=1e-6)
    assert 4 not in own
    assert found["eval/a/b/greedy/accuracy"] == [(7, pytest.approx(50 / 97, rel=1e-6))]
    assert not any("gram" in tag for tag in found)
    back = import_run(tmp_path / "events", tmp_path / "back.h5")
    after = gradscope.open_run(tmp_path / "back.h5")
    np.testing.assert_allclose(after["updates"]["grad_norm"], opened["updates"]["grad_norm"], rtol=1e-6)
    assert after["eval"]["num_correct"].values.tolist() == opened["eval"]["num_correct"].values.tolist()
    assert back.format == "tensorboard"


class StubRun:
    def __init__(self, settings):
        self.settings, self.rows, self.finished, self.axes = settings, [], False, []
        self.id = settings["id"] or "new-id"

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, values):
        self.rows.append(values)

    def finish(self):
        self.finished = True


class StubClient:
    """What W&B's library is asked for, recorded."""

    def __init__(self):
        self.runs = []

    def init(self, **settings):
        self.runs.append(StubRun(settings))
        return self.runs[-1]


def test_wandb_gets_an_axis_of_its_own(run):
    client = StubClient()
    made = export_run(run, "wandb", project="mine", name="first", client=client)
    (logged,) = client.runs
    assert made.where == "mine/new-id"
    assert (logged.settings["project"], logged.settings["name"]) == ("mine", "first")
    assert logged.settings["config"]["slots"] == SLOTS
    assert ("*", "train/global_step") in logged.axes
    assert logged.finished
    losses = {row["train/global_step"]: row["train/loss"] for row in logged.rows if "train/loss" in row}
    np.testing.assert_array_equal(
        [losses[step] for step in range(1, 8)], gradscope.open_run(run)["train"]["loss"]
    )


@pytest.mark.slow
def test_wandb_itself_takes_what_we_log(run, tmp_path):
    pytest.importorskip("wandb")
    script = (
        "from gradscope.exporters.exporting import export_run\n"
        f"print(export_run({str(run)!r}, 'wandb', project='mine').where)\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert kept.stem.removeprefix("run-") == done.stdout.strip().removeprefix("mine/")
    assert kept.stat().st_size > 1000


def test_names(tmp_path):
    assert train_values(
        {"loss": 1.0, "reward_mean": {"a/0": 0.5, "b/0": math.nan}, "seconds": {"gen": 2}, "note": "x"}
    ) == {"train/loss": 1.0, "train/a/0/reward_mean": 0.5, "train/seconds/gen": 2.0}
    record = UpdateRecord("p", ("a/0", "a/1", "b/0"), np.diag([9.0, 16.0, 4.0]), scalars={"grad_norm": 5.0})
    assert update_values([record], products=False) == {"updates/p/grad_norm": 5.0}
    values = gradient_values([record], {"a/0": "a", "a/1": "a", "b/0": "b"})
    assert values == {
        "grad/a/p/norm": 5.0,
        "grad/a/p/energy_share": 25 / 29,
        "grad/a/p/coherence": 0.0,
        "grad/b/p/norm": 2.0,
        "grad/b/p/energy_share": 4 / 29,
    }
    two = update_values([record, record], products=True)
    assert two["updates/p/1/gram/a/1|a/1"] == 16.0
    assert "updates/p/0/grad_norm" in two


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    out = capsys.readouterr()
    return ended.value.code or 0, out.out, out.err


def test_the_command(run, tmp_path, capsys):
    code, out, err = call(capsys, "export", run, "--to", "csv", "-o", tmp_path / "new" / "m.csv")
    assert (code, err) == (0, "")
    assert "12 rows of" in out
    for arguments, complaint in {
        ("--to", "csv"): "needs a place to write to",
        ("--to", "cvs", "-o", tmp_path / "x"): "unknown exporter 'cvs'. Did you mean 'csv'",
        ("--to", "csv", "-o", tmp_path / "new" / "m.csv"): "something is there already",
        ("--to", "wandb", "-o", tmp_path / "x"): "writes to its own place",
    }.items():
        code, out, err = call(capsys, "export", run, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert complaint in err
    code, _, err = call(capsys, "export", tmp_path / "nothing", "--to", "csv", "-o", tmp_path / "y.csv")
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "y.csv").exists()
