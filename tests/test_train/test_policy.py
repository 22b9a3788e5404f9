"""Adapters: where they start, that they are apart, and that the base stays frozen."""

import shutil

import pytest
import torch

from gradscope.errors import ConfigError
from gradscope.train import load_config
from gradscope.train.session import Session
from gradscope.train.sources import TINY

CELL = "voting-isolated-stack_code"


def make(*overrides, cell=CELL):
    return Session(load_config(cell, ["probes.enabled=false", *overrides]))


def tensors(session, name):
    return {key: value.detach().clone() for key, value in session.policies.parameters(name).items()}


def test_adapters_start_without_effect_and_from_the_seed_alone():
    first, again, other = make(), make(), make("train.seed=1")
    for name in first.policies.names:
        mine, same, different = (tensors(session, name) for session in (first, again, other))
        assert len(mine) == 28
        for key, value in mine.items():
            assert torch.equal(value, same[key])
            if "lora_B" in key:
                assert not value.any()
            else:
                assert not torch.equal(value, different[key])
                assert value.abs().max() <= value.shape[1] ** -0.5
    generator, aggregator = (tensors(first, name) for name in first.policies.names)
    pairs = zip(generator.values(), aggregator.values(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_one_policy_starts_the_same_under_every_routing():
    shared, isolated = (make(cell=f"single-{routing}-stack_code") for routing in ("shared", "isolated"))
    pairs = zip(tensors(shared, "shared").values(), tensors(isolated, "generator").values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_only_the_active_policy_gets_gradients_and_the_base_none():
    session = make()
    policies = session.policies
    policies.activate("aggregator")
    ids = torch.tensor([[3, 10, 11, 12]])
    policies.network(input_ids=ids).logits.sum().backward()
    touched = {name for name, p in policies.network.named_parameters() if p.grad is not None}
    assert touched == set(policies.parameters("aggregator"))
    trained = {id(p) for o in policies.optimizers.values() for g in o.param_groups for p in g["params"]}
    assert trained == {id(p) for name in policies.names for p in policies.parameters(name).values()}


@pytest.mark.parametrize("name", ["layers", "model", "q_proj", "weight", "lora_A"])
def test_a_policy_may_be_called_like_a_part_of_the_model(name):
    policies = make(f"policy.routing={{generator: {name}, aggregator: other}}").policies
    trained = {}
    for policy in policies.names:
        policies.activate(policy)
        trained[policy] = {key for key, p in policies.network.named_parameters() if p.requires_grad}
        held = {id(p) for group in policies.optimizers[policy].param_groups for p in group["params"]}
        assert held == {id(p) for p in policies.network.parameters() if p.requires_grad}
        assert set(policies.parameters(policy)) == trained[policy]
        assert len(trained[policy]) == 28
    assert not trained[name] & trained["other"]


def test_training_one_role_leaves_the_other_bit_identical():
    session = make("rollout.num_problems=3", "rollout.group_size=4")
    before = {name: tensors(session, name) for name in session.policies.names}
    result = session.train_step(1)
    samples = [s for s in result.samples if s.row.role == "aggregator"]
    after_step = {name: tensors(session, name) for name in session.policies.names}
    assert any(s.advantage for s in samples)
    session.updater.update("aggregator", samples, minibatch=0, learning_rate=1e-3)
    for key, value in tensors(session, "generator").items():
        assert torch.equal(value, after_step["generator"][key])
    changed = [
        key
        for key, value in tensors(session, "aggregator").items()
        if not torch.equal(value, after_step["aggregator"][key])
    ]
    assert len(changed) == 28
    assert any(
        not torch.equal(before["generator"][k], after_step["generator"][k]) for k in before["generator"]
    )


def test_a_map_routes_roles_and_slots():
    session = make("policy.routing={generator: left, generator/2: right, aggregator: right}")
    assert session.policies.names == ("left", "right")
    assert session.policies.slots_of("right") == ("generator/2", "aggregator/0")


def test_modules_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match=r"policy.target_modules=\('nonsense',\) does not fit"):
        make("policy.target_modules=[nonsense]")


@pytest.mark.parametrize("modules", ["[embed_tokens]", "[q_proj, embed_tokens]"])
def test_an_adapter_on_an_embedding_is_refused(modules):
    message = r"target_modules=.* an adapter on 'model\.embed_tokens', which is no linear layer"
    with pytest.raises(ConfigError, match=message) as caught:
        make(f"policy.target_modules={modules}")
    assert "\n" not in str(caught.value)


def test_the_random_numbers_of_the_caller_are_left_alone():
    state = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_context_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens"):
        make("rollout.max_prompt_tokens=100000")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("tinny", "Did you mean 'tiny'"),
        ("nobody/nothing", "neither in the local cache nor could it be fetched"),
    ],
)
def test_a_model_that_is_not_there_is_refused(path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make(f"model.path={path}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model.safetensors", "the folder cannot be read"),
        ("chat_template.jinja", "has no chat template"),
        ("config.json", "holds no config.json"),
    ],
)
def test_an_incomplete_model_folder_is_refused(tmp_path, missing, message):
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(ConfigError, match=message) as caught:
        make(f"model.path={tmp_path / 'model'}")
    assert "\n" not in str(caught.value)
