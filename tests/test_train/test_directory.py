"""The run directory: what lies in it, which folder a run takes, and what a crash leaves of it."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch

import gradscope
from gradscope.errors import ConfigError, RunFileError
from gradscope.train import load_config, run
from gradscope.train.checkpoint import checkpoint_steps
from gradscope.train.directory import default_out


def test_the_run_directory(small, tmp_path):
    folder = tmp_path / "run"
    run(small(), out=folder)
    assert load_config(folder / "config.yaml") == small()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    files = sorted(path.name for path in (folder / "episodes").iterdir())
    assert files == ["step_000001.jsonl.gz", "step_000003.jsonl.gz"]
    text = gzip.decompress((folder / "episodes" / files[1]).read_bytes()).decode()
    episodes = [json.loads(line) for line in text.splitlines()]
    assert len(episodes) == 8
    rows = {row["row_id"]: row for episode in episodes for row in episode["rows"]}
    recorded = gradscope.open_run(folder)["rows"].to_dataset()
    mine = recorded.where(recorded["step"] == 3, drop=True)
    assert set(mine["row_id"].values) == set(rows)
    for row_id, advantage in zip(mine["row_id"].values, mine["advantage"].values, strict=True):
        assert rows[row_id]["advantage"] == advantage
    assert all(row["prompt"].startswith("<") for row in rows.values())


def test_episodes_stop_when_their_room_is_used(small, tmp_path):
    run(small("voting-isolated-stack_code", "run.episodes_max_megabytes=1e-6"), out=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "episodes").iterdir()] == ["step_000001.jsonl.gz"]


def test_a_taken_folder_is_refused_before_any_work(small, tmp_path):
    config = small("single-shared-stack_code", "train.steps=1", "evaluate.every=0")
    run(config, out=tmp_path / "run")
    missing = small("single-shared-stack_code", "model.path=/no/such/model")
    with pytest.raises(RunFileError, match=r"holds a run already\. Add --resume"):
        run(missing, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="there is no folder"):
        run(missing, out=tmp_path / "other")
    assert not (tmp_path / "other").exists()
    changed = small("single-shared-stack_code", "policy.rank=4")
    with pytest.raises(ConfigError, match=r"policy\.rank is 4, but the run in .* has 8"):
        run(changed, out=tmp_path / "run", resume=True)
    assert load_config(tmp_path / "run" / "config.yaml") == config


def test_names_of_runs(small):
    assert str(default_out(small())) == "runs/voting-isolated-stack_code-seed0"
    mapped = small("voting-shared-stack_code", "policy.routing={generator: a, aggregator: b}")
    assert str(default_out(mapped)) == "runs/voting-mapped-stack_code-seed0"
    task = ["task.path=problems.jsonl"]
    scales = [load_config(f"voting-shared-math_jsonl-{scale}", task) for scale in ("0.6B", "4B", "135M")]
    assert [str(default_out(config)) for config in scales] == [
        "runs/voting-shared-math_jsonl-0.6B-seed0",
        "runs/voting-shared-math_jsonl-4B-seed0",
        "runs/voting-shared-math_jsonl-135M-seed0",
    ]
    own = small("voting-shared-stack_code", "model.path=models/My Own.gguf")
    assert str(default_out(own)) == "runs/voting-shared-stack_code-My_Own.gguf-seed0"


def test_checkpoints_without_their_run_file_are_not_written_over(small, tmp_path):
    config = small("single-shared-stack_code", "train.steps=1", "evaluate.every=0")
    folder = tmp_path / "run"
    run(config, out=folder)
    (folder / "run.h5").unlink()
    for resume in (False, True):
        with pytest.raises(RunFileError, match=r"holds checkpoints .* but no run\.h5"):
            run(config, out=folder, resume=resume)
    assert checkpoint_steps(folder) == [0, 1]


@pytest.mark.parametrize("torn", ["", "optim: {learning_rate: 0.0", "train: [", "policy: {}\nnonsense: 3"])
def test_a_torn_config_does_not_block_a_resume(small, tmp_path, torn):
    folder = tmp_path / "run"
    settings = ("single-shared-stack_code", "evaluate.every=0")
    run(small(*settings, "train.steps=1"), out=folder)
    (folder / "config.yaml").write_text(torn)
    longer = small(*settings, "train.steps=2")
    assert run(longer, out=folder, resume=True).step == 2
    events = gradscope.open_run(folder)["events"]
    assert list(events["kind"].values).count("config_change") == 1
    assert load_config(folder / "config.yaml") == longer


def test_a_crash_while_describing_leaves_the_files_of_before(small, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    settings = ("single-shared-stack_code", "evaluate.every=0", "probes.enabled=false")
    first = small(*settings, "train.steps=1")
    run(first, out=folder)
    environment = (folder / "environment.json").read_text()
    replace = os.replace

    def die(source, target):
        if Path(target).name in ("config.yaml", "environment.json"):
            raise OSError("power failure")
        replace(source, target)

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(OSError, match="power failure"):
        run(small(*settings, "train.steps=2"), out=folder, resume=True)
    assert load_config(folder / "config.yaml") == first
    assert (folder / "environment.json").read_text() == environment


def test_episodes_past_the_checkpoint_go_when_a_run_resumes(small, tmp_path):
    settings = ("single-shared-stack_code", "run.episodes_every=1", "train.checkpoint_every=2")

    def die(report):
        if report.step == 3:
            raise RuntimeError("power failure")

    with pytest.raises(RuntimeError, match="power failure"):
        run(small(*settings), out=tmp_path, on_step=die)
    files = [path.name for path in (tmp_path / "episodes").iterdir()]
    assert "step_000003.jsonl.gz" in files
    run(small(*settings, "run.episodes_every=0"), out=tmp_path, resume=True)
    left = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert left == ["step_000001.jsonl.gz", "step_000002.jsonl.gz"]
