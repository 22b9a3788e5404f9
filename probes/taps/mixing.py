"""Watches a forward pass for what makes a slot's loss depend on rows of other slots.

Two things show without a second backward: packed rows of different slots that attend to each other, and a
loss over the rows of all slots that a mixture of experts adds. What is found stays on the device as one
number and is read at the step.

Legend: T tokens of a packed row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradscope.probes.rows import UNTAGGED, RowBatch
from gradscope.probes.taps.capture import Collector

LEAK = (
    "packed rows of different slots attend to each other ({how}), so a slot's loss depends on other slots' "
    "rows. Give position_ids that start again with each row, no two-dimensional attention_mask and "
    "use_cache=False, or a mask that separates rows, or cu_seq_lens; one row must not hold two slots."
)
ROUTER = (
    "the router loss (aux_loss of {name}) is part of a loss over rows of several slots, so no slot has a "
    "gradient of its own. Set output_router_logits=False, or give each slot micro-batches of its own."
)
FORBIDDEN = -1e3
"""A score below this keeps two tokens of an additive mask apart."""


def watch_mixing(model: nn.Module, collector: Collector) -> list[RemovableHandle]:
    """Watches every module whose forward takes tokens with their positions; returns the hooks."""
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        signature = inspect.signature(module.forward)
        if {"input_ids", "position_ids"} <= signature.parameters.keys():
            look = _watch_packed(collector, signature)
            handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
            handles.append(module.register_forward_hook(_watch_router(collector, name)))
    return handles


def _watch_packed(collector: Collector, signature: inspect.Signature) -> Callable[..., None]:
    @torch.compiler.disable
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = collector.rows
        if rows is None or collector.looked_at is rows:
            return
        given = dict(zip(signature.parameters, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is not None and rows.see(tokens.shape[:2]) and len(rows.slots) > 1:
            collector.looked_at = rows
            collector.suspect(*_attention_across(rows, given, getattr(module, "config", None)))

    return look


def _attention_across(rows: RowBatch, given: dict[str, Any], config: Any) -> tuple[torch.Tensor | bool, str]:
    """Returns whether tokens of different slots attend to each other, and the message in case."""
    starts = [
        at
        for at in range(1, len(rows))
        if rows.slot_N[at] != rows.slot_N[at - 1] and UNTAGGED not in rows.slot_N[at - 1 : at + 1]
    ]
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    lengths = next(
        (given[key] for key in ("cu_seq_lens_q", "cu_seqlens") if given.get(key) is not None), None
    )
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        slots = torch.tensor(rows.slot_N, device=mask.device)
        allowed = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > FORBIDDEN
        tagged = slots != UNTAGGED
        other = (slots[:, None] != slots[None, :]) & tagged[:, None] & tagged[None, :]
        return (allowed & other).any(), LEAK.format(how="the attention mask lets them")
    if lengths is not None:
        missing = ~torch.isin(torch.tensor(starts, device=lengths.device), lengths)
        return missing.any(), LEAK.format(how="cu_seq_lens has no boundary where the slot changes")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        # Masks that number the rows of a packed sequence separate them; a mask of ones hides the positions.
        return (mask <= 1).all(), LEAK.format(how="a two-dimensional attention_mask overrides position_ids")
    if mask is not None:
        return False, ""  # a mask object of an attention library, which nobody can read here
    if positions is None:
        return bool(starts), LEAK.format(how="no position_ids")
    if _positions_are_ignored(given, config):
        return bool(starts), LEAK.format(how="use_cache=True makes transformers ignore position_ids")
    at = torch.tensor(starts, device=positions.device)
    row = positions.reshape(-1, positions.shape[-1])[0]
    return (row[at] == row[at - 1] + 1).any(), LEAK.format(how="position_ids go on where the slot changes")


def _positions_are_ignored(given: dict[str, Any], config: Any) -> bool:
    """Whether transformers builds its mask for a cache, and with it for one sequence alone."""
    said = given.get("use_cache")
    caches = getattr(config, "use_cache", False) if said is None else said
    return bool(caches) and not str(getattr(config, "_attn_implementation", "")).startswith("flash")


def _watch_router(collector: Collector, name: str) -> Callable[..., None]:
    @torch.compiler.disable
    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        rows, loss = collector.rows, getattr(output, "aux_loss", None)
        if rows is None or not isinstance(loss, torch.Tensor) or loss.grad_fn is None or len(rows.slots) < 2:
            return

        def arrived(gradient: torch.Tensor) -> None:
            collector.suspect((gradient != 0).any(), ROUTER.format(name=name or type(module).__name__))

        loss.register_hook(arrived)

    return look
