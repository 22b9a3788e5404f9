"""Answers and programs are found where a person finds them; numbers are compared exactly."""

import threading

import pytest

from gradscope.train.grading import Verdict, code_blocks, compare_answers, extract_answer, extract_code


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{5} then \\boxed{7}", "7"),
        ("\\boxed{5", None),
        ("\\boxed{5} and \\boxed{7", "5"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\boxed{3}}", "\\boxed{3}"),
        ("\\boxed{}", None),
        ("\\boxed {8}", "8"),
        ("<think>\\boxed{5}", None),
        ("<think>\\boxed{5}</think> so \\boxed{6}", "6"),
        ("3 + 4 = 7.", "7"),
        ("it costs $1,234.50, not 2", "2"),
        ("it costs $1,234.50", "1,234.50"),
        ("#### -34", "-34"),
        ("7-3", "3"),
        ("about 1/2", "1/2"),
        ("step2", None),
        ("\ufffd579", None),
        ("57\ufffd", None),
        ("none", None),
        ("", None),
        ("\\boxed{" * 3000, None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```python \nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\n```\n5\n```", "x = 1\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```\nx\n```", "x\n"),
        ("```text\nx\n```", None),
        ("```python\nx = 1\n", None),
        ("```python\na\n```\n```python\nb\n", "a\n"),
        ("x = 1", None),
    ],
)
def test_extract_code(text, code):
    assert extract_code(text) == code


def test_code_blocks_keep_tags_and_order():
    assert code_blocks("```Stack\nab+\n```\n```\n1\n```") == [("stack", "ab+\n"), ("", "1\n")]


@pytest.mark.parametrize(
    ("prediction", "reference", "verdict"),
    [
        ("034", "34", Verdict.EQUAL),
        ("1,234", "1234", Verdict.EQUAL),
        ("0.5", "\\frac12", Verdict.EQUAL),
        ("2/4", "\\frac{1}{2}", Verdict.EQUAL),
        ("204.", "204", Verdict.EQUAL),
        ("1e3", "1000", Verdict.EQUAL),
        ("3 1/2", "3.5", Verdict.EQUAL),
        ("-3 1/2", "-3.5", Verdict.EQUAL),
        ("+7", "7", Verdict.EQUAL),
        ("\\text{Monday}", "Monday", Verdict.EQUAL),
        ("\\dfrac{ x}{2}", "\\frac{x}{2}", Verdict.EQUAL),
        ("$5$", "5", Verdict.EQUAL),
        ("\\frac{1}{3}", "0.333", Verdict.NOT_EQUAL),
        ("33", "34", Verdict.NOT_EQUAL),
        ("-5", "5", Verdict.NOT_EQUAL),
        ("", "5", Verdict.NOT_EQUAL),
        ("1,2", "12", Verdict.UNDECIDED),
        ("1/0", "5", Verdict.UNDECIDED),
        ("1e999999", "5", Verdict.UNDECIDED),
        ("9" * 10_000, "5", Verdict.UNDECIDED),
        ("x+1", "1+x", Verdict.UNDECIDED),
        ("٣", "3", Verdict.UNDECIDED),
    ],
)
def test_compare_answers(prediction, reference, verdict):
    assert compare_answers(prediction, reference) is verdict


def test_compare_answers_works_from_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(compare_answers("2/4", "0.5")))
    thread.start()
    thread.join()
    assert found == [Verdict.EQUAL]
