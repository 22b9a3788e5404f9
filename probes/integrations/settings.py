"""What the run file keeps of a trainer's settings: what it learns from, grouped, and how it ran, apart."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

HOW_IT_RAN = (
    "activation_checkpointing", "bf16_full_eval", "dataloader_", "data_seed", "ddp_", "disable_tqdm", "do_",
    "eval_", "fp16_full_eval", "gradient_checkpointing", "hub_", "include_", "load_best_", "local_rank",
    "log_", "logging_", "metric_for_best_model", "output_dir", "per_device_eval_batch_size",
    "prediction_loss_only", "project", "push_to_hub", "report_to", "restore_", "resume_", "run_name", "save_",
    "seed", "skip_memory_metrics", "torch_compile", "trackio_", "use_cpu", "vllm_",
)  # fmt: skip
"""Beginnings of the names of settings that do not change what is learned."""


def run_settings(trainer: Any) -> dict[str, dict[str, Any]]:
    """Returns a trainer's configuration in groups, of its arguments those that are not as by default.

    Runs that differ in the group `run` alone are seeds of one cell.

    Args:
        trainer: A `transformers.Trainer`.
    """
    args, model = trainer.args, trainer.model
    said = args.to_sanitized_dict()
    chosen = {
        one.name: said[one.name]
        for one in fields(args)
        if one.name == "learning_rate" or _is_chosen(one, getattr(args, one.name))
    }
    how = {name: value for name, value in chosen.items() if name.startswith(HOW_IT_RAN)}
    groups = {
        "trainer": {"name": type(trainer).__name__},
        "model": {"path": _name(model)},
        "adapter": _adapters(model),
        "task": _task(trainer.train_dataset),
        "train": {name: value for name, value in chosen.items() if name not in how},
        "run": how,
    }
    return {group: values for group, values in groups.items() if values}


def _is_chosen(one: Field[Any], value: Any) -> bool:
    """Whether a setting is a plain value that is not the default; trainers fill objects in by themselves."""
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    return isinstance(value, bool | int | float | str) and value != default


def _name(model: Any) -> str:
    """Returns the path or the name that a model was loaded by, else its class."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return str(getattr(base, "name_or_path", "") or type(base).__name__)


def _adapters(model: Any) -> dict[str, Any]:
    """Returns kind, rank and scale of each adapter of PEFT."""
    found = {}
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        kept = {key: getattr(config, key, None) for key in ("r", "lora_alpha", "use_rslora", "use_dora")}
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        found[name] = {"type": kind, **{key: value for key, value in kept.items() if value}}
    return found


def _task(dataset: Any) -> dict[str, Any]:
    name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    size = len(dataset) if hasattr(dataset, "__len__") else None
    known = {"name": name, "num_examples": size}
    return {key: value for key, value in known.items() if value is not None}
