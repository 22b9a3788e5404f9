"""verl's two update loops, instrumented: packed and padded, dynamic micro-batches, several updates a step."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradscope import open_run
from gradscope.errors import ProbeError
from gradscope.probes.integrations.verl import instrument
from gradscope.probes.integrations.verl_loops import EngineLoop


def load(name):
    """The module of that name beside this file, which no package holds."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


verl = load("verl_recorded")
SLOTS = {"solver/0": "solver", "solver/1": "solver", "judge/0": "judge"}
INSTALLED = importlib.util.find_spec("verl") is not None


class Real(verl.Recorded):
    """Builds verl's own engine on a CPU, around a module that no FSDP wraps, in float32."""

    tolerance = 1e-5

    def __init__(self, nano, folder):
        super().__init__(nano)
        import verl.plugin.platform as platform
        from verl.workers.config import ActorConfig
        from verl.workers.utils.losses import ppo_loss

        names = platform.PlatformBase.__abstractmethods__
        body = dict.fromkeys(names, lambda self, *args, **kwargs: None)
        cpu = {"device_name": "cpu", "vendor_name": "cpu", "device_module": torch.cpu}
        body |= {name: property(lambda self, value=value: value) for name, value in cpu.items()}
        body["current_device"] = lambda self: torch.device("cpu")
        body["nvtx_range"] = lambda self, message: nullcontext()
        platform.set_platform(type("Cpu", (platform.PlatformBase,), body)())
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        config = ActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=2, rollout_n=1)
        self.loss = functools.partial(ppo_loss, config=config)

    def engine(self):
        import verl.utils.torch_functional as functional
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        engine = object.__new__(FSDPEngineWithLMHead)
        vars(engine).update(vars(verl.RecordedEngine(self.nano.lora(dtype=torch.float32))))
        engine.engine_config = SimpleNamespace(
            use_fused_kernels=False, entropy_checkpointing=False, entropy_from_logits_with_chunking=False
        )
        engine.ulysses_sequence_parallel_size, engine.ulysses_device_mesh = 1, None
        engine.pad_to_length, engine.pad_to_length_bucket = True, 8
        engine._autocast_dtype, engine._qat_enabled, engine.pass_packed_cu_seqlens = (
            torch.float32,
            False,
            False,
        )
        engine.compute_entropy_from_logits = functional.entropy_from_logits
        return engine

    def batch(self, seed, *, packed, is_last=True, only=None):
        from verl import DataProto
        from verl.utils import tensordict_utils
        from verl.workers.utils.padding import left_right_2_no_padding

        tensors, strings = self.columns(seed, only)
        tensors = {
            key: value.float() if value.is_floating_point() else value for key, value in tensors.items()
        }
        data = DataProto.from_dict(tensors=tensors, non_tensors=strings, meta_info={"temperature": 1.0})
        data = left_right_2_no_padding(data.to_tensordict())
        return tensordict_utils.assign_non_tensor(
            data,
            use_remove_padding=packed,
            update_lr_scheduler=is_last,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=verl.BUDGET,
            global_batch_size=verl.ROWS,
        )


@pytest.fixture(params=["recorded", "real"])
def kind(request, nano, tmp_path):
    if request.param == "recorded":
        yield verl.Recorded(nano)
        return
    if not INSTALLED:
        pytest.skip("verl is not installed (extra 'verl')")
    try:
        yield Real(nano, tmp_path)
    finally:
        torch.distributed.destroy_process_group()


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize("packed", [True, False])
def test_an_engines_updates_hold_its_slots_and_its_weights_stay_bitwise(nano, kind, tmp_path, packed):
    plain, probed = kind.engine(), kind.engine()
    loop = instrument(SimpleNamespace(engine=probed), slots=SLOTS, slot_of="agent", writer=tmp_path / "run")
    before = []
    for step in range(2):
        for is_last in (False, True):
            batch = {"seed": 2 * step + is_last, "packed": packed, "is_last": is_last}
            before.append((weights(probed.module), batch))
            for engine in (plain, probed):
                engine.train_batch(kind.batch(**batch), kind.loss)
    probed.forward_backward_batch(kind.batch(seed=9, packed=packed), kind.loss, forward_only=True)
    loop.close()
    assert all(map(torch.equal, weights(plain.module), weights(probed.module)))
    assert "forward_step" not in vars(probed)
    run = open_run(tmp_path / "run")
    assert run["updates"]["step"].values.tolist() == [1, 1, 2, 2]
    assert run["updates"]["minibatch"].values.tolist() == [0, 1, 0, 1]
    for place, (values, batch) in enumerate(before):
        update = run["updates"].isel(update=place)
        expected = kind.gram(values, **batch)
        assert nano.gram_error(update["gram"].values, expected) <= kind.tolerance
        tensors, strings = verl.columns(batch["seed"])
        for slot in SLOTS:
            own = torch.tensor(strings["agent"] == slot)
            found = update.sel(slot=slot)
            assert found["num_rows"] == own.sum()
            assert found["num_tokens"] == tensors["response_mask"][own].sum()
            magnitude = tensors["advantages"][own].abs().max(1).values.sum()
            assert float(found["advantage_abs_sum"]) == pytest.approx(float(magnitude))
    assert np.isfinite(run["updates"]["gram_cross"].values).any()
    assert run["train"]["step"].values.tolist() == [1, 2]
    rewards = [verl.columns(seed)[0]["token_level_scores"].sum(1) for seed in (0, 1)]
    assert float(run["train"]["episode_reward_mean"][0]) == pytest.approx(float(torch.cat(rewards).mean()))


@pytest.mark.parametrize("packed", [True, False])
def test_an_actors_updates_know_their_rows_though_it_selects_its_columns(nano, tmp_path, packed):
    plain = verl.DataParallelPPOActor(nano.lora(), use_remove_padding=packed)
    probed = verl.DataParallelPPOActor(nano.lora(), use_remove_padding=packed)
    loop = instrument(SimpleNamespace(actor=probed), slots=SLOTS, slot_of="agent", writer=tmp_path / "run")
    tensors, strings = verl.columns(0)
    for actor in (plain, probed):
        actor.update_policy(verl.DataProto(tensors, strings, {"temperature": 1.0}))
    with torch.no_grad():
        probed._forward_micro_batch(tensors, temperature=1.0)
    loop.close()
    assert all(map(torch.equal, weights(plain.actor_module), weights(probed.actor_module)))
    run = open_run(tmp_path / "run")
    assert run["updates"]["step"].values.tolist() == [1, 1]
    gradients = {}
    for slot in SLOTS:
        actor = verl.DataParallelPPOActor(nano.lora(), use_remove_padding=packed)
        rows = [row for row in range(6) if strings["agent"][row] == slot]
        own = {key: value[rows] for key, value in tensors.items()}
        _, scores = actor._forward_micro_batch(own, temperature=1.0)
        (-(scores * own["advantages"] * own["response_mask"]).sum() / 30).backward()
        gradients[slot] = {n: p.grad for n, p in actor.actor_module.named_parameters() if p.grad is not None}
    first = run["updates"].isel(update=0)
    assert nano.gram_error(first["gram"].values, nano.gram(gradients)) <= 1e-12
    assert first["num_rows"].values.sum() == 6
    assert float(run["train"]["episode_reward_mean"][0]) == pytest.approx(
        float(tensors["token_level_scores"].sum(1).mean())
    )


def test_what_cannot_be_told_apart_is_refused_and_bad_input_gets_one_line(nano, tmp_path):
    kind = verl.Recorded(nano)
    options = {"slots": SLOTS, "writer": tmp_path / "run"}
    for name, value, message in (
        ("use_ulysses_sp", True, "Ulysses sequence parallelism splits rows"),
        ("use_prefix_grouper", True, "rows of several slots share a prompt"),
        ("scaler", object(), r"loss scale that changes \(fp16\)"),
    ):
        engine = kind.engine()
        setattr(engine, name, value)
        with pytest.raises(ProbeError, match=message):
            instrument(engine, **options)
    with pytest.raises(ProbeError, match=r"object has neither forward_step.*Use actor\.strategy=fsdp2"):
        instrument(object(), **options)
    engine = verl.RecordedEngine(nano.model())
    engine.engine_config.use_fused_kernels = True
    with pytest.raises(ProbeError, match=r"head, which is trained; set model\.use_fused_kernels"):
        instrument(engine, **options)
    engine = kind.engine()
    loop = instrument(engine, slot_of="role", **options)
    with pytest.raises(ProbeError, match=r"no column 'role'.*Columns: agent, uid"):
        engine.train_batch(kind.batch(0, packed=True), kind.loss)
    loop.close()


@pytest.mark.skipif(not INSTALLED, reason="verl is not installed (extra 'verl')")
@pytest.mark.filterwarnings("ignore")
def test_the_recorded_interface_is_that_of_the_real_engine():
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    for name in (*EngineLoop.needs[:3], "forward_backward_batch", "_get_packed_pad_size"):
        real, recorded = getattr(FSDPEngineWithLMHead, name), getattr(verl.RecordedEngine, name)
        assert list(inspect.signature(real).parameters) == list(inspect.signature(recorded).parameters)
