"""Conversion of tokenizers to entries of a checkpoint and back, without running code from it."""

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

_TEXT = {".txt", ".py", ".jinja"}
_KNOWN = {".json", ".model", *_TEXT}
_PART = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*")
_MAX_PARTS = 2  # templates are in a subfolder


def read_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return the files of a tokenizer: `{"tokenizer.json": {"file_extension": ".json", "content": ...}, ...}`.

    Raises:
        ValueError: It has a file of an unsupported type.
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
            f"The tokenizer has a file {path.name!r}; only files ending in {', '.join(sorted(_KNOWN))} can be saved in "
            f"a checkpoint. Build the model with `tokenizer=None`, and save the tokenizer separately."
        )
    if path.suffix == ".model":
        return path.read_bytes()
    text = path.read_bytes().decode("utf-8")
    return json.loads(text) if path.suffix == ".json" else text


def write_files(saved: Mapping[str, Any], folder: Path, trust_remote_code: bool = False) -> None:
    """Write the files of a saved tokenizer into a folder, and nowhere else.

    Args:
        saved: The result of `read_tokenizer`; names may lack the extension, and texts may be lists of lines.
        folder: The folder, created if it does not exist.
        trust_remote_code: Also write Python files.

    Raises:
        ValueError: An entry is not a supported file, is outside of the folder, or is code that is not trusted.
    """
    contents = {path: _bytes(path, entry) for path, entry in _paths(saved, trust_remote_code).items()}
    for path, content in contents.items():  # all are checked by now: an error leaves no file
        target = folder / path
        if target.parent != folder and target.parent.is_symlink():
            raise ValueError(f"{str(target.parent)!r} is a link to another folder. Remove it.")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():
            target.unlink()
        target.write_bytes(content)


def _paths(saved: Mapping[Any, Any], trust_remote_code: bool) -> dict[str, Mapping[str, Any]]:
    paths = {}
    for name, entry in saved.items():
        extension = entry.get("file_extension") if isinstance(entry, Mapping) else None
        if extension not in _KNOWN or not isinstance(name, str) or "content" not in entry:
            raise ValueError(
                f"The checkpoint's tokenizer has an entry {name!r} that is not a file ending in "
                f"{', '.join(sorted(_KNOWN))}. Nothing was written."
            )
        path = name if name.endswith(extension) else name + extension
        parts = path.split("/")
        if len(parts) > _MAX_PARTS or not all(_PART.fullmatch(part) for part in parts):
            raise ValueError(
                f"The checkpoint's tokenizer has a file {path!r}, which is not a name within a folder. Nothing was "
                f"written."
            )
        if extension == ".py" and not trust_remote_code:
            raise ValueError(
                f"The checkpoint's tokenizer has custom code, {path!r}, which would run. If you trust the checkpoint, "
                f"pass `trust_remote_code=True`."
            )
        paths[path] = entry
    return paths


def _bytes(path: str, entry: Mapping[str, Any]) -> bytes:
    extension, content = entry["file_extension"], entry["content"]
    if extension == ".json":
        if path == "tokenizer_config.json" and isinstance(content, Mapping):
            # These entries name files anywhere, which would be read; `transformers` itself does not save them.
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
    """Return the saved tokenizer, or None if there is none.

    Args:
        saved: The result of `read_tokenizer`.
        trust_remote_code: Allow custom code of the tokenizer to run.
        folder: The folder for its files. None: a temporary folder that is removed with the tokenizer.

    Raises:
        ValueError: See `write_files`; or it is not a tokenizer.
    """
    if not saved:
        return None
    # Some tokenizers read their files again, so the folder must exist as long as the tokenizer.
    target = tempfile.mkdtemp(prefix="composer-tokenizer-") if folder is None else folder
    try:
        write_files(saved, Path(target), trust_remote_code)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            target, trust_remote_code=trust_remote_code, local_files_only=True
        )
        if not isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
            raise ValueError(
                f"The checkpoint's tokenizer has the type {type(tokenizer).__name__}, which is not a tokenizer."
            )
    except BaseException:
        if folder is None:
            shutil.rmtree(target, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(tokenizer, shutil.rmtree, target, ignore_errors=True)
    config = saved.get("tokenizer_config.json", saved.get("tokenizer_config", {}))
    content = config.get("content") if isinstance(config, Mapping) else None
    tokenizer.name_or_path = str(content.get("name_or_path", "")) if isinstance(content, Mapping) else ""
    return tokenizer
