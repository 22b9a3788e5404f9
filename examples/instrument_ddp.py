"""A DDP loop over a LoRA policy, instrumented.

    torchrun --nproc_per_node 2 examples/instrument_ddp.py runs/ddp

The lines marked with `# +` are all that instrumentation adds. Every rank measures, rank 0 writes.
"""

import contextlib
import sys

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

import gradscope  # +
from gradscope import probes  # +

SLOTS = {"solver/0": "solver", "solver/1": "solver", "judge/0": "judge"}


def make_model() -> torch.nn.Module:
    """Returns a tiny model with an adapter, the same on every rank."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=64, num_attention_heads=2, num_key_value_heads=1, **size)
    return get_peft_model(Qwen3ForCausalLM(config), LoraConfig(r=4, target_modules="all-linear"))


def make_batch(step: int, rank: int) -> tuple[torch.Tensor, list[str], list[str]]:
    """Returns tokens, slots and problems of a rank's rows; a problem's rows stay on one rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    problems = [f"problem-{step}-{rank}-{number}" for number in (0, 1) for _ in SLOTS]
    return torch.randint(64, (6, 12), generator=generator), [*SLOTS, *SLOTS], problems


def main() -> None:
    """Trains four steps of two micro-batches."""
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    scope = probes.attach(model, SLOTS)  # +
    writer = contextlib.nullcontext()
    if rank == 0:
        writer = gradscope.RunWriter(  # +
            sys.argv[1], slots=SLOTS, policies=dict.fromkeys(SLOTS, "default"), world_size=world
        )
    with writer as run:
        for step in range(1, 5):
            for micro_batch in range(2):
                tokens, slots, problems = make_batch(2 * step + micro_batch, rank)
                with contextlib.nullcontext() if micro_batch else model.no_sync():
                    with scope.rows(slots, problems):  # +
                        loss = model(input_ids=tokens, labels=tokens).loss / 2
                    loss.backward()
            record = scope.step(optimizer)  # +
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.append(step, record, metrics={"loss": float(loss.detach())})  # +
    scope.detach()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
