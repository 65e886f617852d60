"""From token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from app.token_bytes import TokenBytes


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into pieces of text that are safe to send.

    The joined pieces equal `tokenizer.decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)`, save
    that an incomplete UTF-8 sequence at the very end is dropped, and no piece begins or ends within a character. Each
    push costs the token's own length, whatever came before: bytes are looked up and go through an incremental decoder.

    One departure, for invalid UTF-8 in a run of byte-fallback tokens (`<0xNN>`): `decode` looks at the whole run and
    turns *all* of it to U+FFFD, good characters too; to do the same, a stream would have to hold back whole sentences
    of scripts that are spelled in such tokens. Here good characters are sent as soon as they are complete, and each bad
    byte is one U+FFFD.

    `after_text`: the tokens continue a text (a completion of a prompt), so the first one keeps its leading space:
    then prompt + pieces is what decoding prompt and answer together gives. `shown_ids`: special tokens that are not
    skipped.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        after_text: bool = False,
        shown_ids: Collection[int] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._skip_special_tokens = skip_special_tokens
        self._shown_ids = shown_ids
        self._first = not after_text
        self._strip_left = 0 if after_text else token_bytes.strip_count
        self._decoder = codecs.getincrementaldecoder("utf-8")(token_bytes.decode_errors)

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete or the token is skipped."""
        table = self._token_bytes
        if self._skip_special_tokens and table.is_special(token_id) and token_id not in self._shown_ids:
            return ""
        raw = table.of(token_id, first=self._first)
        if self._first and table.in_vocabulary(token_id):
            self._first = False
        return self._finished(self._decoder.decode(raw))

    def finish(self) -> str:
        """The rest, after the last token: "" nearly always, as an incomplete character is dropped. Bytes that no
        further byte could have completed come out as U+FFFD."""
        pending, _ = self._decoder.getstate()
        rest = self._decoder.decode(b"", final=True)
        # One U+FFFD for all the pending bytes: they are a proper beginning of a character.
        return "" if len(pending.decode("utf-8", "replace")) <= 1 else self._finished(rest)

    def _finished(self, text: str) -> str:
        for pattern, content in self._token_bytes.text_replacements:
            text = text.replace(pattern, content)
        if self._strip_left and text:
            bare = text.lstrip(self._token_bytes.strip_character)
            dropped = min(len(text) - len(bare), self._strip_left)
            self._strip_left = self._strip_left - dropped if dropped == len(text) else 0
            text = text[dropped:]
        return text
