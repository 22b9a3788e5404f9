"""The two update loops of verl, measured at the same places: forward pass, optimizer step, end of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from gradscope.errors import ProbeError
from gradscope.probes.integrations.examples import RowSource
from gradscope.probes.integrations.processes import joined
from gradscope.probes.integrations.replies import Reply, mean_reward, reply_metrics
from gradscope.probes.integrations.session import Plan, Session, Training
from gradscope.probes.integrations.verl_rows import REWARDS, read_micro_batch


class Loop:
    """Hooks on one object of verl; its methods are replaced on the object and put back by `close`.

    Attributes:
        needs: What the object must have.
        session: Of the training.
        step: The training step that is under way.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, holder: Any, source: RowSource, plan: Plan, *, last_step: int) -> None:
        self.holder = holder
        self.source = source
        self.session = Session(plan)
        self.step = last_step + 1
        self._replaced: list[str] = []
        self._replies: list[Reply] = []
        self._losses: list[float] = []
        self._num_rows = 0
        self.check()
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        training = Training(step=last_step, world_size=size, writes=rank == 0)
        self.session.begin(self.model, training)

    @property
    def model(self) -> torch.nn.Module:
        """The model that is trained."""
        raise NotImplementedError

    def check(self) -> None:
        """Checks that slots can be told apart.

        Raises:
            ProbeError: They cannot.
        """
        if isinstance(self.model, FullyShardedDataParallel):
            raise ProbeError(
                "instrument(): FSDP 1 makes one parameter of several layers'; use actor.strategy=fsdp2."
            )
        if getattr(self.holder, "use_ulysses_sp", False):
            raise ProbeError(
                "instrument(): Ulysses sequence parallelism splits rows between processes; set "
                "ulysses_sequence_parallel_size=1."
            )
        if getattr(self.holder, "use_prefix_grouper", False):
            raise ProbeError(
                "instrument(): use_prefix_grouper lets rows of several slots share a prompt, whose "
                "gradient then belongs to none of them; set actor.use_prefix_grouper=False."
            )
        if getattr(self.holder, "scaler", None) is not None:
            raise ProbeError(
                "instrument(): gradients are multiplied by a loss scale that changes (fp16); use bfloat16."
            )

    def close(self) -> None:
        """Puts the object's own methods back and ends the measuring; safe to call twice."""
        for name in self._replaced:
            delattr(self.holder, name)
        self._replaced.clear()
        self.session.end()

    def replace(self, name: str, around: Callable[..., Any]) -> None:
        """Puts `around(own, *args)` in the place of a method of the object."""
        own = getattr(self.holder, name)
        setattr(self.holder, name, functools.wraps(own)(functools.partial(around, own)))
        self._replaced.append(name)

    def announced(
        self, own: Callable[..., Any], batch: Any, *args: Any, packed: bool, padding: int, **kw: Any
    ) -> Any:
        """Runs a forward pass with its rows announced."""
        read = read_micro_batch(batch, self.source, first_row=self._num_rows)
        self._num_rows += len(read.lengths)
        self._replies += read.replies
        with self.session.rows(**(read.packed(padding) if packed else read.padded())):
            return own(batch, *args, **kw)

    def end_step(self) -> None:
        """Writes the training step and goes to the next."""
        own, self._replies = self._replies, []
        parts, self._losses = self._losses, []
        replies, losses = joined(own), joined(parts)
        metrics: dict[str, Any] = {**reply_metrics(replies), "episode_reward_mean": mean_reward(replies)}
        if losses:
            metrics["loss"] = sum(losses) / len(losses)
        self.session.note(self.step, metrics)
        self.session.flush()
        self.step += 1


class EngineLoop(Loop):
    """An FSDP engine, of verl 0.8 and later."""

    needs = ("forward_step", "optimizer_step", "train_batch", "module", "optimizer", "engine_config")

    def __init__(self, holder: Any, source: RowSource, plan: Plan, *, last_step: int) -> None:
        super().__init__(holder, source, plan, last_step=last_step)
        self.replace("forward_step", self._forward_step)
        self.replace("optimizer_step", self._optimizer_step)
        self.replace("train_batch", self._train_batch)

    @property
    def model(self) -> torch.nn.Module:
        """The engine's module."""
        module: torch.nn.Module = self.holder.module
        return module

    def check(self) -> None:
        """Checks that slots can be told apart."""
        super().check()
        if getattr(self.holder.engine_config, "use_fused_kernels", False):
            head = self.holder.module.get_output_embeddings()
            if head is not None and any(p.requires_grad for p in head.parameters()):
                raise ProbeError(
                    "instrument(): use_fused_kernels multiplies by the head's weight without calling the "
                    "head, which is trained; set model.use_fused_kernels=False."
                )

    def _forward_step(self, own: Callable[..., Any], micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(micro_batch, *args, **kwargs)
        packed = bool(_plain(micro_batch, "use_remove_padding", default=True))
        pad_size = getattr(self.holder, "_get_packed_pad_size", None)  # since verl 0.9
        padding = 0
        if packed and pad_size is not None:
            padding = pad_size(int(micro_batch["input_ids"].offsets()[-1]))
        return self.announced(own, micro_batch, *args, packed=packed, padding=padding, **kwargs)

    def _optimizer_step(self, own: Callable[..., Any]) -> Any:
        self.session.measure(self.holder.optimizer, step=self.step)
        return own()

    def _train_batch(self, own: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        is_last = bool(_plain(data, "update_lr_scheduler", default=True))
        outputs = own(data, *args, **kwargs)
        self._losses.append(float(sum(outputs["loss"])))
        if is_last:
            self.end_step()
        return outputs


class ActorLoop(Loop):
    """A DataParallelPPOActor, of verl up to 0.7."""

    needs = ("_forward_micro_batch", "_optimizer_step", "update_policy", "actor_module", "actor_optimizer")

    def __init__(self, holder: Any, source: RowSource, plan: Plan, *, last_step: int) -> None:
        super().__init__(holder, source, plan, last_step=last_step)
        self.replace("_forward_micro_batch", self._forward)
        self.replace("_optimizer_step", self._step)
        self.replace("update_policy", self._update_policy)

    @property
    def model(self) -> torch.nn.Module:
        """The actor's module."""
        module: torch.nn.Module = self.holder.actor_module
        return module

    def _forward(self, own: Callable[..., Any], micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(micro_batch, *args, **kwargs)
        packed = bool(self.holder.use_remove_padding)
        return self.announced(own, micro_batch, *args, packed=packed, padding=0, **kwargs)

    def _step(self, own: Callable[..., Any]) -> Any:
        self.session.measure(self.holder.actor_optimizer, step=self.step)
        return own()

    def _update_policy(self, own: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = own(_keeping_rows(data, self.source), *args, **kwargs)
        self.end_step()
        return metrics


def _keeping_rows(data: Any, source: RowSource) -> Any:
    """Returns a DataProto of the same content whose `select` keeps what names rows, and their rewards.

    `update_policy` selects the columns it knows before it splits the batch.
    """
    columns = [
        column for column in (source.slot_of, source.problem_of, source.row_id_of) if column is not None
    ]
    named = [column for column in columns if isinstance(column, str)]
    kept = named if len(named) == len(columns) else list(data.non_tensor_batch)
    rewards = [name for name in REWARDS if name in data.batch.keys()][:1]  # noqa: SIM118 - a TensorDict

    class Keeping(type(data)):  # type: ignore[misc]
        def select(
            self, batch_keys: Any = None, non_tensor_batch_keys: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if batch_keys is not None:
                batch_keys = [*batch_keys, *rewards]
            if non_tensor_batch_keys is not None:
                non_tensor_batch_keys = [*non_tensor_batch_keys, *kept]
            return super().select(batch_keys, non_tensor_batch_keys, *args, **kwargs)

    return Keeping(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info=data.meta_info)


def _plain(data: Any, key: str, *, default: Any) -> Any:
    """Returns an entry of a TensorDict that is no tensor."""
    value = data.get(key, default)
    return getattr(value, "data", value)
