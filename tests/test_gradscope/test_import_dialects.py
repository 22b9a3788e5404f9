"""What the keys of each framework become: roles, policies, metrics; what nobody knows is kept by its name."""

import json

import numpy as np
import pytest

import gradscope
from gradscope import derive
from gradscope.importers.dialects import DIALECTS
from gradscope.importers.importing import import_run

NUM = 25


def imported(tmp_path, values, **choices):
    """Imports `NUM` steps with those values (numbers, or functions of the step)."""
    file = tmp_path / "log.jsonl"
    with file.open("w") as out:
        for step in range(1, NUM + 1):
            row = {key: value(step) if callable(value) else value for key, value in values.items()}
            out.write(json.dumps({"step": step, "data": row}) + "\n")
    made = import_run(file, tmp_path / "run.h5", **choices)
    return made, gradscope.open_run(tmp_path / "run.h5")


def slot_policies(run):
    return dict(zip(run["slot"].values.tolist(), run["slot_policy"].values.tolist(), strict=True))


def norms_of(run, policy):
    updates = run["updates"].to_dataset()
    return updates["grad_norm"].values[updates["policy"].values == policy]


def test_dr_mas_norms_are_diagonals_of_separate_policies(tmp_path):
    made, run = imported(
        tmp_path,
        {
            "actor/solver/grad_norm": lambda step: 1.0 + step,
            "actor/verifier/grad_norm": 3.0,
            "actor/solver/lr": 1e-6,
            "actor/solver/pg_loss": 0.1,
            "critic/solver/score/mean": 0.5,
            "critic/verifier/score/mean": 0.4,
            "critic/solver/score/max": 1.0,
        },
    )
    assert (made.dialect, made.roles) == ("dr_mas", ("solver", "verifier"))
    assert slot_policies(run) == {"solver": "solver", "verifier": "verifier"}
    np.testing.assert_array_equal(norms_of(run, "solver"), 1.0 + np.arange(1, NUM + 1))
    role_norms = derive.role_norms(run, "solver")
    np.testing.assert_array_equal(role_norms.sel(role="solver"), 1.0 + np.arange(1, NUM + 1))
    cells = run["updates"]["gram"].values
    assert np.isnan(cells[:, 0, 1]).all()  # angles between separate policies are not known, not 0
    assert run["train"]["reward_mean"].sel(slot="verifier").values.tolist() == [0.4] * NUM
    assert set(made.unknown) == {"actor/solver/pg_loss", "critic/solver/score/max"}
    assert any("mean over a step's mini-batches" in note for note in made.notes)
    diagnosis = gradscope.diagnose(run)
    assert "no policy is shared" in diagnosis.skipped["capture"]
    assert any("angles between gradients" in limit for limit in diagnosis.limits)


def test_the_reference_study(tmp_path):
    names = ("grad_norm", "training_ppl", "chi2_token", "kl", "pg_clipfrac", "ppl_ratio")
    values = {f"actor/{role}/{name}": 1.0 for role in ("generator", "aggregator") for name in names}
    made, run = imported(
        tmp_path, {**values, "batch/success": 0.3, "val/unknown/pass@1": 0.25}, num_total=1412
    )
    assert (made.dialect, made.roles) == ("study", ("generator", "aggregator"))
    assert run["train"]["perplexity"].sel(slot="aggregator").values.tolist() == [1.0] * NUM
    assert run["train"]["episode_reward_mean"].values.tolist() == [0.3] * NUM
    assert run["eval"]["num_correct"].values.tolist() == [353] * NUM
    assert "actor/generator/ppl_ratio" in made.unknown


def test_rllm_rewards_by_role_and_one_norm_for_all(tmp_path):
    made, run = imported(
        tmp_path,
        {
            "reward/planner/mean": 0.5,
            "reward/planner/std": 0.1,
            "reward/coder/mean": 0.6,
            "advantage/coder/fraction_zero": 0.75,
            "actor/grad_norm": 2.0,
            "response_length/mean": 44.0,
        },
    )
    assert (made.dialect, made.roles) == ("rllm", ("planner", "coder"))
    assert set(slot_policies(run).values()) == {"policy"}
    assert run["updates"]["grad_norm"].values.tolist() == [2.0] * NUM
    assert "gram" not in run["updates"] or run["updates"]["gram"].isnull().all()
    assert run["train"]["zero_advantage_fraction"].sel(slot="coder").values.tolist() == [0.75] * NUM
    assert run["user"]["response_length.mean"].values.tolist() == [44.0] * NUM  # whose, the log does not say
    assert any("it is of the roles' sum" in limit for limit in made.limits)
    assert any("does not say which policy" in note for note in made.notes)
    assert "/updates/gram" in gradscope.diagnose(run).skipped["capture"]


def test_pettingllms_agents_on_named_models(tmp_path):
    made, run = imported(
        tmp_path,
        {
            "base/actor/grad_norm": 2.0,
            "base/reward_by_agent/coder/mean": 0.5,
            "base/reward_by_agent/tester/mean": 0.6,
            "base/reward_by_agent/tester/count": 8,
            "small/actor/grad_norm": 4.0,
            "small/reward_by_agent/judge/mean": 0.7,
        },
    )
    assert made.dialect == "pettingllms"
    assert slot_policies(run) == {"coder": "base", "tester": "base", "judge": "small"}
    assert norms_of(run, "base").tolist() == [2.0] * NUM
    judge = run["updates"]["gram"].sel(slot="judge", slot_b="judge").values
    assert np.nanmax(judge) == 16.0  # alone on its model
    assert run["updates"]["gram"].sel(slot="coder").isnull().all()  # two on one model: nobody knows


@pytest.mark.parametrize(
    ("dialect", "prefix", "roles"),
    [("openrlhf", "train", ("policy",)), ("marti", "train/agent0", ("agent0",))],
)
def test_openrlhf_and_marti(tmp_path, dialect, prefix, roles):
    made, run = imported(
        tmp_path,
        {
            f"{prefix}/actor_grad_norm": 2.0,
            f"{prefix}/policy_loss": 0.1,
            f"{prefix}/ppo_kl": 0.01,
            f"{prefix}/rollout/reward_mean": 0.5,
            f"{prefix}/response_length": 30.0,
            "eval/accuracy": 0.4,
        },
    )
    assert (made.dialect, made.roles) == (dialect, roles)
    assert run["updates"]["gram"].values.ravel().tolist() == [4.0] * NUM
    assert run["train"]["reward_mean"].values.ravel().tolist() == [0.5] * NUM
    assert run["train"]["kl_old"].values.ravel().tolist() == [0.01] * NUM
    assert any("last of a step's updates" in note for note in made.notes)


@pytest.mark.parametrize("key", ["train/grad_norm", "optim/grad_norm", "grad_norm"])
def test_plain_spellings(tmp_path, key):
    _, run = imported(tmp_path, {key: 3.0, "something/else": 1.0})
    assert run["updates"]["grad_norm"].values.tolist() == [3.0] * NUM


def test_a_role_pattern_finds_roles_where_no_dialect_does(tmp_path):
    values = {"agents/left/actor/grad_norm": 1.0, "agents/right/actor/grad_norm": 2.0}
    made, run = imported(tmp_path, values, dialect="verl", role_pattern="agents/(?P<role>[^/]+)/")
    assert made.roles == ("left", "right")
    assert norms_of(run, "right").tolist() == [2.0] * NUM


def test_the_dialects_do_not_take_each_others_logs():
    """Each dialect reads its own keys, and the choice falls on it."""
    from gradscope.importers.reading import _dialect_of

    own = {
        "verl": ["actor/grad_norm", "critic/score/mean", "response_length/mean"],
        "trl": ["grad_norm", "reward", "completions/mean_length"],
        "dr_mas": ["actor/x/grad_norm", "critic/x/score/mean"],
        "study": ["actor/x/grad_norm", "actor/x/training_ppl", "batch/success"],
        "rllm": ["reward/x/mean", "reward/x/std", "actor/grad_norm"],
        "pettingllms": ["m/actor/grad_norm", "m/reward_by_agent/x/mean"],
        "openrlhf": ["train/actor_grad_norm", "train/rollout/reward_mean"],
        "marti": ["train/x/actor_grad_norm", "train/x/reward"],
        "own": ["train/loss", "train/generator/0/reward_mean", "updates/p/grad_norm"],
    }
    assert set(own) <= set(DIALECTS.names())
    for name, keys in own.items():
        assert _dialect_of(keys, "here", None) == name


MAPPING = """
step: iteration
metrics:
  loss: objective
  reward_mean: {writer: r_w, judge: r_j}
  grad_norm: {writer: g_w, judge: g_j}
evaluation: {dataset: exam, num_correct: right, num_total: 50}
policies: {writer: p, judge: q}
"""


def test_a_mapping_file(tmp_path):
    lines = ["iteration,objective,r_w,r_j,g_w,g_j,right,other"]
    lines += [f"{step},{step / 2},0.5,0.25,1.5,{step},{step if step % 2 else ''},7" for step in range(1, 13)]
    (tmp_path / "log.csv").write_text("\n".join([*lines, ""]))
    (tmp_path / "map.yaml").write_text(MAPPING)
    made = import_run(tmp_path / "log.csv", tmp_path / "run.h5", mapping=tmp_path / "map.yaml")
    run = gradscope.open_run(tmp_path / "run.h5")
    assert (made.format, made.dialect, made.unknown) == ("csv", "map.yaml", ("other",))
    assert slot_policies(run) == {"writer": "p", "judge": "q"}
    assert run["train"]["loss"].values.tolist() == [step / 2 for step in range(1, 13)]
    assert norms_of(run, "q").tolist() == list(range(1, 13))
    assert run["eval"]["num_correct"].values.tolist() == [1, 3, 5, 7, 9, 11]
    assert run["eval"]["num_total"].values.tolist() == [50] * 6
    assert run["eval"]["dataset"].values.tolist() == ["exam"] * 6


def test_several_policies_of_one_norm_each_are_shared_where_the_mapping_says_so(tmp_path):
    (tmp_path / "map.yaml").write_text(
        "metrics: {reward_mean: {a: ra, b: rb}, grad_norm: g}\npolicies: {a: one, b: one}\n"
    )
    (tmp_path / "log.csv").write_text("step,ra,rb,g\n1,0.1,0.2,3\n2,0.1,0.2,4\n")
    import_run(tmp_path / "log.csv", tmp_path / "run.h5", mapping=tmp_path / "map.yaml")
    run = gradscope.open_run(tmp_path / "run.h5")
    assert slot_policies(run) == {"a": "one", "b": "one"}
    assert norms_of(run, "one").tolist() == [3, 4]
