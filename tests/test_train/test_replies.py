"""What roles reply is read as a person would read it, and junk falls back and is counted."""

import pytest

from gradscope.train.workflows.replies import is_copy, read_choice, read_strategies, read_verdict


@pytest.mark.parametrize(
    ("reply", "index", "in_format", "fallback"),
    [
        ("first \\boxed{1}, finally \\boxed{3}", 2, True, False),
        ("All 3 solutions are wrong; best is Solution 2", 1, False, False),
        ("\\boxed{7}", 0, False, True),
        ("\\boxed{2} of \\boxed{9}", 1, True, False),
        ("<think>maybe \\boxed{3}</think>\\boxed{1}", 0, True, False),
        ("<think>maybe \\boxed{3}", 0, False, True),
        ("12 and 3.5", 0, False, True),
        ("", 0, False, True),
        ("\\boxed{" + "9" * 5000 + "}", 0, False, True),
        ("\\boxed{²}", 0, False, True),
    ],
)
def test_natural_choice(reply, index, in_format, fallback):
    choice = read_choice(reply, num_candidates=3, style="natural")
    assert (choice.index, choice.in_format, choice.fallback) == (index, in_format, fallback)


@pytest.mark.parametrize(
    ("reply", "index", "in_format", "fallback"),
    [
        ("2", 1, True, False),
        (" 3 ", 2, True, False),
        ("4", 0, False, True),
        ("ab+2*", 0, False, True),
        ("2|", 0, False, True),
        ("\ufffd", 0, False, True),
        ("", 0, False, True),
    ],
)
def test_compact_choice(reply, index, in_format, fallback):
    choice = read_choice(reply, num_candidates=3, style="compact")
    assert (choice.index, choice.in_format, choice.fallback) == (index, in_format, fallback)


@pytest.mark.parametrize(
    ("reply", "correct", "in_format"),
    [
        ("\\boxed{Correct}", True, True),
        ("\\boxed{\\text{Correct}}", True, True),
        ("\\boxed{Correct.}", True, True),
        ("\\boxed{INCORRECT}", False, True),
        ("\\boxed{**Incorrect**}", False, True),
        ("\\boxed{Incorrect}, no: \\boxed{Correct}", True, True),
        ("\\boxed{42}", None, False),
        ("The answer is incorrect", None, False),
        ("Check the sum.\nVerdict: incorrect.", False, False),
        ("incorrect", False, False),
        ("correct", True, False),
        ("not correct", None, False),
        ("\\boxed{Correct", None, False),
        ("", None, False),
    ],
)
def test_natural_verdict(reply, correct, in_format):
    judgement = read_verdict(reply, style="natural")
    assert (judgement.correct, judgement.in_format) == (correct, in_format)


@pytest.mark.parametrize(
    ("reply", "correct", "feedback", "in_format"),
    [
        ("y", True, "y", True),
        ("n3", False, "3", True),
        ("n", False, "0", False),
        ("n٣", False, "0", False),
        ("yes", True, "yes", False),
        ("ab+", None, "ab+", False),
        ("", None, "", False),
    ],
)
def test_compact_verdict(reply, correct, feedback, in_format):
    judgement = read_verdict(reply, style="compact")
    assert (judgement.correct, judgement.feedback, judgement.in_format) == (correct, feedback, in_format)


@pytest.mark.parametrize(
    ("reply", "texts", "in_format", "fallback"),
    [
        ("STRATEGY 2: guess\nSTRATEGY 1: compute", ("compute", "guess"), True, False),
        ("**STRATEGY 1**: compute", ("compute",), True, False),
        ("**STRATEGY 1:** compute", ("compute",), True, False),
        ("1. compute\n2) guess", ("compute", "guess"), False, False),
        ("use a table of values\nok", ("use a table of values",), False, True),
        ("short", ("short",), False, True),
        ("", ("",), False, True),
        (
            "STRATEGY 1: a\nSTRATEGY 2: b\nSTRATEGY 3: c\nSTRATEGY 4: d",
            ("a", "b", "c"),
            False,
            False,
        ),
    ],
)
def test_natural_strategies(reply, texts, in_format, fallback):
    strategies = read_strategies(reply, max_strategies=3, style="natural")
    assert (strategies.texts, strategies.in_format, strategies.fallback) == (texts, in_format, fallback)


@pytest.mark.parametrize(
    ("reply", "texts", "in_format", "fallback"),
    [
        ("LRL", ("L", "R", "L"), True, False),
        ("LR", ("L", "R"), False, False),
        ("LRLR", ("L", "R", "L"), False, False),
        ("aL", ("L",), False, False),
        ("ab+", ("ab+",), False, True),
        ("", ("",), False, True),
    ],
)
def test_compact_strategies(reply, texts, in_format, fallback):
    strategies = read_strategies(reply, max_strategies=3, style="compact")
    assert (strategies.texts, strategies.in_format, strategies.fallback) == (texts, in_format, fallback)


def test_a_copy_is_the_whole_text_up_to_spacing():
    long = "the sum of all the numbers from one to ten is 55"
    assert is_copy("a +\n b", ["a + b"])
    assert is_copy(f"I agree: {long}!", [long])
    assert not is_copy("see ab+ there", ["ab+"])
    assert not is_copy("", [""])
