"""How a run ends, where its code came from, what failed inside the log, and the flat mirror."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import gradscope
from gradscope import schema
from gradscope.runfile import RunWriter, UpdateRecord, compaction, open_run, provenance
from gradscope.runfile.summary import summarize

SLOTS = {"g/0": "g", "g/1": "g"}
POLICIES = {"g": "p"}
NAMES = tuple(SLOTS)


def failing(path, error):
    with RunWriter(path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(4)
        raise error


@pytest.mark.parametrize("error", [KeyError("reward"), KeyboardInterrupt()])
def test_a_run_that_ends_in_an_exception_is_not_finished(tmp_path, error):
    with pytest.raises(type(error)):
        failing(tmp_path, error)
    run = open_run(tmp_path)
    assert "finished_at" not in run.attrs
    assert run["events"]["kind"].values.tolist() == ["failed"]
    assert run["events"]["step"].values.tolist() == [4]
    assert type(error).__name__ in run["events"]["message"].item()
    assert not list(tmp_path.glob("run.h5.*"))
    assert summarize(tmp_path)["state"].startswith(f"ended by an exception: {type(error).__name__}")


def test_a_run_that_failed_can_be_resumed_and_finished(tmp_path):
    with pytest.raises(KeyError):
        failing(tmp_path, KeyError("reward"))
    copy = tmp_path.with_name("as_a_killed_writer_leaves_it")
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES, resume_from_step=4) as writer:
        writer.append(5)
        shutil.copytree(tmp_path, copy)
    assert summarize(copy)["state"] == "not closed: the writer ended without close()"
    assert summarize(tmp_path)["state"].startswith("closed at")


def test_kinds_of_trouble_are_known():
    assert {"failed", "compaction_failed", "disk_full", "dropped_records"} <= set(schema.EVENT_KINDS)


def test_an_event_of_an_unknown_kind_is_kept_as_it_is(tmp_path):
    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer, warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.append_event(0, "lunch", "pizza")
    assert open_run(tmp_path)["events"]["kind"].values.tolist() == ["lunch"]


FAILURES = [(OSError(28, "No space left"), "disk_full"), (ZeroDivisionError("oh"), "compaction_failed")]


@pytest.mark.parametrize(("error", "kind"), FAILURES)
def test_a_bug_in_compaction_is_no_full_disk(tmp_path, monkeypatch, error, kind):
    whole = compaction.compact

    def broken(*_, **__):
        raise error

    with RunWriter(tmp_path, slots=SLOTS, policies=POLICIES) as writer:
        writer.append(0)
        monkeypatch.setattr(compaction, "compact", broken)
        with pytest.warns(UserWarning, match="compaction failed") as caught:
            writer.compact(wait=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.compact(wait=True)  # the same again is told once
        monkeypatch.setattr(compaction, "compact", whole)
        writer.append(1)
    (warning,) = caught
    (event,) = [text for text in open_run(tmp_path)["events"]["message"].values if "compaction" in text]
    assert open_run(tmp_path)["events"]["kind"].values.tolist() == [kind]
    assert "\n" not in event
    if kind == "compaction_failed":
        assert "ZeroDivisionError: oh" in event
        assert "Traceback" in str(warning.message)
        assert "in broken" in str(warning.message)
    else:
        assert "Traceback" not in str(warning.message)
    assert open_run(tmp_path)["train"]["step"].values.tolist() == [0, 1]


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_package_wherever_one_stands(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "foreign")
    here = provenance.git_hash()
    monkeypatch.chdir(tmp_path)
    assert provenance.git_hash() == here
    assert not here.startswith(git(tmp_path, "rev-parse", "HEAD"))


def test_a_package_without_a_checkout_of_its_own_has_no_commit(tmp_path):
    """Installed inside somebody's repository, whose commit is not ours."""
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "foreign")
    source = Path(gradscope.__file__).parent
    installed = tmp_path / "lib" / "gradscope"
    for name in ("__init__.py", "errors.py", "schema.py"):
        (installed / "runfile").mkdir(parents=True, exist_ok=True)
        (installed / name).write_text((source / name).read_text())
    for name in ("__init__.py", "provenance.py"):
        (installed / "runfile" / name).write_text((source / "runfile" / name).read_text())
    program = "from gradscope.runfile import provenance; print([provenance.__file__, provenance.git_hash()])"
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path / "lib"
    ).stdout
    assert str(installed) in out
    assert out.strip().endswith("'']")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a checkout of the package")
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path / "lib"
    ).stdout
    assert git(tmp_path, "rev-parse", "HEAD") in out


def lines_of(path, **given):
    with RunWriter(path, slots=SLOTS, policies=POLICIES) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer.append(3, **given)
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_the_step_of_a_line_is_the_writers(tmp_path):
    assert lines_of(tmp_path, metrics={"step": 99, "loss": 1.0}) == [{"step": 3, "loss": 1.0}]
    run = open_run(tmp_path)
    assert run["train"]["step"].values.tolist() == [3]
    assert run["user"]["step_of_step"].values.tolist() == [99]


def update(policy, norm):
    return UpdateRecord(policy, NAMES, np.eye(2), scalars={"grad_norm": norm})


def test_several_updates_of_a_policy_all_stand_in_the_mirror(tmp_path):
    records = [update("p", 1.0), update("q", 5.0), update("p", 2.0)]
    assert lines_of(tmp_path, record=records) == [
        {"step": 3, "updates/p/0/grad_norm": 1.0, "updates/q/grad_norm": 5.0, "updates/p/1/grad_norm": 2.0}
    ]
