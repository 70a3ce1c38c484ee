"""The tokenizer against Transformers' AutoTokenizer, on handmade directories and on the real default checkpoint."""

import json
import string
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from openk3.chat.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\ttabs \r\n",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    "你好，世界。今天天气怎么样？",
    "naïve café — “quotes” … ﷽ Ω≈ç√",
    "emoji 🙂👩‍👩‍👧‍👦🇨🇳 and 1234567890",
    "a<|im_start|>b<|im_end|>c <|endoftext|>",
    "\u0000\u200b\ufeff\U0001f600",
    "x" * 2000,
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "What is 2+2?"}],
    "system": [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "法国的首都？"}],
    "turns": [
        {"role": "user", "content": "Hi 🙂"},
        {"role": "assistant", "content": "Hello!\n```python\nprint('<b>')\n```"},
        {"role": "user", "content": "  再来一次  "},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather now — 天气",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in 北京?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "北京"}}}],
    },
    {"role": "tool", "content": '{"temperature": 4}', "tool_call_id": "c1"},
]
TEMPLATE = """{% for m in messages %}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A byte-level BPE with a bos in front, whose chat tokens are declared partly outside tokenizer.json."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text * 5 for text in TEXTS], trainer)
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=7, pad_token="<|endoftext|>")
    backend.save(str(tmp_path / "tokenizer.json"))
    end = backend.get_vocab_size()
    entry = {"content": "<|im_end|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    write_json(
        tmp_path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": {"__type": "AddedToken", **entry},
            "added_tokens_decoder": {str(end): entry},
        },
    )
    write_json(tmp_path / "config.json", {"model_type": "llama", "eos_token_id": 0, "bos_token_id": 0})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [end, 1]})
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return tmp_path


def assert_equal_to_transformers(directory: Path) -> None:
    ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= ours.special_ids
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text
    takes_tools = "tools" in (ours.chat_template or "")  # Transformers drops them where a template does not
    chats, tool_lists = ([*CHATS.values(), TOOL_CHAT], (None, TOOLS)) if takes_tools else (CHATS.values(), (None,))
    for chat, tools, generation in product(chats, tool_lists, (True, False)):
        rendered = ours.render_chat(chat, tools, generation)
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation}
        assert rendered == theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.encode_chat(chat, tools, generation) == theirs.apply_chat_template(
            chat, return_dict=False, **options
        )


def test_handmade_equals_transformers(directory: Path) -> None:
    assert_equal_to_transformers(directory)


def test_attributes(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    end = tokenizer.vocab_size - 1
    assert tokenizer.backend.id_to_token(end) == "<|im_end|>"
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (end, 1, 0)  # generation_config first, then config, then the named token
    assert tokenizer.special_ids == {0, 1, end}
    assert tokenizer.chat_template == TEMPLATE
    assert len(tokenizer.encode(string.ascii_letters)) > 7  # neither truncated nor padded to 7
    assert len(tokenizer.encode("x")) == 1
    assert tokenizer.encode("<tool>")[0] not in tokenizer.special_ids


def test_template_inside_the_settings_and_named_templates(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    write_json(directory / "tokenizer_config.json", settings)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.render_chat(CHATS["plain"]) == "plain"
    assert tokenizer.render_chat(CHATS["plain"], tools=[]) == "plain"
    assert tokenizer.render_chat(CHATS["plain"], tools=TOOLS) == "tools 1"
    theirs = AutoTokenizer.from_pretrained(directory)
    theirs.chat_template = {"default": "default file", "tool_use": "from a file"}
    theirs.save_pretrained(directory)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.render_chat(CHATS["plain"], tools=TOOLS) == "from a file"
    assert tokenizer.render_chat(CHATS["plain"]) == "default file"


def test_no_template(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.chat_template is None
    with pytest.raises(ValueError, match=r"this checkpoint has no chat template.*generate\(\).*chat_template\.jinja"):
        tokenizer.encode_chat(CHATS["plain"])


def test_bad_text(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(ValueError, match=r"^text: expected text, got bytes$"):
        tokenizer.encode(b"x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^text: broken text: character 1 is a lone surrogate \(U\+DC80\)"):
        tokenizer.encode("a\udc80")
    with pytest.raises(ValueError, match=r"^messages\[0\]\.role: 'robot'"):
        tokenizer.encode_chat([{"role": "robot", "content": "x"}])
    for ids in ([-1], ["a"], [1.5], [2**40]):
        with pytest.raises(ValueError, match=r"^token ids must be integers from 0 to"):
            tokenizer.decode(ids)  # type: ignore[arg-type]
    assert tokenizer.decode([10**6]) == ""


def test_unreadable_directories(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ValueError, match=r"^no tokenizer\.json in "):
        Tokenizer.from_directory(tmp_path_factory.mktemp("empty"))
    (directory / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config\.json does not hold a JSON object$"):
        Tokenizer.from_directory(directory)
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON: "):
        Tokenizer.from_directory(directory)
    for broken in ("[" * 100_000, '{"a": ' + "1" * 5000 + "}"):
        (directory / "generation_config.json").write_text(broken)
        with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON: "):
            Tokenizer.from_directory(directory)
    (directory / "generation_config.json").unlink()
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 text"):
        Tokenizer.from_directory(directory)
    (directory / "chat_template.jinja").unlink()
    for templates in (5, [5], [{"name": "default"}], [{"name": "default", "template": 5}]):
        write_json(directory / "tokenizer_config.json", {"chat_template": templates})
        with pytest.raises(ValueError, match=r"chat_template is neither text nor a list of named templates$"):
            Tokenizer.from_directory(directory)
    for tokens in ({"x": {}}, {"5": 5}, {"5": {}}, {"5": {"content": 5}}):
        write_json(directory / "tokenizer_config.json", {"added_tokens_decoder": tokens})
        with pytest.raises(ValueError, match=r"tokenizer_config\.json: added_tokens_decoder is damaged \("):
            Tokenizer.from_directory(directory)
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    (directory / "tokenizer.json").write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer: "):
        Tokenizer.from_directory(directory)


def test_multimodal_config_keeps_ids_one_level_down(directory: Path) -> None:
    write_json(directory / "config.json", {"model_type": "gemma3", "text_config": {"eos_token_id": 5}})
    assert 5 in Tokenizer.from_directory(directory).eos_token_ids


def test_default_checkpoint_equals_transformers(smollm2_dir: Path) -> None:
    assert_equal_to_transformers(smollm2_dir)


@pytest.mark.slow
def test_qwen_equals_transformers() -> None:
    from openk3.weights import resolve

    directory = resolve("qwen2.5-coder-0.5b")
    assert_equal_to_transformers(directory)
    rendered = Tokenizer.from_directory(directory).render_chat(TOOL_CHAT, TOOLS)
    assert "<tools>" in rendered
    assert '"city": "北京"' in rendered
