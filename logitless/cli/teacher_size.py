"""Computes the size of a store before the store is written.

`logitless teacher size` prints the sizes for several K. `logitless teacher capture` first prints
the expected size of its store. The exact number of tokens is unknown until all documents are
tokenised. So this number is estimated from SAMPLE texts, which are chosen at random from all files.
The expected time is printed after the first batch, because the speed is unknown until then.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import teacher_data as _data
from .report import bytes_text, table

SIZES = (16, 32, 64, 128, 256)  # the default of --k in the command `size`
SAMPLE = 200  # number of texts that are tokenised for the estimate
PER_DOCUMENT = 100  # bytes of a document besides its tokens: two entries, lookup, checksum


class Expected(NamedTuple):
    """The number of documents of a capture, and the expected number of their tokens."""

    documents: int
    tokens: float


def expected(
    lines: Iterable[_data.Line], tokenizer: Any, end: int | None, most: int, vocab_size: int | None
) -> Expected:
    """Checks every line. Returns the number of documents, and an estimate of the number of tokens.

    For lines with `input_ids`, the tokens are counted. For lines with text, the number of tokens is
    estimated from the size of the line in bytes. A document has at most `most` tokens.
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
    return f"{text}; the expected time is printed after the first batch"


class Pace:
    """Prints the speed and the expected time of a capture after the first batch."""

    def __init__(self, header: Any, of: Expected, world: int):
        self.header, self.of, self.world = header, of, world
        self.begin: float | None = time.perf_counter()

    def batch(self, tokens: int) -> None:
        """Call this method after each batch, with the number of tokens in the batch."""
        if self.begin is None or not tokens:
            return
        seconds, self.begin = time.perf_counter() - self.begin, None
        if os.environ.get("RANK", "0") == "0":
            speed = self.world * tokens / max(seconds, 1e-9)
            print(self.sentence(speed), flush=True)

    def sentence(self, speed: float) -> str:
        """Returns the line to print. `speed` is in tokens per second, for all ranks together."""
        written = bytes_text(speed * self.header.token_bytes())
        time = datetime.timedelta(seconds=round(self.of.tokens / speed))
        return (
            f"first batch: {speed:,.0f} tokens/s, {written}/s; at this speed, all documents take"
            f" {time} (h:min:s)"
        )


def _check(args: argparse.Namespace) -> None:
    for name, value in (("--k", args.k), ("--values", args.values)):
        if args.sample and value is not None:
            raise ValueError(f"{name} must not be passed together with --sample, got {value}.")
    if args.distinct is not None and not args.sample:
        raise ValueError(
            f"--distinct must be passed with --sample, got {args.distinct:g} without --sample."
        )
    if args.distinct is not None and not 1 <= args.distinct <= min(args.sample):
        raise ValueError(
            f"--distinct must lie in [1, {min(args.sample)}] (the number of draws), got "
            f"{args.distinct:g}."
        )


def size(args: argparse.Namespace) -> None:
    from logitless.store import Header

    _check(args)
    values = "counts" if args.sample else args.values or "u8"
    rows = []
    for k in args.sample or args.k or SIZES:
        header = Header(args.vocab, k, values)
        per_token = header.token_bytes(args.distinct)
        rows.append({
            "n" if args.sample else "K": str(k), "bytes per token": f"{per_token:.1f}",
            f"{args.tokens:.3g} tokens": bytes_text(per_token * args.tokens),
        })  # fmt: skip
    print(table(rows))
    print(f"V = {args.vocab:,}, values = {values}; plus about 100 bytes per document")
    if args.sample:
        share = "0.3 n" if args.distinct is None else f"{args.distinct:g}"
        print(f"if the draws of a token have {share} distinct ids; --distinct sets this number")
