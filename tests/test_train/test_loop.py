"""Whole runs: what they write, that they resume bit by bit, and how they end."""

import signal
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gradscope
from gradscope.errors import ConfigError
from gradscope.train import run
from gradscope.train.checkpoint import checkpoint_steps, find_checkpoint
from gradscope.train.probing import Probe
from gradscope.train.session import Session
from gradscope.train.threads import cpu_threads

CELLS = [
    "single-shared-stack_code",
    "voting-isolated-stack_code",
    "eval_opt-shared-arithmetic",
    "orch_workers-isolated-stack_code",
]
VOLATILE = {"wall_time", "seconds", "segment"}


def numbers(tree):
    """Everything in a run file that two equal runs must share."""
    found = {}
    for group in ("train", "updates", "rows", "eval"):
        for name, variable in tree[group].data_vars.items():
            if name not in VOLATILE:
                found[f"{group}/{name}"] = variable.values
    return found


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert np.array_equal(values, second[name], equal_nan=values.dtype.kind == "f"), name


def assert_same_checkpoints(first, second):
    assert first.name == second.name
    for policy in (path.name for path in first.iterdir() if path.is_dir()):
        weights, theirs = (load_file(p / policy / "adapter_model.safetensors") for p in (first, second))
        assert all(torch.equal(value, theirs[key]) for key, value in weights.items())
        state, other = (torch.load(p / policy / "optimizer.pt", weights_only=True) for p in (first, second))
        for index, entries in state["state"].items():
            assert all(torch.equal(value, other["state"][index][key]) for key, value in entries.items())


@pytest.mark.parametrize("cell", CELLS)
def test_a_run_writes_what_the_schema_can_know(small, tmp_path, cell):
    config = small(cell)
    reports = []
    result = run(config, out=tmp_path / "run", on_step=reports.append)
    assert (result.step, result.interrupted) == (4, False)
    assert [report.step for report in reports] == [0, 1, 2, 3, 4]
    assert [len(report.evaluations) for report in reports] == [2, 0, 2, 0, 2]
    tree = gradscope.open_run(tmp_path / "run")
    train, slots = tree["train"], list(result_slots(config))
    assert list(train["step"].values) == [1, 2, 3, 4]
    assert list(tree["slot"].values) == slots
    always = ["reward_mean", "advantage_abs_mean", "zero_advantage_fraction", "response_tokens_mean",
              "response_tokens_p95", "truncated_fraction", "fallback_fraction", "violation_fraction",
              "entropy", "perplexity", "num_tokens", "num_rows"]  # fmt: skip
    first = slots[0]
    for name in always:
        assert np.isfinite(train[name].sel(slot=first)).all(), name
    assert (train["num_rows"].sel(slot=first) == 12).all()
    assert {"rollout", "update", "probes"} <= set(tree["phase"].values)
    assert np.isfinite(train["loss"]).all()
    updates = tree["updates"]
    assert np.isfinite(updates["grad_norm"]).all()
    assert (updates["skipped"] == 0).all()
    for i in range(updates.sizes["update"]):
        gram = updates["gram"].isel(update=i)
        assert float(np.sqrt(gram.sum())) == pytest.approx(float(updates["grad_norm"][i]), rel=1e-5)
    assert list(tree["eval"]["step"].values) == [0, 0, 2, 2, 4, 4]
    assert list(tree["eval"]["num_total"].values) == [8] * 6
    assert checkpoint_steps(tmp_path / "run") == [0, 2, 4]


def result_slots(config):
    from gradscope.train.config.plugins import build_workflow

    return build_workflow(config.workflow).slots


def test_resumed_equals_uninterrupted(small, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(small("voting-isolated-stack_code", "train.steps=6"), out=whole)
    run(small("voting-isolated-stack_code", "train.steps=2"), out=parts)
    result = run(small("voting-isolated-stack_code", "train.steps=6"), out=parts, resume=True)
    assert result.step == 6
    assert_same_checkpoints(find_checkpoint(whole), find_checkpoint(parts))
    trees = [gradscope.open_run(folder) for folder in (whole, parts)]
    assert_same(*map(numbers, trees))
    events = trees[1]["events"]
    assert "resume" in events["kind"].values
    (change,) = events["message"].values[events["kind"].values == "config_change"]
    assert change == "changed: train.steps 2 -> 6"


def test_resuming_after_a_crash_drops_what_came_after_the_checkpoint(small, tmp_path):
    config = small("voting-shared-stack_code", "train.steps=5")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(config, out=whole)

    def die(report):
        if report.step == 3:
            raise RuntimeError("power failure")

    with pytest.raises(RuntimeError, match="power failure"):
        run(config, out=broken, on_step=die)
    assert find_checkpoint(broken).name == "step_000002"
    assert list(gradscope.open_run(broken)["train"]["step"].values) == [1, 2, 3]
    run(config, out=broken, resume=True)
    assert_same(*(numbers(gradscope.open_run(folder)) for folder in (whole, broken)))
    assert_same_checkpoints(find_checkpoint(whole), find_checkpoint(broken))


def test_the_best_evaluation_leaves_a_checkpoint(small, tmp_path):
    every_step = ["train.steps=8", "train.checkpoint_every=0", "evaluate.every=1", "evaluate.greedy=false"]
    # A rate that breaks the policy in a few steps.
    broken = ["optim.learning_rate=0.03", "evaluate.at_start=false", "run.keep_checkpoints=1"]
    config = small("single-shared-stack_code", *every_step, *broken)
    result = run(config, out=tmp_path)
    accuracies = [evaluation.accuracy for evaluation in result.evaluations]
    best = 1 + accuracies.index(max(accuracies))
    assert best < 8
    assert checkpoint_steps(tmp_path) == [best, 8]
    assert find_checkpoint(tmp_path, "best").name == f"step_{best:06d}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_so_that_it_can_go_on(small, tmp_path, number):
    before = signal.getsignal(number)

    def ask_to_stop(report):
        if report.step == 1:
            signal.raise_signal(number)

    config = small("voting-isolated-stack_code", "train.checkpoint_every=0", "evaluate.every=0")
    result = run(config, out=tmp_path, on_step=ask_to_stop)
    assert result.interrupted
    assert signal.getsignal(number) == before
    assert find_checkpoint(tmp_path).name == f"step_{result.step:06d}"
    assert 1 <= result.step <= 2
    finished = run(config, out=tmp_path, resume=True)
    assert (finished.step, finished.interrupted) == (4, False)
    assert list(gradscope.open_run(tmp_path)["train"]["step"].values) == [1, 2, 3, 4]


def test_a_run_in_a_thread_catches_no_signal(small, tmp_path):
    results = []
    config = small("single-shared-stack_code", "train.steps=1", "evaluate.every=0")
    thread = threading.Thread(target=lambda: results.append(run(config, out=tmp_path / "run")))
    thread.start()
    thread.join()
    assert results[0].step == 1


def test_dropped_episodes_are_an_event_and_no_crash(small, tmp_path):
    session = Session(small("single-shared-arithmetic"))
    prompts = (next(session.workflow.play(problem))[0].messages for problem in session.problems(1))
    shortest = min(len(session.chat.encode(messages)) for messages in prompts)
    session.close()
    limit = f"rollout.max_prompt_tokens={shortest}"
    config = small("single-shared-arithmetic", limit, "train.steps=1", "rollout.num_problems=12")
    run(config, out=tmp_path / "run")
    assert "dropped_episodes" in gradscope.open_run(tmp_path / "run")["events"]["kind"].values


def test_a_run_that_drops_everything_stops(small, tmp_path):
    with pytest.raises(ConfigError, match=r"split 'train' have .*max_prompt_tokens=\d+ or more"):
        run(small("voting-isolated-stack_code", "rollout.max_prompt_tokens=5"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    session = Session(small())
    first = len(session.chat.encode(next(session.workflow.play(session.problems(1)[0]))[0].messages))
    session.close()
    config = small("voting-isolated-stack_code", f"rollout.max_prompt_tokens={first + 1}", "evaluate.every=0")
    with pytest.raises(ConfigError, match=r"every episode .* was dropped; first: aggregator/0 has"):
        run(config, out=tmp_path / "run")


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with cpu_threads(0):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_phases_of_a_step_do_not_overlap(small):
    session = Session(small())
    begin = time.perf_counter()
    result = session.train_step(1)
    elapsed = time.perf_counter() - begin
    seconds = result.metrics["seconds"]
    assert set(seconds) == {"rollout", "update", "probes"}
    assert all(value > 0 for value in seconds.values())
    assert sum(seconds.values()) <= elapsed


@pytest.mark.filterwarnings("ignore:1 trainable parameters are covered only in updates whose micro-batches")
def test_what_the_gram_leaves_out_is_one_event(small, tmp_path, monkeypatch):
    class OddLinear(torch.nn.Linear):
        def forward(self, features):
            return super().forward(features)

    def odd_probe(network, *arguments, **options):
        odd = next(m for name, m in network.named_modules() if name.endswith("lora_A.shared"))
        odd.__class__ = OddLinear
        return Probe(network, *arguments, **options)

    monkeypatch.setattr("gradscope.train.session.Probe", odd_probe)
    # Rows of several slots in one pass: a hook on the parameter cannot tell them apart.
    run(small("voting-shared-stack_code", "train.steps=2", "evaluate.every=0"), out=tmp_path / "run")
    events = gradscope.open_run(tmp_path / "run")["events"]
    messages = events["message"].values[events["kind"].values == "coverage"]
    left_out, not_attributed = messages
    assert "lora_A.shared.weight" in left_out
    assert "Applied changes of policy 'shared' are not" in not_attributed
