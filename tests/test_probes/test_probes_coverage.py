"""What is covered: kinds of layers and of adapters, against one separate backward for each slot."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from gradscope import probes

EXACT = 1e-12
UNEVEN = (3, 2, 4, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "lora_dropout": 0.0},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"rank_pattern": {"q_proj": 2, "down_proj": 7}, "alpha_pattern": {"q_proj": 3}},
        {"bias": "lora_only", "lora_bias": True, "target_modules": ["q_proj", "o_proj"]},
        {"modules_to_save": ["norm", "lm_head"]},
        {"layers_to_transform": [1]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_kinds_of_lora(nano, settings):
    # PEFT takes float64 for no initialisation that looks at the base weight; the model is made double later.
    base = nano.model(tie_word_embeddings=False, attention_bias=True, dtype=torch.float32)
    record = nano.check(nano.lora(model=base, **settings), [nano.shuffled(UNEVEN)])
    assert record.coverage == ()


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=19, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def test_full_fine_tuning_of_gpt2(nano):
    """Transposed linear layers, layer norms, tied head; positions are given for each row."""
    model, batches = gpt2(), [nano.shuffled(UNEVEN), nano.batch(["generator/1"] * 4)]

    def loss(batch):
        positions = torch.arange(batch.ids.shape[1]).expand(len(batch.slots), -1)
        logits = model(input_ids=batch.ids, attention_mask=batch.attention, position_ids=positions).logits
        logprobs = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, batch.ids[:, 1:, None]).squeeze(2)
        return -(logprobs * batch.weights).sum()

    def run(scope):
        for batch in batches:
            with scope.rows(batch.slots):
                total = loss(batch)
            total.backward()

    expected = nano.separate(model, batches, loss)
    record = nano.check(model, batches, run=run, expected=expected)
    assert record.coverage == ()


def test_positions_that_rows_share_are_left_out_where_rows_mix_slots(nano):
    model, mixed = gpt2(), nano.shuffled(UNEVEN)
    expected = nano.separate(model, [mixed])
    without = {
        slot: {name: g for name, g in parts.items() if "wpe" not in name} for slot, parts in expected.items()
    }
    with probes.attach(model, nano.slots) as scope:
        with scope.rows(mixed.slots):
            loss = nano.loss(model, mixed)
        loss.backward()
        record = scope.step(torch.optim.SGD(model.parameters()))
        assert record.coverage == ("transformer.wpe.weight",)
        assert nano.gram_error(record.gram, nano.gram(without)) <= EXACT
        model.zero_grad()
        with scope.rows(mixed.slots):
            loss = nano.loss(model, mixed)
        loss.backward()
        with scope.rows(["generator/0"]):  # a single row shares with nobody
            loss = nano.loss(model, mixed.take([0]))
        loss.backward()
        assert scope.step(torch.optim.SGD(model.parameters())).coverage == ("transformer.wpe.weight",)
        model.zero_grad()
        for slot in nano.slots:
            with scope.rows(mixed.of(slot).slots):
                loss = nano.loss(model, mixed.of(slot))
            loss.backward()
        record = scope.step(torch.optim.SGD(model.parameters()))
    assert record.coverage == ()
    assert nano.gram_error(record.gram, nano.gram(expected)) <= EXACT


def test_lora_on_gpt2(nano):
    model = nano.lora(model=gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    nano.check(model, [nano.shuffled(UNEVEN)])


class Quantised(nn.Module):
    """A frozen layer that holds its weight in eight bits, as the classes of quantisation libraries do."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("codes", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.codes.to(x.dtype) * self.scale)


class QuantisedLora(nn.Module):
    """LoRA over a quantised layer: the adapter is two linear layers, as in PEFT's."""

    def __init__(self, linear, rank=3):
        super().__init__()
        self.base_layer = Quantised(linear)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(linear.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, linear.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["default"](self.lora_A["default"](x))


def test_lora_over_a_quantised_base(nano):
    model = nano.model(tie_word_embeddings=False).requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.down_proj = QuantisedLora(layer.mlp.down_proj).double()
        layer.self_attn.q_proj = QuantisedLora(layer.self_attn.q_proj).double()
    nano.check(model, [nano.shuffled(UNEVEN)])


class Recurrent(nn.Module):
    """Calls the same layers several times in one forward pass, by keyword."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.cell, self.norm = nn.Linear(3, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        x = self.first(input=x)
        for _ in range(3):
            x = self.norm(input=torch.tanh(self.cell(input=x)))
        return x.sum(-1)


class ShiftedNorm(nn.RMSNorm):
    """A norm that scales by one plus its weight, as Gemma's."""

    def forward(self, x):
        return nn.functional.rms_norm(x, self.normalized_shape, None, 1e-6) * (1 + self.weight)


def separate_toy(model, slots, x):
    found = {}
    for slot in dict.fromkeys(slots):
        rows = [row for row, name in enumerate(slots) if name == slot]
        gradients = torch.autograd.grad(model(x[rows]).sum(), list(model.parameters()))
        found[slot] = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
    return found


TOYS = {
    "layers called several times": Recurrent,
    "one plus weight": lambda: nn.Sequential(nn.Linear(3, 8), ShiftedNorm(8), nn.Linear(8, 1)),
    "norm of two axes": lambda: nn.Sequential(
        nn.Linear(3, 8), nn.Unflatten(-1, (2, 4)), nn.LayerNorm((2, 4)), nn.Flatten(1), nn.Linear(8, 1)
    ),
    "bias without weight": lambda: nn.Sequential(
        nn.Linear(3, 8), nn.LayerNorm(8, bias=False), nn.Linear(8, 1)
    ),
    "half frozen": lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8)).requires_grad_(True),
}


@pytest.mark.parametrize("kind", TOYS)
def test_small_networks(toy, nano, kind):
    torch.manual_seed(0)
    model = TOYS[kind]().double()
    if kind == "half frozen":
        model[1].bias.requires_grad_(False)
        model[0].weight.requires_grad_(False)
        model = nn.Sequential(*model)
    slots = ["solver/0", "judge/0", "judge/0", "solver/0", "judge/0"]
    x = toy.data(5)[0]
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    truth = {
        slot: {n: g for n, g in parts.items() if n in trained}
        for slot, parts in separate_toy(model, slots, x).items()
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    with probes.attach(model, toy.slots) as scope:
        with scope.rows(slots):
            loss = model(x).sum()
        loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in toy.slots}
        assert scope.step(toy.sgd(model)).coverage == ()
    assert set(found["judge/0"]) == set(trained)
    assert nano.gradient_error(found, truth) <= EXACT


def test_a_norm_that_gets_two_tensors_is_refused(toy):
    class ResidualNorm(nn.LayerNorm):
        def forward(self, x, residual=None):
            return super().forward(x if residual is None else x + residual)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = ResidualNorm(3)

        def forward(self, x):
            return self.norm(x, residual=x**2)

    model = Model().double()
    scope = probes.attach(model, toy.slots)
    with scope.rows(["solver/0"] * 6):
        model(toy.data()[0]).sum().backward()
    with pytest.raises(probes.ProbeError, match=r"norm: ResidualNorm was called with 2 tensors.*mode 'pure'"):
        scope.step(toy.sgd(model))


@pytest.mark.parametrize("several", [False, True])
def test_lora_on_embeddings(nano, several):
    base = nano.model(tie_word_embeddings=False, pad_token_id=3)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj", "lm_head"]}
    if not several:
        record = nano.check(
            nano.lora(model=base, **config), [nano.shuffled(UNEVEN), nano.shuffled((1, 1, 2, 2))]
        )
        assert record.coverage == ()
        return
    model = nano.lora(model=base, adapters=("one", "two"), **config)
    part = nano.batch(["generator/0", "generator/1", "generator/1"])
    model.set_adapter("one")
    expected = nano.separate(model, [part], slots=["generator/0", "generator/1"])
    with probes.attach(model, nano.slots, {"generator": "one", "aggregator": "two"}) as scope:
        with scope.rows(part.slots):
            loss = nano.loss(model, part)
        loss.backward()
        found = {slot: scope.slot_gradients(slot) for slot in expected}
        own = [p for p in model.parameters() if p.grad is not None]
        record = scope.step(torch.optim.SGD(own, lr=0.1))
    assert record.policy == "one"
    assert nano.gradient_error(found, expected) <= EXACT


def test_lora_on_tied_embeddings_packed_by_token(nano):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=False)
        model = get_peft_model(nano.model(), config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    nano.check(model, [nano.shuffled(UNEVEN)])
