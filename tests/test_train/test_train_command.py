"""The commands train and evaluate: what they print, where, and how they exit."""

import io
import json
import signal
import subprocess
import sys
import time

import pytest
import yaml
from rich.console import Console

from gradscope.cli import main
from gradscope.train.evaluate import Evaluation
from gradscope.train.progress import RunProgress
from gradscope.train.report import StepReport

CELL = "single-shared-stack_code"
SHORT = ["train.steps=2", "rollout.num_problems=2", "evaluate.num_problems=5", "evaluate.every=2"]


def call(*arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


def test_train_evaluate_and_refuse(tmp_path, capsys):
    folder = tmp_path / "run"
    assert call("train", CELL, *SHORT, "--out", folder) == 0
    captured = capsys.readouterr()
    assert captured.out == f"2 steps in {folder}. Next: gradscope diagnose {folder}\n"
    assert "step 0: held-out accuracy" in captured.err
    assert "step 2/2: reward" in captured.err
    assert call("train", CELL, *SHORT, "--out", folder) == 2
    assert capsys.readouterr().err.startswith(f"gradscope: {folder}: holds a run already.")
    assert call("evaluate", folder, "--json", "--n", "4") == 0
    content = json.loads(capsys.readouterr().out)
    assert [item["num_total"] for item in content["evaluations"]] == [4, 4]
    assert call("evaluate", folder, "--checkpoint", "0") == 0
    assert "step 0: held-out accuracy" in capsys.readouterr().out


def test_print_config_is_a_file_that_trains(tmp_path, capsys):
    assert call("train", CELL, *SHORT, "--print-config") == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["train"]["steps"] == 2
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert call("train", file, "--print-config") == 0
    assert capsys.readouterr().out == text


def test_dry_run_loads_everything_and_writes_nothing(tmp_path, capsys):
    assert call("train", CELL, *SHORT, "--dry-run", "--out", tmp_path / "run") == 0
    text = capsys.readouterr().out
    assert "policies: shared, 20,480 trained parameters each" in text
    assert not (tmp_path / "run").exists()
    assert call("train", CELL, "model.path=/nowhere", "--dry-run", "--out", tmp_path / "run") == 2
    assert "gradscope: model.path: there is no folder '/nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["singel-shared-stack_code"], "unknown workflow 'singel'. Did you mean 'single'?"),
        ([CELL, "rollout.group_size=1"], "rollout.group_size is 1"),
        ([CELL, "policy.routing={judge: a}"], "unknown role 'judge'"),
        ([CELL, "train.stepz=3"], "Did you mean 'train.steps'?"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments, message, capsys):
    assert call("train", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.timeout(600)
def test_sigterm_exits_130_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    settings = [
        CELL,
        "train.steps=100000",
        "evaluate.every=0",
        "train.checkpoint_every=0",
        "--out",
        str(folder),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradscope", "train", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130
    last = error.strip().splitlines()[-1]
    assert last.startswith("stopped after step ")
    assert last.endswith(f"gradscope train {folder / 'config.yaml'} --out {folder} --resume")
    done = int(last.split()[3].rstrip("."))
    assert call("train", folder / "config.yaml", f"train.steps={done + 1}", "--out", folder, "--resume") == 0


def report(step):
    evaluation = Evaluation(step, False, 0.7, 5, 10, 0, {}, {})
    return StepReport(
        step,
        20,
        {"episode_reward_mean": 0.25, "seconds": {"rollout": 1.0, "update": 1.0, "probes": 0.02}},
        (evaluation,) if step % 10 == 0 else (),
        (("nonfinite_update", "policy [bold]x"),) if step == 3 else (),
        100,
    )


def test_a_narrow_terminal_shows_the_facts_whole():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, highlight=False)
    with RunProgress("voting-isolated-stack_code", print_every=5, console=console) as progress:
        for step in range(21):
            progress(report(step))
    last = [line for line in stream.getvalue().splitlines() if "20/20" in line][-1]
    assert "reward 0.250, accuracy 0.500" in last
    assert "probes 1.0%" in last
    assert "…" not in last


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_with_and_without_a_terminal(terminal):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=200, highlight=False)
    with RunProgress("cell", print_every=5, console=console) as progress:
        for step in range(21):
            progress(report(step))
    text = stream.getvalue()
    assert "step 3: nonfinite_update: policy [bold]x" in text
    assert text.count("held-out accuracy 0.500 sampled (5 of 10") == 3
    assert "reward 0.250, accuracy 0.500" in text
    assert "probes 1.0%" in text
    if terminal:
        assert "20/20" in text
    else:
        assert [line[:8] for line in text.splitlines() if "tokens/s" in line] == [
            "step 5/2",
            "step 10/",
            "step 15/",
            "step 20/",
        ]
