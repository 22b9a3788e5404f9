"""In every workflow under every policy, what the probes record equals one separate backward for each slot."""

import numpy as np
import pytest
import torch

from gradscope.train.batch import split_rows
from gradscope.train.grpo import token_weights
from gradscope.train.rewards import make_samples
from gradscope.train.rollout import Stream
from gradscope.train.session import Session

MODE = "sequence_mean_token_mean"


def separate_gradient(session, policy, samples, weights):
    """Returns the gradient of some rows' loss by one unpadded forward pass a row and plain autograd."""
    parameters = list(session.policies.parameters(policy).values())
    loss = 0.0 * sum(parameter.sum() for parameter in parameters)
    for sample, weight in zip(samples, weights, strict=True):
        ids = torch.tensor([[*sample.row.prompt_ids, *sample.row.completion_ids]])
        logits = session.policies.network(input_ids=ids).logits[0, len(sample.row.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / session.config.rollout.temperature, -1)
        chosen = logprobs.gather(-1, torch.tensor(sample.row.completion_ids)[:, None])
        # The trainer hands weights and advantages to the device as float32.
        loss = loss - float(np.float32(weight)) * float(np.float32(sample.advantage)) * chosen.sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def record_of(session, policy, samples, weights):
    """Returns what the trainer's passes, several of them, make the probes record."""
    session.policies.activate(policy)
    for places in split_rows(samples, list(session.workflow.slots), max_tokens=600):
        rows = [samples[i] for i in places]
        session.updater._accumulate(rows, [weights[i] for i in places], on_policy=True)
    record = session.probe.step(session.policies.optimizers[policy])
    session.policies.network.zero_grad(set_to_none=True)
    return record


@pytest.mark.parametrize("routing", ["shared", "isolated"])
@pytest.mark.parametrize("workflow", ["single", "voting", "eval_opt", "orch_workers"])
def test_the_gram_equals_separate_backwards(small, workflow, routing):
    session = Session(small(f"{workflow}-{routing}-stack_code", "rollout.num_problems=4"))
    session.policies.network.double()
    generator = torch.Generator().manual_seed(0)
    for policy in session.policies.names:
        for parameter in session.policies.parameters(policy).values():
            parameter.data.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    episodes = session.play(session.problems(1), group_size=6, stream=Stream(0, "train", 1))
    samples = make_samples(episodes, session.config.algorithm)
    mine = {p: [s for s in samples if session.routing[s.row.slot] == p] for p in session.policies.names}
    weights = {p: token_weights([len(s.row.completion_ids) for s in rows], MODE) for p, rows in mine.items()}
    records = {p: record_of(session, p, rows, weights[p].tolist()) for p, rows in mine.items()}
    session.close()
    slots = np.array(list(session.workflow.slots))
    for policy, rows in mine.items():
        session.policies.activate(policy)
        present = np.isin(slots, [s.row.slot for s in rows])
        gradients = []
        for slot in slots[present]:
            chosen = [i for i, s in enumerate(rows) if s.row.slot == slot]
            parts = ([rows[i] for i in chosen], weights[policy][chosen])
            gradients.append(separate_gradient(session, policy, *parts))
        expected = (torch.stack(gradients) @ torch.stack(gradients).T).numpy()
        norms = np.sqrt(np.diag(expected))
        assert (norms > 0).all()
        gap = np.abs(records[policy].gram[np.ix_(present, present)] - expected) / np.outer(norms, norms)
        assert gap.max() < 1e-12
        assert np.isnan(records[policy].gram[~present]).all()
