"""TRL's own GRPOTrainer, instrumented: rows follow its buffer, weights stay bitwise, the run file is read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import trl.trainer.utils as trl_utils
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from gradscope import cli, diagnose, open_run
from gradscope.errors import ProbeError
from gradscope.probes import Evidence
from gradscope.probes.integrations import trl as integration
from gradscope.probes.integrations.trl import instrument
from gradscope.train.assets.model import build_model
from gradscope.train.assets.tokenizer import build_tokenizer

pytestmark = [
    # TRL 1.16 and transformers 5.24 disagree on how activation checkpointing is called.
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
]

SLOW = pytest.mark.slow
SLOTS = {"generator/0": "generator", "generator/1": "generator", "aggregator/0": "aggregator"}
REUSED = {"steps_per_generation": 6, "num_iterations": 2, "loss_type": "grpo", "beta": 0.04}
"""Two updates from a generation, each used twice, with a reference policy."""


@pytest.fixture(scope="session", autouse=True)
def base(tmp_path_factory):
    """An untrained model in a folder, where TRL can find it a second time as the reference."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("base")
    build_model(seed=0).save_pretrained(folder)
    make.base = folder


def examples():
    """Prompts whose last character names the slot, so that a row's slot can be read off its tokens."""
    return [
        {
            "prompt": [
                {"role": "system", "content": role},
                {"role": "user", "content": f"{problem}+{place}"},
            ],
            "who": slot,
            "problem": f"problem {problem}",
        }
        for problem in range(8)
        for place, (slot, role) in enumerate(SLOTS.items())
    ]


def reward(completions, **columns):
    return [float(len(set(completion[0]["content"])) % 3) for completion in completions]


def make(folder, *, lora, trainer=GRPOTrainer, **arguments):
    torch.manual_seed(0)
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "num_generations": 2,
        "max_completion_length": 8,
        "max_steps": 5,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 3,
    } | arguments
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(make.base),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(examples()),
        eval_dataset=Dataset.from_list(examples()[:3]),
        processing_class=build_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
    )


def probed(folder, *, lora, evidence=None, **arguments):
    return instrument(
        make(folder / "out", lora=lora, **arguments),
        slots=SLOTS,
        slot_of="who",
        problem_of="problem",
        writer=folder / "run",
        evidence=evidence,
    )


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=SLOW)])
def test_five_steps_end_in_the_same_weights_and_give_a_run_file_that_diagnose_reads(tmp_path, lora, capsys):
    plain = make(tmp_path / "plain", lora=lora)
    plain.train()
    trainer = probed(tmp_path, lora=lora)
    trainer.train()
    expected = weights(plain)
    assert all(torch.equal(found, expected[name]) for name, found in weights(trainer).items())
    run = open_run(tmp_path / "run")
    assert run["train"]["step"].values.tolist() == [1, 2, 3, 4, 5]
    assert run["updates"]["num_rows"].values.sum(1).tolist() == [12.0] * 5
    assert np.isfinite(run["updates"]["gram"].values).any(axis=(1, 2)).all()
    assert all(diagnose(run).skipped.values())
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(["diagnose", str(tmp_path / "run"), "--json"])
    assert stop.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["skipped"]) == {"cliff"}


class Replay(GRPOTrainer):
    """Keeps what its loss was given, micro-batch by micro-batch, and the weights of each update."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates = []
        trainer = self

        class Keep(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                trainer.updates.append((weights(trainer), []))

        self.add_callback(Keep())

    def _compute_loss(self, model, inputs):
        self.updates[-1][1].append(dict(inputs))
        return super()._compute_loss(model, inputs)


def slots_of(inputs):
    """Reads the slots off the prompts: their last token but `>` is the slot's number."""
    texts = build_tokenizer().batch_decode(inputs["prompt_ids"])
    return [list(SLOTS)[int(text.rstrip(">")[-1])] for text in texts]


def at_update(kept, trainer):
    """Sets a trainer to the weights of an update; returns what its loss was given, place by place, apart."""
    parameters, micro_batches = kept
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(parameters[name])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    places = [inputs[integration.PLACE].tolist() for inputs in micro_batches]
    own = [
        {key: value for key, value in inputs.items() if key != integration.PLACE} for inputs in micro_batches
    ]
    return list(zip(own, places, strict=True))


def gradient(micro_batches, trainer, keep):
    """The gradient of TRL's own loss with the tokens of all but some rows masked."""
    trainer.model.zero_grad(set_to_none=True)
    for inputs, places in micro_batches:
        names = slots_of(inputs)
        own = torch.tensor([keep(name, place) for name, place in zip(names, places, strict=True)]).long()
        mask = own[:, None].expand_as(inputs["completion_mask"])
        if own.any():
            trainer._compute_loss(trainer.model, {**inputs, "tool_mask": mask}).backward()
    named = [p for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in named]).double()


def gram_errors(trainer, plain, run):
    errors = []
    for found, kept in zip(run["updates"]["gram"].values, trainer.updates, strict=True):
        given = at_update(kept, plain)
        flat = torch.stack(
            [gradient(given, plain, lambda name, _, slot=slot: name == slot) for slot in SLOTS]
        )
        expected = (flat @ flat.T).numpy()
        norms = np.sqrt(np.diag(expected))
        seen = norms > 0
        assert np.isfinite(found[np.ix_(seen, seen)]).all()
        gap = np.abs(np.nan_to_num(found) - expected)[np.ix_(seen, seen)]
        errors.append((gap / np.outer(norms, norms)[np.ix_(seen, seen)]).max())
    return errors


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        pytest.param(False, {}, id="full-dapo"),
        pytest.param(True, REUSED, id="lora-reused"),
        pytest.param(True, {}, id="lora-dapo", marks=SLOW),
        pytest.param(False, REUSED, id="full-reused", marks=SLOW),
    ],
)
def test_slots_follow_their_rows_through_shuffle_split_and_reuse(tmp_path, lora, settings):
    trainer = probed(tmp_path, lora=lora, trainer=Replay, max_steps=4, **settings)
    trainer.train()
    run = open_run(tmp_path / "run")
    plain = make(tmp_path / "plain", lora=lora, **settings)
    assert max(gram_errors(trainer, plain, run)) <= 1e-5
    for place, (_, micro_batches) in enumerate(trainer.updates):
        update = run["updates"].isel(update=place)
        slots = np.array([slot for inputs in micro_batches for slot in slots_of(inputs)])
        tokens = torch.cat([inputs["completion_mask"].sum(1) for inputs in micro_batches]).numpy()
        advantages = torch.cat([inputs["advantages"] for inputs in micro_batches]).double().abs().numpy()
        for slot in SLOTS:
            own = update.sel(slot=slot)
            assert own["num_rows"] == (slots == slot).sum()
            assert own["num_tokens"] == tokens[slots == slot].sum()
            assert own["num_signal_rows"] == (advantages[slots == slot] > 0).sum()
            assert float(own["advantage_abs_sum"]) == pytest.approx(advantages[slots == slot].sum())
        assert float(update["loss_weight"].sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=SLOW)])
def test_single_rows_are_measured_with_the_head_that_trl_fuses(tmp_path, lora):
    evidence = Evidence(rows_every=1, sketch_dim=0)
    trainer = probed(tmp_path, lora=lora, evidence=evidence, trainer=Replay, max_steps=1)
    trainer.train()
    plain = make(tmp_path / "plain", lora=lora)
    given = at_update(trainer.updates[0], plain)
    rows = open_run(tmp_path / "run")["rows"].to_dataset()
    assert rows.sizes["row"] == 12
    norms = dict(zip(rows["row_id"].values.tolist(), rows["grad_norm"].values.tolist(), strict=True))
    largest = max(norms.values())
    for row_id, found in norms.items():
        place = int(row_id.removeprefix("0."))
        expected = float(gradient(given, plain, lambda _, at, place=place: at == place).norm())
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5 * largest)


def test_positions_are_told_apart_where_the_head_scores_completions_only(tmp_path, monkeypatch):
    # As TRL does on an accelerator.
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True, raising=False)  # TRL 1.16 asks it
    trainer = probed(tmp_path, lora=False, trainer=Replay, max_steps=1)
    trainer.train()
    plain = make(tmp_path / "plain", lora=False)
    assert max(gram_errors(trainer, plain, open_run(tmp_path / "run"))) <= 1e-5


def test_a_resumed_training_knows_whose_momentum_it_goes_on_with(tmp_path):
    arguments = {"lora": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    probed(tmp_path, **arguments).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert (checkpoint / "gradscope_scope_0.pt").exists()
    residuals = {}
    for name in ("with", "without"):
        if name == "without":
            (checkpoint / "gradscope_scope_0.pt").unlink()
        resumed = instrument(
            make(tmp_path / "again", **arguments), slots=SLOTS, slot_of="who", writer=tmp_path / name
        )
        resumed.train(resume_from_checkpoint=str(checkpoint))
        update = open_run(tmp_path / name)["updates"].isel(update=0)
        assert int(update["step"]) == 3
        gram = update["update_gram"].values
        residuals[name] = gram[update["contributor"].values.tolist().index("carried")].sum() / gram.sum()
    assert residuals["with"] == 0
    assert residuals["without"] > 0.1


def test_another_trl_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    with pytest.raises(ProbeError, match=r"TRL .* has no _calculate_rewards, .* use TRL 1\.12 to 1\.16\."):
        probed(tmp_path, lora=True)


def test_rows_that_lose_their_place_would_be_seen(tmp_path, monkeypatch):
    read = integration.MeasuredGRPO._gradscope_read

    def rolled(self, rows, output):
        return read(self, rows[3:] + rows[:3], output)

    monkeypatch.setattr(integration.MeasuredGRPO, "_gradscope_read", rolled)
    trainer = probed(tmp_path, lora=True, trainer=Replay, max_steps=1)
    trainer.train()
    plain = make(tmp_path / "plain", lora=True)
    assert max(gram_errors(trainer, plain, open_run(tmp_path / "run"))) > 1e-2


def test_metrics_of_trl_stand_under_the_names_of_the_run_file(tmp_path):
    settings = {"gradient_accumulation_steps": 1, "num_iterations": 2, "beta": 0.04, "learning_rate": 3e-2}
    settings |= {"per_device_train_batch_size": 12, "epsilon": 0.05, "use_bias_correction_kl": False}
    trainer = probed(tmp_path, lora=True, max_steps=4, **settings)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    train = open_run(tmp_path / "run")["train"].to_dataset()
    tokens = train["num_tokens"]

    def mean(name):
        return ((train[name] * tokens).sum("slot") / tokens.sum("slot")).values

    assert mean("entropy") == pytest.approx([entry["entropy"] for entry in logged], rel=1e-5)
    assert mean("kl_reference") == pytest.approx([entry["kl"] for entry in logged], rel=1e-4, abs=1e-7)
    clipped = [entry["clip_ratio/region_mean"] for entry in logged]
    assert max(clipped) > 0
    assert mean("clip_fraction") == pytest.approx(clipped, abs=1e-6)
    assert train["loss"].values == pytest.approx([entry["loss"] for entry in logged], abs=1e-6)
    fresh = [0, 2]  # TRL logs what a generation was rewarded at its first update only
    rewards = [logged[place]["reward"] for place in fresh]
    assert train["episode_reward_mean"].values[fresh] == pytest.approx(rewards)
    lengths = [logged[place]["completions/mean_length"] for place in fresh]
    weighted = (train["response_tokens_mean"] * train["num_rows"]).sum("slot") / train["num_rows"].sum("slot")
    assert weighted.values[fresh] == pytest.approx(lengths)
    cut = (train["truncated_fraction"] * train["num_rows"]).sum("slot") / train["num_rows"].sum("slot")
    assert cut.values[fresh] == pytest.approx([logged[place]["completions/clipped_ratio"] for place in fresh])


def test_an_accuracy_among_the_evaluations_becomes_one_of_the_run(tmp_path):
    trainer = make(tmp_path / "out", lora=True, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.reward_funcs[0] = lambda completions, **columns: [1.0, 0.0] * (len(completions) // 2)
    instrument(trainer, slots=SLOTS, slot_of="who", writer=tmp_path / "run").train()
    evaluated = open_run(tmp_path / "run")["eval"].to_dataset()
    assert evaluated["step"].values.tolist() == [1, 2]
    assert evaluated["num_correct"].values.tolist() == [3, 3]
    assert evaluated["num_total"].values.tolist() == [6, 6]  # two completions for each of three prompts


def test_bad_input_and_fused_kernels_get_one_clear_line(tmp_path):
    options = {"slots": SLOTS, "writer": tmp_path / "run"}
    trainer = make(tmp_path / "out", lora=True)
    with pytest.raises(
        ProbeError, match=r"slot_of: the examples have no column 'slot'.*Columns: prompt, who"
    ):
        instrument(trainer, **options)
    with pytest.raises(ProbeError, match=r"slot_of: unknown slot 'generator/1'\. Did you mean"):
        instrument(trainer, slots={"generator/0": "generator"}, slot_of="who", writer=tmp_path / "run")
    trainer.args.use_liger_kernel = True
    with pytest.raises(ProbeError, match=r"Liger's fused kernels bypass.*use_liger_kernel=False"):
        instrument(trainer, slot_of="who", **options)
    with pytest.raises(ProbeError, match=r"got Dataset, which is no trl\.GRPOTrainer"):
        instrument(trainer.train_dataset, **options)
