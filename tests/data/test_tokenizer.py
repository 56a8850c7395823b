import json
import os
import shutil

import pytest
import tokenizers

from fp8rl_jax.data.tokenizer import (
    ByteTokenizer,
    TokenizerError,
    check_tokenizer,
    load_tokenizer,
)

CHAT = [{"role": "user", "content": "ab"}]
WORDS = {"a": 0, "b": 1, "<|endoftext|>": 2, "<|im_start|>": 3, "<|im_end|>": 4}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    "{% if thinking is defined and thinking %}b{% else %}a{% endif %}"
)


def make_folder(path, words=WORDS, generation_config=None, **config):
    """Writes a tokenizer of single characters; a config value of None is left out."""
    words = {"[UNK]": max(words.values()) + 1, **words}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(words, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([w for w in words if w.startswith("<")])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    defaults = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    config = {k: v for k, v in (defaults | config).items() if v is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(generation_config)
    return path


def test_byte_tokenizer():
    tokenizer = load_tokenizer("byte")
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("7+é") == [55, 43, 195, 169]
    special = [tokenizer.pad_id, *tokenizer.stop_ids]
    assert tokenizer.decode([55, 43, 195, 169, *special]) == "7+é"
    assert tokenizer.decode([255]) == "\ufffd"
    assert len({*special, *range(256)}) == tokenizer.vocab_size == max(special) + 1
    with pytest.raises(ValueError, match=r"\[0, 258\)"):
        tokenizer.decode([258])
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.apply_chat_template(CHAT)
    with pytest.raises(TokenizerError, match="chat_template_kwargs"):
        load_tokenizer("byte", {"enable_thinking": False})


def test_check_tokenizer():
    check_tokenizer(ByteTokenizer(), 258)
    check_tokenizer(ByteTokenizer(), 384)
    with pytest.raises(TokenizerError, match="258 ids but the model only 257"):
        check_tokenizer(ByteTokenizer(), 257)


def test_folder(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path))
    assert tokenizer.encode("aba") == [0, 1, 0]
    assert tokenizer.decode([0, 1, 4, 2]) == "ab"
    assert tokenizer.vocab_size == 6
    assert tokenizer.pad_id == 2
    # The end of a turn is found by its name.
    assert tokenizer.stop_ids == (2, 4)


def test_chat_template_variables(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path), {"thinking": True})
    prompt = [3, 0, 1, 4, 3]
    assert tokenizer.apply_chat_template(CHAT) == [*prompt, 1]
    assert tokenizer.apply_chat_template(CHAT, thinking=False) == [*prompt, 0]


@pytest.mark.parametrize(("eos", "expected"), [(4, (4,)), ([4, 2], (4, 2))])
def test_stop_ids_of_the_generation_config(tmp_path, eos, expected):
    config = json.dumps({"eos_token_id": eos})
    folder = make_folder(tmp_path, generation_config=config)
    assert load_tokenizer(folder).stop_ids == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": '{"eos_token_id": 99}'}, r"stop ids \[99\]"),
        ({"generation_config": '{"eos_token_id": null}'}, "no usable `eos_token_id`"),
        ({"generation_config": "{"}, "no usable `eos_token_id`"),
        ({"words": {"a": 0}, "eos_token": None, "pad_token": "a"}, "no stop token"),
        ({"pad_token": None}, "no padding token"),
    ],
)
def test_missing_ids(tmp_path, options, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(make_folder(tmp_path, **options))


def test_no_chat_template(tmp_path):
    tokenizer = load_tokenizer(make_folder(tmp_path, chat_template=None))
    with pytest.raises(TokenizerError, match="no chat template in"):
        tokenizer.apply_chat_template(CHAT)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither tokenizer.json nor vocab.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="absent is not a folder"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot load this tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.skipif(
    "FP8RL_TOKENIZER" not in os.environ,
    reason="set FP8RL_TOKENIZER to a folder with Qwen3's tokenizer",
)
def test_qwen3(tmp_path):
    # Without a generation_config.json, whose stop ids may differ.
    folder = shutil.copytree(
        os.environ["FP8RL_TOKENIZER"],
        tmp_path / "qwen3",
        ignore=shutil.ignore_patterns("generation_config.json", "*.safetensors"),
    )
    tokenizer = load_tokenizer(folder, {"enable_thinking": False})
    assert tokenizer.encode("Hello world") == [9707, 1879]
    assert set(tokenizer.stop_ids) == {151645, 151643}
    assert tokenizer.vocab_size == 151669
    check_tokenizer(tokenizer, 151936)
    text = r"$\frac{1}{2}$ 中文 #### 42"
    assert tokenizer.decode([*tokenizer.encode(text), 151645]) == text
    # Thinking is text; the markers of turns are not.
    assert tokenizer.decode([151667, 9707, 151668, 151645]) == "<think>Hello</think>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    turn = [151644, 872, 198, 9707, 151645, 198, 151644, 77091, 198]
    empty_thought = tokenizer.encode("<think>\n\n</think>\n\n")
    assert prompt == turn + empty_thought
    assert (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], enable_thinking=True
        )
        == turn
    )
