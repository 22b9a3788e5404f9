"""TRL in two processes: slots over both, one run file, the same weights."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from gradscope import open_run

SCRIPT = """
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from gradscope.probes.integrations.trl import PLACE, instrument
from gradscope.train.assets.model import build_model
from gradscope.train.assets.tokenizer import build_tokenizer

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
slots = {"generator/0": "generator", "aggregator/0": "aggregator"}
examples = [
    {"prompt": f"{problem}{place}>", "slot": slot}
    for problem in range(8)
    for place, slot in enumerate(slots)
]


class Replay(GRPOTrainer):
    kept = []

    def _compute_loss(self, model, inputs):
        self.kept.append({key: value for key, value in inputs.items() if key != PLACE})
        return super()._compute_loss(model, inputs)


def make(name, trainer):
    return trainer(
        model=build_model(seed=0),
        reward_funcs=lambda completions, **columns: [float(len(set(text)) % 3) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder / name), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_generations=2, max_completion_length=6, max_steps=1, report_to=[], use_cpu=True, bf16=False,
            disable_tqdm=True, save_strategy="no", ddp_backend="gloo", max_grad_norm=0.1,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=build_tokenizer(),
    )


plain = make("plain", GRPOTrainer)
plain.train()
probed = instrument(make("probed", Replay), slots=slots, writer=folder / "run")
probed.train()
pairs = zip(plain.model.parameters(), probed.model.parameters(), strict=True)
assert all(torch.equal(one, other) for one, other in pairs)

# The gradient of TRL's own loss with the tokens of the other slot masked, averaged over the processes.
again = make("again", GRPOTrainer)
again.model.train()
again.current_gradient_accumulation_steps = 2
gradients = []
for place in range(2):
    again.model.zero_grad()
    for inputs in Replay.kept:
        texts = build_tokenizer().batch_decode(inputs["prompt_ids"])
        own = torch.tensor([text.rstrip(">")[-1] == str(place) for text in texts]).long()
        mask = own[:, None].expand_as(inputs["completion_mask"])
        again._compute_loss(again.model, {**inputs, "tool_mask": mask}).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in again.model.parameters()])
    dist.all_reduce(flat)
    gradients.append(flat.double() / 2)
flat = torch.stack(gradients)
if rank == 0:
    torch.save((flat @ flat.T).tolist(), folder / "gram.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_two_processes_write_one_run_file_of_all_rows(tmp_path):
    import torch

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *(str(script), str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = open_run(tmp_path / "run")
    update = run["updates"].isel(update=0)
    expected = np.array(torch.load(tmp_path / "gram.pt"))
    norms = np.sqrt(np.diag(expected))
    assert np.max(np.abs(update["gram"].values - expected) / np.outer(norms, norms)) <= 1e-5
    assert update["num_rows"].values.sum() == 16  # two processes, two micro-batches of four rows
    assert run["train"]["num_rows"].values.sum() == 16
    assert float(update["loss_weight"].sum()) == pytest.approx(1.0)
    assert run["segments"]["world_size"].values.tolist() == [2]
