"""What is refused in one line before a run directory is written: texts, damaged models, absent models."""

import json
import shutil

import pytest

from gradscope.errors import ConfigError, DataError
from gradscope.train import run
from gradscope.train.session import Session
from gradscope.train.sources import TINY, resolve_model
from gradscope.train.tasks.math_jsonl import read_problems

CELL = "single-shared-stack_code"


def refused(config, folder):
    with pytest.raises(ConfigError) as caught:
        run(config, out=folder)
    assert not folder.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_task_without_compact_texts(small, tmp_path):
    data = tmp_path / "good.jsonl"
    data.write_text("".join(f'{{"question": "{n}+1?", "final_answer": "{n + 1}"}}\n' for n in range(30)))
    config = small("single-shared-math_jsonl", f"task.path={data}")
    message = refused(config, tmp_path / "run")
    assert "task 'math_jsonl' has no compact text" in message
    assert "workflow.style=natural" in message
    assert "single-shared-math_jsonl-135M" in message


@pytest.mark.parametrize("damage", ["weights", "tokenizer"])
def test_a_damaged_model_folder(small, tmp_path, damage):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    if damage == "weights":
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    else:
        for file in model.glob("token*"):
            file.unlink()
    message = refused(small(CELL, f"model.path={model}"), tmp_path / "run")
    assert message.startswith(f"model.path: '{model}' ")
    assert ("the folder cannot be read" if damage == "weights" else "Put its tokenizer files") in message


def test_a_missing_folder_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder 'data/nothere'"):
        resolve_model("data/nothere")
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_unknown_modules_end_in_one_stop(small, tmp_path):
    message = refused(small(CELL, "policy.target_modules=nosuch"), tmp_path / "run")
    assert ".." not in message


def test_an_adapter_names_its_base_as_configured(small, tmp_path):
    run(small(CELL, "train.steps=0", "evaluate.every=0"), out=tmp_path)
    file = tmp_path / "checkpoints" / "step_000000" / "shared" / "adapter_config.json"
    assert json.loads(file.read_text())["base_model_name_or_path"] == "tiny"


def test_short_names_of_adapters_warn_of_nothing(small):
    Session(small("voting-isolated-stack_code", "policy.routing={generator: a, aggregator: b}")).close()


def test_numbers_that_are_none_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('\ufeff{"question": "a?", "final_answer": 1}\n', encoding="utf-8")
    assert len(read_problems(file)) == 1
    file.write_text('{"question": "a?", "final_answer": 1}\n{"question": "b?", "final_answer": NaN}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: .*NaN is no value of JSON"):
        read_problems(file)
