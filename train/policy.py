"""Policies: one LoRA adapter each on one frozen base model, with an optimizer of its own."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from gradscope.errors import ConfigError
from gradscope.train.config.sections import OptimSection, PolicySection

_ADAPTER = re.compile(r"(\.lora_[AB])\.([^.]+)(\.weight)$")
"""Where PEFT names the adapter in a parameter of a linear layer; modules may have any name before it."""
_SAVED_PREFIX = "base_model.model."
"""What PEFT puts before the names of the network in a saved adapter."""


class Policies:
    """The adapters of a run on their shared base, one of them active at a time.

    Attributes:
        names: Policies in the order in which the slots first name them.
        slots: Slot to policy.
        peft: The PEFT model with all adapters, as checkpoints save it.
        network: The transformers model inside it; calling it runs the active adapter without PEFT's wrapper.
        optimizers: One AdamW a policy.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        slots: Mapping[str, str],
        *,
        section: PolicySection,
        optim: OptimSection,
        seed: int,
    ) -> None:
        self.slots = dict(slots)
        self.names = tuple(dict.fromkeys(slots.values()))
        self.peft = _add_adapters(model, self.names, section)
        self.network: torch.nn.Module = self.peft.get_base_model()
        self._active = ""
        self._parameters = {name: _adapter_parameters(self.network, name) for name in self.names}
        self._refuse_other_trainables(section)
        self.optimizers = {}
        for index, name in enumerate(self.names):
            _initialise(self._parameters[name], seed=seed, index=index)
            self.optimizers[name] = torch.optim.AdamW(
                list(self._parameters[name].values()),
                lr=optim.learning_rate,
                betas=(optim.beta1, optim.beta2),
                eps=optim.eps,
                weight_decay=optim.weight_decay,
            )
        self.activate(self.names[0])

    def activate(self, name: str) -> None:
        """Makes a policy the one that the network runs and that gradients reach."""
        if name != self._active:
            self.peft.set_adapter(name)
            self._active = name

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Returns the trainable parameters of a policy by their names in the network."""
        return self._parameters[name]

    def saved_weights(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the tensors of a policy, by the names of PEFT's adapter files."""
        return {
            _SAVED_PREFIX + _ADAPTER.sub(r"\1\3", key): parameter.detach()
            for key, parameter in self._parameters[name].items()
        }

    def load_weights(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Puts tensors that `saved_weights` gave into a policy.

        Raises:
            ValueError: They are of an adapter with other modules or another rank.
        """
        mine = self.saved_weights(name)
        ranks, theirs = ({v.shape[0] for k, v in found.items() if "lora_A" in k} for found in (mine, weights))
        if ranks != theirs:
            raise ValueError(f"policy.rank is {sorted(ranks)}, the saved adapter has {sorted(theirs)}")
        if mine.keys() != weights.keys() or any(mine[k].shape != v.shape for k, v in weights.items()):
            raise ValueError("names or shapes of the adapter differ")
        for key, tensor in mine.items():
            tensor.copy_(weights[key])

    def slots_of(self, name: str) -> tuple[str, ...]:
        """Returns the slots whose rows train a policy."""
        return tuple(slot for slot, policy in self.slots.items() if policy == name)

    def _refuse_other_trainables(self, section: PolicySection) -> None:
        """Checks that what PEFT trains for each policy is what its optimizer holds.

        Raises:
            ConfigError: An adapter is on a module that is no linear layer, such as an embedding.
        """
        for name in self.names:
            self.activate(name)
            for key, parameter in self.network.named_parameters():
                if parameter.requires_grad and key not in self._parameters[name]:
                    raise ConfigError(
                        f"policy.target_modules={section.target_modules!r} puts an adapter on "
                        f"'{key.partition('.lora_')[0]}', which is no linear layer. "
                        "Name linear layers only, or set policy.target_modules=all-linear."
                    )


def _add_adapters(model: torch.nn.Module, names: Sequence[str], section: PolicySection) -> PeftModel:
    modules = section.target_modules
    lora = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers for things by names that transformers is about to drop.
            warnings.simplefilter("ignore", FutureWarning)
            # It warns of merging adapters of tied layers, which is not done here.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # Checkpoints name tensors themselves, so an adapter may be called like a part of PEFT's names.
            warnings.filterwarnings("ignore", message="Adapter name .* should not be contained in the prefix")
            peft = get_peft_model(model, lora, adapter_name=names[0])
            for name in names[1:]:
                peft.add_adapter(name, lora)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise ConfigError(
            f"policy.target_modules={modules!r} does not fit: {reason}. Set policy.target_modules=all-linear."
        ) from error
    return peft.eval()


def _adapter_parameters(network: torch.nn.Module, name: str) -> dict[str, torch.nn.Parameter]:
    found = ((key, value, _ADAPTER.search(key)) for key, value in network.named_parameters())
    return {key: value for key, value, match in found if match is not None and match[2] == name}


def _initialise(parameters: Mapping[str, torch.nn.Parameter], *, seed: int, index: int) -> None:
    """Draws A as PEFT does (uniform, Kaiming) and sets B to 0, from the seed and the policy's number alone.

    Names play no part, so a workflow with one policy starts the same under every routing.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    with torch.no_grad():
        for key, parameter in parameters.items():
            if "lora_A" in key:
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.zero_()
