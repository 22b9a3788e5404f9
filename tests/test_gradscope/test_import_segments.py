"""Logs of runs that were resumed: each step once, the later stretch wins, what it lacks is missing."""

import json

import numpy as np

import gradscope
from gradscope.importers.importing import import_run


def imported(tmp_path, rows, **choices):
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(json.dumps({"step": step, "data": data}) for step, data in rows))
    made = import_run(file, tmp_path / "run.h5", **choices)
    return made, gradscope.open_run(tmp_path / "run.h5")


def row(step, norm, **more):
    return step, {"actor/grad_norm": norm, **more}


def test_the_later_segment_wins_and_missing_keys_stay_missing(tmp_path):
    first = [row(step, 1.0, **{"actor/entropy": 0.5}) for step in range(1, 9)]
    second = [row(step, 2.0) for step in range(6, 12)]
    made, run = imported(tmp_path, first + second)
    train = run["train"].to_dataset()
    assert train["step"].values.tolist() == list(range(1, 12))
    assert run["updates"]["grad_norm"].values.tolist() == [1.0] * 5 + [2.0] * 6
    entropy = train["entropy"].sel(slot="policy").values
    np.testing.assert_array_equal(entropy, [0.5] * 5 + [np.nan] * 6)
    assert train["segment"].values.tolist() == [0] * 5 + [1] * 6
    assert (made.num_segments, made.num_steps) == (2, 11)
    old = run["superseded"]["segment_000"]["train"]
    assert old["step"].values.tolist() == [6, 7, 8]
    assert any("go back 1 time" in note for note in made.notes)


def test_a_segment_that_ends_before_the_one_that_it_replaces(tmp_path):
    made, run = imported(tmp_path, [row(s, 1.0) for s in range(1, 21)] + [row(s, 2.0) for s in range(11, 16)])
    assert run["train"]["step"].values.tolist() == list(range(1, 16))
    assert made.num_steps == 15


def test_evaluations_of_abandoned_weights_are_moved_aside(tmp_path):
    key = "val-core/x/acc/mean@1"
    first = [row(step, 1.0, **({key: 0.5} if step % 2 == 0 else {})) for step in range(1, 9)]
    second = [row(step, 2.0, **({key: 0.75} if step % 2 == 0 else {})) for step in range(5, 11)]
    made, run = imported(tmp_path, first + second, num_total=4)
    assert run["eval"]["step"].values.tolist() == [2, 4, 6, 8, 10]
    assert run["eval"]["num_correct"].values.tolist() == [2, 2, 3, 3, 3]
    assert made.num_evaluations == 5


def test_three_segments_and_one_that_starts_over(tmp_path):
    rows = (
        [row(s, 1.0) for s in (0, 1, 2, 3)] + [row(s, 2.0) for s in (2, 3, 4)] + [row(s, 3.0) for s in (0, 1)]
    )
    made, run = imported(tmp_path, rows)
    assert run["train"]["step"].values.tolist() == [0, 1]
    assert run["updates"]["grad_norm"].values.tolist() == [3.0, 3.0]
    assert any("starts over at step 0" in note and "import them one by one" in note for note in made.notes)
    assert made.num_segments == 3


def test_rows_of_one_step_are_one_and_evaluations_begin_no_segment(tmp_path):
    key = "val-core/x/acc/mean@1"
    rows = [
        (1, {"actor/grad_norm": 1.0}),
        (1, {"actor/entropy": 0.5}),
        row(2, 1.0),
        (1, {key: 0.5}),
        row(3, 1.0),
    ]
    made, run = imported(tmp_path, rows, num_total=2)
    assert made.num_segments == 1
    assert run["train"]["step"].values.tolist() == [1, 2, 3]
    assert run["train"]["entropy"].values[0, 0] == 0.5
    assert run["eval"]["step"].values.tolist() == [1]
