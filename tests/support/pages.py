"""The code blocks of README and docs, and how a user's fresh file runs them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import logitless as ll
from tests.support.paths import ROOT

PAGES = [
    *sorted(path.name for path in ROOT.glob("*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]


def blocks_of(page: str) -> list[tuple[str, str]]:
    """The language and the text of each code block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def python_of(page: str) -> list[str]:
    return [text for language, text in blocks_of(page) if language == "python"]


def run(page: str) -> Iterator[tuple[str, dict]]:
    """Runs the Python blocks of a page in order, in one namespace. Yields after each block."""
    names: dict = {"__name__": page}
    ll.report()  # forgets the logits that other tests materialised
    for block in python_of(page):
        with small_models():
            exec(compile(block, page, "exec"), names)
        yield block, names


@contextmanager
def small_models() -> Iterator[None]:
    """AutoModelForCausalLM.from_pretrained returns a small random model, and downloads nothing."""
    try:
        from transformers import AutoModelForCausalLM, Qwen3Config
    except ImportError:
        yield
        return
    config = Qwen3Config(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config)
    with patch.object(AutoModelForCausalLM, "from_pretrained", lambda name: made):
        yield
