"""Tokenizers: bytes, and Hugging Face folders with their chat templates."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class TokenizerError(ValueError):
    """A tokenizer that is missing, incomplete or does not fit the model."""


class Tokenizer(Protocol):
    """Text to ids and back.

    Completions stay in token form from sampler to trainer: decoded text is for
    graders and people and is never encoded again.

    Attributes:
      vocab_size: One more than the largest id: not the model's padded vocabulary.
      stop_ids: Ids that end a completion.
      pad_id: Fills unused positions.
    """

    vocab_size: int
    stop_ids: tuple[int, ...]
    pad_id: int

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without special tokens added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens left out."""
        ...

    def apply_chat_template(
        self, messages: Sequence[Message], **kwargs: Any
    ) -> list[int]:
        """Returns the ids of a chat, up to where the assistant's turn begins."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then padding and end of sequence."""

    pad_id = 256
    stop_ids = (257,)
    vocab_size = 258

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of `text`."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the bytes in `ids`; malformed UTF-8 becomes U+FFFD."""
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise ValueError(f"ids must be in [0, {self.vocab_size}), got {ids}")
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Message], **kwargs: Any
    ) -> list[int]:
        """Raises TokenizerError: bytes have no chat template."""
        raise TokenizerError(
            "the byte tokenizer has no chat template: use a plain-text prompt"
        )


# Ends of a turn and of a document in Qwen's vocabulary.
_QWEN_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
_VOCABULARY_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


class HFTokenizer:
    """A Hugging Face tokenizer folder.

    Args:
      path: A folder with tokenizer.json (or vocab.json and merges.txt) and
        tokenizer_config.json, such as a checkpoint's.
      chat_template_kwargs: Variables of the chat template, for example
        `{"enable_thinking": False}` for Qwen3.

    Raises:
      TokenizerError: The folder lacks a tokenizer, a stop token or a padding token.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        self._path = pathlib.Path(path)
        self._tokenizer = _load(self._path)
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.stop_ids = _stop_ids(self._path, self._tokenizer)
        if bad := [i for i in self.stop_ids if not 0 <= i < self.vocab_size]:
            raise TokenizerError(
                f"{self._path}: generation_config.json names the stop ids {bad}, "
                f"but the tokenizer has {self.vocab_size} ids: the two files do not "
                "belong together"
            )
        if self._tokenizer.pad_token_id is None:
            raise TokenizerError(
                f"{self._path}: no padding token: set `pad_token` in "
                "tokenizer_config.json"
            )
        self.pad_id: int = self._tokenizer.pad_token_id

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special tokens left out."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(
        self, messages: Sequence[Message], **kwargs: Any
    ) -> list[int]:
        """Returns the ids of a chat and the header of the assistant's turn.

        Args:
          messages: The turns so far.
          **kwargs: Template variables; they override those given at construction.

        Raises:
          TokenizerError: The tokenizer has no chat template.
        """
        if not self._tokenizer.chat_template:
            raise TokenizerError(
                f"{self._path}: no chat template in tokenizer_config.json or "
                "chat_template.jinja: add one, or use a plain-text prompt"
            )
        return self._tokenizer.apply_chat_template(
            list(messages),
            tokenize=True,
            return_dict=False,
            add_generation_prompt=True,
            **(self._chat_template_kwargs | kwargs),
        )


def load_tokenizer(
    path: str | pathlib.Path, chat_template_kwargs: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Returns the tokenizer named by a configuration.

    Args:
      path: `"byte"`, or a Hugging Face folder.
      chat_template_kwargs: See :class:`HFTokenizer`; must be empty for bytes.
    """
    if path == "byte":
        if chat_template_kwargs:
            raise TokenizerError("the byte tokenizer takes no chat_template_kwargs")
        return ByteTokenizer()
    return HFTokenizer(path, chat_template_kwargs)


def check_tokenizer(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Checks that every id of the tokenizer has a row in the model's embedding.

    Args:
      tokenizer: The tokenizer.
      model_vocab_size: Rows of the embedding, padding included.

    Raises:
      TokenizerError: The tokenizer has more ids than the model.
    """
    if tokenizer.vocab_size > model_vocab_size:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model only "
            f"{model_vocab_size}: use the tokenizer of this model, or a model whose "
            f"vocab_size is at least {tokenizer.vocab_size}"
        )


def _load(path: pathlib.Path) -> Any:
    if not path.is_dir():
        raise TokenizerError(
            f"{path} is not a folder: give a Hugging Face tokenizer folder, or 'byte'"
        )
    if not any(all((path / f).is_file() for f in fs) for fs in _VOCABULARY_FILES):
        raise TokenizerError(
            f"{path} has neither tokenizer.json nor vocab.json and merges.txt: copy "
            "the tokenizer files of the checkpoint into it"
        )
    import transformers  # 1.6 s: only where a folder is used.

    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as e:  # The library raises many kinds, from Rust as well.
        raise TokenizerError(
            f"{path}: transformers cannot load this tokenizer ({e}): check that its "
            "files are complete"
        ) from e


def _stop_ids(path: pathlib.Path, tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of generation_config.json, else those found by name."""
    config_path = path / "generation_config.json"
    if config_path.is_file():
        try:
            ids = json.loads(config_path.read_text(encoding="utf-8"))["eos_token_id"]
            return (ids,) if isinstance(ids, int) else tuple(int(i) for i in ids)
        except (ValueError, KeyError, TypeError) as e:
            raise TokenizerError(
                f"{config_path}: no usable `eos_token_id` ({e!r}): correct it, or "
                "remove the file to use the tokenizer's own stop tokens"
            ) from e
    vocabulary = tokenizer.get_vocab()
    names = (tokenizer.eos_token, *_QWEN_STOP_TOKENS)
    ids = tuple(dict.fromkeys(vocabulary[n] for n in names if n in vocabulary))
    if not ids:
        raise TokenizerError(
            f"{path}: no stop token: set `eos_token` in tokenizer_config.json"
        )
    return ids
