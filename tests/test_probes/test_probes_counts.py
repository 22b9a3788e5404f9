"""Counts of an update: rows are rows also when packed, and a missing advantage is no signal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradscope import probes
from gradscope.probes.counts import slot_counts
from gradscope.probes.rows import RowBatch

TAGS = ["solver/0"] * 5 + ["judge/0"] * 3 + ["solver/0"] * 2
IDS = ["a", "a", "b", "b", "b", "c", "c", "c", "d", "d"]
"""Four packed rows of ten tokens: a and b of the solver, c of the judge, d of the solver."""


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2)).double()


def packed_input():
    return torch.randn(1, len(TAGS), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def test_rows_of_packed_tokens_are_counted_although_a_micro_batch_has_no_backward(toy, linear):
    """Its loss is zero, so the loop spares it the backward; it had a forward pass."""
    with probes.attach(linear, toy.slots) as scope:
        with scope.rows(TAGS, row_ids=IDS):
            linear(packed_input())
        with scope.rows(TAGS, row_ids=IDS):
            loss = linear(packed_input()).sum()
        loss.backward()
        counts = scope.step(toy.sgd(linear)).counts
    assert counts["num_rows"].tolist() == [6, 2]


def test_a_forward_without_gradients_shows_that_rows_are_packed(toy, linear):
    with probes.attach(linear, toy.slots) as scope:
        with scope.rows(TAGS), torch.no_grad():
            linear(packed_input())
        counts = scope.step(toy.sgd(linear)).counts
    assert counts["num_rows"].tolist() == [2, 1]  # stretches of one slot: ids were not given


def test_an_empty_block_is_packed_where_row_ids_repeat(toy, linear):
    with probes.attach(linear, toy.slots) as scope:
        with scope.rows(TAGS, row_ids=IDS, tokens=[1.0] * 10, advantages=[0.0] * 10):
            pass
        counts = scope.step(toy.sgd(linear)).counts
    assert counts["num_rows"].tolist() == [3, 1]
    assert counts["num_tokens"].tolist() == [7, 3]
    assert counts["num_signal_rows"].tolist() == [0, 0]


def test_an_empty_block_is_packed_where_the_loop_says_so(toy, linear):
    with probes.attach(linear, toy.slots) as scope:
        with scope.rows(TAGS, packed=True):
            pass
        packed = scope.step(toy.sgd(linear)).counts
        with scope.rows(TAGS, row_ids=IDS, packed=False):
            pass
        unpacked = scope.step(toy.sgd(linear)).counts
    assert packed["num_rows"].tolist() == [2, 1]
    assert unpacked["num_rows"].tolist() == [7, 3]


def test_what_the_forward_pass_shows_goes_before_what_was_said(toy, linear):
    with probes.attach(linear, toy.slots) as scope:
        with (
            pytest.warns(UserWarning, match="same row id"),
            scope.rows(["solver/0", "solver/0", "judge/0"], row_ids=["same"] * 3, packed=True),
        ):
            loss = linear(packed_input()[0, :3]).sum()
        loss.backward()
        counts = scope.step(toy.sgd(linear)).counts
    assert counts["num_rows"].tolist() == [2, 1]


def test_a_missing_advantage_is_no_signal():
    advantages = np.array([math.nan, 0.5, -2.0, 0.0, math.nan])
    batch = RowBatch((0, 0, 0, 1, 1), ("a", "b"), numbers={"advantages": advantages})
    counts = slot_counts([batch], (0, 1), 2)
    assert counts["num_rows"].tolist() == [3, 2]
    assert counts["num_signal_rows"].tolist() == [2, 0]
    assert counts["advantage_abs_sum"].tolist() == [2.5, 0.0]


def test_a_packed_row_has_the_largest_advantage_that_is_known():
    advantages = np.array([math.nan, -1.5, math.nan, math.nan])
    batch = RowBatch((0, 0, 1, 1), ("a", "b"), numbers={"advantages": advantages}, packed=True)
    counts = slot_counts([batch], (0, 1), 2)
    np.testing.assert_array_equal(counts["num_signal_rows"], [1, math.nan])  # none of b's is known
    np.testing.assert_array_equal(counts["advantage_abs_sum"], [1.5, math.nan])
