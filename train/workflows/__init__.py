"""Workflows: how several roles answer one problem together."""

from gradscope.registry import Registry

WORKFLOWS = Registry(
    "workflow",
    {
        "single": "gradscope.train.workflows.single:Single",
        "voting": "gradscope.train.workflows.voting:Voting",
        "eval_opt": "gradscope.train.workflows.eval_opt:EvalOpt",
        "orch_workers": "gradscope.train.workflows.orch_workers:OrchWorkers",
    },
)
