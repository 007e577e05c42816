"""Finds a checkpoint's files: a folder, a snapshot from the hub, or the embedded model.

The module imports nothing heavy, because a server's HTTP process uses it too.
"""

from __future__ import annotations

from pathlib import Path

from milepost.errors import ConfigError

EMBEDDED_MODEL = Path(__file__).parent.parent / "tiny"

_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer*", "*.model"]
_GGUF = "; GGUF is not read: name the model's safetensors checkpoint"
_WEIGHT_FILES = ["*.safetensors"]


def find_folder(
    model: str | Path,
    *,
    revision: str | None,
    with_weights: bool,
    download_dir: str | None = None,
    token: str | None = None,
) -> Path:
    """Returns the folder itself, or its snapshot from the hub, in `download_dir` or the hub's own
    cache. Raises ConfigError if there is neither."""
    folder = Path(model)
    if folder.is_dir():
        return _checked(folder, model)
    if folder.is_absolute() or folder.exists() or str(model).startswith((".", "~")):
        what = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        advice = _GGUF if folder.suffix == ".gguf" else ""
        raise ConfigError(f"model={str(model)!r}: {what}{advice}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    patterns = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        snapshot = Path(
            snapshot_download(
                str(model),
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=patterns,
                token=token,
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model={str(model)!r} is neither a folder nor a checkpoint from the hub ({why})"
        ) from error
    return _checked(snapshot, model)


def _checked(folder: Path, model: str | Path) -> Path:
    """Returns the folder if it has a configuration; raises ConfigError otherwise."""
    if (folder / "config.json").exists():
        return folder
    advice = ": name one with a checkpoint in Hugging Face's format"
    if "gguf" in str(model).lower() or any(folder.glob("*.gguf")):
        advice = _GGUF
    raise ConfigError(f"model={str(model)!r}: there is no config.json{advice}")
