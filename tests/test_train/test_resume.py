"""Going on with a run: what it must keep, which checkpoint it takes, and what is lost when files go."""

import itertools
import shutil

import pytest

import gradscope
from gradscope.cli import main
from gradscope.errors import ConfigError, RunFileError
from gradscope.train import run
from gradscope.train.checkpoint import checkpoint_steps

CELL = "voting-shared-stack_code"
QUIET = ("evaluate.every=0", "probes.enabled=false", "rollout.num_problems=2", "rollout.group_size=2")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kinds(folder):
    return list(gradscope.open_run(folder)["events"]["kind"].values)


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(small(CELL, *QUIET), out=folder)
    return folder


@pytest.fixture
def finished(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value", "old"),
    [
        ("workflow.name", "single", "'voting'"),
        ("workflow.num_generators", "4", "3"),
        ("workflow.style", "natural", "'compact'"),
        ("task.name", "arithmetic", "'stack_code'"),
        ("task.seed", "4", "0"),
        ("policy.routing", "isolated", "'shared'"),
        ("policy.rank", "4", "8"),
        ("train.seed", "4", "0"),
        ("rollout.num_problems", "5", "2"),
        ("algorithm.group_by", "role", "'slot'"),
        ("algorithm.reward", "own", "'outcome'"),
    ],
)
def test_another_run_is_refused(small, finished, key, value, old):
    before = contents(finished)
    with pytest.raises(ConfigError) as caught:
        run(small(CELL, *QUIET, f"{key}={value}"), out=finished, resume=True)
    message = str(caught.value)
    assert message.startswith(f"{key} is ")
    assert f"has {old}: that is another run. Take it back" in message
    assert contents(finished) == before


def test_an_edited_description_does_not_hide_another_run(small, finished):
    description = finished / "config.yaml"
    description.write_text(description.read_text().replace("stack_code", "arithmetic"))
    with pytest.raises(ConfigError, match=r"task\.name is 'arithmetic'"):
        run(small(CELL, *QUIET, "task.name=arithmetic"), out=finished, resume=True)


def test_a_default_spelled_out_and_other_settings_may_change(small, finished):
    reports = []
    changed = ["optim.learning_rate=0.001", "workflow.num_generators=3", "train.steps=5"]
    result = run(small(CELL, *QUIET, *changed), out=finished, resume=True, on_step=reports.append)
    assert result.step == 5
    ((kind, message),) = reports[0].events
    assert (reports[0].step, kind) == (4, "config_change")
    assert "optim.learning_rate 0.003 -> 0.001" in message
    assert "config_change" in kinds(finished)


@pytest.mark.parametrize("steps", [3, 4])
def test_nothing_to_do_writes_nothing(small, finished, steps, capsys):
    before = contents(finished)
    result = run(
        small(CELL, *QUIET, f"train.steps={steps}", "optim.learning_rate=1"), out=finished, resume=True
    )
    assert (result.step, result.was_done) == (4, True)
    with pytest.raises(SystemExit) as end:
        main(["train", str(finished / "config.yaml"), "--out", str(finished), "--resume"])
    assert end.value.code == 0
    assert "already at step 4: nothing to do" in capsys.readouterr().out
    assert contents(finished) == before


def test_no_run_to_go_on_with_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", CELL, *QUIET, "train.steps=1", "--out", str(tmp_path / "run"), "--resume"])
    assert end.value.code == 0
    assert "there is no run to go on with, so a new one starts" in capsys.readouterr().err


def test_a_run_without_its_checkpoints_is_refused(small, finished):
    shutil.rmtree(finished / "checkpoints")
    before = contents(finished)
    with pytest.raises(RunFileError, match="has 4 steps but no checkpoint"):
        run(small(CELL, *QUIET, "train.steps=6"), out=finished, resume=True)
    assert contents(finished) == before


def test_a_run_that_never_left_its_start_begins_again(small, tmp_path):
    run(small(CELL, *QUIET, "train.steps=0"), out=tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    assert run(small(CELL, *QUIET, "train.steps=1"), out=tmp_path, resume=True).step == 1


WEIGHTS, MOMENTS, STATE = "shared/adapter_model.safetensors", "shared/optimizer.pt", "state.json"
EMPTY, GARBAGE, OBJECT = b"", b"garbage\n" * 30, b"{}"
IN_SHORT = {(WEIGHTS, EMPTY), (MOMENTS, GARBAGE), (STATE, OBJECT), (STATE, EMPTY)}


@pytest.mark.parametrize(
    ("file", "garbage"),
    [
        pytest.param(*pair, marks=() if pair in IN_SHORT else pytest.mark.slow)
        for pair in itertools.product((WEIGHTS, MOMENTS, STATE), (EMPTY, GARBAGE, OBJECT))
    ],
)
def test_a_damaged_checkpoint_is_passed_over(small, finished, file, garbage):
    (finished / "checkpoints" / "step_000004" / file).write_bytes(garbage)
    reports = []
    config = small(CELL, *QUIET, "train.steps=5")
    assert run(config, out=finished, resume=True, on_step=reports.append).step == 5
    assert reports[0].step == 2
    message = "step_000004 cannot be read; the run goes on from step 2"
    assert ("checkpoint_damaged", message) in reports[0].events
    assert checkpoint_steps(finished) == [2, 4, 5]
    assert run(small(CELL, *QUIET, "train.steps=6"), out=finished, resume=True).step == 6


def test_damaged_checkpoints_only_are_refused_in_one_line(small, finished):
    for step in checkpoint_steps(finished):
        (finished / "checkpoints" / f"step_{step:06d}" / "shared" / "optimizer.pt").write_bytes(b"garbage")
    with pytest.raises(RunFileError, match="None of the 3 checkpoints can be read") as caught:
        run(small(CELL, *QUIET, "train.steps=5"), out=finished, resume=True)
    assert "\n" not in str(caught.value)


def test_the_start_is_evaluated_once(small, tmp_path):
    settings = ("single-shared-stack_code", "evaluate.num_problems=4", "evaluate.every=50")
    run(small(*settings, "train.steps=0"), out=tmp_path)

    def die(report):
        raise RuntimeError("power failure")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="power failure"):
            run(small(*settings, "train.steps=2"), out=tmp_path, resume=True, on_step=die)
    steps = gradscope.open_run(tmp_path)["eval"]["step"].values
    assert list(steps) == [0, 0]


def test_a_folder_that_goes_away_is_no_success(small, tmp_path):
    folder = tmp_path / "run"

    def clear(report):
        if report.step == 2:
            # Removing a tree file by file fails where a compaction puts one back meanwhile.
            folder.rename(tmp_path / "elsewhere")

    with pytest.raises(RunFileError, match="the run file went away while the run went on, at step"):
        run(small(CELL, *QUIET), out=folder, on_step=clear)


@pytest.mark.parametrize("only_first", [True, False])
def test_a_checkpoint_that_cannot_be_saved_is_not_the_end(small, tmp_path, monkeypatch, only_first):
    from gradscope.train import checkpoint

    folder, save, reports = tmp_path / "run", checkpoint.save_file, []

    def full(content, path):
        if "step_000002" in str(path) or ("step_000004" in str(path) and not only_first):
            raise OSError(28, "No space left on device")
        save(content, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    if only_first:
        assert run(small(CELL, *QUIET), out=folder, on_step=reports.append).step == 4
    else:
        with pytest.raises(
            RunFileError, match=r"after step 4 could not be saved .* those of step 0 are kept"
        ):
            run(small(CELL, *QUIET), out=folder, on_step=reports.append)
    assert [kind for kind, _ in reports[2].events] == ["checkpoint_failed"]
    assert "checkpoint_failed" in kinds(folder)
    assert checkpoint_steps(folder) == ([0, 4] if only_first else [0])
    assert not list((folder / "checkpoints").glob(".*"))
