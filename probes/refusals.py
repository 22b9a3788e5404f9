"""Models on which no exact measurement is possible, by name and with what to do about it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradscope.errors import ProbeError
from gradscope.probes.taps.capture import Tap
from gradscope.probes.taps.pure import Mark


def refuse_models(model: nn.Module) -> None:
    """Refuses models that are probed or compiled already, or whose layers hide or mix slots.

    Raises:
        ProbeError: With the module and the reason.
    """
    for name, module in model.named_modules():
        _refuse_compiled(module)
        if any(isinstance(hook, Tap | Mark) for hook in module._forward_hooks.values()):
            raise ProbeError(
                f"attach(): the model is probed already (at '{name}'); call detach() of the first scope."
            )
        _refuse_batch_statistics(name, module)
        _refuse_sparse_gradients(name, module)
        _refuse_foreign_paths(name, module)


def _refuse_compiled(module: nn.Module) -> None:
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        raise ProbeError(
            "attach(): the model is compiled; attach to the model that was given to torch.compile, before it "
            "is compiled."
        )


def _refuse_batch_statistics(name: str, module: nn.Module) -> None:
    """Refuses a norm over the rows of the batch: it makes a slot's loss depend on other slots' rows."""
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        raise ProbeError(
            f"attach(): '{name}' ({type(module).__name__}) normalises over the rows of all slots, so "
            "no slot has a gradient of its own. Put it into eval mode before attach(), or use a norm of "
            "single rows."
        )


_FLATTENING = {
    "FullyShardedDataParallel": "FSDP1 flattens parameters, so that no module holds its own",
    "DeepSpeedEngine": "DeepSpeed keeps gradients to itself",
}
"""Wrappers after which parameters have no gradients of their own."""


def _refuse_sparse_gradients(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
        raise ProbeError(
            f"attach(): '{name}' ({type(module).__name__}) has sparse gradients, which have no inner "
            "products here; set sparse=False, or freeze it."
        )


_MEGATRON = ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")
"""Layers whose weight is one shard of a larger one."""


def _refuse_foreign_paths(name: str, module: nn.Module) -> None:
    """Refuses layers that compute gradients where neither autograd nor a tap sees the slots apart."""
    cls = type(module)
    if cls.__name__ in _FLATTENING or any(hasattr(p, "ds_id") for p in module._parameters.values()):
        why = _FLATTENING.get(cls.__name__, "DeepSpeed ZeRO-3 partitions parameters")
        raise ProbeError(
            f"attach(): '{name}' ({cls.__name__}) cannot be probed: {why}. Use fully_shard (FSDP2) or "
            "DistributedDataParallel."
        )
    if cls.__module__.startswith("megatron.") or cls.__name__ in _MEGATRON:
        raise ProbeError(
            f"attach(): '{name}' ({cls.__name__}) is a tensor-parallel layer of Megatron, of which every "
            "process holds a shard; such models cannot be probed. Train with DDP or FSDP2."
        )
    source = _source(module, "unsloth")
    if source is not None:
        raise ProbeError(
            f"attach(): '{name}' ({cls.__name__}) runs {source} of Unsloth, which computes the gradients of "
            "the adapters itself, past the layers. Load the model without Unsloth's fast patching."
        )
    source = _source(module, "liger_kernel")
    head = getattr(module, "lm_head", None)
    if source is not None and isinstance(head, nn.Module) and any(p.requires_grad for p in head.parameters()):
        raise ProbeError(
            f"attach(): '{name}' ({cls.__name__}) runs {source} of Liger, whose fused cross-entropy uses the "
            "trained lm_head past its layer. Apply Liger with fused_linear_cross_entropy=False, or freeze "
            "lm_head."
        )


def _source(module: nn.Module, package: str) -> str | None:
    """Returns the function of a package that a module runs: its class's forward, or one patched onto it."""
    candidates = {"forward": type(module).forward} | {
        name: value for name, value in vars(module).items() if callable(value) and not isinstance(value, type)
    }
    for name, function in candidates.items():
        origin = str(getattr(function, "__module__", None) or "")
        if origin.split(".", maxsplit=1)[0].startswith(package):
            return f"{name}()"
    return None
