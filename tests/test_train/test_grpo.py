"""Advantages, token weights and the clipped surrogate, against values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from gradscope.train.grpo import clipped_surrogate, group_advantages, token_weights

R = math.sqrt(0.75)


def advantages(*rewards, groups=None, **options):
    return group_advantages(rewards, groups or [0] * len(rewards), **options)


@pytest.mark.parametrize(
    ("options", "expected", "tolerance"),
    [
        ({}, 0.5 / (math.sqrt(1 / 3) + 1e-6), 1e-15),
        ({"ddof": 0}, 0.5 / (0.5 + 1e-6), 1e-15),
        ({"eps": 1e-4}, 0.86588, 5e-6),
        ({"scale": "none"}, 0.5, 0.0),
    ],
)
def test_basic_group(options, expected, tolerance):
    found = advantages(1, 0, 1, 0, **options)
    assert found == pytest.approx([expected, -expected, expected, -expected], abs=tolerance)
    assert found.dtype == np.float64


def test_published_values_of_a_basic_group():
    assert advantages(1, 0, 1, 0) == pytest.approx([0.86602, -0.86602, 0.86602, -0.86602], abs=5e-6)
    one_right = advantages(1, *[0] * 7)
    assert one_right == pytest.approx([2.47487, *[-0.35355] * 7], abs=1e-5)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
def test_equal_rewards_are_exactly_zero(baseline, scale):
    for rewards in ([1.0] * 4, np.float32([0.35] * 8), [0.1 + 0.2] * 3):
        found = group_advantages(rewards, [7] * len(rewards), baseline=baseline, scale=scale)
        assert (found == 0.0).all()


def test_equal_rewards_compared_with_something_outside_the_group():
    assert (advantages(1, 1, baseline="none", scale="none") == 1).all()
    assert advantages(1, 1, baseline=[0.25, 0.5], scale="none") == pytest.approx([0.75, 0.5], abs=0)
    assert (advantages(1, 1, baseline="none", scale="std") == 0).all()


def test_singleton():
    assert advantages(1) == [0.0]
    assert advantages(1, singleton="raw") == pytest.approx([1 / (1 + 1e-6)], abs=1e-15)


def test_leave_one_out():
    found = advantages(1, 0, 0, 0, baseline="leave_one_out", scale="none")
    assert found == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], abs=1e-15)


def test_low_variance():
    rewards = [1, 1.00001, 1.00002, 1.00003]
    assert advantages(*rewards) == pytest.approx([-1.0784, -0.3595, 0.3595, 1.0784], abs=1e-4)
    assert advantages(*rewards, eps=1e-4)[:2] == pytest.approx([-0.1329, -0.0443], abs=1e-4)


def test_groups_per_agent_and_pooled():
    rewards = [1, 0, 0, 1, 1, 1, 0, 1]
    slots = ["g"] * 4 + ["a"] * 4
    found = group_advantages(rewards, slots)
    assert found == pytest.approx([R, -R, -R, R, 0.5, 0.5, -1.5, 0.5], abs=3e-6)
    pooled = group_advantages(rewards, [0] * 8)
    assert sorted(set(pooled.round(4))) == [-1.2076, 0.7246]
    votes = group_advantages([1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2])
    assert votes == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0, 0, 0, 0], abs=2e-6)
    by_role = group_advantages([1, 0, 1, 1, 0, 0], [0] * 6)
    assert np.abs(by_role) == pytest.approx([0.9129] * 6, abs=6e-5)


def test_turns_mixed_and_apart():
    assert advantages(1, 1, 0) == pytest.approx([0.5774, 0.5774, -1.1547], abs=6e-5)
    apart = group_advantages([1, 0, 1], [0, 0, 1], singleton="raw")
    assert apart == pytest.approx([0.7071, -0.7071, 0.999999], abs=1e-5)


def test_missing_rewards_are_left_out():
    found = advantages(1, math.nan, 0, 1, 0)
    assert math.isnan(found[1])
    assert found[[0, 2, 3, 4]] == pytest.approx(advantages(1, 0, 1, 0), abs=0)
    assert np.isnan(advantages(math.nan, math.nan)).all()
    assert advantages(1, math.nan)[0] == 0


def test_batch_deviation_is_over_all_groups():
    rewards = np.array([1.0, 0.0, 5.0, 9.0])
    found = group_advantages(rewards, [0, 0, 1, 1], scale="batch_std")
    assert found == pytest.approx(np.array([0.5, -0.5, -2, 2]) / (rewards.std(ddof=1) + 1e-6), abs=1e-15)


def test_order_of_rows_does_not_matter():
    generator = np.random.default_rng(0)
    rewards, groups = generator.random(40), generator.integers(6, size=40)
    order = generator.permutation(40)
    whole = group_advantages(rewards, groups)
    assert group_advantages(rewards[order], groups[order]) == pytest.approx(whole[order], abs=1e-13)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="both must be"):
        group_advantages([1.0, 0.0], [0])
    with pytest.raises(ValueError, match="the baseline has shape"):
        group_advantages([1.0, 0.0], [0, 0], baseline=[0.5])


LENGTHS = [2, 4, 0, 6]


def weighted_loss(losses, aggregation, **options):
    weights = token_weights([len(row) for row in losses], aggregation, **options)
    return sum(weight * sum(row) for weight, row in zip(weights, losses, strict=True))


def test_aggregation_modes_by_hand():
    losses = [[1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [], [6.0, 0, 0, 0, 0, 0]]
    assert weighted_loss(losses, "sequence_mean_token_mean") == pytest.approx((2 + 2 + 1) / 3)
    assert weighted_loss(losses, "token_mean") == pytest.approx((4 + 8 + 6) / 12)
    assert weighted_loss(losses, "sequence_sum") == pytest.approx((4 + 8 + 6) / 3)
    assert weighted_loss(losses, "fixed_length", fixed_length=10) == pytest.approx((4 + 8 + 6) / 30)


def test_rows_without_tokens_have_no_weight():
    for aggregation in ("sequence_mean_token_mean", "token_mean", "sequence_sum"):
        assert token_weights(LENGTHS, aggregation)[2] == 0
        assert (token_weights([0, 0], aggregation) == 0).all()
    with pytest.raises(ValueError, match="fixed_length needs a length"):
        token_weights(LENGTHS, "fixed_length")


def test_surrogate_on_policy_is_the_policy_gradient():
    logprobs = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    loss, clipped = clipped_surrogate(logprobs, logprobs.detach(), weights, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    assert torch.equal(logprobs.grad, -weights[:, None].expand(3, 5))
    assert not clipped.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (1.1, 1.0, -1.1, -1.1, False),
        (1.5, 1.0, -1.28, 0.0, True),
        (1.5, -1.0, 1.5, 1.5, False),
        (0.5, -1.0, 0.8, 0.0, True),
        (0.5, 1.0, -0.5, -0.5, False),
        (0.9, -1.0, 0.9, 0.9, False),
    ],
)
def test_clipping(ratio, advantage, loss, gradient, is_clipped):
    logprobs = torch.full((1, 1), math.log(ratio), dtype=torch.float64, requires_grad=True)
    found, clipped = clipped_surrogate(
        logprobs,
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
    )
    found.sum().backward()
    assert found.item() == pytest.approx(loss, abs=1e-15)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-15)
    assert clipped.item() is is_clipped
