"""Convert tokens to text as they arrive: characters may span tokens, and stop sequences may span both."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from qurl_ray.tools.calls import overlap

_UNFINISHED = "\ufffd"  # a decoder's output for bytes that are not a whole character yet


class Detokenizer:
    """Incremental decoder of one answer: its parts, joined, equal the text of all tokens decoded at once.

    A window of tokens is decoded again with each new token: the text of a token may depend on the one before it (a
    space at the beginning), and a character may span several tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []
        self._start = self._told = 0  # start of the window, and of its tokens whose text is not returned yet

    def feed(self, token: int) -> str:
        """Return the new text since the last call; "" in the middle of a character."""
        self._ids.append(token)
        new = self._new()
        return "" if new.endswith(_UNFINISHED) else self._tell(new)

    def flush(self) -> str:
        """Return the rest of the text at the end, even if a character is incomplete."""
        return self._tell(self._new())

    def _new(self) -> str:
        return self._decode(self._start, len(self._ids))[len(self._decode(self._start, self._told)) :]

    def _tell(self, new: str) -> str:
        if new:
            self._start, self._told = self._told, len(self._ids)
        return new

    def _decode(self, start: int, stop: int) -> str:
        ids = self._ids[start:stop]
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False)


class StopMatcher:
    """Ends a text before the first complete stop sequence in it, however the text is split into parts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return (text to release, True if a stop sequence is complete). Text that may become one is held back."""
        self._held += text
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            told, self._held = self._held[: min(matches)[1]], ""
            return told, True
        kept = max((overlap(self._held, stop) for stop in self._stops), default=0)
        told, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return told, False

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        told, self._held = self._held, ""
        return told
