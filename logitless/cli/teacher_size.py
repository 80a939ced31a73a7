"""The size of a store before it is written: `teacher size`, and the line before a capture.

A capture does not know its number of tokens before it has tokenised all documents. So the number is
estimated from SAMPLE documents, which are spread over the files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import teacher_data as _data
from .report import bytes_text, table

SAMPLE = 200  # documents that are tokenised for the estimate
PER_DOCUMENT = 80  # bytes of the index of documents, which are 60 to 100 bytes per document


class Expected(NamedTuple):
    """The documents of a capture, and the expected number of their tokens."""

    documents: int
    tokens: float


def expected(
    lines: Iterable[_data.Line], tokenizer: Any, end: int | None, most: int, vocab_size: int | None
) -> Expected:
    """Checks every line, and estimates the number of tokens.

    Lines with input_ids are counted. The tokens of texts are estimated from the sizes in bytes.
    Documents have at most `most` tokens.
    """
    picks, sample = random.Random(0), []
    documents, known, texts, size = 0, 0, 0, 0
    for line in lines:
        _data.check(line, vocab_size)
        documents += 1
        ids = line.fields.get("input_ids")
        if ids is not None:
            known += min(len(ids), most)
            continue
        texts, size = texts + 1, size + line.size
        # Every text is in the sample with the same probability.
        if len(sample) < SAMPLE:
            sample.append(line)
        elif (place := picks.randrange(texts)) < SAMPLE:
            sample[place] = line
    found = [
        len(tokenizer(line.fields["text"])["input_ids"]) + (end is not None) for line in sample
    ]
    per_byte = sum(min(n, most) for n in found) / max(sum(line.size for line in sample), 1)
    return Expected(documents, known + size * per_byte)


def sentence(header: Any, of: Expected, out: object) -> str:
    """The line that a capture prints before it starts."""
    per_token = header.token_bytes()
    total = per_token * of.tokens + PER_DOCUMENT * of.documents
    text = f"expected: {total:,.0f} bytes ({bytes_text(total)}) in {out}, for {of.documents:,}"
    text += f" documents and about {of.tokens:,.0f} tokens of {per_token:.1f} bytes"
    if header.sampled:
        from logitless.store.format import DISTINCT

        text += f", if {DISTINCT * header.k:.0f} of {header.k} draws have distinct ids"
    return text


def size(args: argparse.Namespace) -> None:
    from logitless.store import Header

    values = "counts" if args.sample else args.values
    rows = []
    for k in args.sample or args.k:
        header = Header(args.vocab, k, values)
        per_token = header.token_bytes(args.distinct)
        rows.append({
            "n" if args.sample else "K": str(k), "bytes per token": f"{per_token:.1f}",
            f"{args.tokens:.3g} tokens": bytes_text(per_token * args.tokens),
        })  # fmt: skip
    print(table(rows))
    print(f"V = {args.vocab:,}, values = {values}; plus 60 to 100 bytes per document")
    if args.sample:
        share = "0.3 n" if args.distinct is None else f"{args.distinct:g}"
        print(f"if a token has {share} distinct ids, which --distinct sets")
