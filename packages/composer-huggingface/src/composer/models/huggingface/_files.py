"""A tokenizer as entries of a checkpoint, and back, running no code from it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

__all__ = ["read_tokenizer", "tokenizer_of", "write_files"]

_TEXT = {".txt", ".py", ".jinja"}
_KNOWN = {".json", ".model", *_TEXT}
_PART = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*")
_MOST_PARTS = 2  # templates have a folder of their own


def read_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """The files of a tokenizer: `{"tokenizer.json": {"file_extension": ".json", "content": ...}, ...}`.

    Raises:
        ValueError: It has a file of an unknown kind.
    """
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="composer-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {
            path.relative_to(folder).as_posix(): {"file_extension": path.suffix, "content": _content(path)}
            for path in files
        }


def _content(path: Path) -> Any:
    if path.suffix not in _KNOWN:
        raise ValueError(
            f"The tokenizer has a file {path.name!r}; only files ending in {', '.join(sorted(_KNOWN))} can be kept in "
            f"a checkpoint. Build the model with `tokenizer=None`, and keep the tokenizer beside the checkpoint."
        )
    if path.suffix == ".model":
        return path.read_bytes()
    text = path.read_bytes().decode("utf-8")
    return json.loads(text) if path.suffix == ".json" else text


def write_files(saved: Mapping[str, Any], folder: Path, trust_remote_code: bool = False) -> None:
    """Write the files of a saved tokenizer into a folder, and nowhere else.

    Args:
        saved: What `read_tokenizer` returned, here or elsewhere; names may lack the extension, texts be lists of lines.
        folder: Made if need be.
        trust_remote_code: Whether files of code are written, too.

    Raises:
        ValueError: An entry is no such file, leads out of the folder, or is code that is not trusted.
    """
    contents = {path: _bytes(path, entry) for path, entry in _paths(saved, trust_remote_code).items()}
    for path, content in contents.items():  # nothing is written if anything is wrong
        target = folder / path
        if target.parent != folder and target.parent.is_symlink():
            raise ValueError(f"{str(target.parent)!r} is a link out of the folder to write to. Remove it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        target.write_bytes(content)


def _paths(saved: Mapping[Any, Any], trust_remote_code: bool) -> dict[str, Mapping[str, Any]]:
    found = {}
    for name, entry in saved.items():
        extension = entry.get("file_extension") if isinstance(entry, Mapping) else None
        if extension not in _KNOWN or not isinstance(name, str) or "content" not in entry:
            raise ValueError(
                f"The checkpoint's tokenizer has an entry {name!r} that is no file ending in "
                f"{', '.join(sorted(_KNOWN))}. Nothing was written."
            )
        path = name if name.endswith(extension) else name + extension
        parts = path.split("/")
        if len(parts) > _MOST_PARTS or not all(_PART.fullmatch(part) for part in parts):
            raise ValueError(
                f"The checkpoint's tokenizer has a file {path!r}, which is no name within a folder. Nothing was "
                f"written."
            )
        if extension == ".py" and not trust_remote_code:
            raise ValueError(
                f"The checkpoint's tokenizer has code of its own, {path!r}, which would run. If you trust the "
                f"checkpoint, pass `trust_remote_code=True`."
            )
        found[path] = entry
    return found


def _bytes(path: str, entry: Mapping[str, Any]) -> bytes:
    extension, content = entry["file_extension"], entry["content"]
    if extension == ".json":
        if path == "tokenizer_config.json" and isinstance(content, Mapping):
            # What names files would be read from wherever it says; `transformers` itself does not save it.
            content = {key: value for key, value in content.items() if not str(key).endswith("_file")}
        return json.dumps(content, ensure_ascii=False, indent=2).encode()
    if extension == ".model" and isinstance(content, bytes):
        return content
    if extension in _TEXT and isinstance(content, list) and all(isinstance(line, str) for line in content):
        content = "\n".join(content)
    if extension in _TEXT and isinstance(content, str):
        return content.encode()
    raise ValueError(
        f"The checkpoint's tokenizer has a file {path!r} whose content is of the type {type(content).__name__}. "
        f"Nothing was written."
    )


def tokenizer_of(saved: Mapping[str, Any], trust_remote_code: bool = False, folder: str | None = None) -> Any:
    """The tokenizer that was saved; None: none was.

    Args:
        saved: What `read_tokenizer` returned, here or elsewhere.
        trust_remote_code: Whether code of the tokenizer's own may run.
        folder: Where its files are kept; None: in a temporary folder that goes with the tokenizer.

    Raises:
        ValueError: See `write_files`; or it is no tokenizer.
    """
    if not saved:
        return None
    # Some tokenizers go back to their files, so the folder has to stay.
    target = tempfile.mkdtemp(prefix="composer-tokenizer-") if folder is None else folder
    try:
        write_files(saved, Path(target), trust_remote_code)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            target, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            raise ValueError(f"The checkpoint's tokenizer is of the type {type(tokenizer).__name__}, which is none.")
    except BaseException:
        if folder is None:
            shutil.rmtree(target, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(tokenizer, shutil.rmtree, target, ignore_errors=True)
    tokenizer.name_or_path = _name_or_path(saved)
    return tokenizer


def _name_or_path(saved: Mapping[str, Any]) -> str:
    config = saved.get("tokenizer_config.json", saved.get("tokenizer_config", {}))
    content = config.get("content") if isinstance(config, Mapping) else None
    return str(content.get("name_or_path", "")) if isinstance(content, Mapping) else ""
