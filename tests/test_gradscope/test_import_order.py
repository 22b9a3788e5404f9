"""Tables in no order of time, several runs in one, and rows that are no training step."""

import json

import numpy as np
import pytest

import gradscope
from gradscope.importers.importing import import_run

NUM = 20


def table(tmp_path, rows, header="step,loss,grad_norm", name="log.csv"):
    path = tmp_path / name
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows), ""]))
    return path


def imported(tmp_path, source, **choices):
    made = import_run(source, tmp_path / "run.h5", **choices)
    return made, gradscope.open_run(tmp_path / "run.h5")


@pytest.mark.parametrize("order", ["newest first", "shuffled"])
def test_a_table_without_repeats_is_sorted_by_step(tmp_path, order):
    steps = (
        np.arange(NUM, 0, -1) if order == "newest first" else np.random.default_rng(0).permutation(NUM) + 1
    )
    made, run = imported(tmp_path, table(tmp_path, [(step, step / 2, step) for step in steps]))
    assert (made.num_steps, made.num_segments) == (NUM, 1)
    assert run["train"]["loss"].values.tolist() == [step / 2 for step in range(1, NUM + 1)]
    assert any("in no order of time: sorted by step" in note for note in made.notes)


def test_a_table_with_times_is_sorted_by_them(tmp_path):
    rows = [(s, 1.0, 1.0, 1.7e9 + s) for s in range(1, 9)] + [(s, 2.0, 2.0, 1.8e9 + s) for s in range(5, 11)]
    source = table(tmp_path, rows[::-1], header="step,loss,grad_norm,_timestamp")
    made, run = imported(tmp_path, source)
    assert made.num_segments == 2
    assert run["train"]["loss"].values.tolist() == [1.0] * 4 + [2.0] * 6
    assert any("sorted by it" in note for note in made.notes)


def test_a_table_with_repeats_and_no_order_is_refused(tmp_path):
    rows = [(step, 1.0, 1.0) for step in (*range(1, 9), *range(5, 11))]
    with pytest.raises(gradscope.GradscopeError, match=r"steps go back 13|go back \d+ times in 14 rows"):
        imported(tmp_path, table(tmp_path, rows[::-1]))
    made, _ = imported(tmp_path, table(tmp_path, rows))
    assert made.num_segments == 2


def test_lines_are_a_log_and_keep_their_order(tmp_path):
    def write(steps):
        (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {s}, "grad_norm": {s}}}\n' for s in steps))

    write([10, 20, 30, 26, 36])  # resumed between two logged steps: 30 is abandoned, not out of order
    made, run = imported(tmp_path, tmp_path / "log.jsonl")
    assert run["train"]["step"].values.tolist() == [10, 20, 26, 36]
    assert made.num_segments == 2
    write(range(20, 0, -1))
    with pytest.raises(gradscope.GradscopeError, match="go back 19 times in 20 rows"):
        import_run(tmp_path / "log.jsonl", tmp_path / "never.h5")


def test_two_seeds_in_one_table_are_no_resume(tmp_path):
    rows = [(step, seed, 1.0, seed) for seed in (0, 1) for step in range(1, 6)]
    source = table(tmp_path, rows, header="step,loss,grad_norm,seed")
    with pytest.raises(gradscope.GradscopeError, match=r"2 runs by 'seed'.*--where seed=0"):
        imported(tmp_path, source)
    made, run = imported(tmp_path, source, where={"seed": "1"})
    assert (made.num_steps, made.num_segments) == (5, 1)
    assert run["train"]["loss"].values.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("value", "asked"), [(1, "1"), (1, "1.0"), (1.0, "1"), (True, "true"), (True, "True"), ("True", "true")]
)
def test_where_takes_a_value_in_any_spelling(tmp_path, value, asked):
    rows = [{"step": s, "loss": 1.0, "which": own} for own in (value, 2) for s in (1, 2)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, _ = imported(tmp_path, tmp_path / "log.jsonl", where={"which": asked})
    assert (made.num_steps, made.num_segments) == (2, 1)


def test_an_evaluation_with_a_clock_is_no_training_step(tmp_path):
    header = "step,train/wall_time,eval/x/sampled/num_correct,eval/x/sampled/num_total,train/loss"
    rows = [
        (0, 1.7e9, 3, 8, ""),
        *((s, 1.7e9 + s, "", "", 0.5) for s in range(1, 6)),
        (5, 1.7e9 + 9, 4, 8, ""),
    ]
    made, run = imported(tmp_path, table(tmp_path, rows, header=header))
    assert (made.num_steps, made.num_evaluations) == (5, 2)
    assert run["train"]["step"].values.tolist() == [1, 2, 3, 4, 5]
    assert run["eval"]["greedy"].values.tolist() == [0, 0]
