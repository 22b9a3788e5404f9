"""Tasks: where problems come from and what makes an answer right."""

from gradscope.registry import Registry

TASKS = Registry(
    "task",
    {
        "stack_code": "gradscope.train.tasks.stack_code:StackCode",
        "arithmetic": "gradscope.train.tasks.arithmetic:Arithmetic",
        "math_jsonl": "gradscope.train.tasks.math_jsonl:MathJsonl",
    },
)
