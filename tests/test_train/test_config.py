"""The configuration: presets, cells, overrides, round trip, and one line for every way to get it wrong."""

import pytest

from gradscope.errors import ConfigError, GradscopeError, UnknownNameError
from gradscope.train.config import (
    describe_presets,
    load_config,
    resolve_layers,
    resolve_routing,
    to_yaml,
)
from gradscope.train.config.loading import describe_keys
from gradscope.train.config.presets import preset_names, scale_names
from gradscope.train.schedule import learning_rate

SLOTS = {"generator/0": "generator", "generator/1": "generator", "aggregator/0": "aggregator"}


@pytest.mark.parametrize(
    ("cell", "workflow", "routing", "task", "path"),
    [
        ("voting-shared-stack_code", "voting", "shared", "stack_code", "tiny"),
        ("Voting-IP-0.1M-Stack_Code", "voting", "isolated", "stack_code", "tiny"),
        ("eval_opt-sp-arithmetic-0.1m", "eval_opt", "shared", "arithmetic", "tiny"),
        (
            "Orch-Workers-Isolated-arithmetic-0.6B",
            "orch_workers",
            "isolated",
            "arithmetic",
            "Qwen/Qwen3-0.6B",
        ),
        ("single-ip-stack-code-4b", "single", "isolated", "stack_code", "Qwen/Qwen3-4B"),
    ],
)
def test_cells_are_put_together(cell, workflow, routing, task, path):
    config = load_config(cell)
    assert (config.workflow.name, config.policy.routing) == (workflow, routing)
    assert (config.task.name, config.model.path) == (task, path)
    assert config.workflow.style == ("compact" if path == "tiny" else "natural")


def test_scales_are_ordered_by_size():
    assert scale_names() == ["0.1M", "135M", "0.6B", "1.7B", "4B"]


def test_every_preset_is_listed_with_a_line_and_reads_back(tmp_path):
    described = describe_presets()
    data = tmp_path / "problems.jsonl"
    data.write_text('{"question": "1+1?", "final_answer": "2"}\n')
    for name in preset_names():
        assert len(described[name]) > 20
        needs_path = "math_jsonl" in str(resolve_layers(name))
        config = load_config(name, [f"task.path={data}"] if needs_path else [])
        copy = tmp_path / f"{name}.yaml"
        copy.write_text(to_yaml(config))
        assert load_config(copy) == config


def test_overrides_are_yaml_and_lie_over_the_preset():
    config = load_config(
        "voting-shared-stack_code",
        [
            "optim.learning_rate=1e-4",
            "workflow.num_generators=2",
            "policy.routing={generator: a, aggregator: b}",
            "probes.enabled=false",
        ],
    )
    assert config.optim.learning_rate == 1e-4
    assert config.workflow.options == {"num_generators": 2}
    assert config.policy.routing == {"generator": "a", "aggregator": "b"}
    assert config.probes.enabled is False


def test_another_plugin_drops_the_options_of_the_one_below(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: voting-shared-stack_code\nworkflow: {num_generators: 2}\n")
    config = load_config(file, ["workflow.name=single"])
    assert config.workflow.options == {}
    assert config.workflow.style == "compact"


def test_a_file_builds_on_a_base_and_a_loop_is_refused(tmp_path):
    (tmp_path / "low.yaml").write_text("base: demo\ntrain: {steps: 3}\n")
    (tmp_path / "high.yaml").write_text("base: low.yaml\ntrain: {seed: 5}\n")
    config = load_config(tmp_path / "high.yaml")
    assert (config.train.steps, config.train.seed) == (3, 5)
    (tmp_path / "low.yaml").write_text("base: high.yaml\n")
    with pytest.raises(ConfigError, match="leads back to this file"):
        load_config(tmp_path / "high.yaml")


def test_the_configuration_is_frozen_and_every_key_has_help():
    config = load_config("demo")
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3
    assert all(len(text) > 10 for text in describe_keys().values())


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ("dmo", [], "unknown preset 'dmo'. Did you mean 'demo'?"),
        ("votng-sp-stack_code", [], "unknown workflow 'votng'. Did you mean 'voting'?"),
        ("voting-sp-stak_code", [], "unknown task 'stak_code'. Did you mean 'stack_code'?"),
        ("voting-sp-stack_code-9B", [], "unknown scale '9B'"),
        (
            "demo",
            ["rollout.group_sze=3"],
            "unknown key 'rollout.group_sze'. Did you mean 'rollout.group_size'?",
        ),
        ("demo", ["optim.lr=1"], "unknown key 'optim.lr'. Did you mean 'optim.learning_rate'?"),
        ("demo", ["train.learning_rate=1"], "Did you mean 'optim.learning_rate'?"),
        ("demo", ["rolout.group_size=3"], "unknown section 'rolout'. Did you mean 'rollout'?"),
        ("demo", ["workflow.num_generatrs=3"], "'workflow.num_generatrs'. Did you mean 'num_generators'?"),
        ("demo", ["workflow.num_generators=many"], "workflow.num_generators is 'many'"),
        ("demo", ["workflow.num_generators=0"], "workflow.num_generators is 0"),
        ("demo", ["workflow.name=votin"], "unknown workflow 'votin'. Did you mean 'voting'?"),
        ("demo", ["task.difficlty=3"], "'task.difficlty'. Did you mean 'difficulty'?"),
        ("demo", ["train.steps=soon"], "train.steps is 'soon'"),
        ("demo", ["train.steps=true"], "train.steps is True: input should be a number"),
        ("demo", ["optim.learning_rate=true"], "input should be a number, not true or false"),
        ("demo", ["workflow.num_generators=true"], "workflow.num_generators is True: input should be"),
        ("demo", ["algorithm.clip_low=1"], "algorithm.clip_low is 1"),
        (
            "demo",
            ["policy.routing={generator: 1, aggregator: a}"],
            "or a map from role or slot to",
        ),
        ("demo", ["policy.routing={generator: a, generator: b}"], "the value is not valid YAML"),
        ("demo", ["train"], "expected section.key=value"),
        ("demo", ["steps=3"], "expected section.key=value"),
        ("demo", ["train.steps=[1"], "the value is not valid YAML"),
        ("demo", ["rollout.group_size=1"], "rollout.group_size is 1"),
        ("demo", ["algorithm.num_minibatches=4"], "not divisible by algorithm.num_minibatches=4"),
        ("demo", ["policy.routing={generatr: a}"], "unknown role 'generatr'. Did you mean 'generator'?"),
        ("demo", ["policy.routing={generator: a}"], "no policy for aggregator/0"),
        ("demo", ["policy.routing={generator: a.b, aggregator: b}"], "'a.b' (for 'generator') cannot name"),
        ("demo", ["policy.routing=split"], "policy.routing is 'split'"),
        (
            "demo",
            ["optim.schedule=cosine", "train.steps=40", "optim.warmup_steps=40"],
            "nothing is left for the cosine",
        ),
        ("demo", ["evaluate.sampled=false", "evaluate.greedy=false"], "are both off"),
        ("demo", ["optim.learning_rate=.nan"], "optim.learning_rate is nan"),
        ("smollm2-gsm8k", [], "task 'math_jsonl' needs the option task.path"),
        ("nowhere.yaml", [], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(source, overrides, message):
    with pytest.raises(GradscopeError) as caught:
        load_config(source, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_malformed_files(tmp_path):
    file = tmp_path / "bad.yaml"
    for text, message in (
        ("train: [", "not valid YAML"),
        ("- 1", "holds a list"),
        ("train: 3", "is 3, expected keys"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(file)
    for text, message in (
        ("", "holds nothing"),
        ("train:\n  steps: 3\n  steps: 4\n", "'steps' stands twice.* line 3"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(file)
    file.write_text("\ufefftrain: {steps: 3}\n", encoding="utf-8")
    assert load_config(file).train.steps == 3


def test_routing():
    assert resolve_routing("shared", SLOTS) == dict.fromkeys(SLOTS, "shared")
    assert resolve_routing("isolated", SLOTS) == SLOTS
    mixed = resolve_routing({"generator": "a", "generator/1": "b", "aggregator": "a"}, SLOTS)
    assert mixed == {"generator/0": "a", "generator/1": "b", "aggregator/0": "a"}
    with pytest.raises(UnknownNameError, match="unknown role 'judge'"):
        resolve_routing({"judge": "a"}, SLOTS)


def test_cosine_with_warmup_as_published():
    options = {"peak": 2e-5, "num_steps": 500, "warmup_steps": 15, "schedule": "cosine"}
    for step, expected in ((15, 2.0e-5), (125, 1.757e-5), (250, 1.049e-5), (375, 3.10e-6), (500, 0.0)):
        assert learning_rate(step, **options) == pytest.approx(expected, abs=5e-9)
    assert learning_rate(3, **options) == pytest.approx(2e-5 * 3 / 15)
    assert learning_rate(9, peak=1.0, num_steps=20) == 1.0
