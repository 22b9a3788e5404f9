"""The reference study's fork of rLLM: actor/ROLE/... under isolated policies only."""

from __future__ import annotations

from gradscope.importers.dialect import Dialect, Trap
from gradscope.importers.dialects import verl

ROLE = "(?P<role>[^/]+)"
RULES = {
    f"actor/{ROLE}/grad_norm": "grad_norm",
    f"actor/{ROLE}/training_ppl": "perplexity",
    f"actor/{ROLE}/chi2_token": "chi2_token",
    f"actor/{ROLE}/kl": "kl_reference",
    f"actor/{ROLE}/pg_clipfrac": "clip_fraction",
    "batch/success": "episode_reward_mean",
    r"val/(?P<dataset>.+)/pass@(?P<repeats>1)": "eval_accuracy",
    **verl.RULES,
}


def dialect() -> Dialect:
    """Reference study (rLLM fork): actor/ROLE/{grad_norm,training_ppl,chi2_token}, batch/success."""
    shared = Trap(
        "actor/grad_norm", "Without actor/ROLE/... keys the policy was shared; the log then splits nothing."
    )
    return Dialect(
        rules=RULES,
        traps=(shared, *verl.TRAPS[:2]),
        limits=("per-role numbers under a shared policy: the study's code logs them for isolated ones only",),
    )
