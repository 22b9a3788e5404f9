"""CPU time, operations and memory of the probes beside plain training and others' ways to the same Gram.

Printed, never asserted on (`make bench`). Methods take turns, in both directions, and each is the median of
its rounds in CPU seconds, so that a busy machine slows all alike. Every method does the same work: gradients
of the loss, the Gram matrix of the slots and a step of AdamW.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from gradscope import probes

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "tiny (1M)": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "60M": {
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
NUM_ROWS, ROW_TOKENS = 32, 64
PROBED = ("observe", "fused")
BARS = {
    "tiny (1M)": {"observe": 1.15, "fused": 1.15},
    "60M": {"observe": 1.10, "fused": 1.10},
    "tiny (1M), all parameters": {"observe": 1.40, "fused": 1.10},
}
"""Largest ratio to plain training that is aimed at."""


@dataclass(frozen=True)
class Job:
    """A model with its rows: what every method is given."""

    size: str
    num_slots: int
    lora: bool = True
    rank: int = 16

    @property
    def slots(self) -> list[str]:
        return [f"worker/{row * self.num_slots // NUM_ROWS}" for row in range(NUM_ROWS)]

    @property
    def slot_index(self) -> torch.Tensor:
        return torch.tensor([row * self.num_slots // NUM_ROWS for row in range(NUM_ROWS)])

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=512, **SIZES[self.size])
        model = Qwen3ForCausalLM(config)
        if not self.lora:
            return model.train()
        settings = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules=ALL_LINEAR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(model, settings)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        return model.train()

    def row_losses(self, model: nn.Module, rows: torch.Tensor | None = None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        shape = (NUM_ROWS, ROW_TOKENS)
        ids = torch.randint(0, SIZES[self.size]["vocab_size"], shape, generator=generator)
        weights = torch.randn(NUM_ROWS, generator=generator)
        if rows is not None:
            ids, weights = ids[rows], weights[rows]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        ).view(len(ids), -1)
        return losses.sum(1) * weights / NUM_ROWS


Step = Callable[[], torch.Tensor | None]


def attach(model: nn.Module, slots: dict[str, str], mode: str, *, attribution: bool = False) -> probes.Scope:
    """A scope that looks at slots alone, or also attributes what the optimizer applies."""
    return probes.attach(
        model,
        slots,
        mode=mode,
        attribution=probes.Attribution(enabled=attribution),
        evidence=probes.Evidence(modules_every=0),
    )


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def plain(job: Job) -> Step:
    model = job.model()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-5)

    def step() -> None:
        job.row_losses(model).sum().backward()
        finish(model, optimizer)

    return step


def probed(mode: str, *, cross: bool = False) -> Callable[[Job], Step]:
    def method(job: Job) -> Step:
        model = job.model()
        optimizer = torch.optim.AdamW(trained(model), lr=1e-5)
        roles = {f"worker/{k}": f"role {k % 2}" for k in range(job.num_slots)}
        scope = attach(model, roles, mode, attribution=cross)
        problems = [row % 8 for row in range(NUM_ROWS)] if cross else None

        def step() -> torch.Tensor:
            with scope.rows(job.slots, problems=problems):
                loss = job.row_losses(model).sum()
            loss.backward()
            record = scope.step(optimizer)
            finish(model, optimizer)
            return torch.from_numpy(record.gram)

        return step

    return method


def pure(job: Job) -> Step:
    model = job.model()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-5)
    scope = attach(model, {f"worker/{k}": "worker" for k in range(job.num_slots)}, "pure")

    def step() -> torch.Tensor:
        for slot in range(job.num_slots):
            rows = (job.slot_index == slot).nonzero().flatten()
            with scope.rows([f"worker/{slot}"] * len(rows)):
                loss = job.row_losses(model, rows).sum()
            loss.backward()
        record = scope.step(optimizer)
        finish(model, optimizer)
        return torch.from_numpy(record.gram)

    return step


def separate_backwards(job: Job) -> Step:
    model = job.model()
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)

    def step() -> torch.Tensor:
        losses = job.row_losses(model)
        by_slot = losses.new_zeros(job.num_slots).index_add(0, job.slot_index, losses)
        flat = torch.stack(
            [
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
                for loss in by_slot
            ]
        )
        total = flat.sum(0).split([p.numel() for p in parameters])
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient.view_as(parameter)
        finish(model, optimizer)
        return flat.double() @ flat.double().T

    return step


def opacus(job: Job) -> Step:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus import GradSampleModule

        model = job.model()
        per_row = GradSampleModule(model, loss_reduction="sum", strict=False)
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)

    def step() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.row_losses(per_row).sum().backward()
        gram = torch.zeros(job.num_slots, job.num_slots, dtype=torch.float64)
        for parameter in parameters:
            rows = parameter.grad_sample.flatten(1)
            slots = rows.new_zeros(job.num_slots, rows.shape[1]).index_add_(0, job.slot_index, rows).double()
            gram += slots @ slots.T
            parameter.grad_sample = None
        finish(model, optimizer)
        return gram

    return step


def torchjd(job: Job) -> Step:
    from torchjd.autogram import Engine

    model = job.model()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-5)
    engine = Engine(model, batch_dim=0)
    members = nn.functional.one_hot(job.slot_index, job.num_slots).float()

    def step() -> torch.Tensor:
        losses = job.row_losses(model)
        gramian = engine.compute_gramian(losses)
        losses.sum().backward()
        finish(model, optimizer)
        return members.T @ gramian @ members

    return step


METHODS = {
    "plain": plain,
    "observe": probed("observe"),
    "fused": probed("fused"),
    "observe + cross + attribution": probed("observe", cross=True),
    "fused + cross + attribution": probed("fused", cross=True),
    "pure micro-batches": pure,
    "Opacus": opacus,
    "TorchJD": torchjd,
    "K backwards": separate_backwards,
}


def measure(job: Job, names: list[str], rounds: int) -> dict[str, float]:
    """CPU seconds of a step of each method, medians; the first round warms up."""
    steps = {name: METHODS[name](job) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    grams = {}
    for turn in range(rounds + 1):
        for name in names if turn % 2 else names[::-1]:
            gc.collect()
            begin = time.process_time()
            gram = steps[name]()
            if turn:
                seconds[name].append(time.process_time() - begin)
            elif gram is not None:
                grams[name] = gram.double()
    for name, gram in grams.items():  # the same work, or the comparison means nothing
        scale = grams["observe"].diagonal().sqrt()
        assert float(((gram - grams["observe"]) / torch.outer(scale, scale)).abs().max()) < 1e-3, name
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(capsys, title: str, found: dict[str, float], bars: dict[str, float]) -> None:
    with capsys.disabled():
        print(f"\n{title}")
        for name, seconds in found.items():
            bar = f"   aim <= {bars[name]:.2f}" if name in bars else ""
            print(f"  {name:30s} {seconds:8.3f} CPU s   {seconds / found['plain']:5.2f} x plain{bar}")
        for name in ("Opacus", "TorchJD", "K backwards"):
            if name in found:
                print(f"  fused / {name}: {found['fused'] / found[name]:.2f}", end="")
                print(f", observe / {name}: {found['observe'] / found[name]:.2f}")


def with_peers() -> list[str]:
    """The methods whose packages are installed; they are in the extra `parity`."""
    pytest.importorskip("opacus", reason="needs the extra parity")
    pytest.importorskip("torchjd", reason="needs the extra parity")
    return list(METHODS)


@pytest.mark.parametrize(("size", "rounds"), [("tiny (1M)", 15), ("60M", 3)])
def test_adapters_with_four_slots(size, rounds, capsys):
    found = measure(Job(size, 4), with_peers(), rounds)
    report(capsys, f"{size}, LoRA r=16, {NUM_ROWS} x {ROW_TOKENS} tokens, K=4", found, BARS[size])


@pytest.mark.parametrize(("size", "rounds"), [("tiny (1M)", 15), ("60M", 3)])
def test_adapters_with_few_and_many_slots(size, rounds, capsys):
    ratios = {}
    for num_slots in (2, 16):
        found = measure(Job(size, num_slots), ["plain", *PROBED], rounds)
        report(capsys, f"{size}, LoRA r=16, K={num_slots}", found, BARS[size])
        ratios[num_slots] = {name: found[name] / found["plain"] for name in PROBED}
    with capsys.disabled():
        for name in PROBED:
            print(f"  {name}: K=16 / K=2 {ratios[16][name] / ratios[2][name]:.2f}   aim <= 1.05")


def test_all_parameters(capsys):
    size = "tiny (1M)"
    found = measure(Job(size, 4, lora=False), ["plain", *PROBED], rounds=15)
    report(capsys, f"{size}, all parameters, K=4", found, BARS[f"{size}, all parameters"])


class Operations(TorchDispatchMode):
    """Counts what would be launches on an accelerator: operations that are no views and no bare memory."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        alias = returned[0].alias_info if returned else None
        is_view = alias is not None and not alias.is_write
        if not is_view and not func.__name__.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            self.number += 1
        return func(*args, **(kwargs or {}))


class Stack(nn.Module):
    """Layers one behind the other."""

    def __init__(self, num_layers: int, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
def test_operations_and_host_time_of_a_lora_layer(adapters, capsys):
    """Numbers so small that nearly all of it is the host's time, which is the cost on an accelerator."""
    num_layers, rows = 40, [f"worker/{row // 2}" for row in range(8)]
    x = torch.randn(8, 16, 16, dtype=torch.bfloat16, requires_grad=True)
    lines = []
    for mode in ("plain", "observe", "fused"):
        model = get_peft_model(
            Stack(num_layers, 16).bfloat16(), LoraConfig(r=4, target_modules=r".*layers\.\d+")
        )
        for parameter in trained(model):
            parameter.data = parameter.data.to(adapters)
        optimizer = torch.optim.SGD(trained(model), lr=0.0)
        scope = None
        if mode != "plain":
            scope = attach(model, {f"worker/{k}": "worker" for k in range(4)}, mode)
        host, operations = [], Operations()
        for turn in range(60):
            counting = operations if turn == 1 else contextlib.nullcontext()
            with scope.rows(rows) if scope else contextlib.nullcontext(), counting:
                begin = time.thread_time()
                model(x).sum().backward()
                host.append(time.thread_time() - begin)
            if scope is not None:
                scope.step(optimizer)
            optimizer.zero_grad()
        microseconds = 1e6 * statistics.median(host[2:]) / num_layers
        lines.append(f"  {mode:8s} {operations.number / num_layers:5.1f} operations, {microseconds:6.1f} us")
    with capsys.disabled():
        print(f"\na LoRA layer, bfloat16 base, {adapters} adapters, forward and backward, on the CPU")
        print("\n".join(lines))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory of tensors at one time, temporaries inside operations included."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    live = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.parametrize("num_slots", [4, 16])
def test_memory(num_slots, capsys):
    job = Job("tiny (1M)", num_slots, rank=64)
    numbers = sum(parameter.numel() for parameter in trained(job.model()))
    copies = {"observe": 1, "fused": 1, "observe + cross + attribution": 2}
    base = peak_bytes(two_steps(plain(job)))
    with capsys.disabled():
        print(f"\nmemory beside plain training, r=64, P={numbers}, K={num_slots}")
        for name, each in copies.items():
            extra = peak_bytes(two_steps(METHODS[name](job))) - base
            roles = 4 if "attribution" in name else 0  # two roles and two more
            bar = 1.1 * 4 * numbers * (each * num_slots + roles)
            print(f"  {name:30s} {extra / 2**20:7.1f} MiB   aim <= {bar / 2**20:.1f} MiB")


def two_steps(step: Step) -> Callable[[], None]:
    def both() -> None:
        step()
        step()

    return both
