"""Checks parquet files. Errors have the form `<file> must <rule>, got <value>.`"""

from pathlib import Path
from typing import Any

from .file_checks import refuse

COLUMNS = ("tokens", "ids", "logprobs", "tail")


def pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "parquet files must be written and read with pyarrow, got an import error"
            f" ({str(error).rstrip('.')}). Run pip install 'logitless[parquet]', or in a clone"
            " pip install '.[parquet]'."
        ) from error
    return pyarrow, pyarrow.parquet


def no_parquet(folder: Path) -> None:
    for path in sorted(folder.glob("*.parquet")):
        refuse(folder, "have no parquet files before the export", path.name)


def some_files(files: Any) -> None:
    if isinstance(files, (str, bytes)) or not hasattr(files, "__len__") or not len(files):
        raise ValueError(f"files must be a list of parquet files, got {files!r:.100}.")


def one_header(name: str, stored: Any, given: dict) -> None:
    if stored is not None and given:
        rule = "be imported without header arguments, because the file contains a header"
        refuse(name, rule, ", ".join(sorted(given)))
    if stored is None and not {"vocab_size", "k"} <= given.keys():
        refuse(name, "have a header in its metadata, or be imported with vocab_size and k", "none")


def columns(name: str, found: list[str], sampled: bool) -> None:
    wanted = COLUMNS[:-1] if sampled else COLUMNS  # sampled targets have no tail
    if missing := [column for column in wanted if column not in found]:
        refuse(name, f"have the columns {', '.join(wanted)}", f"no {missing[0]}")


def is_list(name: str, column: str, array: Any, pa: Any) -> None:
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or array.null_count:
        got = f"{kind} with {array.null_count} nulls"
        refuse(name, f"have lists in the column {column}, and no nulls", got)


def is_numbers(name: str, column: str, array: Any, pa: Any) -> None:
    wanted = pa.types.is_floating if column in ("logprobs", "tail") else pa.types.is_integer
    if (not wanted(array.type) and len(array)) or array.null_count:
        got = f"{array.type} with {array.null_count} nulls"
        kind = "floats" if column in ("logprobs", "tail") else "integers"
        refuse(name, f"have {kind} in the column {column}, and no nulls", got)


def same_lengths(name: str, column: str, same: bool) -> None:
    if not same:
        rule = f"have as many items in {column} as tokens, and as many logprobs as ids"
        refuse(name, rule, "another number")


def slots(name: str, most: int, k: int) -> None:
    if most > k:
        refuse(name, f"have at most {k} ids per token", str(most))
