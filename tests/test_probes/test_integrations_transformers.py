"""A transformers.Trainer, instrumented: the same weights, the slots' gradients, a run file that is read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from gradscope import diagnose, open_run
from gradscope.errors import ProbeError
from gradscope.figures.cells import group_cells
from gradscope.probes.integrations.transformers import instrument

SLOTS = {"solver/0": "solver", "solver/1": "solver", "judge/0": "judge"}
ROWS = 4
"""Rows of a micro-batch; two make an update."""


class Examples(Dataset):
    """Sequences of random tokens with the columns that a data set of agents has."""

    column_names = ("input_ids", "labels", "slot", "problem")

    def __init__(self, number=24, **columns):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(1, 19, (number, 6), generator=generator)
        self.columns = {
            "slot": [list(SLOTS)[place % 3] for place in range(number)],
            "problem": [f"p{place // 3}" for place in range(number)],
        } | columns

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, place):
        own = {name: values[place] for name, values in self.columns.items()}
        return {"input_ids": self.ids[place], "labels": self.ids[place], **own}


def make(nano, folder, *, lora=True, trainer=Trainer, examples=None, **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.05,
        "logging_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 7,
    } | arguments
    return trainer(
        model=nano.lora() if lora else nano.model(),
        args=TrainingArguments(**settings),
        train_dataset=examples or Examples(),
        eval_dataset=Examples(8),
        compute_metrics=lambda prediction: {"accuracy": 0.75},
    )


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_are_bitwise_those_of_the_same_training_without(nano, tmp_path, lora):
    plain = make(nano, tmp_path / "plain", lora=lora)
    plain.train()
    probed = instrument(
        make(nano, tmp_path / "probed", lora=lora), slots=SLOTS, problem_of="problem", writer=tmp_path / "run"
    )
    probed.train()
    expected = weights(plain)
    assert all(torch.equal(found, expected[name]) for name, found in weights(probed).items())
    assert not any(module._forward_hooks for module in probed.model.modules())
    history = [
        [
            {key: entry[key] for key in ("loss", "grad_norm") if key in entry}
            for entry in one.state.log_history
        ]
        for one in (plain, probed)
    ]
    assert history[0] == history[1]


def test_each_update_holds_the_slots_own_gradients_before_clipping(nano, tmp_path):
    batches = []

    class Seen(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            batches.append({name: value.clone() for name, value in inputs.items()})
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = instrument(
        make(nano, tmp_path / "out", trainer=Seen, max_steps=1, logging_steps=1),
        slots=SLOTS,
        slot_of="slot",
        problem_of="problem",
        row_id_of=lambda example: f"{example['problem']}:{example['slot']}",
        writer=tmp_path / "run",
    )
    model = nano.lora()
    slot_of = {tuple(example["input_ids"].tolist()): example["slot"] for example in Examples()}
    trainer.train()

    # The model's own loss: the mean over the labels of the whole update.
    gradients, num_rows = {}, dict.fromkeys(SLOTS, 0)
    for slot in SLOTS:
        model.zero_grad(set_to_none=True)
        for batch in batches:
            rows = [slot_of[tuple(row.tolist())] == slot for row in batch["input_ids"]]
            num_rows[slot] += sum(rows)
            if any(rows):
                own = batch["input_ids"][rows]
                logits = model(input_ids=own).logits[:, :-1].flatten(0, 1).float()
                loss = torch.nn.functional.cross_entropy(logits, own[:, 1:].flatten(), reduction="sum")
                (loss / (2 * ROWS * 5)).backward()
        gradients[slot] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    update = open_run(tmp_path / "run")["updates"].isel(update=0)
    assert nano.gram_error(update["gram"].values, nano.gram(gradients)) <= 1e-6  # the loss is float32
    assert update["num_rows"].values.tolist() == list(num_rows.values())
    assert update["num_tokens"].values.tolist() == [5 * number for number in num_rows.values()]
    assert np.isfinite(update["gram_cross"].values).any()
    assert float(update["grad_norm"]) == pytest.approx(trainer.state.log_history[0]["grad_norm"], rel=1e-5)
    assert float(update["grad_norm"]) > trainer.args.max_grad_norm


def test_the_run_file_holds_every_step_and_the_evaluations(nano, tmp_path):
    trainer = instrument(
        make(nano, tmp_path / "out", eval_strategy="steps", eval_steps=1, logging_steps=1),
        slots=SLOTS,
        writer=tmp_path / "run",
    )
    trainer.train()
    run = open_run(tmp_path / "run")
    assert run["train"]["step"].values.tolist() == [1, 2, 3]
    assert run["train"]["num_updates"].values.tolist() == [1, 1, 1]
    assert run["updates"]["step"].values.tolist() == [1, 2, 3]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert run["train"]["loss"].values == pytest.approx([entry["loss"] for entry in logged], rel=1e-6)
    rates = [entry["learning_rate"] for entry in logged]
    assert run["updates"]["learning_rate"].values == pytest.approx(rates)
    assert run["updates"]["grad_norm"].values == pytest.approx([e["grad_norm"] for e in logged], rel=1e-5)
    assert run["eval"]["num_correct"].values.tolist() == [6, 6, 6]
    assert run["eval"]["num_total"].values.tolist() == [8, 8, 8]
    assert run["eval"]["dataset"].values.tolist() == ["eval"] * 3
    diagnosis = diagnose(run)
    assert all(reason for reason in diagnosis.skipped.values())
    assert run.attrs["seed"] == 7
    assert '"max_steps": 3' in run.attrs["config_json"]


def test_a_training_that_is_resumed_goes_on_in_the_same_run_file(nano, tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "save_only_model": False}
    first = instrument(
        make(nano, tmp_path / "out", max_steps=3, **arguments), slots=SLOTS, writer=tmp_path / "run"
    )
    first.train()
    second = instrument(
        make(nano, tmp_path / "out", max_steps=4, **arguments), slots=SLOTS, writer=tmp_path / "run"
    )
    second.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    run = open_run(tmp_path / "run")
    assert run["train"]["step"].values.tolist() == [1, 2, 3, 4]
    assert run["train"]["segment"].values.tolist() == [0, 0, 1, 1]


def test_a_resumed_training_knows_whose_momentum_it_goes_on_with(nano, tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options = {"slots": SLOTS, "problem_of": "problem"}
    whole = instrument(make(nano, tmp_path / "out", **arguments), writer=tmp_path / "whole", **options)
    whole.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    resumed = instrument(make(nano, tmp_path / "out", **arguments), writer=tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    runs = [open_run(tmp_path / name)["updates"] for name in ("whole", "resumed")]
    assert [run["step"].values.tolist() for run in runs] == [[1, 2, 3, 4], [3, 4]]
    expected, found = (run.isel(update=slice(-2, None)) for run in runs)
    for name in ("gram", "update_gram", "effect", "dot_previous_update", "dot_ema"):
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-9, err_msg=name)
    assert (expected["update_gram"].values != 0).any()


def test_momentum_of_other_slots_counts_as_carried(nano, tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2}
    first = instrument(make(nano, tmp_path / "out", **arguments), slots=SLOTS, writer=tmp_path / "run")
    first.train()
    other = {name: name for name in SLOTS}
    again = instrument(make(nano, tmp_path / "out", **arguments), slots=other, writer=tmp_path / "other")
    with pytest.warns(UserWarning, match="counts as carried: load_state_dict"):
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert open_run(tmp_path / "other")["updates"]["step"].values.tolist() == [3]


def test_a_loss_scale_is_taken_out(nano, tmp_path):
    """In float64 powers of two change nothing, so that the records must be those of a run without."""
    grams = []
    for name, scale in (("plain", None), ("scaled", 512.0)):
        trainer = instrument(
            make(nano, tmp_path / "out", max_grad_norm=0), slots=SLOTS, writer=tmp_path / name
        )
        if scale:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
        trainer.train()
        updates = open_run(tmp_path / name)["updates"]
        grams.append([updates[name].values for name in ("gram", "update_gram", "grad_norm", "loss_weight")])
    assert trainer.accelerator.scaler.get_scale() == 512 * 2**3
    for plain, scaled in zip(*grams, strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=1e-6)


def test_settings_are_few_and_how_it_ran_makes_no_other_cell(nano, tmp_path):
    configs, runs = [], []
    for place, extra in enumerate(({}, {"seed": 8, "logging_steps": 1}, {"learning_rate": 0.5})):
        trainer = instrument(
            make(nano, tmp_path / f"out{place}", max_steps=1, **extra),
            slots=SLOTS,
            writer=tmp_path / f"run{place}",
        )
        trainer.train()
        runs.append(open_run(tmp_path / f"run{place}"))
        configs.append(json.loads(runs[-1].attrs["config_json"]))
    assert configs[0]["trainer"] == {"name": "Trainer"}
    assert configs[0]["adapter"]["default"]["r"] == 4
    assert configs[0]["train"] == {
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.05,
        "max_steps": 1,
        "per_device_train_batch_size": ROWS,
    }
    cells = group_cells(runs)
    assert [len(cell.runs) for cell in cells] == [2, 1]
    assert [cell.name for cell in cells] == [
        "Trainer-SP-Qwen3ForCausalLM (train.learning_rate=0.01)",
        "Trainer-SP-Qwen3ForCausalLM (train.learning_rate=0.5)",
    ]


def test_a_class_is_instrumented_too(nano, tmp_path):
    trainer = make(
        nano, tmp_path / "out", trainer=instrument(Trainer, slots=SLOTS, writer=tmp_path / "run"), max_steps=1
    )
    trainer.train()
    assert open_run(tmp_path / "run")["updates"].sizes["update"] == 1


def test_a_failing_measurement_ends_itself_and_not_the_training(nano, tmp_path):
    class Bypassing(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            weight = next(p for p in model.parameters() if p.requires_grad)
            return super().compute_loss(model, inputs, *args, **kwargs) + weight.sum()

    trainer = instrument(
        make(nano, tmp_path / "out", trainer=Bypassing), slots=SLOTS, writer=tmp_path / "run"
    )
    with pytest.warns(UserWarning, match=r"gradscope stops measuring at step 1: step\(\): policy 'default'"):
        trainer.train()
    run = open_run(tmp_path / "run")
    assert run["train"]["step"].values.tolist() == [1, 2, 3]
    assert run["events"]["kind"].values.tolist() == ["probe_disabled"]


@pytest.mark.parametrize(
    ("options", "examples", "message"),
    [
        ({"slot_of": "slots"}, {}, r"slot_of: the examples have no column 'slots'\. Did you mean 'slot'\?"),
        ({"problem_of": "task"}, {}, "problem_of: the examples have no column 'task'.*Columns: input_ids,"),
        ({}, {"slot": ["solver/0", "solver/9"] * 12}, r"slot_of: unknown slot 'solver/9'\. Did you mean"),
        ({}, {"slot": ["solver"] * 24}, r"'solver' is a role with 2 slots \(solver/0, solver/1\)"),
    ],
)
def test_bad_input_gets_one_clear_line(nano, tmp_path, options, examples, message):
    trainer = make(nano, tmp_path / "out", examples=Examples(**examples))
    with pytest.raises(ProbeError, match=message) as caught:
        instrument(trainer, slots=SLOTS, writer=tmp_path / "run", **options).train()
    assert "\n" not in str(caught.value)


def test_what_cannot_be_measured_is_refused(nano, tmp_path):
    options = {"slots": SLOTS, "writer": tmp_path / "run"}
    with pytest.raises(ProbeError, match=r"got int, which is no transformers\.Trainer"):
        instrument(3, **options)
    trainer = make(nano, tmp_path / "out")
    trainer.args.use_liger_kernel = True
    with pytest.raises(ProbeError, match="Liger's fused kernels bypass"):
        instrument(trainer, **options)
    assert type(trainer) is Trainer
    trainer.args.use_liger_kernel = False
    with pytest.raises(ProbeError, match="is instrumented already"):
        instrument(instrument(trainer, **options), **options)
