"""What the run file costs at 7 slots x 200 modules, beside what other tools take for the same numbers.

Printed by `make bench`, never asserted on. The payload of a step: 1400 norms of modules (float32), a 7 x 7
Gram, and the scalars that a trainer logs, 1.6 thousand numbers in all, 6.9 kB. Fractions are of 48 replies.

Run as a script, `NAME FOLDER STEPS`, it writes with one tool and does nothing else.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pytest

from gradscope import RunWriter, open_run
from gradscope.runfile import UpdateRecord
from gradscope.runfile.mirror import MetricsMirror

pytestmark = pytest.mark.benchmark

SLOTS = {f"worker/{k}": "worker" for k in range(7)}
NAMES = tuple(SLOTS)
MODULES = [f"model.layers.{n // 7}.proj_{n % 7}" for n in range(200)]
FRACTIONS = ("reward_mean", "accuracy", "zero_advantage_fraction", "truncated_fraction", "violation_fraction")
METRICS = (
    *FRACTIONS, "reward_std", "advantage_abs_mean", "response_tokens_mean", "response_tokens_p95", "entropy",
    "kl_reference", "clip_fraction",
)  # fmt: skip
SCALE = np.random.default_rng(0).lognormal(size=(7, 200))
"""Modules differ in size more than steps do."""


def payload(step):
    """Returns the record, the metrics and the norms of the modules of a step."""
    rng = np.random.default_rng(step)
    gradients = rng.normal(size=(7, 30))
    metrics = {"loss": float(rng.normal()), "episode_reward_mean": float(rng.random())}
    for name in METRICS:
        values = rng.integers(0, 49, 7) / 48 if name in FRACTIONS else rng.random(7)
        metrics[name] = dict(zip(NAMES, values.tolist(), strict=True))
    record = UpdateRecord(
        "shared",
        NAMES,
        gradients @ gradients.T,
        counts={"num_rows": np.full(7, 8.0), "num_tokens": rng.integers(100, 900, 7).astype(float)},
        scalars={"learning_rate": 1e-3, "grad_norm": float(rng.random()), "clip_factor": 1.0},
    )
    return record, metrics, (SCALE * rng.lognormal(sigma=0.3, size=(7, 200))).astype(np.float32)


def flat(step):
    """Returns the payload as every tool of scalars takes it: one name a number."""
    record, metrics, norms = payload(step)
    numbers = {f"updates/{name}": value for name, value in record.scalars.items()}
    numbers |= {
        f"updates/{name}/{slot}": value
        for name, values in record.counts.items()
        for slot, value in zip(NAMES, values.tolist(), strict=True)
    }
    for name, value in metrics.items():
        numbers |= (
            {f"{name}/{slot}": own for slot, own in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    gram = record.gram.tolist()
    numbers |= {f"gram/{a}/{b}": gram[i][j] for i, a in enumerate(NAMES) for j, b in enumerate(NAMES)}
    values = norms.tolist()
    for k, slot in enumerate(NAMES):
        numbers |= {f"norm/{slot}/{module}": values[k][m] for m, module in enumerate(MODULES)}
    return numbers


def append(writer, step, prepared):
    record, metrics, norms = prepared
    writer.append(step, record, metrics=metrics)
    writer.append_modules(step, slots=NAMES, modules=MODULES, grad_norm=norms)


def write_run(path, num_steps):
    """Writes a run; returns the CPU milliseconds of each step in the training thread."""
    seconds = []
    with RunWriter(path, slots=SLOTS, policies={"worker": "shared"}) as writer:
        for step in range(num_steps):
            prepared = payload(step)
            begin = time.thread_time()
            append(writer, step, prepared)
            seconds.append(time.thread_time() - begin)
    return 1e3 * np.array(seconds)


def mirror_milliseconds(path, num_steps):
    """Returns the CPU milliseconds of each step that the mirror metrics.jsonl takes."""
    mirror = MetricsMirror(path, keep_to_step=None)
    milliseconds = []
    for step in range(num_steps):
        record, metrics, _ = payload(step)
        begin = time.thread_time()
        mirror.append(step, [record], metrics)
        milliseconds.append(1e3 * (time.thread_time() - begin))
    mirror.close()
    return np.array(milliseconds)


def raw_bytes(path):
    """Returns what the arrays of a run take uncompressed."""
    sizes = []
    with h5py.File(path / "run.h5") as file:
        file.visititems(
            lambda _, node: sizes.append(node.size * node.dtype.itemsize if hasattr(node, "size") else 0)
        )
    return sum(sizes)


def say(capsys, text):
    with capsys.disabled():
        print(f"\n{text}", end="")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "run"
    return path, write_run(path, 10_000)


def test_appending_and_size(long_run, tmp_path, capsys):
    path, milliseconds = long_run
    size, raw = (path / "run.h5").stat().st_size, raw_bytes(path)
    median, mean = np.median(milliseconds), milliseconds.mean()
    say(capsys, f"append: {median:.2f} ms CPU a step (median of 10,000; mean {mean:.2f}); bar 0.5")
    mirror = np.median(mirror_milliseconds(tmp_path / "metrics.jsonl", 2000))
    say(capsys, f"  of which the mirror metrics.jsonl, which no other tool writes: {mirror:.2f} ms")
    say(capsys, f"file: {size / 1e6:.1f} MB, {size / raw:.3f} of the raw bytes; bar 0.82")


DIAGNOSE = (
    "import sys, time\nfrom gradscope import cli\n"
    "try:\n    cli.main(['diagnose', sys.argv[1]])\n"
    "except SystemExit:\n    print(time.process_time())"
)


def test_opening_and_diagnosing_ten_thousand_steps(long_run, capsys):
    path, _ = long_run
    seconds = []
    for _ in range(3):
        command = [sys.executable, "-c", DIAGNOSE, str(path)]
        seconds.append(
            float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
        )
    say(capsys, f"open and diagnose 10,000 steps, cold: {min(seconds):.2f} CPU s, imports included; bar 2")


def queued():
    """Returns how many seconds this thread has been ready to run while others had the processors."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def longest_stalls(is_over):
    """Returns the longest times, in ms, that this thread did not get on until something is over.

    The first counts waiting for locks, as Python's, and for devices: what a compaction could be to blame for.
    The second also counts what a busy machine takes, with or without a compaction.
    """
    blocked = longest = 0.0
    before = time.perf_counter()
    most = before - time.thread_time() - queued()
    while not is_over():
        now = time.perf_counter()
        # Of what passes between the readings of the clocks the sum recovers with the next reading.
        total = now - time.thread_time() - queued()
        blocked, longest = max(blocked, total - most), max(longest, now - before)
        most, before = max(most, total), now
    return 1e3 * blocked, 1e3 * longest


def stalls_in_a_compaction(writer, path):
    """Returns how long `compact` took to begin a compaction, and the longest stalls until its end, in ms."""
    before = path.stat().st_ino
    begin = time.perf_counter()
    writer.compact()
    called = 1e3 * (time.perf_counter() - begin)
    return called, longest_stalls(lambda: path.stat().st_ino != before)


def stalls_without(seconds):
    end = time.perf_counter() + seconds
    return longest_stalls(lambda: time.perf_counter() > end)


def test_the_longest_stall_of_the_training_thread(tmp_path, capsys):
    calls, found, control = {}, [], []
    for fsync in ("never", "checkpoint"):
        folder = tmp_path / fsync
        with RunWriter(folder, slots=SLOTS, policies={"worker": "shared"}, fsync=fsync) as writer:
            for step in range(9_000):
                append(writer, step, payload(step))
            writer.compact(wait=True)
            size = (folder / "run.h5").stat().st_size / 1e6
            for trial in range(3):
                for step in range(40):
                    append(writer, 9_000 + 40 * trial + step, payload(step))
                called, stalls = stalls_in_a_compaction(writer, folder / "run.h5")
                calls.setdefault(fsync, []).append(called)
                found.append(stalls)
                control.append(stalls_without(1.5))
    blocked, longest = (", ".join(f"{ms:.1f}" for ms in own) for own in zip(*found, strict=True))
    alone, busy = (", ".join(f"{ms:.1f}" for ms in own) for own in zip(*control, strict=True))
    never, checkpoint = (", ".join(f"{ms:.1f}" for ms in calls[fsync]) for fsync in calls)
    say(capsys, f"longest wait for a lock or device while {size:.0f} MB are compacted: {blocked} ms; bar 5")
    say(capsys, f"  without a compaction: {alone} ms; with the queue for a processor: {longest} ms")
    say(capsys, f"  the same without a compaction: {busy} ms")
    say(
        capsys,
        f"  compact() itself: {never} ms; with fsync of the journal, as at checkpoints: {checkpoint} ms",
    )


def folder_size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def with_gradscope(path, num):
    milliseconds = write_run(path / "run", num)
    (path / "run" / "metrics.jsonl").unlink()
    return milliseconds, lambda: open_run(path / "run").load()


def timed(num, put):
    """Returns the CPU milliseconds of each call of `put`, all threads, on numbers made before."""
    milliseconds = []
    for step in range(num):
        numbers = flat(step)
        begin = time.process_time()
        put(step, numbers)
        milliseconds.append(1e3 * (time.process_time() - begin))
    return np.array(milliseconds)


def with_jsonl(path, num):
    with (path / "log.jsonl").open("w") as file:
        milliseconds = timed(
            num, lambda step, numbers: file.write(json.dumps({"step": step, **numbers}) + "\n")
        )

    def read():
        with (path / "log.jsonl").open() as file:
            return [json.loads(line) for line in file]

    return milliseconds, read


def with_tensorboard(path, num):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(path))

    def put(step, numbers):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    milliseconds = timed(num, put)
    writer.close()
    return milliseconds, lambda: EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()


def with_wandb(path, num):
    import wandb

    run = wandb.init(
        mode="offline", dir=str(path), settings=wandb.Settings(silent=True, x_disable_stats=True)
    )
    milliseconds = timed(num, lambda step, numbers: run.log(numbers, step=step))
    run.finish()
    return milliseconds, None


def in_blocks(num, put, size=64):
    """Appends arrays in blocks, as formats of columns are written; returns the CPU milliseconds of a step."""
    block, milliseconds = [], []
    for step in range(num):
        record, metrics, norms = payload(step)
        begin = time.process_time()
        row = {"gram": record.gram, "norms": norms, "loss": np.float64(metrics["loss"])}
        row |= {name: np.array(list(metrics[name].values())) for name in METRICS}
        block.append(row)
        if len(block) == size or step == num - 1:
            put({name: np.stack([own[name] for own in block]) for name in row})
            block = []
        milliseconds.append(1e3 * (time.process_time() - begin))
    return np.full(num, np.mean(milliseconds))


def with_zarr(path, num):
    import zarr

    group = zarr.open_group(str(path / "run.zarr"), mode="w")

    def put(block):
        for name, values in block.items():
            if name in group:
                group[name].append(values)
            else:
                array = group.create_array(name, shape=values.shape, chunks=values.shape, dtype=values.dtype)
                array[:] = values

    milliseconds = in_blocks(num, put)
    return milliseconds, lambda: {name: array[:] for name, array in group.arrays()}


def with_parquet(path, num):
    import pyarrow
    import pyarrow.parquet

    parts = []

    def put(block):
        columns = {
            name: pyarrow.FixedSizeListArray.from_arrays(values.ravel(), max(1, values[0].size))
            for name, values in block.items()
        }
        part = path / f"{len(parts):05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), part, compression="zstd")
        parts.append(part)

    milliseconds = in_blocks(num, put)
    return milliseconds, lambda: [pyarrow.parquet.read_table(part) for part in parts]


OTHERS = {
    "gradscope": (with_gradscope, (), 2000),
    "JSONL": (with_jsonl, (), 2000),
    "zarr": (with_zarr, ("zarr",), 2000),
    "parquet": (with_parquet, ("pyarrow",), 2000),
    "TensorBoard": (with_tensorboard, ("tensorboard", "torch"), 100),
    "W&B offline": (with_wandb, ("wandb",), 600),
}


LAUNCHER = """
import ctypes, os, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
code = subprocess.run([sys.executable, *sys.argv[1:]]).returncode
try:
    while True:
        os.wait()
except ChildProcessError:
    sys.exit(code)
"""


def cpu_of_all_processes(name, folder, num):
    """Returns the CPU seconds of writing steps with a tool, helper processes included.

    Helpers that their tool left behind are waited for as well: the launcher adopts them.
    """
    before = os.times()
    command = [sys.executable, "-c", LAUNCHER, __file__, name, str(folder), str(num)]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("name", OTHERS)
def test_beside_other_tools(name, tmp_path, capsys):
    write, packages, num = OTHERS[name]
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: see the extras 'importers' and 'bench'")
    folders = [tmp_path / label for label in ("here", "many", "few")]
    for folder in folders:
        folder.mkdir()
    # First, for a process started later would share the helper that W&B starts for this one, uncounted.
    more = cpu_of_all_processes(name, folders[1], num) - cpu_of_all_processes(name, folders[2], num // 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        milliseconds, read = write(folders[0], num)
        seconds = "-"
        if read is not None:
            begin = time.process_time()
            read()
            seconds = f"{(time.process_time() - begin) / num * 10_000:.1f}"
    size = folder_size(folders[0]) / 1e6 / num * 10_000
    say(
        capsys,
        f"{name:<12} append {np.median(milliseconds):6.2f} ms CPU (median; mean of all processes "
        f"{1e3 * more / (0.9 * num):5.2f}), {size:5.0f} MB, {seconds:>5} s to read 10,000 steps (from {num})",
    )


if __name__ == "__main__":
    OTHERS[sys.argv[1]][0](Path(sys.argv[2]), int(sys.argv[3]))
