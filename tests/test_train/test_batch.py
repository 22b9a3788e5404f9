"""Padding, micro-batches and skipped rows change nothing: loss, gradient and every count stay."""

import math

import numpy as np
import pytest
import torch

from gradscope.train import load_config
from gradscope.train.batch import collate, completion_logprobs, split_rows
from gradscope.train.grpo import token_weights
from gradscope.train.rewards import make_samples, takes_part
from gradscope.train.session import Session

AGGREGATIONS = ["sequence_mean_token_mean", "token_mean", "fixed_length", "sequence_sum"]


@pytest.fixture(scope="module")
def made():
    """A session in float64 and the samples of one step."""
    session = Session(
        load_config("voting-shared-stack_code", ["rollout.num_problems=4", "rollout.group_size=4"])
    )
    result = session.train_step(1)  # so that B is not 0 and every parameter has a gradient
    session.policies.network.double()
    return session, result.samples, result.episodes


def reference_loss(session, samples, aggregation):
    """The loss row by row, without padding, as the definitions have it."""
    total, num_tokens = 0.0, sum(len(s.row.completion_ids) for s in samples)
    for s in samples:
        ids = torch.tensor([[*s.row.prompt_ids, *s.row.completion_ids]])
        logits = session.policies.network(input_ids=ids).logits[0, len(s.row.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / session.config.rollout.temperature, -1)
        chosen = logprobs.gather(-1, torch.tensor(s.row.completion_ids)[:, None]).squeeze(-1)
        losses = -(chosen - chosen.detach()).exp() * s.advantage
        total = (
            total
            + {
                "sequence_mean_token_mean": losses.mean() / len(samples),
                "token_mean": losses.sum() / num_tokens,
                "fixed_length": losses.sum() / len(samples) / session.config.rollout.max_new_tokens,
                "sequence_sum": losses.sum() / len(samples),
            }[aggregation]
        )
    return total


def gradient(session):
    parameters = session.policies.parameters("shared").values()
    found = torch.cat([p.grad.flatten() for p in parameters])
    for p in parameters:
        p.grad = None
    return found


@pytest.mark.parametrize(
    ("aggregation", "max_tokens"),
    [*((name, 300) for name in AGGREGATIONS), *((AGGREGATIONS[0], n) for n in (1, 10**6))],
)
def test_loss_and_gradient_equal_the_definition(made, aggregation, max_tokens):
    session, samples, _ = made
    expected = reference_loss(session, samples, aggregation)
    expected.backward()
    expected_gradient = gradient(session)
    fixed = session.config.rollout.max_new_tokens
    weights = token_weights([len(s.row.completion_ids) for s in samples], aggregation, fixed_length=fixed)
    loss = 0.0
    signal = [i for i, s in enumerate(samples) if s.advantage != 0]
    assert 0 < len(signal) < len(samples)
    for places in split_rows(
        [samples[i] for i in signal], list(session.workflow.slots), max_tokens=max_tokens
    ):
        mine = [signal[i] for i in places]
        part, _ = session.updater._accumulate(
            [samples[i] for i in mine], [float(weights[i]) for i in mine], on_policy=True
        )
        loss += part
    session.probe.step(session.policies.optimizers["shared"])
    # The weights and advantages of a pass are float32, and rows of opposite sign partly cancel.
    assert loss == pytest.approx(expected.item(), abs=1e-7)
    found = gradient(session)
    assert float((found - expected_gradient).norm() / expected_gradient.norm()) < 1e-6


def test_passes_hold_every_row_once_within_the_budget(made):
    session, samples, _ = made
    slots = list(session.workflow.slots)
    for max_tokens in (64, 300, 2000):
        batches = split_rows(samples, slots, max_tokens=max_tokens)
        assert sorted(i for batch in batches for i in batch) == list(range(len(samples)))
        for batch in batches:
            ids = collate([samples[i] for i in batch], [1.0] * len(batch), torch.device("cpu")).ids
            assert len(batch) == 1 or ids.numel() <= max_tokens
            places = [slots.index(samples[i].row.slot) for i in batch]
            assert places == sorted(places)


def test_layout_of_a_pass(made):
    _, samples, _ = made
    batch = collate(samples[:8], range(8), torch.device("cpu"))
    num_prompt = batch.ids.shape[1] - batch.completion_ids.shape[1]
    for b, s in enumerate(samples[:8]):
        kept = batch.mask[b].bool()
        assert batch.ids[b, kept].tolist() == [*s.row.prompt_ids, *s.row.completion_ids]
        assert batch.positions[b, kept].tolist() == list(range(int(kept.sum())))
        assert batch.completion_ids[b, : len(s.row.completion_ids)].tolist() == list(s.row.completion_ids)
        assert kept[num_prompt - 1]
        assert not kept[num_prompt + len(s.row.completion_ids) :].any()


def test_log_probabilities_ignore_padding(made):
    session, samples, _ = made
    whole = collate(samples, [1.0] * len(samples), torch.device("cpu"))
    with torch.no_grad():
        together = completion_logprobs(session.policies.network, whole, temperature=0.7)
        for b, s in enumerate(samples[:5]):
            alone = collate([s], [1.0], torch.device("cpu"))
            expected = completion_logprobs(session.policies.network, alone, temperature=0.7)[0]
            assert together[b, : len(expected)] == pytest.approx(expected, abs=1e-12)


def test_rewards_and_groups(made):
    session, _, episodes = made
    algorithm = session.config.algorithm
    by_slot = make_samples(episodes, algorithm)
    assert len({s.group for s in by_slot}) == 4 * 4
    assert {s.reward for s in by_slot} <= {0.0, 1.0}
    by_role = make_samples(episodes, algorithm.model_copy(update={"group_by": "role"}))
    assert len({s.group for s in by_role}) == 4 * 2
    own = make_samples(episodes, algorithm.model_copy(update={"reward": "own"}))
    assert [s.reward for s in own] == [s.row.own for s in own]
    for episode in episodes:
        mine = [s for s in by_slot if s.row.id.startswith(f"{episode.id}-")]
        assert {s.reward for s in mine} == {float(episode.correct)}


def test_a_missing_reward_takes_no_part():
    config = load_config("orch_workers-shared-stack_code", ["algorithm.reward=own", "rollout.num_problems=2"])
    session = Session(config)
    result = session.train_step(1)
    missing = [s for s in result.samples if not takes_part(s)]
    assert {s.row.role for s in missing} == {"orchestrator"}
    assert all(math.isnan(s.reward) for s in missing)
    (update,) = result.updates
    first = update.record.slots.index("orchestrator/0")
    assert update.record.counts["num_rows"][first] == 0
    assert np.nansum(update.record.counts["loss_weight"]) == pytest.approx(1, abs=1e-12)
