"""Libraries and losses that go past the layers or mix slots: named at attach, or found at the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gradscope import probes
from gradscope.errors import ProbeError


def mixture_of_experts(**settings):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=19, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, experts_implementation="eager", **settings,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).double()


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
@pytest.mark.parametrize("slots", [["generator/0", "aggregator/0"], ["generator/0"] * 2])
def test_a_router_loss_over_several_slots_is_refused(nano, coefficient, slots):
    model, batch = mixture_of_experts(output_router_logits=True), nano.batch(slots)
    model.model.layers[0].mlp.requires_grad_(False)
    scope = probes.attach(model, nano.slots)
    with scope.rows(batch.slots):
        output = model(input_ids=batch.ids, attention_mask=batch.attention)
        loss = output.logits.square().sum() + coefficient * output.aux_loss
    loss.backward()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    if coefficient and len(set(slots)) > 1:
        with pytest.raises(
            ProbeError, match=r"the router loss .* is part of a loss over rows of several slots"
        ):
            scope.step(optimizer)
    else:
        assert scope.step(optimizer).coverage == ()
        scope.detach()


def patched(layer, module, function="forward"):
    """Gives a layer a function as a library does that patches models: one that was defined in its modules."""

    def forward(*args, **kwargs):
        return type(layer).forward(layer, *args, **kwargs)

    forward.__module__ = module
    setattr(layer, function, forward)


def unsloth_attention(model):
    patched(model.model.layers[0].self_attn, "unsloth.kernels.fast_lora", "apply_qkv")


def unsloth_model(model):
    patched(model.model.layers[0].mlp, "unsloth_zoo.patching")


def liger_loss(model):
    patched(model, "liger_kernel.transformers.model.qwen3")


def megatron_layer(model):
    class ColumnParallelLinear(nn.Linear):
        pass

    model.model.layers[0].mlp.up_proj = ColumnParallelLinear(16, 24)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            unsloth_attention,
            r"'model\.layers\.0\.self_attn' .* runs apply_qkv\(\) of Unsloth.*without Unsloth",
        ),
        (unsloth_model, r"'model\.layers\.0\.mlp' .* runs forward\(\) of Unsloth"),
        (liger_loss, r"runs forward\(\) of Liger.*fused_linear_cross_entropy=False, or freeze lm_head"),
        (megatron_layer, r"up_proj' \(ColumnParallelLinear\) is a tensor-parallel layer of Megatron"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_libraries_that_go_past_the_layers_are_refused(nano, patch, message):
    model = nano.model(tie_word_embeddings=False)
    patch(model)
    with pytest.raises(ProbeError, match=message):
        probes.attach(model, nano.slots)


def test_a_fused_loss_over_a_frozen_head_is_measured(nano):
    model = nano.model(tie_word_embeddings=False)
    model.lm_head.requires_grad_(False)
    batch = nano.shuffled((1, 1, 1, 1))
    expected = nano.separate(model, [batch])
    patched(model, "liger_kernel.transformers.model.qwen3")
    nano.check(model, [batch], expected=expected)


def test_a_fused_loss_that_nothing_names_is_found_by_the_sum_check(nano):
    """It uses the weight of the head past its layer, which is tied to the embedding that a tap sees."""
    model, batch = nano.model(), nano.shuffled((1, 1, 1, 1))
    scope = probes.attach(model, nano.slots)
    with scope.rows(batch.slots):
        hidden = model.model(input_ids=batch.ids, attention_mask=batch.attention).last_hidden_state
        loss = nn.functional.linear(hidden, model.lm_head.weight).square().sum()
    loss.backward()
    with pytest.raises(
        ProbeError, match=r"most at 'model\.embed_tokens\.weight'.* a use of the weights that no"
    ):
        scope.step(torch.optim.SGD(model.parameters()))
