"""Loads the tokenizer and the frozen base model of a configuration, and refuses what cannot be used."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from gradscope.errors import ConfigError
from gradscope.train.config.sections import ModelSection, RolloutSection
from gradscope.train.rollout.chat import Chat
from gradscope.train.sources import resolve_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(section: ModelSection) -> torch.device:
    """Returns where to compute.

    Raises:
        ConfigError: CUDA is asked for and absent.
    """
    if section.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda', but torch finds no CUDA device. Set model.device=auto.")
    if section.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(section.device)


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Loads the tokenizer.

    Raises:
        ConfigError: There is none, or the hub cannot be reached.
    """
    return _load(AutoTokenizer, section.path)


def load_chat(section: ModelSection, model: torch.nn.Module | None = None) -> Chat:
    """Returns the chat of a model; the end tokens are the tokenizer's and those the model generates with.

    Raises:
        ConfigError: The tokenizer has no chat template, or nothing ends a reply.
    """
    tokenizer = load_tokenizer(section)
    generation = getattr(model, "generation_config", None)
    named = [tokenizer.eos_token_id, getattr(generation, "eos_token_id", None)]
    end_ids = {i for ids in named if ids is not None for i in (ids if isinstance(ids, list) else [ids])}
    return Chat(tokenizer, sorted(end_ids))


def load_model(section: ModelSection) -> torch.nn.Module:
    """Loads the base model, frozen and in evaluation mode, on its device.

    Raises:
        ConfigError: There is no such model, or the hub cannot be reached.
    """
    device = resolve_device(section)
    on_cuda = device.type == "cuda"
    dtype = section.dtype if section.dtype != "auto" else ("bfloat16" if on_cuda else "float32")
    attention = section.attention if section.attention != "auto" else "sdpa"
    model = _load(AutoModelForCausalLM, section.path, dtype=DTYPES[dtype], attn_implementation=attention)
    return model.to(device).eval().requires_grad_(False)


def check_lengths(section: ModelSection, rollout: RolloutSection) -> None:
    """Refuses prompts and replies that together pass the model's context.

    Raises:
        ConfigError: They do.
    """
    context = getattr(_load(AutoConfig, section.path), "max_position_embeddings", None)
    asked = rollout.max_prompt_tokens + rollout.max_new_tokens
    if context is not None and asked > context:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens is {asked}, but '{section.path}' holds "
            f"{context} tokens. Lower one of them."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps progress bars, retries and notices of coming renames out of our output."""
    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    hub_level = hub_logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if had_bars:
            logging.enable_progress_bar()


def _load(loader: Any, path: str, **options: Any) -> Any:
    source = resolve_model(path)
    on_disk = Path(source).is_dir()
    # A hub id is looked for in the local cache first, so that a cached model needs no network.
    attempts = [True] if on_disk or is_offline_mode() else [True, False]
    for local_only in attempts:
        try:
            with _quiet():
                return loader.from_pretrained(
                    source, local_files_only=local_only, trust_remote_code=False, **options
                )
        except Exception as error:  # whatever the readers make of a damaged folder
            failure = error
    where = (
        "the folder cannot be read" if on_disk else "it is neither in the local cache nor could it be fetched"
    )
    reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:160]
    raise ConfigError(
        f"model.path: '{path}' cannot be loaded: {where} ({reason}). "
        "Give a folder with a complete model, or download the model first."
    ) from failure
