"""Runs made of known gradient vectors, so that every plotted number can be computed again from them."""

import numpy as np
import pytest

import gradscope
from gradscope.runfile import RunWriter, UpdateRecord

VOTING = {
    "generator/0": "generator", "generator/1": "generator", "generator/2": "generator",
    "aggregator/0": "aggregator",
}  # fmt: skip


class Recipe:
    """One run: gradients `[T, M, K, D]` (M updates a step), rows with signal `[T, K]`, evaluations."""

    def __init__(self, slots, policies, gradients, signal, evaluations):
        self.slots, self.policies, self.gradients = slots, policies, gradients
        self.signal, self.evaluations = signal, evaluations

    def role_vectors(self, role):
        """The role's summed gradient at every step and update, `[T, M, D]`."""
        own = [place for place, name in enumerate(self.slots.values()) if name == role]
        return self.gradients[:, :, own].sum(axis=2)

    def energy(self, role):
        """Squared norm of the role's gradient, summed over a step's updates, `[T]`."""
        return (self.role_vectors(role) ** 2).sum(axis=(1, 2))


def configuration(layout, seed, **changes):
    sections = {
        "workflow": {"name": "voting", "style": "compact"},
        "task": {"name": "stack_code", "difficulty": 1},
        "model": {"path": "org/Small-0.6B"},
        "policy": {
            "routing": "shared" if layout == "SP" else "isolated" if layout == "IP" else layout,
            "rank": 8,
        },
        "optim": {"learning_rate": 0.003},
        "train": {"seed": seed},
        "run": {"episodes_every": seed},
    }
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        sections[section][leaf] = value
    return sections


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Writes a run and returns (opened run, its recipe, its path)."""

    def make(
        layout="SP", seed=0, *, num_steps=40, slots=VOTING, dead=(), cliff=False, settings=((0.7, False),),
        evaluate_every=2, num_updates=1, scale=1.0, gradients=True, config=None, drop_rows=(),
        pull=1.0, lean=1.0, counts=True, **changes,
    ):  # fmt: skip
        rng = np.random.default_rng([seed, layout == "SP"])
        roles = list(dict.fromkeys(slots.values()))
        policies = (
            layout
            if isinstance(layout, dict)
            else {role: "all" if layout == "SP" else role for role in roles}
        )
        pulls = {role: pull * rng.standard_normal(30) for role in roles}
        vectors = np.array(
            [
                [
                    [pulls[role] * step / num_steps + rng.standard_normal(30) for role in slots.values()]
                    for _ in range(num_updates)
                ]
                for step in range(num_steps)
            ]
        )
        vectors *= scale
        vectors[:, :, [role == roles[0] for role in slots.values()]] *= lean
        vectors[list(dead)] = 0.0
        signal = rng.integers(1, 24, (num_steps, len(slots))).astype(float)
        signal[list(dead)] = 0.0
        path = tmp_path_factory.mktemp("figures") / f"run-{seed}"
        names = list(slots)
        evaluations = []
        with RunWriter(
            path, slots=slots, policies=policies, seed=seed, hardware="none",
            config=configuration(layout, seed, **changes) if config is None else config,
        ) as writer:  # fmt: skip
            for step in range(num_steps):
                records = []
                owner = [policies.get(slot, policies.get(role)) for slot, role in slots.items()]
                for number in range(num_updates):
                    for policy in dict.fromkeys(owner):
                        own = [
                            k for k, name in enumerate(owner)
                            if name == policy and (step, names[k]) not in drop_rows
                        ]  # fmt: skip
                        part = vectors[step, number][own]
                        records.append(
                            UpdateRecord(
                                policy=policy, slots=tuple(names[k] for k in own), gram=part @ part.T,
                                counts={
                                    "num_rows": np.full(len(own), 24.0),
                                    "num_signal_rows": signal[step, own],
                                } if counts else {},
                            )
                        )  # fmt: skip
                writer.append(step, records if gradients else None, metrics={"loss": 0.0})
                if evaluate_every and step % evaluate_every == 0:
                    for temperature, greedy in settings:
                        chance = 0.8 - 0.5 * (cliff and step >= 0.7 * num_steps)
                        correct = int(rng.binomial(300, chance))
                        evaluations.append((step, greedy, correct))
                        writer.append_evaluation(
                            step, num_correct=correct, num_total=300, dataset="held_out",
                            temperature=temperature, greedy=greedy,
                        )  # fmt: skip
        return gradscope.open_run(path), Recipe(slots, policies, vectors, signal, evaluations), path

    return make


BOTH = ((0.7, False), (float("nan"), True))


@pytest.fixture(scope="session")
def shared(build):
    """Three seeds of Voting under a shared policy; no signal at steps 20 to 29."""
    return [build("SP", seed, dead=range(20, 30), settings=BOTH) for seed in range(3)]


@pytest.fixture(scope="session")
def isolated(build):
    """Three seeds of Voting under isolated policies; the first two end in a cliff."""
    return [build("IP", seed, cliff=seed < 2, settings=BOTH) for seed in range(3)]


@pytest.fixture(scope="session")
def six(shared, isolated):
    return [run for run, _, _ in [*isolated, *shared]]


@pytest.fixture(scope="session")
def drawings(six):
    """Every figure of the six runs."""
    from gradscope.figures import FIGURES

    return {name: FIGURES.get(name)(six) for name in FIGURES.names()}
