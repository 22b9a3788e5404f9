"""Math problems from JSONL: the shapes that are written in the wild, and files that cannot be used."""

import json

import pytest

from gradscope.errors import ConfigError, DataError
from gradscope.train.tasks import TASKS

MathJsonl = TASKS.get("math_jsonl")


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"question": "Q", "final_answer": "16"}, "16"),
        ({"question": "Q", "final_answer": 16}, "16"),
        ({"question": "Q", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}, "1,004"),
        ({"problem": "Q", "solution": "We get $\\boxed{\\frac{1}{2}}$."}, "\\frac{1}{2}"),
        ({"problem": "Q", "answer": 204, "problem_idx": 1}, "204"),
        ({"prompt": "Q", "solution": "34", "reward_model": {"ground_truth": "34", "style": "rule"}}, "34"),
        (
            {
                "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
                "reward_model": {"ground_truth": "7"},
            },
            "7",
        ),
    ],
)
def test_records_of_several_shapes(tmp_path, record, answer):
    task = MathJsonl(path=write(tmp_path / "a.jsonl", [record, {"question": "other", "final_answer": "1"}]))
    problems = [task.problem(split, 0) for split in ("train", "held_out")]
    (problem,) = (problem for problem in problems if problem.question == "Q")
    assert problem.reference == answer
    assert problem.short == ""
    assert task.grade(problem, f"\\boxed{{{answer}}}")
    assert not task.grade(problem, "\\boxed{5}")
    assert not task.grade(problem, "I do not know")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.jsonl: no problems"),
        ("\n\n", "a.jsonl: no problems"),
        ('{"question": "Q", "final_answer": "1"}\n{"question": ', r"a.jsonl:2: not a JSON object"),
        ("[1]", r"a.jsonl:1: found list"),
        ('\n{"final_answer": "1"}', r"a.jsonl:2: field 'question' is missing"),
        ('{"question": "  ", "final_answer": "1"}', r"a.jsonl:1: field 'question' holds no text"),
        ('{"prompt": [{"role": "system"}], "answer": "1"}', r"a.jsonl:1: field 'prompt' holds no text"),
        ('{"question": "Q"}', r"a.jsonl:1: field 'final_answer' is missing"),
        ('{"question": "Q", "final_answer": null}', r"a.jsonl:1: field 'final_answer' is missing"),
        ('{"question": "Q", "final_answer": [1]}', r"a.jsonl:1: field 'final_answer' is \[1\]"),
        ('{"question": "Q", "final_answer": true}', r"a.jsonl:1: field 'final_answer' is True"),
        ('{"question": "Q", "final_answer": ""}', r"a.jsonl:1: field 'final_answer' is ''"),
        ('{"question": "Q", "final_answer": "1"}', "1 different problem, at least 2"),
    ],
)
def test_an_unusable_file_is_refused_with_line_and_field(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        MathJsonl(path=tmp_path / "a.jsonl")
    assert "\n" not in str(caught.value)


def test_an_absent_or_binary_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none.jsonl: cannot be read \(No such file"):
        MathJsonl(path=tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"b.jsonl: cannot be read as UTF-8"):
        MathJsonl(path=tmp_path / "b.jsonl")


@pytest.mark.parametrize("fraction", [0, 1, -0.5])
def test_a_bad_share_is_refused(tmp_path, fraction):
    with pytest.raises(ConfigError, match="held_out_fraction"):
        MathJsonl(path=tmp_path / "a.jsonl", held_out_fraction=fraction)


def test_splits_are_apart_whole_and_the_same_for_every_seed_and_order(tmp_path):
    records = [{"question": f"Q{k}", "final_answer": k} for k in range(40)]
    forwards = MathJsonl(path=write(tmp_path / "a.jsonl", records + records[:5]), held_out_fraction=0.25)
    backwards = MathJsonl(path=write(tmp_path / "b.jsonl", records[::-1]), held_out_fraction=0.25, seed=5)
    for task in (forwards, backwards):
        assert (task.num_problems("train"), task.num_problems("held_out")) == (30, 10)
    ids = {
        (name, split): [task.problem(split, k).id for k in range(task.num_problems(split))]
        for name, task in (("forwards", forwards), ("backwards", backwards))
        for split in ("train", "held_out")
    }
    assert len(set(ids["forwards", "train"]) | set(ids["forwards", "held_out"])) == 40
    for split in ("train", "held_out"):
        assert sorted(ids["forwards", split]) == sorted(ids["backwards", split])
        assert ids["forwards", split] != ids["backwards", split]
    with pytest.raises(ConfigError, match=r"problem index 30 of split 'train': allowed are 0 to 29"):
        forwards.problem("train", 30)


@pytest.mark.parametrize(
    ("name", "num_problems"),
    [("gsm8k/sample", 330), ("svamp/sample", 500), ("math500/sample", 219), ("aime24/test", 30)],
)
def test_real_files_load_and_their_own_answers_are_right(real_data, name, num_problems):
    task = MathJsonl(path=real_data / f"{name}.jsonl")
    assert task.num_problems("train") + task.num_problems("held_out") == num_problems
    for split in ("train", "held_out"):
        for index in range(task.num_problems(split)):
            problem = task.problem(split, index)
            assert task.grade(problem, f"So it is \\boxed{{{problem.reference}}}."), problem
