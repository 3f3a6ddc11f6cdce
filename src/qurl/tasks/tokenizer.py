"""A character-level tokenizer for the generated tasks, as a normal transformers tokenizer."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline; no token is added by itself."""
    characters = sorted(string.digits + string.ascii_letters + string.punctuation + " \n")
    vocabulary = {token: i for i, token in enumerate([*_SPECIAL.values(), *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **_SPECIAL
    )
