"""Reading answers and programs out of replies, and comparing answers."""

from gradscope.train.grading.compare import Verdict, compare_answers
from gradscope.train.grading.extract import code_blocks, extract_answer, extract_code, last_box, visible_text

__all__ = [
    "Verdict",
    "code_blocks",
    "compare_answers",
    "extract_answer",
    "extract_code",
    "last_box",
    "visible_text",
]
