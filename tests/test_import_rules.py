"""Imports go one way: analysis <- probes <- train, analysis <- figures; only commands compose them."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each layer may import of the project, and which outside packages it must leave alone.
# Beside those of the design: exporters, which mirror a training, and extras, which errors name packages from.
SEAMS = {"schema", "registry", "errors", "runfile", "derive", "warner", "exporters", "extras"}
TORCH = {"torch", "transformers", "peft", "safetensors"}
LAYERS = {
    "gradscope": {"inside": {"gradscope"}, "outside": TORCH | {"pydantic", "matplotlib", "seaborn"}},
    "probes": {"inside": {"gradscope", "gradscope.probes"}, "outside": {"pydantic", "matplotlib", "seaborn"}},
    "train": {
        "inside": {"gradscope", "gradscope.probes", "gradscope.train"},
        "outside": {"matplotlib", "seaborn"},
    },
    "figures": {"inside": {"gradscope", "gradscope.figures"}, "outside": TORCH | {"pydantic"}},
}
PARTS = {"probes", "train", "figures"}
PURE = ["train/workflows", "train/tasks", "train/grading", "train/episode.py"]


def python_files(folder: str) -> list[Path]:
    path = ROOT / folder
    if path.is_file():
        return [path]
    skip = {ROOT / "gradscope" / part for part in PARTS}
    return [file for file in sorted(path.rglob("*.py")) if not skip & set(file.parents)]


def imports(file: Path, *, top_level_only: bool) -> set[str]:
    tree = ast.parse(file.read_text())
    lazy = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lazy |= set(ast.walk(node))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            lazy |= set(ast.walk(node))
    names = set()
    for node in ast.walk(tree):
        if top_level_only and node in lazy:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(layer: str, file: Path) -> list[str]:
    rule = LAYERS[layer]
    composing = layer == "gradscope" and file.parent.name == "commands"
    found = []
    for name in imports(file, top_level_only=composing):
        parts = name.split(".")
        if parts[0] in rule["outside"]:
            found.append(name)
        if parts[0] != "gradscope":
            continue
        part = parts[1] if len(parts) > 1 else ""
        if part in PARTS:
            if f"gradscope.{part}" not in rule["inside"]:
                found.append(name)
        elif layer in {"probes", "train"} and part not in SEAMS and name != "gradscope.__version__":
            found.append(name)
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_one_way(layer):
    files = python_files(layer)
    assert files, f"no files found in {layer}"
    bad = {str(file.relative_to(ROOT)): names for file in files if (names := violations(layer, file))}
    assert not bad


@pytest.mark.parametrize("folder", PURE)
def test_workflows_and_tasks_are_plain_python(folder):
    for file in python_files(folder):
        roots = {name.split(".")[0] for name in imports(file, top_level_only=False)}
        assert not roots & (TORCH | {"numpy", "pydantic"}), file


def test_the_rule_catches_a_wrong_import(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import torch\nfrom gradscope.train import grpo\n")
    assert set(violations("gradscope", wrong)) == {"torch", "gradscope.train.grpo"}
    wrong.write_text("from gradscope.detectors import cliff\n")
    assert violations("probes", wrong) == ["gradscope.detectors.cliff"]


def loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(out.stdout.splitlines()[-1]))


def test_diagnosing_a_run_loads_nothing_heavy(tmp_path):
    run = tmp_path / "run"
    loaded = loaded_by(
        "import gradscope\n"
        "from gradscope import synthetic\n"
        f"synthetic.write_run({str(run)!r}, 'cliff', seed=0)\n"
        f"diagnosis = gradscope.diagnose(gradscope.open_run({str(run)!r}))\n"
        "from gradscope.commands.diagnose import diagnose\n"
        f"diagnose({str(run)!r})\n"
    )
    assert "xarray" in loaded
    heavy = {"torch", "transformers", "peft", "pydantic", "matplotlib", "seaborn", "scipy.stats"}
    assert not loaded & heavy


def test_importing_the_package_loads_neither_numpy_nor_torch():
    assert not loaded_by("import gradscope") & {"numpy", "torch", "xarray", "scipy"}


def test_diagnose_works_where_torch_is_not_installed(tmp_path):
    run = tmp_path / "run"
    absent = ["torch", "transformers", "peft", "safetensors", "matplotlib", "seaborn", "jinja2"]
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"  # None there makes an import fail
        "from gradscope import cli, synthetic\n"
        f"synthetic.write_run({str(run)!r}, 'cliff', seed=0)\n"
        f"cli.main(['diagnose', {str(run)!r}])\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    assert "cliff" in out.stdout
