"""Computes the size of a store before the store is written.

`logitless teacher size` prints the sizes for several K. `logitless teacher capture` first prints
the expected size of its store. The number of tokens is known only after all documents are
tokenised. So the number is estimated from SAMPLE texts, which are chosen at random from all files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import teacher_data as _data
from .report import bytes_text, table

SAMPLE = 200  # number of texts that are tokenised for the estimate
PER_DOCUMENT = 80  # assumed bytes of the start and the index entries per document; usual: 60 to 100


class Expected(NamedTuple):
    """The number of documents of a capture, and the expected number of their tokens."""

    documents: int
    tokens: float


def expected(
    lines: Iterable[_data.Line], tokenizer: Any, end: int | None, most: int, vocab_size: int | None
) -> Expected:
    """Checks every line, and returns the number of documents and an estimate of their tokens.

    The tokens of lines with input_ids are counted. The tokens of all texts are estimated from the
    sizes of their lines in bytes. A document has at most `most` tokens.
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
    """Returns the line that `logitless teacher capture` prints first."""
    per_token = header.token_bytes()
    total = per_token * of.tokens + PER_DOCUMENT * of.documents
    text = f"expected: {total:,.0f} bytes ({bytes_text(total)}) in {out}, for {of.documents:,}"
    text += f" documents and about {of.tokens:,.0f} tokens of {per_token:.1f} bytes"
    if header.sampled:
        from logitless.store.format import DISTINCT

        text += f", if {header.k} draws have {DISTINCT * header.k:.0f} distinct ids"
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
        print(f"if the draws of a token have {share} distinct ids; --distinct sets this number")
