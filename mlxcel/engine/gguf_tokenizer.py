"""A GGUF file's vocabulary as a transformers tokenizer.

Two kinds: byte-level BPE ("gpt2"), whose split pattern is named by tokenizer.ggml.pre, and SentencePiece BPE
("llama"), whose merges are derived from the piece scores. What is special, what starts and what ends a text
follow llama.cpp's src/llama-vocab.cpp, so the same file gives the same tokens in both. A split pattern that is
not in the table is refused: any other would tokenize the same text differently from how the model was trained.
Knows no weights and no config.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlxcel.engine.gguf_file import GGUFError, GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"  # SentencePiece's visible space

# Texts that end a generation whatever the file says of them: files that forget to mark them are common.
END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)

SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_QWEN2 = SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLIT_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


ID_KEYS = {"pad": "padding", "unk": "unknown"}  # the others are called the same in the metadata


class TokenType(IntEnum):
    """llama_token_type of llama.h."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`split` None is GPT-2's own pattern. `whole_words`: a word in the vocabulary is a token, whatever the merges."""

    split: str | None = None
    digits_apart: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(digits_apart=True)
_LLAMA3 = PreTokenizer(SPLIT_LLAMA3, whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer(SPLIT_QWEN2, nfc=True)
_TEKKEN = PreTokenizer(SPLIT_TEKKEN, whole_words=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts by id, each once; their types; the ids that the file names ("bos", "eos", "eot", ...)."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def text(self, name: str) -> str | None:
        return self.tokens[self.ids[name]] if name in self.ids else None


def build_tokenizer(file: GGUFFile) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer and the ids that end a generation, that of EOS first. Raises GGUFError.

    Encoding with special tokens adds BOS and EOS as the file asks. `<s>` and its like in a text are always read
    as the tokens they name.
    """
    # Importing transformers takes seconds, and a damaged file is refused without it.
    from transformers import PreTrainedTokenizerFast

    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise GGUFError(f"tokenizer model {kind!r} is not supported (gpt2 and llama are)")
    vocabulary = _read_vocabulary(file, sentencepiece=kind == "llama")
    if kind == "llama":
        tokenizer, add_bos = _sentencepiece(file, vocabulary), True
    else:
        tokenizer, add_bos = _byte_level(file, vocabulary)
    _add_special_tokens(tokenizer, vocabulary)
    add_bos = file.flag("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = file.flag("tokenizer.ggml.add_eos_token", False)
    tokenizer.post_processor = _post_processor(vocabulary, add_bos, add_eos)
    named = {f"{name}_token": vocabulary.text(name) for name in ("bos", "eos", "pad", "unk")}
    special: dict[str, Any] = {key: text for key, text in named.items() if text is not None}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    return fast, _end_ids(vocabulary)


def _read_vocabulary(file: GGUFFile, sentencepiece: bool) -> Vocabulary:
    tokens = file.items("tokenizer.ggml.tokens", str)
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    if not tokens or len(set(tokens)) != len(tokens):
        raise GGUFError("the vocabulary is empty or names a token twice")
    if len(tokens) > file.tensor("token_embd.weight").shape[0]:
        raise GGUFError(f"the vocabulary has {len(tokens)} tokens, token_embd.weight has fewer rows")
    types = [int(TokenType.NORMAL)] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        types = file.items("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise GGUFError("tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length")
    types = [int(TokenType.CONTROL) if text in END_OF_TURN else t for text, t in zip(tokens, types, strict=True)]
    return Vocabulary(tokens, types, _named_ids(file, len(tokens), sentencepiece))


def _named_ids(file: GGUFFile, num_tokens: int, sentencepiece: bool) -> dict[str, int]:
    ids = {"unk": 0, "bos": 1, "eos": 2} if sentencepiece else {}
    ids = {name: i for name, i in ids.items() if i < num_tokens}
    for name in ("bos", "eos", "eot", "eom", "pad", "unk"):
        key = f"tokenizer.ggml.{ID_KEYS.get(name, name)}_token_id"
        if key not in file.metadata:
            continue
        if file.metadata[key] in range(num_tokens):
            ids[name] = file.integer(key)
        elif name not in ("pad", "unk"):  # those two are often -1, and nothing depends on them
            raise GGUFError(f"metadata key {key} is not a token of the vocabulary")
    return ids


def _sentencepiece(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    scores = file.items("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise GGUFError("tokenizer.ggml.scores and tokenizer.ggml.tokens differ in length")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate(vocabulary.tokens)},
            merges=_merges_from_scores(vocabulary, scores),
            unk_token=vocabulary.text("unk"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    visible = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = visible
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_from_scores(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose joined piece scores best: every split of every piece, best piece first."""
    apart = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.BYTE)
    pieces = {text: i for i, text in enumerate(vocabulary.tokens) if vocabulary.types[i] not in apart}
    merges = []
    for piece, i in pieces.items():
        cuts = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        pairs = [(pieces[a], pieces[b], a, b) for a, b in cuts if a in pieces and b in pieces]
        merges += [(-scores[i], a, b) for _, _, a, b in sorted(pairs)]
    merges.sort(key=lambda merge: merge[0])  # stable: keeps the order within one piece
    return [(a, b) for _, a, b in merges]


def _byte_level(file: GGUFFile, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether its kind starts a text with BOS when the file does not say."""
    name = file.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise GGUFError(f"pre-tokenizer {name!r} is not supported ({', '.join(PRE_TOKENIZERS)} are)")
    pre = PRE_TOKENIZERS[name]
    vocab = {text: i for i, text in enumerate(vocabulary.tokens)}
    merges = _checked_merges(file.items("tokenizer.ggml.merges", str), vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _checked_merges(lines: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Checked here because tokenizers raises a bare Exception on a merge outside the vocabulary."""
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise GGUFError(f"merge {line!r} is not in the vocabulary")
        merges.append((left, right))
    return merges


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    by_type: dict[int, list[str]] = {TokenType.CONTROL: [], TokenType.USER_DEFINED: []}
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in by_type:
            by_type[kind].append(text)
    control, user = by_type[TokenType.CONTROL], by_type[TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in user])


def _post_processor(vocabulary: Vocabulary, add_bos: bool, add_eos: bool) -> processors.PostProcessor:
    for name, wanted in (("bos", add_bos), ("eos", add_eos)):
        if wanted and name not in vocabulary.ids:
            raise GGUFError(f"metadata key tokenizer.ggml.{name}_token_id is missing")
    used = [name for name, wanted in (("bos", add_bos), ("eos", add_eos)) if wanted]
    template = ["bos"] * add_bos + ["$A"] + ["eos"] * add_eos
    special = [{"id": name, "ids": [vocabulary.ids[name]], "tokens": [vocabulary.text(name)]} for name in used]
    return processors.TemplateProcessing(single=template, special_tokens=special)


def _end_ids(vocabulary: Vocabulary) -> list[int]:
    named = [vocabulary.ids[name] for name in ("eos", "eot", "eom") if name in vocabulary.ids]
    known = [i for i, text in enumerate(vocabulary.tokens) if text in END_OF_TURN]
    return list(dict.fromkeys(named + known))
