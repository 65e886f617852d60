"""What each token of a vocabulary contributes to the text, in bytes.

A tokenizer decodes a list of tokens through a small pipeline (its *decoder*). For the two families that language
models use, it concatenates bytes, so one table serves streaming (`app/detokenizer.py`) and log-probabilities:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM, OPT): every character of a token stands for one byte;
- SentencePiece style (Llama 2, Mistral, Gemma, T5): "▁" stands for a space, and `<0xNN>` tokens for single bytes.

Any other decoder (WordPiece, CTC, `</w>` suffixes) is refused when the table is made, that is, when the server starts.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

REPLACE_EACH_BYTE = "equipoise-replace-each-byte"
"""Error handler for `bytes.decode`: U+FFFD for every bad byte, as the byte-fallback decoder of `tokenizers` does it."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (from GPT-2): printable Latin-1 characters stand for themselves, the others
    for the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + n): byte for n, byte in enumerate(rest)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


class TokenBytes:
    """The table token id -> bytes of one tokenizer, filled as tokens are asked for. One per process; share it.

    `tokenizer` is a fast tokenizer of transformers. The attributes say how the concatenated bytes become text:
    `decode_errors` is the `errors` argument of `bytes.decode`, then `text_replacements` are applied, then up to
    `strip_count` characters `strip_character` are removed from the very beginning.

    Raises ValueError when the tokenizer is not a fast one or its decoder belongs to neither family.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is not a fast tokenizer (one with a tokenizer.json). "
                "Convert the model's tokenizer with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            )
        backend = tokenizer.backend_tokenizer
        self._token_of = backend.id_to_token
        self._special_tokens = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self._bytes: dict[int, bytes] = {}
        self._special: dict[int, bool] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._token_replacements: list[tuple[str, str]] = []
        self._metaspace: str | None = None
        self._drop_leading_metaspace = False
        self.text_replacements: tuple[tuple[str, str], ...] = ()
        self.strip_character = " "
        self.strip_count = 0
        self._read_decoder(_decoder_steps(backend))
        self.decode_errors = REPLACE_EACH_BYTE if self._byte_fallback else "replace"

    def _read_decoder(self, steps: list[dict[str, Any]]) -> None:
        if [step["type"] for step in steps] == ["ByteLevel"]:
            self._byte_level = True
            return
        joined = False  # whether the tokens are one text by now
        for step in steps:
            match step:
                case {"type": "Metaspace", "replacement": str(character)} if not joined:
                    self._metaspace = character
                    self._drop_leading_metaspace = step.get("prepend_scheme") != "never"
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if not joined:
                    self._token_replacements.append((pattern, content))
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if (
                    len(pattern) == 1 and not self.strip_count
                ):
                    self.text_replacements += ((pattern, content),)
                case {"type": "ByteFallback"} if not joined:
                    self._byte_fallback = joined = True
                case {"type": "Fuse"}:
                    joined = True
                case {"type": "Strip", "content": str(character), "start": int(count), "stop": 0} if joined:
                    self.strip_character, self.strip_count = character, count
                case _:
                    raise _unsupported(steps)
        if not (self._metaspace or self._token_replacements or self.text_replacements or self._byte_fallback):
            raise _unsupported(steps)

    def of(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes of a token; `first`: as the first token of a text (a Metaspace decoder drops its leading space).

        An id outside the vocabulary (models pad their embeddings) has none, as in `tokenizer.decode`.
        """
        if first and self._drop_leading_metaspace:
            return self._make(token_id, drop_metaspace=True)
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make(token_id, drop_metaspace=False)
        return known

    def _make(self, token_id: int, *, drop_metaspace: bool) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # A token with a character outside the alphabet (an added one, such as "<｜user｜>") stands for itself.
            values = [_BYTE_OF_CHARACTER.get(character) for character in token]
            return token.encode() if None in values else bytes(value for value in values if value is not None)
        if self._metaspace is not None:
            token = token.replace(self._metaspace, "" if drop_metaspace else " ")
        for pattern, content in self._token_replacements:
            token = token.replace(pattern, content)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return str(token).encode()

    def text(self, token_id: int) -> str:
        """The token as a string of its own, for log-probabilities: its text, or `bytes:\\xNN...` when its bytes are not
        whole characters (OpenAI's form), so that two different tokens never look the same by their bad bytes."""
        raw = self.of(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        for pattern, content in self.text_replacements:
            text = text.replace(pattern, content)
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        known = self._special.get(token_id)
        if known is None:
            known = self._special[token_id] = self._token_of(token_id) in self._special_tokens
        return known

    def in_vocabulary(self, token_id: int) -> bool:
        return self._token_of(token_id) is not None


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _unsupported(steps: list[dict[str, Any]]) -> ValueError:
    given = " + ".join(str(step["type"]) for step in steps) or "none"
    return ValueError(
        f"The tokenizer's decoder ({given}) is not supported. Supported are ByteLevel, Metaspace, and sequences of "
        "Replace, Metaspace, ByteFallback, Fuse and Strip (SentencePiece models)."
    )
