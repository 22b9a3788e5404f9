"""What is checked in each process of a group: see `rank_group.py`. Each check runs on all ranks at once."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import tempfile
import warnings

import numpy as np
import pytest
import torch
from conftest import EXACT, SLOTS, Nano
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradscope
from gradscope import probes
from gradscope.probes import ranks as ranks_module
from gradscope.probes.distributed import Replicas
from gradscope.probes.halves import digest_of

NANO = Nano()
ROLES = dict(SLOTS)
HERE = {
    0: (["generator/0", "aggregator/0", "generator/0", "generator/2"], ["generator/2", "generator/0"]),
    1: (["generator/2", "generator/1", "generator/1", "generator/0"], ["generator/1", "generator/2"]),
}
"""Slots of the rows of each micro-batch: ranks hold different slots, and not the same number of a slot."""


def batches_of(rank):
    return [NANO.batch(slots, seed=10 * rank + number) for number, slots in enumerate(HERE[rank % 2])]


def everywhere(world):
    return [batch for rank in range(world) for batch in batches_of(rank)]


def problems_of(rank, batch):
    """Problems stay on one rank."""
    return [f"problem {rank}.{row % 3}" for row in range(len(batch.slots))]


def loss_of(model, batch, factor=1.0):
    return NANO.loss(model, batch) * factor


def backward_all(scope, model, batches, rank, *, factor, quiet, problems=problems_of):
    """Runs the micro-batches; gradients are added up over ranks in the last."""
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else quiet():
            with scope.rows(batch.slots, problems(rank, batch), tokens=[1.0] * len(batch.slots)):
                loss = loss_of(model, batch, factor)
            loss.backward()


def same_on_all_ranks(record):
    said = [None] * distributed.get_world_size()
    distributed.all_gather_object(said, record)
    for other in said:
        for name in ("gram", "gram_cross", "update_gram", "effect", "attribution_residual"):
            np.testing.assert_array_equal(
                np.asarray(getattr(other, name), dtype=float), np.asarray(getattr(record, name), dtype=float)
            )
        assert other.coverage == record.coverage
        for name, values in other.counts.items():
            np.testing.assert_array_equal(values, record.counts[name])
        np.testing.assert_equal(other.scalars, record.scalars)


def whole_batch(scope, model, batches, world):
    """The same rows on one process, halved as ranks halve them."""
    for place, batch in enumerate(batches):
        rank = place // (len(batches) // world)
        with scope.rows(batch.slots, problems_of(rank, batch)):
            loss = NANO.loss(model, batch)
        loss.backward()


def train(kind, wrapped, scope, world, rank, *, quiet, steps=3, factor=None):
    """Compares the records of a few steps with those of one process that has all rows; returns the last."""
    whole = NANO_MODELS[kind]()
    batches = everywhere(world)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    with probes.attach(whole, ROLES) as whole_scope:
        for _ in range(steps):
            separate = NANO.gram(NANO.separate(whole, batches))
            backward_all(scope, wrapped, batches_of(rank), rank, factor=factor or world, quiet=quiet)
            whole_batch(whole_scope, whole, batches, world)
            record, expected = scope.step(optimizer), whole_scope.step(reference)
            for model, each in ((wrapped, optimizer), (whole, reference)):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                each.step()
                each.zero_grad()
            error = NANO.gram_error(record.gram, separate)
            assert error <= EXACT, error
            assert max(scope.residuals.values()) <= EXACT
            same_on_all_ranks(record)
            same_as_one_process(record, expected)
    rows = [sum(batch.slots.count(slot) for batch in batches) for slot in SLOTS]
    assert record.counts["num_rows"].tolist() == record.counts["num_tokens"].tolist() == rows
    return record


def same_as_one_process(record, expected):
    assert record.attribution_residual <= 1e-10, record.attribution_residual
    for name in ("update_gram", "effect"):
        found, true = getattr(record, name), getattr(expected, name)
        np.testing.assert_allclose(found, true, rtol=1e-9, atol=1e-10 * np.nanmax(np.abs(true)), err_msg=name)
    for name in ("grad_norm", "update_norm", "decay_norm", "clip_factor", "learning_rate"):
        np.testing.assert_allclose(record.scalars[name], expected.scalars[name], rtol=1e-9, err_msg=name)
    for name in ("dot_previous_update", "dot_ema"):
        true = expected.counts[name]
        scale = 0.0 if np.isnan(true).all() else np.nanmax(np.abs(true))
        np.testing.assert_allclose(record.counts[name], true, rtol=1e-9, atol=1e-9 * scale, err_msg=name)


NANO_MODELS = {
    "lora": lambda: NANO.lora(),
    "full": lambda: NANO.model(),
    "untied": lambda: NANO.model(tie_word_embeddings=False),
}


def ddp_lora_attached_before(rank, world):
    model = NANO.lora()
    scope = probes.attach(model, ROLES)
    wrapped = DistributedDataParallel(model)
    with scope:
        record = train("lora", wrapped, scope, world, rank, quiet=wrapped.no_sync)
    return {"residual": record.attribution_residual}


def ddp_full_attached_after(rank, world):
    wrapped = DistributedDataParallel(NANO.model(), static_graph=True, gradient_as_bucket_view=True)
    with probes.attach(wrapped, ROLES) as scope:
        train("full", wrapped, scope, world, rank, quiet=contextlib.nullcontext)


def shard(model, *, reshard, **options):
    layers = [module for module in model.modules() if type(module).__name__ == "Qwen3DecoderLayer"]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    return fully_shard(model, reshard_after_forward=reshard, **options)


def quiet_shards(model):
    @contextlib.contextmanager
    def quiet():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return quiet


def fsdp_lora_attached_before(rank, world):
    model = NANO.lora()
    scope = probes.attach(model, ROLES)
    shard(model, reshard=True)
    with scope:
        train("lora", model, scope, world, rank, quiet=quiet_shards(model))


def evidence_of_modules_and_rows(rank, world):
    """Norms by module and rows of all ranks, in the units of `.grad`, are those of one process."""
    settings = probes.Evidence(modules_every=1, module_gram=True, rows_every=2, top_rows=3, sketch_dim=16)
    model, whole = NANO.lora(), NANO.lora()
    for wrap in (DistributedDataParallel, lambda model: shard(model, reshard=True)):
        wrapped = wrap(copy.deepcopy(model))
        with (
            probes.attach(wrapped, ROLES, evidence=settings) as scope,
            probes.attach(whole, ROLES, evidence=settings) as whole_scope,
        ):
            for _ in range(2):
                for part, one, batches, ranks in (
                    (scope, wrapped, batches_of(rank), [rank]),
                    (whole_scope, whole, everywhere(world), range(world)),
                ):
                    for number, batch in enumerate(batches):
                        own = ranks[number // len(batches_of(rank))]
                        names = [
                            f"{own}.{number % len(batches_of(rank))}.{row}" for row in range(len(batch.slots))
                        ]
                        with part.rows(batch.slots, row_ids=names):
                            loss = loss_of(one, batch, world if one is wrapped else 1.0)
                        loss.backward()
                found = scope.step(torch.optim.SGD(wrapped.parameters(), lr=0.1))
                expected = whole_scope.step(torch.optim.SGD(whole.parameters(), lr=0.1))
                wrapped.zero_grad()
                whole.zero_grad()
                scale = np.nanmax(np.abs(expected.modules.gram))
                np.testing.assert_allclose(found.modules.gram, expected.modules.gram, atol=EXACT * scale)
                assert found.modules.modules == expected.modules.modules
                assert found.rows.row_ids == expected.rows.row_ids
                np.testing.assert_allclose(found.rows.grad_norm, expected.rows.grad_norm, rtol=EXACT)
                assert (found.rows.sketch is None) == (expected.rows.sketch is None)
                if found.rows.sketch is not None:
                    np.testing.assert_allclose(
                        found.rows.sketch, expected.rows.sketch, atol=EXACT * found.rows.grad_norm.max()
                    )
            with pytest.raises(gradscope.errors.ProbeError, match="spread over processes"):
                scope.evidence.components({"whole": loss})


def fused_layers(rank, world):
    """Nodes that hand autograd the sum of the slots, under both ways to share the work."""
    wrapped = DistributedDataParallel(NANO.lora())
    with probes.attach(wrapped, ROLES, mode="fused") as scope:
        train("lora", wrapped, scope, world, rank, quiet=wrapped.no_sync, steps=2)
    for kind, reshard in (("lora", True), ("full", False)):
        model = NANO_MODELS[kind]()
        scope = probes.attach(model, ROLES, mode="fused")
        shard(model, reshard=reshard)
        with scope:
            train(kind, model, scope, world, rank, quiet=quiet_shards(model), steps=2)


def fsdp_full_attached_to_shards(rank, world):
    model = shard(NANO.model(), reshard=True)
    with probes.attach(model, ROLES) as scope:
        train("full", model, scope, world, rank, quiet=quiet_shards(model), steps=2)


def fsdp_full_attached_after(rank, world):
    model = shard(NANO.model(), reshard=False)
    with torch.no_grad():  # leaves whole parameters on the root module
        model(input_ids=batches_of(rank)[0].ids)
    with probes.attach(model, ROLES) as scope:
        train("full", model, scope, world, rank, quiet=quiet_shards(model))


def summed_per_rank_grams_are_wrong(rank, world):
    """What each rank could tell from its own gradients, added up, is not the Gram matrix."""
    model = NANO.lora()
    own = torch.tensor(NANO.gram(NANO.separate(model, batches_of(rank))))
    distributed.all_reduce(own)
    true = NANO.gram(NANO.separate(model, everywhere(world)))
    error = NANO.gram_error(own.numpy(), true)
    norms = np.sqrt(np.diag(own.numpy())) / np.sqrt(np.diag(true))
    assert abs(error - 0.115) < 0.001
    return {"worst entry over the product of norms": error, "norms over true norms": norms.tolist()}


POLICIES = {"generator": "generators", "aggregator": "judge"}


def isolated(rank):
    model = NANO.lora(adapters=("generators", "judge"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


def a_policy_without_rows_on_a_rank(rank, world):
    """Rank 1 has no aggregator: it takes part in that policy's reduction with nothing."""
    model = isolated(rank)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    own = {
        "generators": ["generator/0", "generator/2"] if rank == 0 else ["generator/1"],
        "judge": ["aggregator/0"] * 2,
    }
    expected = {}
    whole = isolated(rank)
    for policy in own:
        activate(whole, policy)
        batches = [
            NANO.batch(slots, seed=place)
            for place, slots in enumerate(
                [["generator/0", "generator/2"], ["generator/1"]]
                if policy == "generators"
                else [["aggregator/0"] * 2]
            )
        ]
        expected[policy] = NANO.gram(NANO.separate(whole, batches))
    with probes.attach(wrapped, ROLES, POLICIES) as scope:
        for policy, slots in own.items():
            activate(model, policy)
            batch = NANO.batch(slots, seed=rank if policy == "generators" else 0)
            if policy == "judge" and rank == 1:
                loss = wrapped(input_ids=batch.ids).logits.sum() * 0.0  # takes part, announces nothing
            else:
                with scope.rows(slots, ["p"] * len(slots) if rank == 0 else None):
                    loss = loss_of(wrapped, batch, world)
            loss.backward()
        records = scope.step(optimizer)
    assert [record.policy for record in records] == ["generators", "judge"]
    for record in records:
        same_on_all_ranks(record)
        there = ~np.isnan(np.diag(record.gram))
        assert there.tolist() == [policy_of(slot) == record.policy for slot in SLOTS]
        places = np.ix_(there, there)
        assert NANO.gram_error(record.gram[places], expected[record.policy][places]) <= EXACT


def policy_of(slot):
    return POLICIES[ROLES[slot]]


def activate(model, policy):
    model.set_adapter(policy)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)


def reference_cross(model, batches, halves):
    """Products of the rows of one half with those of the other, from separate backwards."""
    by_half = []
    for half in (0, 1):
        parts = [
            batch.take([row for row, found in enumerate(own) if found == half])
            for batch, own in zip(batches, halves, strict=True)
        ]
        gradients = NANO.separate(model, [part for part in parts if part.slots])
        by_half.append(
            torch.stack([torch.cat([g.flatten() for g in found.values()]) for found in gradients.values()])
        )
    a, b = by_half
    return (a @ b.T + b @ a.T).numpy()


def problems_that_stay_on_a_rank(rank, world):
    """The first problem of rank 0 goes to the first half, that of rank 1 to the other."""
    model = NANO.lora()
    wrapped = DistributedDataParallel(model)
    slots = ["generator/0", "generator/0", "aggregator/0"]
    problems = {0: ["a", "b", "b"], 1: ["c", "c", "d"]}
    halves = {0: [0, 1, 1], 1: [1, 1, 0]}
    with probes.attach(wrapped, ROLES) as scope:
        with scope.rows(slots, problems[rank]):
            loss = loss_of(wrapped, NANO.batch(slots, seed=rank), world)
        loss.backward()
        record = scope.step(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    same_on_all_ranks(record)
    whole = NANO.lora()
    expected = reference_cross(whole, [NANO.batch(slots, seed=r) for r in (0, 1)], [halves[0], halves[1]])
    there = [0, 3]
    assert np.isnan(record.gram_cross[1]).all()
    np.testing.assert_allclose(
        record.gram_cross[np.ix_(there, there)], expected[np.ix_(there, there)], rtol=1e-10
    )


def problems_spread_over_ranks(rank, world):
    """The first update has no cross products, and says so; from the second on names decide."""
    wrapped = DistributedDataParallel(NANO.lora())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    slots = ["generator/0", "generator/1", "generator/0", "generator/1"]
    said, measured = [], []
    with probes.attach(wrapped, ROLES) as scope:
        for step in range(4):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                problems = [f"{step}-{number}" for number in (0, 1, 2, 3)]
                with scope.rows(slots, problems):
                    loss = loss_of(wrapped, NANO.batch(slots, seed=rank), world)
                loss.backward()
                record = scope.step(optimizer)
                said += [str(warning.message) for warning in caught]
                wrapped.zero_grad()
            same_on_all_ranks(record)
            measured.append(not np.isnan(record.gram_cross).all())
            if step:
                halves = [digest_half(step, problem) for problem in problems]
                expected = reference_cross(
                    NANO.lora(), [NANO.batch(slots, seed=r) for r in range(world)], [halves] * world
                )
                there = ~np.isnan(record.gram_cross)
                np.testing.assert_allclose(record.gram_cross[there], expected[there], rtol=1e-10)
    assert not measured[0]
    assert any(measured[1:])
    assert sum("spread over processes" in text for text in said) == 1


def digest_half(step, problem):
    return (digest_of((step, problem)) or 0) % 2


def step_fails_everywhere(scope, optimizer, *, match):
    with pytest.raises(probes.ProbeError, match=re.escape(match)):
        scope.step(optimizer)
    assert not scope.attached


def a_failure_on_one_rank_ends_all(rank, world):
    """However one rank fails, all raise at the step, none waits, and training goes on."""
    model = NANO.lora()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    slots = ["generator/0", "aggregator/0"]
    batch = NANO.batch(slots, seed=rank)

    scope = probes.attach(wrapped, ROLES)  # an unknown slot on one rank
    with pytest.raises(probes.ProbeError) if rank == 1 else contextlib.nullcontext():  # noqa: SIM117
        with scope.rows(["generator/0", "nobody" if rank == 1 else "aggregator/0"]):
            pass
    loss = loss_of(wrapped, batch)
    loss.backward()
    step_fails_everywhere(scope, optimizer, match=f"on rank 1 of {world}: rows(): unknown slot 'nobody'")
    optimizer.step()
    optimizer.zero_grad()

    scope = probes.attach(wrapped, ROLES)  # a wrong number of rows on one rank
    with scope.rows(slots if rank else [*slots, *slots]):
        loss = loss_of(wrapped, batch)
    loss.backward()
    step_fails_everywhere(scope, optimizer, match=f"on rank 0 of {world}: ")
    optimizer.zero_grad()

    scope = probes.attach(wrapped, ROLES)  # another optimizer on one rank
    with scope.rows(slots):
        loss = loss_of(wrapped, batch)
    loss.backward()
    stranger = torch.optim.SGD(NANO.lora().parameters(), lr=0.1)
    step_fails_everywhere(
        scope, stranger if rank else optimizer, match=f"on rank 1 of {world}: step(): the optimizer holds"
    )
    optimizer.zero_grad()

    scope = probes.attach(wrapped, ROLES)  # gradients that somebody touched on one rank only
    with scope.rows(slots):
        loss = loss_of(wrapped, batch)
    loss.backward()
    if rank == 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2
    step_fails_everywhere(scope, optimizer, match="miss autograd's gradient")
    optimizer.zero_grad()

    with probes.attach(wrapped, ROLES) as scope:  # and all is well again
        with scope.rows(slots):
            loss = loss_of(wrapped, batch)
        loss.backward()
        same_on_all_ranks(scope.step(optimizer))


def nothing_announced_keeps_the_scope(rank, world):
    wrapped = DistributedDataParallel(NANO.lora())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with probes.attach(wrapped, ROLES) as scope:
        NANO.loss(wrapped, batches_of(rank)[0]).backward()
        optimizer.zero_grad()
        with pytest.raises(probes.ProbeError, match="no rows of policy"):
            scope.step(optimizer)
        assert scope.attached


def pure_micro_batches(rank, world):
    """Hooks on parameters see a backward of one slot; under FSDP2 they sit on the whole parameters."""
    own = {0: ["generator/0", "aggregator/0"], 1: ["generator/2", "generator/0"]}
    batches = {r: [NANO.batch([slot] * 2, seed=10 * r + n) for n, slot in enumerate(own[r])] for r in own}
    for sharded in (False, True):
        for attached_before in (False, True):
            model = NANO.lora(use_dora=True, target_modules=["q_proj", "down_proj"])
            expected = NANO.gram(NANO.separate(model, [*batches[0], *batches[1]]))
            wrap = (lambda m: shard(m, reshard=True)) if sharded else DistributedDataParallel
            wrapped = None if attached_before else wrap(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scope = probes.attach(model, ROLES)
            wrapped = wrapped or wrap(model)
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
            quiet = quiet_shards(model) if sharded else wrapped.no_sync
            with scope:
                backward_all(scope, wrapped, batches[rank], rank, factor=world, quiet=quiet)
                record = scope.step(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                assert record.coverage == ()
                there = ~np.isnan(np.diag(record.gram))
                assert (
                    NANO.gram_error(record.gram[np.ix_(there, there)], expected[np.ix_(there, there)])
                    <= EXACT
                )
                assert record.attribution_residual <= 1e-10
                mixed = NANO.batch(["generator/0", "generator/2"], seed=rank)
                with scope.rows(mixed.slots if rank == 0 else ["generator/0"] * 2):
                    loss = loss_of(wrapped, mixed)
                loss.backward()
                record = scope.step(optimizer)
                same_on_all_ranks(record)
                assert len(record.coverage) == 4
                assert all("magnitude" in name for name in record.coverage)


def other_ways_to_shard(rank, world):
    """Along another axis, with a divisor of one's own, and adding up in bfloat16."""
    along_columns = {
        "shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else None
    }
    model = shard(NANO.lora(), reshard=True, **along_columns)
    model.set_gradient_divide_factor(1.0)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    with probes.attach(model, ROLES) as scope:
        train("lora", model, scope, world, rank, quiet=quiet_shards(model), steps=2, factor=1.0)
    model = shard(
        NANO.lora(dtype=torch.float32),
        reshard=True,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    )
    whole = NANO.gram(NANO.separate(NANO.lora(dtype=torch.float32), everywhere(world)))
    with probes.attach(model, ROLES) as scope:
        backward_all(scope, model, batches_of(rank), rank, factor=world, quiet=quiet_shards(model))
        record = scope.step(torch.optim.AdamW(model.parameters(), lr=1e-3))
        same_on_all_ranks(record)
        assert NANO.gram_error(record.gram, whole) < 5e-2  # the forward pass is in bfloat16 too
        assert 1e-6 < scope.residuals["default"] < 2e-2


def ways_that_are_refused(rank, world):
    """Each in one line on every rank, with nothing left waiting."""
    optimizer_of = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    batch = batches_of(rank)[0]

    model = NANO.lora()  # gradients averaged by hand
    scope = probes.attach(model, ROLES)
    with scope.rows(batch.slots):
        loss = loss_of(model, batch)
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)
    step_fails_everywhere(scope, optimizer_of(model), match="averaged before step()")

    wrapped = DistributedDataParallel(NANO.lora())
    scope = probes.attach(wrapped, ROLES)
    with wrapped.join():
        with scope.rows(batch.slots):
            loss = loss_of(wrapped, batch)
        loss.backward()
        step_fails_everywhere(scope, optimizer_of(wrapped), match="DistributedDataParallel.join()")

    model = NANO.lora()  # a root that is not sharded
    for layer in model.modules():
        if type(layer).__name__ == "Qwen3DecoderLayer":
            fully_shard(layer)
            break
    scope = probes.attach(model, ROLES)
    with scope.rows(batch.slots):
        loss = loss_of(model, batch)
    loss.backward()
    step_fails_everywhere(scope, optimizer_of(model), match="trained but not sharded")

    model = shard(NANO.lora(), reshard=True, offload_policy=CPUOffloadPolicy(pin_memory=False))
    scope = probes.attach(model, ROLES)
    with scope.rows(batch.slots):
        loss = loss_of(model, batch)
    loss.backward()
    step_fails_everywhere(scope, optimizer_of(model), match="offloaded to the CPU")

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel()})
    with pytest.raises(probes.ProbeError, match="tensor-parallel"):
        probes.attach(model, ROLES)

    for original in (False, True):
        model = NANO.model()
        scope = probes.attach(model, ROLES)
        whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)
        with pytest.raises(probes.ProbeError, match="FSDP1"), scope.rows(batch.slots):
            pass
        scope.detach()
        with pytest.raises(probes.ProbeError, match="FSDP1"):
            probes.attach(whole, ROLES)


def verification(rank, world):
    """Wrong slots of one rank's rows are seen on every rank."""
    wrapped = DistributedDataParallel(NANO.lora())
    batch = batches_of(rank)[0]
    with probes.attach(wrapped, ROLES) as scope:

        def losses(slots):
            def loss_of_rows(mask):
                with scope.rows(slots):
                    losses = NANO.row_losses(wrapped, batch)
                return (losses * mask).sum()

            return loss_of_rows

        found = scope.verify(losses(batch.slots), batch.slots)
        assert found.relative_error <= EXACT
        said = [None] * world
        distributed.all_gather_object(said, found)
        assert all(one == found for one in said)
        rolled = batch.slots if rank else [*batch.slots[1:], batch.slots[0]]
        with pytest.raises(probes.ProbeError, match="differs by"):
            scope.verify(losses(rolled), batch.slots, slot="generator/0")
        backward_all(scope, wrapped, batches_of(rank), rank, factor=1.0, quiet=wrapped.no_sync)
        same_on_all_ranks(scope.step(torch.optim.SGD(wrapped.parameters(), lr=0.1)))


def hybrid_shards(rank, world):
    """Shards within pairs of ranks, copies across pairs."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    model = shard(NANO.model(), reshard=True, mesh=mesh)
    with probes.attach(model, ROLES) as scope:
        train("full", model, scope, world, rank, quiet=quiet_shards(model), steps=2)


def work_that_fails_on_one_rank(rank, world):
    """What one process cannot do none does; they part at the same place."""
    wrapped = DistributedDataParallel(NANO.lora())
    ranks = Replicas(wrapped)

    def work():
        if rank == 1:
            raise MemoryError("no room")
        return rank

    with pytest.raises(probes.ProbeError, match=f"on rank 1 of {world}: MemoryError: no room"):
        ranks.together(work)
    assert ranks.together(lambda: rank) == rank
    assert ranks.unanimous(True)
    assert not ranks.unanimous(rank == 0)


def pieces_in_windows(rank, world):
    """What is sent at a time does not change what arrives."""
    sizes = [(5, 3), (1,), (2, 4), (7,)]
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    )
    wrapped = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(rank)
    sums = torch.randn(3, sum(p.numel() for p in model), generator=generator, dtype=torch.float64)
    whole = sums.clone()
    distributed.all_reduce(whole)
    before = ranks_module.BUFFER_NUMBERS
    try:
        for numbers in (1, 3 * world, 3 * world * 2, before):
            ranks_module.BUFFER_NUMBERS = numbers
            replicas = Replicas(wrapped)
            found = replicas.local_sums(sums, list(model))
            columns = whole.split([p.numel() for p in model], dim=1)
            expected = (
                torch.cat([torch.stack([replicas.local(row) for row in part]) for part in columns], dim=1)
                / world
            )
            torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    finally:
        ranks_module.BUFFER_NUMBERS = before


def one_rank_writes(rank, world):
    """A second writer of the same run is turned away in one line."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    distributed.broadcast_object_list(folder)
    settings = {"slots": ROLES, "policies": dict.fromkeys(ROLES, "default"), "world_size": world}
    wrapped = DistributedDataParallel(NANO.lora())
    batch = batches_of(rank)[0]
    with probes.attach(wrapped, ROLES) as scope:
        with scope.rows(batch.slots):
            loss = loss_of(wrapped, batch)
        loss.backward()
        record = scope.step(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    if rank == 0:
        with gradscope.RunWriter(f"{folder[0]}/run", **settings) as writer:
            writer.append(1, record)
            distributed.barrier()
            distributed.barrier()
        run = gradscope.open_run(f"{folder[0]}/run")
        np.testing.assert_array_equal(run["updates"]["gram"].values[0], record.gram)
        assert run["segments"]["world_size"].values.tolist() == [world]
        shutil.rmtree(folder[0])
    else:
        distributed.barrier()
        with pytest.raises(gradscope.errors.RunFileError):
            gradscope.RunWriter(f"{folder[0]}/run", **settings)
        distributed.barrier()


def momenta_in_checkpoints(rank, world):
    """Each rank saves its pieces; a run that goes on attributes as one that never stopped."""
    for sharded in (False, True):
        records = []
        for stopped in (False, True):
            model, optimizer, scope = resumable(sharded)
            for step in range(3):
                if stopped and step == 2:
                    kept = copy.deepcopy([optimizer.state_dict(), scope.state_dict()])
                    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                    optimizer.load_state_dict(kept[0])
                    scope.detach()
                    scope = probes.attach(model, ROLES)
                    foreign = kept[1] | {"rank": 1 - kept[1]["rank"]}
                    with pytest.raises(probes.ProbeError, match=f"this is rank {rank} of {world}"):
                        scope.load_state_dict(foreign)
                    scope.load_state_dict(kept[1])
                quiet = quiet_shards(model) if sharded else model.no_sync
                backward_all(scope, model, batches_of(rank), rank, factor=world, quiet=quiet)
                record = scope.step(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            scope.detach()
            records.append(record)
        whole, resumed = records
        assert resumed.attribution_residual <= 1e-10
        np.testing.assert_allclose(resumed.update_gram, whole.update_gram, rtol=1e-10, atol=1e-18)


def resumable(sharded):
    model = NANO.lora()
    model = shard(model, reshard=True) if sharded else DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), probes.attach(model, ROLES)
