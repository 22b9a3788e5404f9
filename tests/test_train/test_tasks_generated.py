"""Generated tasks: deterministic problems, splits apart, grading by value, junk survived."""

import itertools

import pytest

from gradscope.errors import ConfigError, UnknownNameError
from gradscope.train.tasks import TASKS, stack_machine
from gradscope.train.tasks.stack_code import evaluate, read_program

GENERATED = ("stack_code", "arithmetic")
JUNK = [
    "",
    " ",
    "\x00",
    "y",
    "n3",
    "|||",
    "\ufffd",
    "9" * 10_000,
    "a" * 10_000,
    "\ud800",
    "<|im_end|>",
    "```",
    "٣",
]


@pytest.mark.parametrize("name", GENERATED)
def test_a_problem_is_a_pure_function_of_seed_split_and_index(name):
    task = TASKS.get(name)(seed=3)
    backwards = [task.problem("train", index) for index in reversed(range(50))][::-1]
    assert [TASKS.get(name)(seed=3).problem("train", index) for index in range(50)] == backwards
    other_seed = [TASKS.get(name)(seed=4).problem("train", index) for index in range(50)]
    assert sum(a == b for a, b in zip(backwards, other_seed, strict=True)) < 5


@pytest.mark.parametrize("name", GENERATED)
def test_splits_never_overlap_even_across_seeds(name):
    train = {TASKS.get(name)(difficulty=2).problem("train", index).short for index in range(2000)}
    held = {TASKS.get(name)(difficulty=2, seed=9).problem("held_out", index).short for index in range(2000)}
    assert len(train) > 100
    assert len(held) > 50
    assert not train & held


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("text", JUNK)
def test_junk_is_graded_wrong_and_never_raises(name, text):
    task = TASKS.get(name)()
    assert not task.grade(task.problem("held_out", 0), text)
    assert isinstance(task.in_format(text), bool)


@pytest.mark.parametrize("name", GENERATED)
def test_problems_can_be_stated_in_both_styles(name):
    task = TASKS.get(name)()
    for index in range(20):
        problem = task.problem("train", index)
        assert set(problem.short) <= set("0123456789ab+-*")
        assert problem.answer_format.endswith(".") or "```" in problem.answer_format
        assert problem.id.endswith(problem.short)
    assert task.num_problems("train") is None


def test_difficulty_and_spread_set_the_lengths():
    chains = [TASKS.get("stack_code")(difficulty=4, spread=3).problem("train", k).short for k in range(100)]
    assert {len(chain[1::2]) for chain in chains} == {2, 3, 4}
    sums = [TASKS.get("arithmetic")(difficulty=3, spread=9).problem("train", k).short for k in range(100)]
    assert {len(text) for text in sums} == {5, 7}


@pytest.mark.parametrize("name", GENERATED)
def test_shorter_problems_can_come_more_often(name):
    task = TASKS.get(name)(difficulty=4, spread=2, easy_weight=9)
    lengths = [len(task.problem("train", index).short) for index in range(500)]
    assert len(set(lengths)) == 2
    assert 0.05 < lengths.count(max(lengths)) / len(lengths) < 0.15


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("option", ["difficulty", "spread", "easy_weight"])
@pytest.mark.parametrize("value", [0, 10, 2.5, True])
def test_a_bad_difficulty_is_refused(name, option, value):
    with pytest.raises(ConfigError, match=f"{name}.*whole numbers from"):
        TASKS.get(name)(**{option: value})


def test_unknown_splits_and_negative_indices_are_refused():
    task = TASKS.get("arithmetic")()
    with pytest.raises(UnknownNameError, match=r"unknown split 'heldout'. Did you mean 'held_out'"):
        task.problem("heldout", 0)
    with pytest.raises(ConfigError, match="index -1"):
        task.problem("train", -1)


def test_stack_code_is_judged_by_running_it():
    task = TASKS.get("stack_code")(difficulty=2, spread=1)
    index = next(k for k in itertools.count() if task.problem("train", k).short[1::2] == "-*")
    problem = task.problem("train", index)
    x, y, z = problem.short[::2]
    assert task.grade(problem, f"{x}{y}-{z}*")
    assert task.grade(problem, f"{z}{x}{y}-*"), "another program of the same value is right too"
    assert task.grade(problem, f"Here:\n```stack\n{x} {y} -\n{z} *\n```\nDone.")
    assert task.grade(problem, f"It is \\boxed{{{x}{y}-{z}*}}.")
    assert not task.grade(problem, f"{y}{x}-{z}*")
    assert not task.grade(problem, f"{x}{y}-{z}*1")
    assert not task.grade(problem, problem.short)


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("5", 5),
        ("ab-", -3),
        ("a3+b*2-", 62),
        (" a\n3 + ", 8),
        ("+", None),
        ("a+", None),
        ("ab", None),
        ("", None),
        ("__import__('os')", None),
        ("9" * 101, None),
    ],
)
def test_stack_machine(program, value):
    assert stack_machine.run(program, {"a": 5, "b": 8}) == value


def test_expressions_are_read_strictly_from_left_to_right():
    assert evaluate("a+3*b-2", {"a": 5, "b": 8}) == (5 + 3) * 8 - 2
    assert evaluate("7", {}) == 7


def test_a_program_is_read_from_fence_then_box_then_text():
    assert read_program("\\boxed{1}\n```\nab+\n```") == "ab+\n"
    assert read_program("so \\boxed{ab+}") == "ab+"
    assert read_program("ab+") == "ab+"


def test_arithmetic_never_carries_and_is_graded_by_value():
    task = TASKS.get("arithmetic")(difficulty=4, spread=3)
    for index in range(100):
        problem = task.problem("held_out", index)
        width = len(problem.short) // 2
        left, right = problem.short[:width], problem.short[width + 1 :]
        digits = [
            int(x) + int(y) if problem.short[width] == "+" else int(x) - int(y)
            for x, y in zip(left, right, strict=True)
        ]
        written = "".join(map(str, digits))
        assert all(0 <= digit <= 9 for digit in digits)
        assert written == problem.reference
        assert task.grade(problem, f"{left} and {right} give {written}.")
        assert task.grade(problem, f"\\boxed{{0{written}}}")
        assert not task.grade(problem, f"-{written}")
        assert not task.grade(problem, f"{written}1")
