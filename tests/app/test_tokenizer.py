from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from app.tokenizer import read_tokenizer

TEXTS = ["The quick brown fox <tool call>", "Grüße aus Köln", "你好，世界", "<|bos|>a <s> b", "  two  spaces\n"]
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def saved(tokenizer: Any, folder: Path, model_type: str, tokenizer_class: str | None) -> Path:
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    if tokenizer_class is not None:
        config["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("model_type", ["llama", "opt", "qwen2"])
@pytest.mark.parametrize("tokenizer_class", [None, "LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("family", ["byte_level_tokenizer", "byte_fallback_tokenizer"])
def test_every_folder_is_read_as_transformers_reads_it(
    family: str, tokenizer_class: str | None, model_type: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = saved(request.getfixturevalue(family), tmp_path, model_type, tokenizer_class)
    ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)
    chat = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_a_folder_without_a_tokenizer_is_refused_by_transformers(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)):
        read_tokenizer(tmp_path)


def test_an_ingress_needs_no_torch(byte_level_tokenizer: Any, tmp_path: Path) -> None:
    """With torch its start takes seconds more, and it holds hundreds of MiB that it never uses."""
    folder = saved(byte_level_tokenizer, tmp_path, "llama", None)
    program = (
        "import sys, pathlib\n"
        "import app.ingress\n"
        "from app.chat_protocol import ChatCompletionRequest\n"
        "from app.chat_template import render_chat\n"
        "from app.token_bytes import TokenBytes\n"
        "from app.tokenizer import read_tokenizer\n"
        "tokenizer = read_tokenizer(pathlib.Path(sys.argv[1]))\n"
        "TokenBytes(tokenizer)\n"
        "chat = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hello'}]}\n"
        "print(len(render_chat(tokenizer, ChatCompletionRequest.model_validate(chat))) > 0, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
