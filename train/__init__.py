"""Trains multi-agent workflows with GRPO and records what each role's gradient does.

    from gradscope import train
    config = train.load_config("voting-shared-stack_code", ["train.steps=30"])
    result = train.run(config, out="runs/voting-sp")

Names are imported when first used, so that configurations can be read without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradscope.train import grading, grpo
    from gradscope.train.config import Config, load_config
    from gradscope.train.evaluate import Evaluation, evaluate_run
    from gradscope.train.loop import run
    from gradscope.train.report import RunResult, StepReport

__all__ = [
    "Config",
    "Evaluation",
    "RunResult",
    "StepReport",
    "evaluate_run",
    "grading",
    "grpo",
    "load_config",
    "run",
]

_MODULES = {
    "Config": "config",
    "Evaluation": "evaluate",
    "RunResult": "report",
    "StepReport": "report",
    "evaluate_run": "evaluate",
    "load_config": "config",
    "run": "loop",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"gradscope.train.{_MODULES[name]}"), name)
    if name in __all__:
        return import_module(f"gradscope.train.{name}")
    raise AttributeError(f"module 'gradscope.train' has no attribute '{name}'")
