"""The character-level tokenizer of the generated tasks."""

import string

import pytest
from transformers import AutoTokenizer

from qurl.tasks import load_task
from qurl.tasks.tokenizer import build_tokenizer


@pytest.mark.parametrize("text", ["37+85=", "3,7,25:46=", " a  b\n(c) ", string.punctuation])
def test_decoding_gives_back_the_text(text):
    tokenizer = build_tokenizer()
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_distinct_and_vanish_from_the_text():
    tokenizer = build_tokenizer()
    specials = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert len(set(specials)) == 3
    ids = [*tokenizer("12").input_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"


def test_a_saved_tokenizer_is_a_normal_folder(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.decode(loaded("37 + 85 = ?").input_ids) == "37 + 85 = ?"


@pytest.mark.parametrize(("name", "difficulty"), [("arithmetic", 3), ("countdown", 5)])
def test_generated_tasks_need_no_unknown_token(name, difficulty):
    tokenizer = build_tokenizer()
    task = load_task(name, tokenizer=tokenizer, difficulty=difficulty)
    for i in range(50):
        problem = task[i]
        assert tokenizer.unk_token_id not in problem.prompt_ids
        assert tokenizer.unk_token_id not in tokenizer(problem.answer).input_ids
        assert tokenizer.decode(problem.prompt_ids) == problem.extra["prompt"]
