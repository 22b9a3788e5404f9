"""find_capture: planted captures with role and onset, harmless look-alikes, and what must not matter."""

import numpy as np
import pytest

from gradscope import derive, find_capture, synthetic
from gradscope.errors import SchemaError

WORKFLOWS = (
    {"generator": 3, "aggregator": 1},
    {"orchestrator": 1, "worker": 3, "synthesizer": 1},
    {"generator": 3, "evaluator": 3},
)


def by_role(series, roles):
    """Role Gram, tokens and violations of a slot series."""
    membership = np.repeat(np.eye(len(roles)), list(roles.values()), axis=0)
    copies = membership.sum(axis=0)
    return (
        derive.role_gram(series.gram, membership),
        series.tokens @ membership / copies,
        series.violation @ membership / copies,
    )


def planted(kind="capture", seed=0, roles=WORKFLOWS[1], num_steps=200):
    series = synthetic.gradient_series(
        kind, roles=roles, num_steps=num_steps, generator=np.random.default_rng(seed)
    )
    return by_role(series, roles), series


def obvious(num_steps=100, onset=50):
    """Role 1 of 3 grows fivefold at the onset while role 0's replies shorten; no noise."""
    late = np.arange(num_steps) >= onset
    gram = np.tile(np.eye(3), (num_steps, 1, 1))
    gram[late, 1, 1] = 25.0
    tokens = np.full((num_steps, 3), 100.0)
    tokens[late, 0] = 50.0
    return gram, tokens, np.full((num_steps, 3), np.nan)


def test_an_obvious_capture_with_its_parts():
    capture = find_capture(*obvious(), step=10 * np.arange(100))
    assert (capture.verdict, capture.role, capture.index, capture.step) == ("capture", 1, 50, 500)
    share = (np.log(25 / 2) - np.log(1 / 2)) / 0.8
    gap = (5 / np.sqrt(27) - 1 / np.sqrt(27)) / 0.25
    assert capture.parts["share"] == pytest.approx(share, rel=1e-12)
    assert capture.parts["alignment"] == pytest.approx(gap, rel=1e-12)
    assert capture.parts["drift"] == pytest.approx(np.log(2) / 0.3, rel=1e-12)
    assert capture.score == pytest.approx(min(share, gap, np.log(2) / 0.3), rel=1e-12)
    assert capture.parts["drift_role"] == 0
    assert capture.parts["drift_from"] == "reply lengths only"


def test_without_drift_it_is_dominance():
    gram, tokens, violation = obvious()
    assert find_capture(gram, np.full_like(tokens, 100.0), violation).verdict == "dominance"


def test_drift_of_the_captor_alone_is_no_drift_of_another():
    gram, tokens, violation = obvious()
    assert find_capture(gram, tokens[:, [1, 0, 2]], violation).verdict == "dominance"


def test_format_violations_alone_show_drift():
    gram, tokens, violation = obvious()
    violation = np.zeros_like(tokens)
    violation[50:, 2] = 0.3
    capture = find_capture(gram, np.full_like(tokens, np.nan), violation)
    assert capture.verdict == "capture"
    assert capture.parts["drift_violation"] == pytest.approx(3.0)
    assert capture.parts["drift_from"] == "format violations only"


def test_without_any_record_of_replies_nothing_is_determined():
    gram, tokens, violation = obvious()
    capture = find_capture(gram, np.full_like(tokens, np.nan), violation)
    assert capture.verdict == "undetermined"
    assert np.isnan(capture.score)
    assert capture.parts["share"] > 1


def test_a_role_that_falls_silent_drifts_by_a_finite_amount():
    gram, tokens, violation = obvious()
    tokens[50:, 0] = 0.0
    assert np.isfinite(find_capture(gram, tokens, violation).score)


@pytest.mark.parametrize("num_steps", [0, 1, 19])
def test_a_short_run_is_undetermined(num_steps):
    capture = find_capture(*obvious(num_steps, onset=num_steps // 2))
    assert capture.verdict == "undetermined"
    assert np.isnan(capture.score)
    assert (capture.role, capture.index, capture.step) == (None, None, None)


@pytest.mark.parametrize(("num_valid", "verdict"), [(4, "undetermined"), (5, "capture")])
@pytest.mark.parametrize("window", [slice(0, 20), slice(80, 100)])
def test_a_window_needs_five_steps_with_signal(num_valid, verdict, window):
    gram, tokens, violation = obvious()
    gram[window][: 20 - num_valid] = np.nan
    assert find_capture(gram, tokens, violation).verdict == verdict


def test_steps_without_signal_change_nothing_else():
    gram, tokens, violation = obvious()
    holes = gram.copy()
    holes[::3] = np.nan
    holes[1::7] = 0.0
    capture = find_capture(holes, tokens, violation)
    assert (capture.verdict, capture.role) == ("capture", 1)
    assert abs(capture.index - 50) <= 2


def test_scale_of_gradients_does_not_matter():
    arguments, _ = planted()
    plain = find_capture(*arguments)
    for factor in (1e-12, 7.0, 1e9):
        scaled = find_capture(factor * arguments[0], *arguments[1:])
        assert scaled.score == pytest.approx(plain.score, rel=1e-9)
        assert (scaled.verdict, scaled.role, scaled.index) == (plain.verdict, plain.role, plain.index)


def test_order_of_roles_does_not_matter():
    (gram, tokens, violation), _ = planted(seed=3)
    plain = find_capture(gram, tokens, violation)
    order = [2, 0, 1]
    mixed = find_capture(gram[:, order][:, :, order], tokens[:, order], violation[:, order])
    assert mixed.score == pytest.approx(plain.score, rel=1e-9)
    assert order[mixed.role] == plain.role


def test_splitting_a_slot_does_not_matter():
    roles = WORKFLOWS[0]
    series = synthetic.gradient_series(
        "capture", roles=roles, num_steps=100, generator=np.random.default_rng(5)
    )
    parts = np.zeros((5, 4))
    parts[[0, 1, 2, 3], [0, 1, 2, 3]] = 1.0
    parts[0, 0], parts[4, 0] = 0.3, 0.7  # the first slot's gradient in two pieces
    split = parts @ series.gram @ parts.T
    whole = derive.role_gram(series.gram, np.array([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=float))
    pieces = derive.role_gram(split, np.array([[1, 0], [1, 0], [1, 0], [0, 1], [1, 0]], dtype=float))
    np.testing.assert_allclose(pieces, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, t, v: (g[0], t, v), r"role_gram has shape \(3, 3\)"),
        (lambda g, t, v: (g[:, :1, :1], t[:, :1], v[:, :1]), "at least 2 gradients"),
        (lambda g, t, v: (-g, t, v), r"role_gram\[0, 0, 0\] is a negative"),
        (lambda g, t, v: (g, t[:5], v), r"role_tokens has shape \(5, 3\)"),
        (lambda g, t, v: (g, -t, v), r"role_tokens\[0, 0\] = -100"),
        (lambda g, t, v: (g, t, t), r"role_violation\[0, 0\] = 100 is not between 0 and 1"),
    ],
)
def test_impossible_input_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        find_capture(*change(*obvious()))


def asymmetric(gram):
    gram[7, 0, 1] = 0.5
    return gram


def impossible(gram):
    gram[7, 0, 1] = gram[7, 1, 0] = 1.00001
    return gram


def infinite(gram):
    gram[7, 1, 1] = np.inf
    return gram


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (asymmetric, r"role_gram\[7, 0, 1\] is a product that differs from its mirror image"),
        (impossible, r"role_gram\[7, 0, 1\] is a product larger than the two norms allow"),
        (infinite, r"role_gram\[7, 1, 1\] is an infinite product"),
        (lambda gram: gram + 0j, "role_gram must be an array of real numbers"),
    ],
)
def test_matrices_that_are_no_products_of_real_vectors_are_refused(change, message):
    gram, tokens, violation = obvious()
    with pytest.raises(SchemaError, match=message):
        find_capture(change(gram), tokens, violation)


@pytest.mark.parametrize("step", [np.arange(99), np.zeros(100), np.arange(100)[::-1]])
def test_impossible_steps_are_refused(step):
    with pytest.raises(ValueError, match="step"):
        find_capture(*obvious(), step=step)


def check_rates(num_runs, seed):
    generator = np.random.default_rng(seed)
    verdicts = {kind: [] for kind in ("capture", *synthetic.HARMLESS)}
    right_role, late = [], []
    for run in range(num_runs):
        roles = WORKFLOWS[run % 3]
        for kind, seen in verdicts.items():
            num_steps = int(generator.choice([60, 100, 200, 400]))
            series = synthetic.gradient_series(kind, roles=roles, num_steps=num_steps, generator=generator)
            capture = find_capture(*by_role(series, roles))
            seen.append(capture.verdict == "capture")
            if kind == "capture" and seen[-1]:
                right_role.append(list(roles)[capture.role] == series.role)
                late.append(abs(capture.index - series.onset) / num_steps)
    shares = {kind: float(np.mean(seen)) for kind, seen in verdicts.items()}
    false = float(np.mean([share for kind, share in shares.items() if kind != "capture"]))
    print({kind: round(share, 3) for kind, share in shares.items()})
    print(
        f"false {false:.4f}, right role {np.mean(right_role):.3f}, onset error {np.median(late):.3f} of the "
        "run"
    )
    assert shares["capture"] > 0.88 - 3 * np.sqrt(0.88 * 0.12 / num_runs)
    assert false < 0.012 + 3 * np.sqrt(0.012 / (10 * num_runs))
    assert np.mean(right_role) > 0.97
    assert np.median(late) < 0.04


def test_rates_of_finding_and_of_false_alarm():
    check_rates(50, seed=1)


@pytest.mark.slow
def test_rates_of_finding_and_of_false_alarm_on_many_runs():
    check_rates(500, seed=2)
