"""Evaluation: intervals, repeatability, dropped episodes, and reading a run back."""

import math

import pytest

from gradscope.errors import RunFileError
from gradscope.train import evaluate_run, run
from gradscope.train.evaluate import Evaluation, evaluate_session
from gradscope.train.session import Session


def test_a_checkpoint_evaluates_as_the_run_did(small, tmp_path):
    config = small("voting-isolated-stack_code", "evaluate.greedy=false", "evaluate.num_problems=20")
    result = run(config, out=tmp_path)
    sampled, greedy = evaluate_run(tmp_path)
    assert sampled == result.evaluations[-1]
    assert (greedy.greedy, greedy.num_total) == (True, 20)
    (first, *_) = result.evaluations
    assert evaluate_run(tmp_path, checkpoint=0)[0] == first
    best = max(result.evaluations, key=lambda evaluation: evaluation.accuracy)
    assert evaluate_run(tmp_path, checkpoint="best")[0].accuracy == best.accuracy
    assert [e.num_total for e in evaluate_run(tmp_path, num_problems=5)] == [5, 5]
    with pytest.raises(RunFileError, match=r"no checkpoint '3'\. Allowed: last, best, 0, 2, 4"):
        evaluate_run(tmp_path, checkpoint="3")


def test_sampling_differs_from_step_to_step_and_greedy_does_not(small):
    session = Session(small("voting-isolated-stack_code", "evaluate.num_problems=40"))
    one, two = (evaluate_session(session, step=step) for step in (1, 2))
    again = evaluate_session(session, step=1)
    assert one[0] == again[0]
    assert one[0].role_accuracy != two[0].role_accuracy
    assert one[1].role_accuracy == two[1].role_accuracy
    assert math.isnan(one[1].temperature)
    assert one[0].temperature == 0.7


def test_as_text_and_json():
    evaluation = Evaluation(
        step=5,
        greedy=False,
        temperature=math.nan,
        num_correct=5,
        num_total=10,
        num_dropped=1,
        role_accuracy={"generator": math.nan},
        role_tokens_mean={"generator": 3.0},
    )
    assert evaluation.describe() == (
        "held-out accuracy 0.500 sampled (5 of 10, 95 % 0.237 to 0.763, 1 dropped)"
    )
    content = evaluation.to_json()
    assert content["temperature"] is None
    assert content["role_accuracy"] == {"generator": None}
    assert content["accuracy"] == 0.5


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunFileError, match=r"holds no config\.yaml"):
        evaluate_run(tmp_path)
    (tmp_path / "config.yaml").write_text("base: demo\n")
    with pytest.raises(RunFileError, match="has no checkpoint yet"):
        evaluate_run(tmp_path)
