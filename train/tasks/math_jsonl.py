"""Math problems from a JSONL file with a question and a final answer a line (GSM8K, DAPO and the like)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random

from gradscope.errors import ConfigError, DataError
from gradscope.train.episode import Problem
from gradscope.train.grading import Verdict, compare_answers, extract_answer, last_box
from gradscope.train.tasks.splits import check_place, text_hash

_QUESTION_FIELDS = ("question", "problem", "prompt")
_ANSWER_FIELDS = ("final_answer", "answer", "solution")


class MathJsonl:
    """Math problems of a JSONL file, graded on the last box or else the last number.

    A question stands in `question`, `problem` or `prompt` (text, or chat messages whose last user message it
    is). Its answer stands in `final_answer`, `reward_model.ground_truth`, `answer` or `solution`: a number or
    bare text; of a worked solution, what follows `####` or stands in the last box. Repeated questions count
    once. Problems are held out by the hash of their question, whatever the seed.

    Args:
        path: The file.
        held_out_fraction: Share of the problems that is held out, above 0 and below 1; at least one is.
        seed: In which order the problems of a split come.

    Raises:
        ConfigError: The share is not between 0 and 1.
        DataError: The file is absent, empty or malformed; the message names the line and the field.
    """

    def __init__(self, *, path: str | Path, held_out_fraction: float = 0.1, seed: int = 0) -> None:
        if not 0 < held_out_fraction < 1:
            raise ConfigError(
                f"math_jsonl: held_out_fraction is {held_out_fraction!r}, allowed is above 0 and below 1."
            )
        problems = sorted(read_problems(Path(path)), key=lambda problem: text_hash(problem.question))
        if len(problems) < 2:
            raise DataError(
                f"{path}: 1 different problem, at least 2 are needed: one to train on, one held out."
            )
        num_held_out = min(max(1, round(held_out_fraction * len(problems))), len(problems) - 1)
        self._problems = {"held_out": problems[:num_held_out], "train": problems[num_held_out:]}
        for split, members in self._problems.items():
            Random(f"{seed}/{split}").shuffle(members)

    def problem(self, split: str, index: int) -> Problem:
        """Returns problem `index` of a split.

        Raises:
            ConfigError: The split has fewer problems.
        """
        check_place(split, index)
        problems = self._problems[split]
        if index >= len(problems):
            raise ConfigError(
                f"problem index {index} of split '{split}': allowed are 0 to {len(problems) - 1}."
            )
        return problems[index]

    def num_problems(self, split: str) -> int | None:
        """Returns how many different problems the split has."""
        check_place(split, 0)
        return len(self._problems[split])

    def grade(self, problem: Problem, text: str) -> bool:
        """Returns whether the last box, or else the last number, is the right answer; undecided is wrong."""
        answer = extract_answer(text)
        return answer is not None and compare_answers(answer, str(problem.reference)) is Verdict.EQUAL

    def in_format(self, text: str) -> bool:
        """Returns whether an answer can be read out of the reply."""
        return extract_answer(text) is not None


def read_problems(path: Path) -> list[Problem]:
    """Returns the problems of a JSONL file in its order, repeated questions once; blank lines are skipped.

    Raises:
        DataError: The file cannot be read, holds no problem, or a line lacks what is needed.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a JSONL file."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: cannot be read as UTF-8 text ({error}). Give the path of a JSONL file."
        ) from error
    problems: dict[str, Problem] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            question, answer = _read_line(line, f"{path}:{number}")
            problems.setdefault(question, _problem(question, answer))
    if not problems:
        raise DataError(
            f"{path}: no problems. Expected one JSON object a line with question and final_answer."
        )
    return list(problems.values())


def _problem(question: str, answer: str) -> Problem:
    return Problem(
        id=f"math_jsonl/{text_hash(question):016x}",
        question=question,
        short="",
        answer_format="Think step by step and put the final answer in \\boxed{}.",
        reference=answer,
    )


def _read_line(line: str, where: str) -> tuple[str, str]:
    """Returns the question and the bare answer of one line."""
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not a JSON object ({error}). Each line must be one JSON object."
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: found {type(record).__name__}, expected a JSON object with question and final_answer."
        )
    return _read_question(record, where), _read_answer(record, where)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no value of JSON; write a number or text")


def _read_question(record: Mapping[str, object], where: str) -> str:
    name = next((name for name in _QUESTION_FIELDS if name in record), None)
    if name is None:
        raise DataError(f"{where}: field 'question' is missing. Allowed: {', '.join(_QUESTION_FIELDS)}.")
    value = record[name]
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        value = turns[-1].get("content") if turns else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: field '{name}' holds no text. Expected text, or messages with a user turn."
        )
    return value.strip()


def _read_answer(record: Mapping[str, object], where: str) -> str:
    found = {name: record[name] for name in _ANSWER_FIELDS if record.get(name) is not None}
    reward_model = record.get("reward_model")
    if (
        "final_answer" not in found
        and isinstance(reward_model, dict)
        and reward_model.get("ground_truth") is not None
    ):
        found = {"reward_model.ground_truth": reward_model["ground_truth"]}
    if not found:
        raise DataError(
            f"{where}: field 'final_answer' is missing. Allowed: {', '.join(_ANSWER_FIELDS)} or reward_model."
        )
    name, value = next(iter(found.items()))
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise DataError(f"{where}: field '{name}' is {value!r:.60}, expected a number or text.")
    text = str(value)
    if "####" in text:
        text = text.rpartition("####")[2]
    box = last_box(text)
    return (text if box is None else box).strip().strip("$")
