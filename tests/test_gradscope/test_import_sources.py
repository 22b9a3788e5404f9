"""Every importer on a file that the tool's own library wrote: values come back by their schema names."""

import contextlib
import json
import logging
import sqlite3

import numpy as np
import pytest

import gradscope
from gradscope.importers.importing import import_run

STEPS = list(range(1, 13))
NORMS = np.random.default_rng(0).lognormal(size=len(STEPS))
REWARDS = np.linspace(0.2, 0.6, len(STEPS))


def opened(source, tmp_path, **choices):
    made = import_run(source, tmp_path / "out" / "run.h5", **choices)
    return made, gradscope.open_run(tmp_path / "out" / "run.h5")


def check_single_policy(run, *, exact=True):
    """The series above, as a run of one role on one policy."""
    same = np.testing.assert_array_equal if exact else np.testing.assert_allclose
    tolerance = {} if exact else {"rtol": 1e-7}  # 32-bit floats
    assert run["train"]["step"].values.tolist() == STEPS
    same(run["updates"]["grad_norm"].values, NORMS, **tolerance)
    same(run["updates"]["gram"].values[:, 0, 0], run["updates"]["grad_norm"].values ** 2)
    same(run["train"]["reward_mean"].sel(slot="policy").values, REWARDS, **tolerance)
    same(run["train"]["episode_reward_mean"].values, REWARDS, **tolerance)
    assert run["slot_role"].values.tolist() == ["policy"]


def test_trl_state_written_by_transformers(tmp_path):
    from transformers import TrainerState

    state = TrainerState(global_step=STEPS[-1])
    for step, norm, reward in zip(STEPS, NORMS.tolist(), REWARDS.tolist(), strict=True):
        state.log_history.append(
            {"step": step, "grad_norm": norm, "reward": reward, "reward_std": 0.1, "num_tokens": 7.0 * step,
             "completions/mean_length": 20.0, "rewards/exact/mean": reward, "step_time": 1.5}
        )  # fmt: skip
    state.log_history.append({"step": 12, "eval_reward": 0.4})
    folder = tmp_path / "trainer" / "checkpoint-12"
    folder.mkdir(parents=True)
    state.save_to_json(str(folder / "trainer_state.json"))
    made, run = opened(folder.parent, tmp_path)
    assert (made.format, made.dialect, made.roles) == ("trl", "trl", ("policy",))
    check_single_policy(run)
    assert run["train"]["seconds"].sel(phase="step").values.tolist() == [1.5] * 12
    assert run["train"]["num_updates"].isnull().all()
    assert run["train"]["wall_time"].isnull().all()
    np.testing.assert_array_equal(run["user"]["rewards.exact.mean"], REWARDS)
    assert run["user"]["source.num_tokens"][-1] == 84
    assert run["user"]["eval_reward"][-1] == 0.4
    told = " ".join(made.notes)
    assert "reward_std" in told
    assert "num_tokens counts all tokens" in told
    assert "evaluations are means" in told
    assert any("one norm" in limit for limit in made.limits)


def test_trl_in_windows_of_ten_steps_warns_of_lost_spikes(tmp_path):
    history = [{"step": step, "grad_norm": 1.0, "reward": 0.5} for step in range(10, 101, 10)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    made, _ = opened(tmp_path / "trainer_state.json", tmp_path)
    assert any("every 10th step only" in note and "spikes between are lost" in note for note in made.notes)


def test_verl_file_logger(tmp_path):
    file = tmp_path / "experiment.jsonl"
    with file.open("w") as out:
        for step, norm, reward in zip(STEPS, NORMS.tolist(), REWARDS.tolist(), strict=True):
            data = {"actor/grad_norm": norm, "critic/score/mean": reward, "critic/rewards/mean": reward - 1,
                    "response_length/clip_ratio": 0.25, "timing_s/gen": 2.0, "perf/mfu": 0.3}  # fmt: skip
            if step % 4 == 0:
                data["val-core/openai/gsm8k/acc/mean@2"] = step / 200
            out.write(json.dumps({"step": step, "data": data}) + "\n")
        out.write('{"step": 13, "da')  # torn by a crash
    made, run = opened(file, tmp_path, num_total=100)
    assert (made.format, made.dialect, made.num_evaluations) == ("verl", "verl", 3)
    check_single_policy(run)
    assert run["eval"]["dataset"].values.tolist() == ["openai/gsm8k"] * 3
    assert run["eval"]["num_correct"].values.tolist() == [4, 8, 12]
    assert run["eval"]["num_total"].values.tolist() == [200] * 3
    np.testing.assert_array_equal(run["user"]["critic.rewards.mean"], REWARDS - 1)
    assert run["train"]["seconds"].sel(phase="gen").values.tolist() == [2.0] * 12
    assert any("torn" in note for note in made.notes)
    assert any("no deviation" in limit for limit in made.limits)


def write_events(folder, rows):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step, values in rows:
        for tag, value in values.items():  # one event a scalar, as add_scalar writes them
            own = [summary_pb2.Summary.Value(tag=tag, simple_value=value)]
            event = event_pb2.Event(wall_time=1.7e9 + step, step=step, summary=summary_pb2.Summary(value=own))
            writer.add_event(event)
    writer.close()


def test_tensorboard_events_written_by_its_own_writer(tmp_path):
    rows = [
        (step, {"train/reward": reward, "train/grad_norm": norm, "train/completions/mean_length": 9.0})
        for step, norm, reward in zip(STEPS, NORMS.tolist(), REWARDS.tolist(), strict=True)
    ]
    write_events(tmp_path / "events", rows)
    made, run = opened(tmp_path / "events", tmp_path)
    assert (made.format, made.dialect) == ("tensorboard", "trl")
    check_single_policy(run, exact=False)
    assert run["train"]["wall_time"].values.tolist() == [1.7e9 + step for step in STEPS]
    assert any("32-bit" in note for note in made.notes)


def test_tensorboard_tensors_of_newer_writers(tmp_path):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.plugins.scalar import metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util import tensor_util

    writer = EventFileWriter(str(tmp_path / "events"))
    for step in (1, 2):
        about = metadata.create_summary_metadata("", "") if step == 1 else None
        tensor = tensor_util.make_tensor_proto(np.float32(step / 2))
        value = summary_pb2.Summary.Value(tag="train/grad_norm", tensor=tensor, metadata=about)
        text = summary_pb2.Summary.Value(tag="note", tensor=tensor_util.make_tensor_proto("words"))
        writer.add_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[value, text])))
    writer.close()
    _, run = opened(tmp_path / "events", tmp_path)
    assert run["updates"]["grad_norm"].values.tolist() == [0.5, 1.0]


def test_tensorboard_folders_of_several_runs_are_refused_and_joined_by_name(tmp_path):
    write_events(tmp_path / "runs" / "a", [(step, {"train/grad_norm": 1.0}) for step in (1, 2, 3, 4)])
    write_events(tmp_path / "runs" / "b", [(step, {"train/grad_norm": 2.0}) for step in (3, 4, 5)])
    with pytest.raises(gradscope.GradscopeError, match=r"event files of 2 runs \(a, b\)"):
        import_run(tmp_path / "runs", tmp_path / "never.h5")
    made, run = opened([tmp_path / "runs" / "a", tmp_path / "runs" / "b"], tmp_path)
    assert run["updates"]["grad_norm"].values.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert (made.num_segments, made.num_steps) == (2, 5)


@pytest.fixture
def trackio_folder(tmp_path, monkeypatch):
    """A folder of trackio's own; the library fixes it when it is first imported."""
    trackio = pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    folder = tmp_path / "trackio"
    folder.mkdir()
    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", folder)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return trackio, folder


def log_to_trackio(trackio, name, shift):
    run = trackio.init(project="tests", name=name, embed=False, auto_log_gpu=False, auto_log_cpu=False)
    for step, norm, reward in zip(STEPS, NORMS.tolist(), REWARDS.tolist(), strict=True):
        run.log({"train/grad_norm": norm + shift, "train/reward": reward, "train/global_step": step})
    trackio.finish()


def test_trackio_project_written_by_its_own_library(tmp_path, trackio_folder):
    trackio, folder = trackio_folder
    log_to_trackio(trackio, "first", 0.0)
    log_to_trackio(trackio, "second", 1.0)
    with pytest.raises(gradscope.GradscopeError, match="--where run_name=first"):
        import_run(folder / "tests.db", tmp_path / "never.h5")
    made, run = opened(folder, tmp_path, where={"run_name": "first"})  # where TRACKIO_DIR points
    assert made.format == "trackio"
    check_single_policy(run)  # steps from train/global_step, though its own count from 0
    assert run["train"]["wall_time"].notnull().all()
    assert any("only numbers rows" in note for note in made.notes)


def test_a_folder_of_trackio_holds_one_project(tmp_path):
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    for name in ("a.db", "b.db"):
        with contextlib.closing(sqlite3.connect(full / name)) as connection, connection:
            connection.execute("CREATE TABLE metrics (step, metrics)")
    (empty / "c.db").write_text("no database", encoding="utf-8")
    with pytest.raises(gradscope.GradscopeError, match=r"holds 2 projects of trackio's \(a\.db, b\.db\)"):
        import_run(full, tmp_path / "never.h5")
    with pytest.raises(gradscope.GradscopeError, match="holds no SQLite file of a trackio project"):
        import_run(empty, tmp_path / "never.h5", format="trackio")


def test_a_run_exported_to_trackio_goes_on_there_and_comes_back(tmp_path, trackio_folder):
    from gradscope.exporters.sink import Target
    from gradscope.exporters.trackio import Exporter

    _, folder = trackio_folder
    about = {"slots": {"a/0": "left"}, "policies": {"a/0": "p"}}
    first = Exporter(Target(path=tmp_path, project="mine", name="run", about=about))
    for step in (1, 2, 3):
        first.log(step, {"train/a/0/reward_mean": step / 3, "updates/p/grad_norm": 1.0})
    first.close()
    place = {"path": tmp_path, "project": "mine", "about": about}
    again = Exporter(Target(name="x", run_id=first.run_id, from_step=1, **place))
    for step in (2, 3):
        again.log(step, {"train/a/0/reward_mean": 0.25})
    again.close()
    made, run = opened(folder / "mine.db", tmp_path)
    assert run["train"]["reward_mean"].sel(slot="a/0").values.tolist() == [1 / 3, 0.25, 0.25]
    # Told by the tracker's configuration, not by the slot's name.
    assert run["slot_role"].values.tolist() == ["left"]
    assert (made.dialect, made.num_segments) == ("own", 2)


class RecordedRun:
    """What `wandb.Api().run(path)` returns, with recorded rows; `history` would sample, and is not there."""

    def __init__(self, rows):
        self.rows = rows
        self.config = {}

    def scan_history(self, keys=None):
        assert keys is None, "with keys only rows that have all of them come back"
        return iter(self.rows)


class RecordedClient:
    def __init__(self, rows):
        self.rows = rows

    def run(self, path):
        assert path == "team/project/abc123"
        return RecordedRun(self.rows)


def test_wandb_history_through_a_client(tmp_path):
    rows = []
    for step, norm, reward in zip(STEPS, NORMS.tolist(), REWARDS.tolist(), strict=True):
        # Two calls of log a step: the counter runs twice as fast as training.
        rows.append(
            {"_step": len(rows), "_timestamp": 1.7e9, "train/grad_norm": norm, "train/global_step": step}
        )
        rows.append(
            {"_step": len(rows), "train/reward": reward, "train/global_step": step, "table": {"a": 1}}
        )
    rows.append({"_step": len(rows), "system": 1.0})
    made, run = opened("wandb:team/project/abc123", tmp_path, client=RecordedClient(rows))
    assert made.format == "wandb"
    check_single_policy(run)
    assert any("1 of 25 rows have no step" in note for note in made.notes)
    assert any("1 key(s) hold no numbers and are left out (table)" in note for note in made.notes)


def test_wandb_history_exported_as_parquet_and_csv(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = pandas.DataFrame(
        {
            "_step": np.arange(12) * 3,
            "train/global_step": STEPS,
            "train/grad_norm": NORMS,
            "train/reward": REWARDS,
            "eval/note": ["text"] * 12,
        }
    )
    table.loc[3, "train/reward"] = np.nan
    table.to_parquet(tmp_path / "history.parquet")
    table.to_csv(tmp_path / "history.csv", index=False)
    for name in ("history.parquet", "history.csv"):
        made, run = opened(tmp_path / name, tmp_path / name.replace(".", "_"))
        assert made.format == name.partition(".")[2]
        np.testing.assert_array_equal(run["updates"]["grad_norm"], NORMS)
        np.testing.assert_array_equal(
            run["train"]["reward_mean"].sel(slot="policy"), table["train/reward"].to_numpy()
        )


def test_our_own_metrics_file(tmp_path):
    slots = {"a/0": "a", "a/1": "a", "b/0": "b"}
    with gradscope.RunWriter(tmp_path / "ours", slots=slots, policies={"a": "p", "b": "p"}) as writer:
        for step in (1, 2, 3):
            writer.append(step, metrics={"loss": 0.5 * step, "reward_mean": {"a/0": step, "b/0": -step}})
    made, run = opened(tmp_path / "ours" / "metrics.jsonl", tmp_path)
    assert (made.format, made.dialect) == ("jsonl", "own")
    assert run["train"]["loss"].values.tolist() == [0.5, 1.0, 1.5]
    assert run["train"]["reward_mean"].sel(slot="b/0").values.tolist() == [-1, -2, -3]
    assert dict(zip(run["slot"].values, run["slot_role"].values, strict=True)) == {"a/0": "a", "b/0": "b"}
