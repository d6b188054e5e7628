"""Drafts with a vocabulary of their own: which of their ids the target has, and how they read.

Paper: "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
    Vocabularies", ICML 2025, arXiv 2502.05202, its token-level intersection (TLI).
Reference code studied: huggingface/transformers 5.23 (``AssistantToTargetTranslator``).
Method: the draft's law is masked to the tokens that both have, and renormalised; the verifier is
given that law, so the output is the target's as ever.
Where ours differs, and why:
    - Tokens are compared as bytes, whatever their tokenizers write for a space or a byte;
      transformers compares their names with the sign of a space exchanged.
    - A token of the text that the draft lacks is read as several of its own, the longest first
      that the rest begins with; the prompt too, which transformers tokenizes again. Their
      text is the target's, their cut may not be the draft tokenizer's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbench.arrays import IntArray

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_LEVEL_SPACE, _METASPACE = "Ġ", "▁"


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The mapping between a draft's ids and the target's.

    Attributes:
        ids: ``[draft vocab]`` the target's id of each of the draft's, -1 where it has none.
        begins: ``[target vocab + 1]``: target id t is read as ``reads[begins[t] : begins[t + 1]]``.
        reads: the draft's ids.
    """

    ids: IntArray
    begins: IntArray
    reads: IntArray

    def expand(self, tokens: IntArray) -> IntArray:
        """Translate the target's ``tokens`` to the draft's ids."""
        begins = self.begins[tokens]
        counts = self.begins[tokens + 1] - begins
        ends = np.cumsum(counts)
        places = np.arange(ends[-1] if len(ends) else 0)
        ids: IntArray = self.reads[places + np.repeat(begins - (ends - counts), counts)]
        return ids


def shared_vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    *,
    target_vocab: int,
    draft_vocab: int,
) -> SharedVocabulary:
    """Match two tokenizers; the heads have so many ids, padding among them."""
    ours, theirs = token_texts(tokenizer), token_texts(draft)
    draft_ids: dict[tuple[bytes, bool], int] = {}
    for i, spelled in theirs.items():
        if i < draft_vocab:
            draft_ids.setdefault(spelled, i)
    ids = np.full(draft_vocab, -1, dtype=np.int64)
    reads: list[list[int]] = []
    pieces = {spelled: i for (spelled, special), i in draft_ids.items() if spelled and not special}
    longest = max(map(len, pieces), default=0)
    stand_in = draft.unk_token_id if draft.unk_token_id is not None else 0
    for token in range(target_vocab):
        text = ours.get(token)
        partner = None if text is None else draft_ids.get(text)
        if partner is not None:
            if ids[partner] < 0:
                ids[partner] = token
            reads.append([partner])
        else:
            cut = [] if text is None else _cut(text[0], pieces, longest)
            reads.append(cut or [stand_in])
    counts = np.array([len(ids_of_token) for ids_of_token in reads], dtype=np.int64)
    return SharedVocabulary(
        ids,
        np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))),
        np.array([i for ids_of_token in reads for i in ids_of_token], dtype=np.int64),
    )


def token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[int, tuple[bytes, bool]]:
    """Map each id to its bytes, and whether it is a special marker.

    In the order of ids, those that spell a single byte last: where a tokenizer has the same bytes
    twice, its texts have the other one.
    """
    vocabulary = tokenizer.get_vocab()
    added = tokenizer.get_added_vocab()
    byte_level = any(token.startswith(_BYTE_LEVEL_SPACE) for token in vocabulary)
    byte_of = {sign: byte for byte, sign in bytes_to_unicode().items()}
    entries: list[tuple[bool, int, tuple[bytes, bool]]] = []
    for token, i in vocabulary.items():
        spelled = None if byte_level else _BYTE.fullmatch(token)
        if token in added:
            text = token.encode()
        elif spelled:
            text = bytes([int(spelled.group(1), 16)])
        elif byte_level and all(sign in byte_of for sign in token):
            text = bytes(byte_of[sign] for sign in token)
        else:
            text = token.replace(_METASPACE, " ").encode()
        entries.append((spelled is not None, i, (text, token in added)))
    return {i: text for _, i, text in sorted(entries)}


def _cut(text: bytes, pieces: dict[bytes, int], longest: int) -> list[int]:
    """Cut a text into pieces, the longest first; unknown bytes are lost."""
    ids, at = [], 0
    while at < len(text):
        for size in range(min(longest, len(text) - at), 0, -1):
            piece = pieces.get(text[at : at + size])
            if piece is not None:
                ids.append(piece)
                break
        else:
            size = 1
        at += size
    return ids
