"""The tiny model's tokenizer: role tags in, safe text out."""

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from gradscope.train.assets.model import TINY
from gradscope.train.assets.tokenizer import (
    CHARACTERS,
    ROLE_TAGS,
    SPECIAL_STAND_IN,
    build_tokenizer,
    decode_reply,
)
from gradscope.train.tasks import TASKS


@pytest.fixture(scope="module", params=["built", "shipped"])
def tokenizer(request):
    return build_tokenizer() if request.param == "built" else AutoTokenizer.from_pretrained(TINY)


@pytest.mark.parametrize("role", ROLE_TAGS)
def test_the_chat_template_turns_a_role_into_its_tag(tokenizer, role):
    chat = [{"role": "system", "content": role}, {"role": "user", "content": "a+3|b"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == f"{ROLE_TAGS[role]}a+3|b>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids(ROLE_TAGS[role])
    assert len(ids) == 1 + len("a+3|b") + 1


@pytest.mark.parametrize("role", ["critic", "Generator", "You are the generator."])
def test_a_role_without_a_tag_is_refused(tokenizer, role):
    chat = [{"role": "system", "content": role}, {"role": "user", "content": "a+3"}]
    with pytest.raises(TemplateError, match=f"no tag for the role '{role}'"):
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_a_past_reply_is_closed_by_the_end_token(tokenizer):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "a>b<end>"
    assert tokenizer(text)["input_ids"][-1] == tokenizer.eos_token_id


def test_every_character_of_tasks_and_replies_is_one_known_token(tokenizer):
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert len(set(ids)) == len(CHARACTERS)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == CHARACTERS
    for name in ("stack_code", "arithmetic"):
        for index in range(20):
            text = TASKS.get(name)().problem("train", index).short
            assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False)["input_ids"]


def test_special_tokens_inside_a_reply_become_a_stand_in(tokenizer):
    tag = tokenizer.convert_tokens_to_ids("<A>")
    body = tokenizer("12", add_special_tokens=False)["input_ids"]
    ids = [tag, *body, tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id, *body]
    assert decode_reply(tokenizer, ids) == f"{SPECIAL_STAND_IN}12{SPECIAL_STAND_IN * 2}"
    assert decode_reply(tokenizer, []) == ""
    assert decode_reply(tokenizer, [tokenizer.eos_token_id]) == ""


@pytest.mark.parametrize("name", ["stack_code", "arithmetic"])
def test_no_reader_accepts_a_reply_with_the_stand_in(name):
    task = TASKS.get(name)()
    for text in (SPECIAL_STAND_IN, f"{SPECIAL_STAND_IN}12", f"12{SPECIAL_STAND_IN}", f"1{SPECIAL_STAND_IN}2"):
        assert not task.in_format(text)
