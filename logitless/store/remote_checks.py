"""Checks addresses, responses of servers, and the options of the cache."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .checks import whole
from .file_checks import refuse


def connection(timeout: Any, attempts: Any, options: Any) -> None:
    whole("attempts", attempts, 1, 1000)
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}.")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"storage_options must map names to values, got {options!r:.80}.")


def http_options(options: Any) -> None:
    if unknown := sorted(options.keys() - {"headers"}):
        raise ValueError(
            "storage_options must have only the key 'headers' for an http or https address,"
            f" got {unknown[0]!r}."
        )
    headers = options.get("headers", {})
    if not isinstance(headers, dict) or not all(
        isinstance(text, str) for pair in headers.items() for text in pair
    ):
        raise TypeError("storage_options['headers'] must be a dict of strings, got another value.")


def local_options(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} must be left out for a store in a local folder, got {value!r:.80}. An"
                " address of a remote store has the form s3://bucket/targets."
            )


def missing_package(url: str, missing: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"{url} must be read with fsspec and its package for this protocol, got an import error"
        f" ({missing.rstrip('.')}). Run pip install 'logitless[remote]', or in a clone"
        " pip install '.[remote]'."
    )


def unknown_protocol(argument: str, url: str, error: Exception) -> ValueError:
    return ValueError(
        f"{argument} must be an address of a protocol of fsspec, got {url!r:.200}"
        f" ({str(error).rstrip('.')})."
    )


def can_write(url: str, is_http: bool) -> None:
    if is_http:
        raise ValueError(
            f"upload must be an address that fsspec can write, such as s3://bucket/targets, got"
            f" {url!r}. http and https can only be read."
        )


def upload_address(url: Any, is_address: bool) -> None:
    if not is_address:
        raise ValueError(
            f"upload must be an address such as s3://bucket/targets, got {url!r:.200}."
        )


def own_address(url: str, name: str, same: bool) -> None:
    if not same:
        raise ValueError(
            f"upload must be an address without another store, got {url} with a store.index that"
            f" lists {name}. The local folder does not have this file, or has another file of this"
            " name."
        )


def refused(where: str, error: Any) -> NoReturn:
    if error.code in (404, 410):
        raise missing(where, f"HTTP status {error.code}")
    kind = PermissionError if error.code in (401, 403) else OSError
    raise kind(f"{where} must be readable, got HTTP status {error.code} ({error.reason}).")


def missing(where: str, got: str = "no file") -> FileNotFoundError:
    return FileNotFoundError(f"{where} must exist, got {got}.")


def missing_listed(error: FileNotFoundError) -> FileNotFoundError:
    """The error for a missing file of an open store."""
    return FileNotFoundError(
        f"{error} store.index listed this file when the store was opened. If the store has changed"
        " since it was opened, open it again."
    )


def failed(where: str, done: str, attempts: int, error: Any) -> OSError:
    text = str(error).rstrip(".") or "no message"
    return OSError(
        f"{where} must be {done} in {attempts} attempts, got {type(error).__name__}: {text}."
    )


def whole_file(where: str, got: int, announced: int | None) -> None:
    if announced is not None and got != announced:
        refuse(where, f"have the {announced} bytes that the server has announced", str(got))


def listed_file(where: str, got: int, digest: str, listed: Any) -> None:
    if got != listed.bytes:
        more = "more bytes" if got > listed.bytes else f"{got} bytes"
        refuse(where, f"have the {listed.bytes} bytes that store.index lists", more)
    if digest != listed.sha256:
        refuse(where, f"have the SHA-256 {listed.sha256} that store.index lists", digest)


def uploaded(where: str, got: int, wanted: int) -> None:
    if got != wanted:
        refuse(where, f"have {wanted} bytes after its upload", str(got))


def has_index(url: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{url} must have a store.index, got none. A writer leaves this file when it closes. Close"
        " the writer, or call `ll.store.recover(FOLDER)` for the local folder of the store, and"
        " serve or upload all files of this folder."
    )


def cache_bytes(limit: Any, largest: int = 1) -> None:
    whole("cache_bytes", limit, 1, 2**60)
    if limit < largest:
        raise ValueError(
            f"cache_bytes must be at least {largest}, the size of the store's largest file,"
            f" got {limit}."
        )


def cache_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(f"cache must be a folder, got {str(folder)!r}.") from None


def failed_meanwhile(before: str, after: str) -> None:
    """Raises the error in SHA256.failed if another process wrote it during the wait."""
    if after != before:
        raise OSError(after.partition("\n")[2])


def index_format(where: str, metadata: dict, form: str, version: str) -> None:
    stored = metadata.get("format"), metadata.get("version")
    if stored != (form, version):
        got = f"{stored[0]!r:.50}, {stored[1]!r:.50}"
        refuse(where, f"be an index of format {form!r}, version {version!r}", got)


def index_content(where: str, right: bool) -> None:
    if not right:
        refuse(where, "list the files, the documents and the header of a store", "other content")


def index_digest(where: str, same: bool) -> None:
    if not same:
        refuse(where, "have the bytes it was written with (SHA-256)", "other bytes")


def same_starts(where: object, same: bool) -> None:
    if not same:
        refuse(where, "have the documents that store.index lists", "other documents")


def not_uploaded(url: str, names: list[str], error: Exception | None) -> OSError:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    why = "" if error is None else f" ({type(error).__name__}: {str(error).rstrip('.')})"
    return OSError(
        f"{url} must have all shards of this writer, got an upload without {shown}{why}. The local"
        " store is complete. Open a writer again with the same arguments to upload the rest."
    )
