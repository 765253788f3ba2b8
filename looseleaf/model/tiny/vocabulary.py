"""Trains a small vocabulary on the spot and wraps it in a family's own tokenizer class.

In: which style of tokenizer a family uses, its special tokens and, for other than the tiny models, a corpus and a size.
Out: a transformers tokenizer with the ordinary tokens (about five hundred for the tiny models) followed by the special
ones, the same on every run. What it does not know: models, images, chat templates.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

VOCABULARY_SIZE = 512
"""Ordinary tokens before the special ones: 256 bytes and as many merges."""

CORPUS = (
    "You are a helpful assistant. Look at the images and answer the question about them.",
    "What is in this image? The image shows a red circle next to a blue square on a white page.",
    "Describe the picture in one sentence. There are two people and a small dog in front of a green house.",
    "Which cell changed between the first image and the second image? The cell in the third row changed colour.",
    "What colour is the shape in the top left corner? It is yellow, and the one below it is orange.",
    "Read the text on the page. The invoice says that the total is 1280 and the date is the 4th of July.",
    "The chart shows how the price of bread rose from 2019 to 2023 and then fell again in the last quarter.",
    "How many triangles are there? Count them row by row: three, then five, then none at all.",
    "Compare both documents and say what is different. The second document has one more paragraph at the end.",
    "According to the legend, the star stands for a station and the line stands for a road.",
    "At what time does the video show the bird? The bird appears after twelve seconds and flies to the right.",
    "Use the table to find the number that belongs to the name, and write only the number.",
    "Is the door open or closed? I think that it was closed before, but now it is open.",
    "When the water had gone, the children walked along the river and looked for round stones.",
    "Please give a short answer with a reason. I do not know, because the picture is too dark to see.",
    "Page one of two: this report describes the work that was done during the year and what comes next.",
    "Where should the user click to save the file? Click the button with the arrow in the upper right part.",
    "It would be better to ask again with another image, since this one has been cut off at the bottom.",
    "They said that their house, which stands near the old bridge, would be sold before winter.",
    "Answer yes or no. Yes, there is a black cat under the table, and the cup on it is empty.",
)
"""Plain English around questions about images: enough for merges that make prompts about as long as real ones."""

_GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Kimi cut text into words before merging bytes."""


_Merges = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A family's tokenizer as data: the class it uses and its special tokens.

    Styles: `qwen2` and `gpt2` are byte-level, `llama` cuts at spaces and falls back to bytes as SentencePiece does,
    `fast` is a byte-level backend without a class of its own, as Llama 3, Kimi and DeepSeek load.
    """

    style: Literal["qwen2", "gpt2", "llama", "fast"]
    eos: str
    pad: str
    bos: str | None = None
    adds_bos: bool = False
    special: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    """Special tokens the processor reads as attributes of the tokenizer, such as `image_token`."""


def build_tokenizer(vocabulary: Vocabulary, *, corpus: Sequence[str] = CORPUS, size: int = VOCABULARY_SIZE) -> Any:
    """The family's tokenizer class over `size` ordinary tokens, bytes included, learned from `corpus`.

    A special token is always one id, behind the ordinary ones. A small corpus may hold fewer merges than asked for.
    """
    arguments: dict[str, Any] = {
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.eos,
        "pad_token": vocabulary.pad,
        "extra_special_tokens": list(vocabulary.special),
        "model_specific_special_tokens": dict(vocabulary.named),
        "clean_up_tokenization_spaces": False,
    }
    if vocabulary.adds_bos:
        arguments["add_bos_token"] = True
    if vocabulary.style == "qwen2":
        vocab, merges = _train_bytes(Qwen2Tokenizer().backend_tokenizer.pre_tokenizer, corpus, size)
        return Qwen2Tokenizer(vocab=vocab, merges=merges, **arguments)
    if vocabulary.style == "gpt2":
        vocab, merges = _train_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False), corpus, size)
        return GPT2Tokenizer(vocab=vocab, merges=merges, unk_token=vocabulary.eos, **arguments)
    if vocabulary.style == "llama":
        vocab, merges = _train_spaces(corpus, size)
        return LlamaTokenizer(vocab=vocab, merges=merges, **arguments)
    return PreTrainedTokenizerFast(tokenizer_object=_gpt4_backend(corpus, size), **arguments)


def _train_bytes(pre_tokenizer: Any, corpus: Sequence[str], size: int) -> tuple[dict[str, int], _Merges]:
    """Byte-level BPE: every byte is a token, the rest are merges inside the words `pre_tokenizer` cuts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return _contents(tokenizer)


def _train_spaces(corpus: Sequence[str], size: int) -> tuple[dict[str, int], _Merges]:
    """BPE over words that start with a visible space, with one token per byte for what the corpus lacks."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    reserved = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    total = len(reserved) + size - 256
    trainer = trainers.BpeTrainer(vocab_size=total, special_tokens=reserved, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return _contents(tokenizer)


def _contents(tokenizer: Tokenizer) -> tuple[dict[str, int], _Merges]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _gpt4_backend(corpus: Sequence[str], size: int) -> Tokenizer:
    words = pre_tokenizers.Split(Regex(_GPT4_SPLIT), behavior="isolated")
    cut = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    vocab, merges = _train_bytes(cut, corpus, size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
