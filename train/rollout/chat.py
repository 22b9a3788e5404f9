"""Between chat messages and token ids: the tokenizer's own template in, safe text out."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from gradscope.errors import ConfigError
from gradscope.train.assets.tokenizer import SPECIAL_STAND_IN, decode_reply
from gradscope.train.episode import Message

MEMORY = 8192


class Chat:
    """Turns prompts into token ids and replies into text.

    Args:
        tokenizer: Tokenizer with a chat template.
        end_ids: Token ids that end a reply.

    Raises:
        ConfigError: The tokenizer has no chat template, or nothing ends a reply.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"model.path: the tokenizer of '{tokenizer.name_or_path}' has no chat template, so roles "
                "cannot be prompted. Take an instruction-tuned model, or put a chat_template.jinja beside it."
            )
        if not end_ids:
            raise ConfigError(
                f"model.path: '{tokenizer.name_or_path}' names no end token, so replies would never end. "
                "Set eos_token in its tokenizer_config.json."
            )
        self.tokenizer = tokenizer
        self.end_ids = tuple(end_ids)
        self.special_texts = tuple(sorted(tokenizer.all_special_tokens, key=len, reverse=True))
        # Qwen3 and its kin think at length unless told not to.
        self.template_options = (
            {"enable_thinking": False} if "enable_thinking" in str(tokenizer.chat_template) else {}
        )
        self._encoded: dict[tuple[Message, ...], tuple[int, ...]] = {}

    def encode(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Returns the prompt's token ids, up to where the reply begins.

        A special token spelled out in a message is replaced, so that no quoted reply can end a turn.

        Raises:
            ConfigError: The chat template refuses the messages.
        """
        known = self._encoded.get(messages)
        if known is not None:
            return known
        chat = [{"role": message.role, "content": self._harmless(message.content)} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False, **self.template_options
            )
        except TemplateError as error:
            raise ConfigError(
                f"model.path: the chat template of '{self.tokenizer.name_or_path}' cannot word the prompt "
                f"({' '.join(str(error).split())}). Take another model, workflow.name or workflow.style."
            ) from error
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(self._encoded) >= MEMORY:
            self._encoded.clear()
        self._encoded[messages] = ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns a reply's text without its end token; never raises, whatever was sampled."""
        kept = ids[:-1] if ids and ids[-1] in self.end_ids else ids
        return decode_reply(self.tokenizer, kept)

    def _harmless(self, text: str) -> str:
        for special in self.special_texts:
            if special in text:
                text = text.replace(special, SPECIAL_STAND_IN)
        return text
