"""The character tokenizer of the embedded model, and reading replies back from token ids safely."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

ROLE_TAGS = {
    "generator": "<G>",
    "aggregator": "<A>",
    "evaluator": "<E>",
    "orchestrator": "<O>",
    "worker": "<W>",
    "synthesizer": "<Y>",
}
PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
CHARACTERS = "0123456789ab+-*ynLR|>=#.,:() "
SPECIAL_STAND_IN = "\ufffd"
"""What a sampled special token looks like in a reply's text; no reader of replies accepts it."""

_CHAT_TEMPLATE = (
    "{%- set tags = {" + ", ".join(f"'{role}': '{tag}'" for role, tag in ROLE_TAGS.items()) + "} -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{%- if message['content'] not in tags -%}"
    "{{ raise_exception(\"no tag for the role '\" + message['content'][:60] + \"'; the roles are \""
    " + tags | join(', ')) }}"
    "{%- endif -%}"
    "{{ tags[message['content']] }}"
    "{%- elif message['role'] == 'assistant' -%}{{ '>' + message['content'] + '<end>' }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '>' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the character tokenizer with one token for each role tag and a chat template that sets them.

    `[{system: generator}, {user: X}]` with a generation prompt becomes `<G>X>`; a role without a tag makes
    the template raise jinja2's `TemplateError`. Characters outside the vocabulary become `<unk>`.
    """
    specials = [PAD, END, UNKNOWN, *ROLE_TAGS.values()]
    vocabulary = {token: index for index, token in enumerate([*specials, *CHARACTERS])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLE_TAGS.values()),
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=512,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def decode_reply(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Returns the text of a sampled reply up to its end token; never raises and never hides a token.

    Special tokens sampled inside the reply become `SPECIAL_STAND_IN`, so that no text of ours can be read
    back as a token. The ids, not this text, are what is trained on.
    """
    special = set(tokenizer.all_special_ids)
    pieces: list[str] = []
    run: list[int] = []
    for token in ids:
        if token == tokenizer.eos_token_id:
            break
        if token not in special:
            run.append(token)
            continue
        pieces += [tokenizer.decode(run), SPECIAL_STAND_IN]
        run = []
    return "".join([*pieces, tokenizer.decode(run)])
