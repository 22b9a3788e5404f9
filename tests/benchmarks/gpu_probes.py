"""What the probes cost on an accelerator, beside plain PEFT: a script, split by case and bounded in time.

    python tests/benchmarks/gpu_probes.py --seconds-per-case 18 --json probes.json
    python tests/benchmarks/gpu_probes.py --cases 16x512,r=64 --device cpu --tiny

Model of the shape of Qwen3-0.6B with random weights in bfloat16, LoRA on all linear layers, 256 scored
positions a row. Modes take turns; the median of a mode is over its turns. Timed is forward + backward +
`scope.step` (its Gram matrix on the host included); what the optimizer's step takes longer than in plain
training is added.

Before that slot gradients are compared with separate backward passes on the device itself. A case that fails
says so and the next one begins; what is measured is in the JSON file after every case. The exit code is 1
where anything failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from gradscope import probes

SHAPES = {
    "0.6B": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
}
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCORED = 256
MODES = ("plain", "fused", "observe", "fused + cross + attribution", "pure")
NUM_ROLES = 2
PURE_TURNS = 3
"""Slot-pure micro-batches take many times as long and are only there for comparison."""


@dataclass(frozen=True)
class Case:
    """One setting; `aims` are the largest ratios to plain that are aimed at."""

    rows: int
    tokens: int
    rank: int
    num_slots: int
    adapters: str
    checkpointing: bool
    aims: dict[str, float]

    @property
    def name(self) -> str:
        tail = ", checkpointing" if self.checkpointing else ""
        return f"{self.rows}x{self.tokens} r={self.rank} K={self.num_slots} {self.adapters}{tail}"


def all_cases() -> list[Case]:
    """The settings, those first that were hardest to meet."""
    short = {"fused": 1.05, "observe": 1.15, "fused + cross + attribution": 1.10}
    long = {"fused": 1.00, "observe": 1.06, "fused + cross + attribution": 1.05}
    checkpointed = {"fused": 1.05, "fused + cross + attribution": 1.10}
    grid = [
        (rank, slots, adapters) for adapters in ("bf16", "fp32") for rank in (64, 16) for slots in (4, 16)
    ]
    cases = [Case(16, 512, *setting, False, short) for setting in grid]
    cases += [Case(32, 1024, *setting, False, long) for setting in grid]
    return [*cases, Case(4, 8192, 16, 4, "bf16", True, checkpointed)]


class Trainee:
    """A model with its optimizer and its scope, in one mode."""

    def __init__(self, base: nn.Module, case: Case, mode: str) -> None:
        self.case, self.mode = case, mode
        self.model = _with_adapters(base, case)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=False)
        self.device = self.parameters[0].device
        slots = {f"worker/{k}": f"role {k % NUM_ROLES}" for k in range(case.num_slots)}
        self.slots = [f"worker/{row * case.num_slots // case.rows}" for row in range(case.rows)]
        self.problems = [row % 4 for row in range(case.rows)] if "cross" in mode else None
        self.scope = None
        if mode != "plain":
            self.scope = probes.attach(
                self.model,
                slots,
                mode=mode.split(" ")[0],
                attribution=probes.Attribution(enabled="attribution" in mode),
                evidence=probes.Evidence(modules_every=0),
            )

    def loss(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        scored = min(SCORED, ids.shape[1] - 1)
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=scored + 1).logits[:, :-1]
        targets = ids[:, -scored:].flatten()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="none")
        return (losses.view(len(ids), -1).mean(1) * weights).sum() / self.case.rows

    def gradients(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Forward and backward of all rows."""
        if self.scope is None:
            self.loss(ids, weights).backward()
        elif self.mode == "pure":
            for slot in dict.fromkeys(self.slots):
                rows = [row for row, name in enumerate(self.slots) if name == slot]
                with self.scope.rows([slot] * len(rows)):
                    loss = self.loss(ids[rows], weights[rows])
                loss.backward()
        else:
            with self.scope.rows(self.slots, problems=self.problems):
                loss = self.loss(ids, weights)
            loss.backward()

    def turn(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[float, float, float]:
        """One update; returns ms of its gradients and record, of them on the host, and of the optimizer."""
        marks = [self._mark()]
        begin = time.perf_counter()
        self.gradients(ids, weights)
        host = 1e3 * (time.perf_counter() - begin)
        if self.scope is not None:
            self.scope.step(self.optimizer)
        marks.append(self._mark())
        self.optimizer.step()
        marks.append(self._mark())
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            spans = [a.elapsed_time(b) for a, b in pairwise(marks)]
        else:
            spans = [1e3 * (b - a) for a, b in pairwise(marks)]
        return spans[0], host, spans[1]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _with_adapters(base: nn.Module, case: Case) -> nn.Module:
    """Adapters on a copy of the model that shares the base's weights."""
    shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    settings = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules=ALL_LINEAR)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(
            copy.deepcopy(base, shared), settings, autocast_adapter_dtype=case.adapters == "fp32"
        )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    model.train()
    if case.checkpointing:
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def run_case(base: nn.Module, case: Case, modes: Sequence[str], *, turns: int, seconds: float) -> list[dict]:
    """Measures all modes of one case; stops early, at a whole round, when its time is up."""
    device = next(base.parameters()).device
    generator = torch.Generator().manual_seed(0)
    vocabulary = base.config.vocab_size
    ids = torch.randint(0, vocabulary, (case.rows, case.tokens), generator=generator).to(device)
    weights = torch.randn(case.rows, generator=generator).to(device)
    deadline = time.monotonic() + seconds
    trainees, peaks, launches = {}, {}, {}
    for mode in modes:
        if mode == "pure" and time.monotonic() > deadline:
            modes = [other for other in modes if other != "pure"]
            break
        before = _allocated(device)
        trainees[mode] = Trainee(base, case, mode)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        trainees[mode].turn(ids, weights)
        trainees[mode].turn(ids, weights)
        peaks[mode] = _peak(device) - before
        launches[mode] = None if mode == "pure" else _launches(trainees[mode], ids, weights)
    found: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in modes}
    for number in range(turns):
        if time.monotonic() > deadline and number:
            break
        for mode in modes if number % 2 else modes[::-1]:
            if mode != "pure" or number < PURE_TURNS:
                found[mode].append(trainees[mode].turn(ids, weights))
    numbers = sum(parameter.numel() for parameter in trainees[modes[0]].parameters)
    return [_line(case, mode, found, peaks, launches, numbers) for mode in modes]


def check(device: str) -> dict[str, float]:
    """Returns the largest errors of slot gradients against separate backward passes, by type and mode.

    A small model, rows out of order and of an uneven number for each slot; TF32 off while it lasts.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return {
            f"{'LoRA' if lora else 'all parameters'} {dtype} {mode}": _error(device, dtype, lora, mode)
            for dtype in (torch.float32, torch.bfloat16)
            for lora in (True, False)
            for mode in ("observe", "fused")
        }
    finally:
        torch.set_float32_matmul_precision(precision)


CHECK_SLOTS = ["a", "b", "a", "c", "c", "a", "b", "c", "c", "a", "a"]
CHECK_BARS = {"torch.float32": 1e-5, "torch.bfloat16": 2e-2}
"""Largest error of a slot's gradient, relative to its norm; separate passes round bfloat16 as well."""


def _error(device: str, dtype: torch.dtype, lora: bool, mode: str) -> float:
    torch.manual_seed(0)
    config = Qwen3Config(tie_word_embeddings=True, **SHAPES["tiny"])
    # A model, not its copy to the device: initial numbers are the same everywhere.
    model: nn.Module = Qwen3ForCausalLM(config).to(device, dtype)
    if lora:
        case = Case(len(CHECK_SLOTS), 24, 4, 3, "fp32", False, {})
        model = _with_adapters(model, case)
    ids = torch.randint(0, config.vocab_size, (len(CHECK_SLOTS), 24)).to(device)

    def loss_of(rows: list[int]) -> torch.Tensor:
        logits = model(input_ids=ids[rows], use_cache=False).logits[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[rows, 1:].flatten(), reduction="sum")

    scope = probes.attach(model, dict.fromkeys("abc", "role"), mode=mode)
    with scope.rows(CHECK_SLOTS):
        loss = loss_of(list(range(len(CHECK_SLOTS))))
    loss.backward()
    found = {slot: scope.slot_gradients(slot) for slot in "abc"}
    scope.step(torch.optim.SGD(model.parameters(), lr=0.0))
    scope.detach()
    worst = 0.0
    for slot, own in found.items():
        model.zero_grad()
        loss_of([row for row, name in enumerate(CHECK_SLOTS) if name == slot]).backward()
        expected = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        squares = [[float((own[n] - g).square().sum()), float(g.square().sum())] for n, g in expected.items()]
        gap, size = (sum(part) for part in zip(*squares, strict=True))
        worst = max(worst, (gap / size) ** 0.5)
    return worst


def _line(
    case: Case,
    mode: str,
    found: dict[str, list[tuple[float, float, float]]],
    peaks: dict[str, int],
    launches: dict[str, int | None],
    numbers: int,
) -> dict:
    medians = {
        name: [statistics.median(part) for part in zip(*turns, strict=True)] for name, turns in found.items()
    }
    gradients, host, optimizer = medians[mode]
    plain, _, plain_optimizer = medians["plain"]
    copies = case.num_slots * (2 if "cross" in mode else 1) + (NUM_ROLES + 2 if "attribution" in mode else 0)
    return {
        "case": case.name,
        "setting": asdict(case),
        "mode": mode,
        "turns": len(found[mode]),
        "milliseconds": gradients,
        "host_milliseconds": host,
        "optimizer_milliseconds": optimizer,
        "ratio": (gradients + max(0.0, optimizer - plain_optimizer)) / plain,
        "aim": case.aims.get(mode),
        "launches": launches[mode],
        "extra_bytes": peaks[mode] - peaks["plain"],
        "aim_bytes": 0 if mode == "plain" else int(1.1 * 4 * numbers * copies),
    }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _launches(trainee: Trainee, ids: torch.Tensor, weights: torch.Tensor) -> int | None:
    """Kernels that one update starts; None without an accelerator."""
    if trainee.device.type != "cuda":
        return None
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as recorded:
        trainee.gradients(ids, weights)
        if trainee.scope is not None:
            trainee.scope.step(trainee.optimizer)
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    events = recorded.profiler.kineto_results.events()
    return sum("LaunchKernel" in event.name() for event in events)


def table(lines: Sequence[dict]) -> str:
    """Markdown, one line a case and mode."""
    head = (
        "| case | mode | turns | ms | host ms | ratio | aim | launches | extra GiB | aim GiB |\n"
        + "|---" * 10
        + "|"
    )
    rows = [
        f"| {line['case']} | {line['mode']} | {line['turns']} | {line['milliseconds']:.1f} | "
        f"{line['host_milliseconds']:.1f} | {line['ratio']:.3f} | {line['aim'] or ''} | "
        f"{line['launches'] or ''} | {line['extra_bytes'] / 2**30:.2f} | {line['aim_bytes'] / 2**30:.2f} |"
        for line in lines
    ]
    return "\n".join([head, *rows])


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    """Runs the cases that were asked for; returns what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only cases whose name holds all of these, by commas")
    parser.add_argument(
        "--modes", default=",".join(MODES), help="some of the modes, by commas; plain always runs"
    )
    parser.add_argument("--turns", type=int, default=20, help="turns of each mode")
    parser.add_argument("--seconds-per-case", type=float, default=18.0)
    parser.add_argument("--seconds", type=float, default=1e9, help="no case is begun after this time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model and short rows, to try the script")
    parser.add_argument("--no-check", action="store_true", help="do not compare with separate passes first")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    wanted = [part.strip() for part in options.cases.split(",") if part.strip()]
    cases = [case for case in all_cases() if all(part in case.name for part in wanted)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return []
    asked = [mode.strip() for mode in options.modes.split(",")]
    modes = ["plain", *(mode for mode in MODES[1:] if mode in asked)]
    torch.manual_seed(0)
    config = Qwen3Config(
        tie_word_embeddings=True, max_position_embeddings=8192, **SHAPES["tiny" if options.tiny else "0.6B"]
    )
    with torch.device(options.device):
        base = Qwen3ForCausalLM(config).bfloat16()
    report = Report(options)
    if not options.no_check:
        report.compare()
    longest = 0.0
    for case in cases:
        begin = time.monotonic()
        if report.seconds + longest > options.seconds:
            print(f"left out for want of time: {case.name}", file=sys.stderr)
            continue
        if options.tiny:
            case = replace(case, rows=min(case.rows, 8), tokens=12)
        seconds = min(options.seconds_per_case, options.seconds - report.seconds)
        report.run(case, partial(run_case, base, case, modes, turns=options.turns, seconds=seconds))
        longest = max(longest, time.monotonic() - begin)
    if report.errors and arguments is None:
        sys.exit(1)
    return report.lines


class Report:
    """What was found so far, on the screen and in the file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lines: list[dict] = []
        self.checks: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the beginning."""
        return time.monotonic() - self._begin

    def compare(self) -> None:
        """Runs the comparison with separate backward passes."""
        with self._noted("check"):
            self.checks = check(self.options.device)
            for name, error in self.checks.items():
                bar = next(bar for dtype, bar in CHECK_BARS.items() if dtype in name)
                print(f"{name}: error {error:.1e} (allowed {bar:.0e})", flush=True)
                if not error <= bar:
                    self.errors[f"check: {name}"] = f"error {error:.1e}"

    def run(self, case: Case, measure: Callable[[], list[dict]]) -> None:
        """Measures a case."""
        with self._noted(case.name):
            found = measure()
            self.lines += found
            print(table(found), flush=True)

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Keeps what goes wrong in a block, gives its memory back, and writes the file."""
        try:
            yield
        except Exception as error:
            self.errors[what] = f"{type(error).__name__}: {error}"
            print(f"{what} failed", file=sys.stderr)
            traceback.print_exc()
        gc.collect()
        if self.options.device == "cuda":
            torch.cuda.empty_cache()
        if self.options.json is not None:
            about = torch.cuda.get_device_name() if self.options.device == "cuda" else "cpu"
            found = {"lines": self.lines, "checks": self.checks, "errors": self.errors}
            self.options.json.write_text(
                json.dumps({"device": about, "torch": torch.__version__, "seconds": self.seconds} | found)
            )


if __name__ == "__main__":
    main()
