"""Text while it comes: pieces add up to the whole, whatever is split where; stop sequences end it at the same place."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qurl_ray.engines.torch.batch import Draw
from qurl_ray.serving.choice import Choice
from qurl_ray.serving.replies import _chat_logprobs, _completion_logprobs, token_text
from qurl_ray.serving.text import Detokenizer, StopMatcher


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level vocabulary of single bytes: token i < 256 is byte i; <eos> is 256."""
    characters = bytes_to_unicode()
    vocabulary = {characters[byte]: byte for byte in range(256)} | {"<eos>": 256}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words that begin with a space, as sentencepiece has them, and bytes for the rest."""
    words = ["▁he", "llo", "▁", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="!")


BYTES, WORDS = byte_tokenizer(), metaspace_tokenizer()
EOS = 256


def pieces(tokenizer, ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_pieces_of_a_text_add_up_and_never_hold_half_a_character(text):
    told = pieces(BYTES, list(text.encode()))
    assert "".join(told) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in told)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([0xE4, 0xB8, 0xAD, 0xF0, 0x80])), max_size=25))
def test_any_bytes_add_up_to_what_decoding_them_at_once_gives(ids):
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


def fallback(character: str) -> list[int]:
    """A character as tokens of its bytes."""
    return [5 + byte for byte in character.encode(errors="ignore")]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(range(5)).map(lambda i: [i]), st.characters().map(fallback)), max_size=8))
def test_spaces_at_the_beginning_of_words_stay(tokens):
    ids = [token for word in tokens for token in word]
    assert "".join(pieces(WORDS, ids)) == WORDS.decode(ids, skip_special_tokens=True)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: at the first moment that a stop sequence is complete, the text ends before it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - len(max(complete, key=len))], True
    return text, False


short = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="ab", max_size=20), st.lists(short, max_size=4), st.lists(st.integers(1, 5), max_size=20))
def test_stops_end_the_text_at_one_place_however_it_is_cut(text, stops, lengths):
    matcher, told, at = StopMatcher(stops), "", 0
    for length in [*lengths, len(text)]:
        piece, at = text[at : at + length], at + length
        new, stopped = matcher.feed(piece)
        told += new
        if stopped:
            break
    else:
        told, stopped = told + matcher.flush(), False
    assert (told, stopped) == reference(text, stops)


def test_only_what_may_become_a_stop_is_held_back():
    matcher = StopMatcher(["</answer>"])
    assert matcher.feed("is 46</ans") == ("is 46", False)
    assert matcher.feed("ers>") == ("</ansers>", False)


def choice_of(ids, *, stops=(), finish="length", at_once=False, eos=EOS):
    choice = Choice(BYTES, stops=stops, stop_ids=(eos,), logprobs=True)
    draws = [Draw(token=token, logprob=-0.5, top=((token, -0.5),)) for token in ids]
    batches = [draws] if at_once else [[draw] for draw in draws]
    parts = [choice.feed(batch, finish if batch is batches[-1] else None) for batch in batches]
    return choice, parts


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab中", max_size=12), st.lists(st.text(alphabet="ab中", min_size=1, max_size=3), max_size=2))
def test_a_choice_is_the_same_in_pieces_and_at_once(text, stops):
    ids = [*text.encode(), EOS]
    choices = [choice_of(ids, stops=stops, finish="stop", at_once=at_once) for at_once in (False, True)]
    found = []
    for choice, parts in choices:
        entries = [entry for part in parts for entry in part.logprobs]
        found.append(("".join(part.text for part in parts), entries, choice.finish, choice.tokens))
    assert found[0] == found[1]
    told, entries, finish, tokens = found[0]
    assert (told, finish) == (reference(text, stops)[0], "stop")
    assert all(entry.at < max(1, len(told)) for entry in entries)
    if not reference(text, stops)[1]:
        assert tokens == len(ids)
        assert [entry.draw.token for entry in entries] == ids[:-1], "the stop token is no part of the answer"


def test_a_stop_sequence_ends_a_choice_in_the_middle_of_what_was_drawn():
    choice, parts = choice_of(b"46#47#48", stops=["#"], at_once=True)
    assert (parts[0].text, parts[0].finish, choice.tokens) == ("46", "stop", 3)
    assert [entry.draw.token for entry in parts[0].logprobs] == list(b"46")


def test_log_probs_go_with_the_text_that_they_begin():
    _, parts = choice_of(b"a#b", stops=["#c"])
    assert [part.text for part in parts] == ["a", "", "#b"]
    assert [[chr(entry.draw.token) for entry in part.logprobs] for part in parts] == [["a"], [], ["#", "b"]]
    written = _completion_logprobs([entry for part in parts for entry in part.logprobs], BYTES)
    assert written["tokens"] == ["a", "#", "b"]
    assert written["text_offset"] == [0, 1, 2]
    assert written["top_logprobs"][0] == {"a": -0.5}


@pytest.mark.parametrize("finish", ["length", "deadline", "cancelled"])
def test_an_answer_that_was_cut_short_says_length(finish):
    assert choice_of(b"46", finish=finish)[0].finish == "length"


def test_the_impossible_can_be_written_as_json():
    draw = Draw(token=65, logprob=-math.inf, top=((66, -math.inf),))
    entries = Choice(BYTES, stops=(), stop_ids=(), logprobs=True).feed([draw], "length").logprobs
    for write in (_chat_logprobs, _completion_logprobs):
        assert "-9999.0" in json.dumps(write(entries, BYTES), allow_nan=False)


def test_the_text_of_a_token_keeps_its_space_and_replaces_parts_of_characters():
    assert [token_text(BYTES, token) for token in (65, "中".encode()[0], 100_000)] == ["A", "\ufffd", ""]
    assert [token_text(WORDS, token) for token in (0, 1)] == [" he", "llo"]
