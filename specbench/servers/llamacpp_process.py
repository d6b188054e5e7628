"""The child process that llama.cpp's server runs in: ``specbench.servers.llamacpp`` starts it.

It writes one line of JSON, its address and what the library was built for, and serves until its
standard input ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_NO_GPU_LAYERS = 0


def main(parent: int, flags: Mapping[str, Any]) -> None:
    """Serve until the parent closes the pipe or ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the request was in place
            os._exit(1)
    # A terminal's Ctrl-C reaches the whole group; the parent decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import xllamacpp

    try:
        server = xllamacpp.Server(_params(xllamacpp, flags))
    except RuntimeError as error:  # the log says what is wrong above
        sys.exit(str(error))
    reply = {"url": str(server.listening_address), "system": str(xllamacpp.get_system_info())}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    os._exit(0)  # nothing of it is worth waiting for: its destructor drains the queue


def _params(library: Any, flags: Mapping[str, Any]) -> Any:
    params = library.CommonParams()
    params.model.path = flags["model"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # any free one
    params.n_parallel = flags["slots"]
    params.n_ctx = flags["context"] * flags["slots"]
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = flags["threads"]
    params.n_gpu_layers = _NO_GPU_LAYERS
    params.cache_ram_mib = 0  # no prompt is sent twice
    params.endpoint_props = True
    params.ui = False
    if (flash := flags.get("flash_attention")) is not None:
        states = library.llama_flash_attn_type
        name = "ENABLED" if flash else "DISABLED"
        params.flash_attn_type = getattr(states, f"LLAMA_FLASH_ATTN_TYPE_{name}")
    if kv := flags.get("kv_type"):
        params.cache_type_k = params.cache_type_v = getattr(
            library.ggml_type, f"GGML_TYPE_{kv.upper()}"
        )
    params.n_batch = flags.get("batch", params.n_batch)
    params.n_ubatch = flags.get("ubatch", params.n_ubatch)
    params.n_cache_reuse = flags.get("reuse", params.n_cache_reuse)
    speculative, kinds = params.speculative, flags["speculation"].split("+")
    names = {"draft": "DRAFT_SIMPLE", "eagle3": "DRAFT_EAGLE3", "mtp": "DRAFT_MTP"}
    names["dflash"] = "DRAFT_DFLASH"
    types = library.common_speculative_type
    speculative.types = [
        getattr(types, f"COMMON_SPECULATIVE_TYPE_{names.get(kind, kind.upper())}") for kind in kinds
    ]
    for kind in kinds:
        if kind in ("ngram_simple", "ngram_map_k", "ngram_map_k4v"):
            options = getattr(speculative, kind)
            options.size_n, options.size_m = flags["size_n"], flags["size_m"]
            options.min_hits = flags["min_hits"]
        elif kind == "ngram_mod":
            options = speculative.ngram_mod
            options.n_match, options.n_min, options.n_max = flags["size_n"], 1, flags["size_m"]
    if "draft" in flags:
        speculative.draft.mparams.path = flags["draft"]
        speculative.draft.n_max, speculative.draft.n_min = flags["draft_max"], flags["draft_min"]
        speculative.draft.p_min = flags["draft_p_min"]
        speculative.draft.n_gpu_layers = _NO_GPU_LAYERS
    return params


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
