"""Loss of power, which a kill cannot test: recorded writes are replayed without some that were not synced.

A file keeps what was written before its last sync, and of later writes any subset, whole or in part. A folder
keeps the names it had at its last sync, and of later renames and deletions any subset. That is less than any
file system in use promises.
"""

import os
import threading
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest

from gradscope.errors import RunFileError
from gradscope.runfile import RunWriter, UpdateRecord, durable
from gradscope.runfile.load import load

SLOTS = {"a/0": "a", "a/1": "a"}
POLICIES = {"a": "p"}


@dataclass
class Recording:
    """System calls in order, as `(what, file number or name, ...)`, and what was promised in between."""

    folder: str
    calls: list = field(default_factory=list)
    names: dict = field(default_factory=dict)
    descriptors: dict = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_files: int = 0

    def promise(self, steps, segment):
        """From here on the steps must survive."""
        with self.lock:
            self.calls.append(("promise", steps, segment))

    def patch(self, monkeypatch):
        for name in ("create", "append", "cut", "sync_data", "rename", "remove", "sync"):
            monkeypatch.setattr(durable, name, self._wrap(getattr(durable, name), getattr(self, f"_{name}")))

    def _wrap(self, whole, note):
        def call(*arguments):
            with self.lock:
                # Nothing has to be on this machine's disk.
                result = None if whole.__name__.startswith("sync") else whole(*arguments)
                note(result, *arguments)
                return result

        return call

    def _create(self, descriptor, path):
        self.num_files += 1
        self.descriptors[descriptor] = self.names[path.name] = self.num_files
        self.calls.append(("name", path.name, self.num_files))

    def _append(self, written, descriptor, data):
        self.calls.append(("write", self.descriptors[descriptor], bytes(data[:written])))

    def _cut(self, _, descriptor, num_bytes):
        self.calls.append(("cut", self.descriptors[descriptor], num_bytes))

    def _sync_data(self, _, descriptor):
        self.calls.append(("sync", self.descriptors[descriptor]))

    def _rename(self, _, path, target):
        if path.name in self.names:  # announcements of writers are not data
            self.names[target.name] = self.names.pop(path.name)
            self.calls.append(("rename", path.name, target.name, self.names[target.name]))

    def _remove(self, _, path):
        if self.names.pop(path.name, None) is not None:
            self.calls.append(("remove", path.name))

    def _sync(self, _, path):
        self.calls.append(("sync", self.names[path.name]) if path.name in self.names else ("sync names",))


def value(step, segment):
    return np.random.default_rng([step, segment]).normal(size=(2, 2))


def record_run(folder, monkeypatch, policy):
    """A run with compactions, labels that turn up late, a resume that supersedes steps, and an end."""
    recording = Recording(str(folder))
    with monkeypatch.context() as patch:
        recording.patch(patch)
        for segment, steps in enumerate([range(40), range(30, 70), range(70, 77)]):
            resume = steps[0] - 1 if segment else None
            recording.calls.append(("resume", range(steps[0])))
            with RunWriter(
                folder, slots=SLOTS, policies=POLICIES, resume_from_step=resume, fsync=policy
            ) as writer:
                for step in steps:
                    gram = value(step, segment)
                    metrics = {"loss": gram[0, 0], "seconds": {f"phase{step // 15}": 1.0}}
                    writer.append(step, UpdateRecord("p", tuple(SLOTS), gram), metrics=metrics)
                    if policy == "record":
                        recording.promise([step], segment)
                    if step % 7 == 6:
                        writer.compact(wait=policy == "never" or step % 2 == 0)
                        recording.promise(range(steps[0], step + 1), segment)
            recording.promise(steps, segment)
    return recording


def disk_after(calls, rng):
    """Returns name to bytes after a loss of power behind those calls.

    Without `rng` all of them happened, as after a kill.
    """
    safe, names = {}, {}
    pending, pending_names = {}, []
    sizes = {}
    for what, *rest in calls:
        if what in ("write", "cut"):
            file, content = rest
            size = sizes.get(file, 0)
            pending.setdefault(file, []).append((what, size, content))
            sizes[file] = size + len(content) if what == "write" else content
        elif what == "sync":
            safe[rest[0]] = _applied(safe.get(rest[0], b""), pending.pop(rest[0], ()), None)
        elif what == "sync names":
            names, pending_names = _renamed(names, pending_names, None), []
        elif what not in ("promise", "resume"):
            pending_names.append((what, *rest))
    names = _renamed(names, pending_names, rng)
    return {name: _applied(safe.get(file, b""), pending.get(file, ()), rng) for name, file in names.items()}


def _applied(content, writes, rng):
    content = bytearray(content)
    for what, start, data in writes:
        if rng is not None and rng.random() < 0.5:
            continue
        if what == "cut":
            del content[data:]
            continue
        if rng is not None and rng.random() < 0.3:
            data = data[: rng.integers(0, len(data) + 1)]
        content.extend(bytes(max(0, start - len(content))))
        content[start : start + len(data)] = data
    return bytes(content)


def _renamed(names, changes, rng):
    names = dict(names)
    for what, name, *rest in changes:
        if rng is not None and rng.random() < 0.5:
            continue
        if what == "name":
            names[name] = rest[0]
        else:
            names.pop(name, None)
            if what == "rename":
                names[rest[0]] = rest[1]
    return names


def promised(calls):
    """Returns step to the segment that must hold it, None where any may."""
    steps = {}
    for what, *rest in calls:
        if what == "resume":  # which moves later steps aside, or has not yet
            steps = dict.fromkeys(*rest)
        elif what == "promise":
            steps |= dict.fromkeys(*rest)
    return steps


def check(folder, calls, rng):
    for name, data in disk_after(calls, rng).items():
        (folder / name).write_bytes(data)
    steps = promised(calls)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = load(folder).content
    except RunFileError:
        if steps:
            raise
        return 0
    train, updates = content.tables.get("train", {}), content.tables.get("updates", {})
    found = dict(zip(train.get("step", ()), train.get("segment", ()), strict=True))
    assert len(found) == len(train.get("step", ()))
    assert sorted(found) == list(found)
    for step, segment in steps.items():
        assert step in found, f"step {step} is lost"
        assert segment is None or found[step] >= segment
    for step, segment, gram in zip(*(updates.get(v, ()) for v in ("step", "segment", "gram")), strict=True):
        np.testing.assert_array_equal(gram, value(step, segment))
    for step, segment, loss in zip(*(train.get(v, ()) for v in ("step", "segment", "loss")), strict=True):
        assert loss == value(step, segment)[0, 0]
    return len(steps)


def replay(folder, recording, num, *, seed):
    rng = np.random.default_rng(seed)
    num_promised = 0
    for number in range(num):
        calls = recording.calls[: rng.integers(1, len(recording.calls) + 1)]
        image = folder / f"image{number}"
        image.mkdir()
        num_promised += check(image, calls, rng if number % 4 else None)
        for path in image.iterdir():
            path.unlink()
        os.rmdir(image)
    assert num_promised > 5 * num


POLICIES_OF_FSYNC = ["never", "checkpoint", "record"]


@pytest.mark.parametrize("policy", POLICIES_OF_FSYNC)
def test_no_synced_step_is_lost_in_twenty_replays(tmp_path, monkeypatch, policy):
    replay(tmp_path, record_run(tmp_path / "run", monkeypatch, policy), 20, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES_OF_FSYNC)
def test_no_synced_step_is_lost_in_three_hundred_replays(tmp_path, monkeypatch, policy):
    replay(tmp_path, record_run(tmp_path / "run", monkeypatch, policy), 300, seed=1)


def test_the_replay_finds_what_is_not_synced(tmp_path, monkeypatch):
    """A log that claims more than it syncs is caught."""
    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_data", lambda descriptor: None)
        patch.setattr(durable, "sync", lambda path: None)
        recording = record_run(tmp_path / "run", monkeypatch, "record")
    recording.calls = [call for call in recording.calls if not call[0].startswith("sync")]
    with pytest.raises((AssertionError, RunFileError), match=r"is lost|holds no run|not a readable"):
        replay(tmp_path, recording, 40, seed=2)
