"""Small configurations on the embedded model, for tests that train."""

import pytest

SMALL = [
    "rollout.num_problems=3",
    "rollout.group_size=4",
    "train.steps=4",
    "train.checkpoint_every=2",
    "evaluate.every=2",
    "evaluate.num_problems=8",
    "run.episodes_every=2",
]


@pytest.fixture(scope="session")
def small():
    """Returns a maker of configurations that train in a second: a cell and further overrides."""
    from gradscope.train import load_config

    def make(cell: str = "voting-isolated-stack_code", *overrides: str):
        return load_config(cell, [*SMALL, *overrides])

    return make
