"""Finds the mappings behind a preset name, a cell name or a YAML file, lowest layer first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gradscope.errors import ConfigError, nearest, unknown_name
from gradscope.train.tasks import TASKS
from gradscope.train.workflows import WORKFLOWS

FOLDER = Path(__file__).resolve().parent.parent / "presets"
ROUTINGS = {"shared": "shared", "sp": "shared", "isolated": "isolated", "ip": "isolated"}
CELL = "{workflow}-{shared|isolated}-{task}[-{scale}]"
SCALE = re.compile(r"\d+(\.\d+)?[mb]", re.IGNORECASE)
NUM_WORDS_PER_UNIT = {"m": 1e6, "b": 1e9}


def preset_names() -> list[str]:
    """Returns the names of the shipped presets."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def scale_names() -> list[str]:
    """Returns the model scales that a cell name may end in, smallest first."""
    return sorted((file.stem for file in (FOLDER / "scales").glob("*.yaml")), key=_num_parameters)


def scale_of(model_path: str) -> str | None:
    """Returns the scale whose model has that path; None for a model of the user's own."""
    for name in scale_names():
        if read_yaml(FOLDER / "scales" / f"{name}.yaml")["model"]["path"] == model_path:
            return name
    return None


def describe_presets() -> dict[str, str]:
    """Returns each preset and the form of a cell name with one line about it."""
    described = {name: _description(FOLDER / f"{name}.yaml") for name in preset_names()}
    described[CELL] = (
        f"A cell put together on the spot; workflows: {', '.join(WORKFLOWS.names())}; "
        f"tasks: {', '.join(TASKS.names())}; scales: {', '.join(scale_names())}. "
        f"The smallest scale has compact prompts, which math_jsonl lacks: it needs a larger one."
    )
    return described


def resolve_layers(source: str | Path) -> list[dict[str, Any]]:
    """Returns the mappings that make up a preset, cell or file, to be merged in order.

    A file may name a preset or cell that it builds on under the key `base`.

    Raises:
        ConfigError: The file cannot be read or is no mapping.
        UnknownNameError: Nothing has that name; the message says the nearest one.
    """
    name = str(source)
    if name.endswith((".yaml", ".yml")):
        return _file_layers(Path(source), seen=())
    for preset in preset_names():
        if name.lower() == preset.lower():
            return _file_layers(FOLDER / f"{preset}.yaml", seen=())
    cell = _cell_layers(name)
    if cell is None:
        raise ConfigError(
            f"unknown preset '{name}'.{nearest(name, preset_names())} "
            f"Allowed: {', '.join(preset_names())}, a YAML file, or a cell name {CELL}."
        )
    return cell


def _file_layers(file: Path, *, seen: tuple[Path, ...]) -> list[dict[str, Any]]:
    layer = dict(read_yaml(file))
    base = layer.pop("base", None)
    if base is None:
        return [layer]
    if file.resolve() in seen:
        raise ConfigError(f"{file}: 'base: {base}' leads back to this file. Remove one of the two.")
    if str(base).endswith((".yaml", ".yml")):
        return [*_file_layers(file.parent / str(base), seen=(*seen, file.resolve())), layer]
    return [*resolve_layers(str(base)), layer]


def read_yaml(file: Path) -> Mapping[str, Any]:
    """Reads a YAML file that must hold a mapping.

    Raises:
        ConfigError: The file is absent, malformed or no mapping.
    """
    try:
        content = load_yaml(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}). Give a preset or a YAML file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        raise ConfigError(f"{file}: holds nothing. Expected sections such as 'train:'.")
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds a {type(content).__name__}, expected sections such as 'train:'.")
    return content


class _Loader(yaml.SafeLoader):
    """Reads YAML and refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key '{key.value}' stands twice; keep one", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


def load_yaml(text: str) -> Any:
    """Returns what a YAML text holds.

    Raises:
        yaml.YAMLError: It is malformed, or has a key twice.
    """
    return yaml.load(text, Loader=_Loader)


def _cell_layers(name: str) -> list[dict[str, Any]] | None:
    """Returns the layers of a cell name; None when it has no routing word, so that it is no cell."""
    words = name.split("-")
    routing_at = next((i for i, word in enumerate(words) if word.lower() in ROUTINGS and i > 0), None)
    if routing_at is None or routing_at == len(words) - 1:
        return None
    rest = words[routing_at + 1 :]
    scale = next((word for word in rest if SCALE.fullmatch(word)), None)
    task = "_".join(word for word in rest if word != scale)
    cell = {
        "workflow": {"name": _match("workflow", "_".join(words[:routing_at]), WORKFLOWS.names(), name)},
        "policy": {"routing": ROUTINGS[words[routing_at].lower()]},
        "task": {"name": _match("task", task, TASKS.names(), name)},
    }
    scale = scale_names()[0] if scale is None else _match("scale", scale, scale_names(), name)
    return [dict(read_yaml(FOLDER / "scales" / f"{scale}.yaml")), cell]


def _match(kind: str, found: str, allowed: list[str], cell: str) -> str:
    for name in allowed:
        if name.lower() == found.lower():
            return name
    raise unknown_name(kind, found, allowed, where=f"preset '{cell}'")


def _num_parameters(scale: str) -> float:
    return float(scale[:-1]) * NUM_WORDS_PER_UNIT[scale[-1].lower()]


def _description(file: Path) -> str:
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip()
