"""An EAGLE-3 head that says fewer ids: a smaller file, and a smaller LM head at every guess.

    python -m scripts.draft_model.fewer_ids HEAD 8192 --out FOLDER --work WORK --groups 8 --read 31

WORK holds the texts of its training; the ids kept are the most frequent there. Nothing is trained
anew: the LM head's rows are the target's, and where the likeliest id is kept, the guess stays. The
list of ids lies beside the head, for others of the target's heads (``method.vocabulary=FOLDER``).
"""

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from analysis.runs.command import parser_of, reporting_errors
from scripts.draft_model.folder import FACTS, write_head
from scripts.draft_model.head_lesson import frequent
from scripts.draft_model.sources import add_options, groups_of, read_texts
from specbench.errors import ConfigurationError
from specbench.models.checkpoints import int8
from specbench.models.draft.loading import ID_MAP_FILE
from specbench.storage import jsonl

_FILE = "model.safetensors"


def fewer(options: argparse.Namespace) -> None:
    stored = load_file(options.head / _FILE)
    config = jsonl.read_json(options.head / "config.json")
    said = stored["t2d"]
    if options.ids >= int(said.sum()):
        raise ConfigurationError(f"{options.head} says {int(said.sum())} ids. Type fewer.")
    texts, _ = read_texts(groups_of(options))
    common = frequent(texts, len(said))
    ids = common[said[common]][: options.ids].sort().values
    places = torch.searchsorted(said.nonzero()[:, 0], ids)
    tensors = int8.restored(stored, options.head / _FILE)
    rows = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = rows[places]
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros_like(said).index_fill(0, ids, True)
    facts = jsonl.read_json(options.head / FACTS)
    facts["parameters"] -= rows.numel() - len(ids) * rows.shape[1]
    facts |= {"vocab": len(ids), "vocab_in_training": config["draft_vocab_size"]}
    config["draft_vocab_size"] = len(ids)
    write_head(options.out, (_FILE, tensors, config), facts)
    save_file({"ids": ids.to(torch.int32)}, options.out / ID_MAP_FILE)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("head", type=Path, help="folder of a trained EAGLE-3 head")
    parser.add_argument("ids", type=int, help="how many it may say")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new head")
    add_options(parser, work=".cache/heads_smollm2_135m", groups=14, batch=96)
    options = parser.parse_args(argv)

    def work() -> int:
        fewer(options)
        return 0

    return reporting_errors(work)


if __name__ == "__main__":
    sys.exit(main())
