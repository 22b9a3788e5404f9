"""Mistakes in a mapping file are told before anything is read wrongly."""

import pytest

import gradscope
from gradscope.errors import GradscopeError
from gradscope.importers.importing import import_run

LOG = "iteration,objective,r_w,r_j,g_w,g_j,right,share\n" + "".join(
    f"{step},{step / 2},0.5,0.25,3,4,{20 + step},25.4\n" for step in range(1, 6)
)

WRONG = {
    "no such column": (
        "metrics: {loss: objektive}",
        "metrics.loss names the column 'objektive'.*Did you mean 'obj",
    ),
    "no such norm": (
        "metrics: {grad_norm: {writer: g_w, judge: g_jj}}",
        r"metrics.grad_norm.judge names .*'g_jj'",
    ),
    "no such count": (
        "evaluation: {num_correct: rigth, num_total: 50}",
        "evaluation.num_correct names .*'rigth'",
    ),
    "no such role": (
        "metrics: {reward_mean: {writer: r_w}}\npolicies: {writr: a}",
        "'writr'.*Did you mean 'writer'",
    ),
    "roles of the loss": (
        "metrics: {loss: {writer: objective}}",
        "metrics.loss has roles, but is one number",
    ),
    "nobody's reward": (
        "metrics: {reward_mean: r_w, grad_norm: {a: g_w, b: g_j}}",
        "'r_w' is reward_mean, but of which",
    ),
    "nobody's norm": (
        "metrics: {reward_mean: {a: r_w, b: r_j}, grad_norm: g_w}\npolicies: {a: p, b: q}",
        "'g_w' is grad_norm, but of which of a, b",
    ),
    "twice": (
        "metrics: {loss: objective, reward_mean: objective}",
        "is both metrics.loss and metrics.reward_mean",
    ),
    "key twice": ("metrics: {loss: objective, loss: r_w}", "'loss' stands twice"),
    "norms of one policy": (
        "metrics: {grad_norm: {writer: g_w, judge: g_j}}\npolicies: {writer: p, judge: p}",
        "writer, judge have a gradient norm each but share the policy 'p'",
    ),
    "no count": (
        "evaluation: {num_correct: share, num_total: 50}",
        "25.4 right of 50 at step 1 are no whole",
    ),
    "no number": ("evaluation: {num_correct: right, num_total: 0.5}", "num_total is 0.5, expected a whole"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_refused(tmp_path, name):
    mapping, complaint = WRONG[name]
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "map.yaml").write_text(f"step: iteration\n{mapping}\n")
    with pytest.raises(GradscopeError, match=complaint):
        import_run(tmp_path / "log.csv", tmp_path / "run.h5", mapping=tmp_path / "map.yaml")
    assert not (tmp_path / "run.h5").exists()


def test_a_pattern_that_fits_nothing_is_told(tmp_path):
    (tmp_path / "log.csv").write_text(LOG)
    (tmp_path / "map.yaml").write_text(
        "step: iteration\nmetrics: {loss: objective}\npatterns: {'.*/kl': kl_old}\n"
    )
    made = import_run(tmp_path / "log.csv", tmp_path / "run.h5", mapping=tmp_path / "map.yaml")
    assert any("pattern(s) of map.yaml fit no key (.*/kl)" in note for note in made.notes)
    assert gradscope.open_run(tmp_path / "run.h5")["train"]["loss"].values.tolist() == [0.5, 1, 1.5, 2, 2.5]


def test_an_empty_column_is_there(tmp_path):
    (tmp_path / "log.csv").write_text("step,loss,kl\n1,2,\n2,3,\n")
    (tmp_path / "map.yaml").write_text("metrics: {loss: loss, kl_old: kl}\n")
    made = import_run(tmp_path / "log.csv", tmp_path / "run.h5", mapping=tmp_path / "map.yaml")
    assert made.num_steps == 2
