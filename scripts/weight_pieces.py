"""Weight files in pieces, for a machine that takes only so much at once.

    python -m scripts.weight_pieces FOLDER FILE...   cut files into FOLDER, 40 MiB a piece
    python -m scripts.gpu_visit --weights FOLDER     join them there, before the parts run

A piece's name is the hash of its bytes; pieces.json says which make up which file.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PIECE = 40 << 20  # bytes


def cut(folder: Path, files: list[Path], size: int = PIECE) -> None:
    """Write pieces of ``size`` bytes; a file outside the project is joined as FOLDER/NAME in it."""
    folder.mkdir(parents=True, exist_ok=True)
    listed: dict[str, list[str]] = {}
    for file in files:
        place = file.absolute()
        inside = place.is_relative_to(PROJECT) and ".venv" not in place.parts
        name = place.relative_to(PROJECT) if inside else Path(place.parent.name, place.name)
        names = listed.setdefault(str(name), [])
        with file.open("rb") as whole:
            while piece := whole.read(size):
                names.append(sha256(piece).hexdigest())
                (folder / names[-1]).write_bytes(piece)
    (folder / "pieces.json").write_text(json.dumps(listed, indent=1))


def join(folder: Path, project: Path = PROJECT) -> str | None:
    """Write the files into ``project``; why not, where a piece is missing or is another one."""
    try:
        listed = json.loads((folder / "pieces.json").read_text())
    except (OSError, ValueError):
        return f"{folder} has no pieces.json: type python -m scripts.weight_pieces FOLDER FILE..."
    for name, pieces in listed.items():
        missing = [piece for piece in pieces if not (folder / piece).is_file()]
        if missing:
            return f"{folder} lacks {len(missing)} of {len(pieces)} pieces of {name}: {missing[0]}"
        target = project / name
        half = target.with_name(f"{target.name}.half")
        half.parent.mkdir(parents=True, exist_ok=True)
        with half.open("wb") as whole:
            for piece in pieces:
                content = (folder / piece).read_bytes()
                if sha256(content).hexdigest() != piece:
                    half.unlink()
                    return f"{folder / piece} of {name} is damaged: send it again"
                whole.write(content)
        half.replace(target)
    return None


if __name__ == "__main__":
    cut(Path(sys.argv[1]), [Path(file) for file in sys.argv[2:]])
