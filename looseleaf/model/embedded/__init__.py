"""The small trained models that come with the package: folders beside this file, named like their family.

A folder holds what plain `from_pretrained` takes, a model card, the log of its training and `checksums.json`, the
SHA-256 of every file but the card and its pictures. Opening one by `embedded:NAME` compares them first: a file that was
changed, lost or added is an error, not a model that answers a little differently.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from looseleaf.errors import ModelLoadError

FOLDER = Path(__file__).parent
CHECKSUMS = "checksums.json"


def embedded_models() -> list[str]:
    """The names that can stand behind `embedded:`."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{CHECKSUMS}"))


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model, its files checked."""
    if name not in embedded_models():
        raise ModelLoadError(f"there is no embedded model {name!r}; there are {', '.join(embedded_models())}")
    folder = FOLDER / name
    expected, found = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8")), checksums(folder)
    wrong = sorted(one for one in {*expected, *found} if expected.get(one) != found.get(one))
    if wrong:
        raise ModelLoadError(
            f"the embedded model {name!r} is not as it was released: {', '.join(wrong)} changed; reinstall looseleaf, "
            f"or open the folder by its path to use it all the same"
        )
    return folder


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of a folder but the list itself, the card and its pictures."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    files = [path for path in files if path.suffix not in (".md", ".png")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def seal(folder: Path) -> None:
    """Write the list of checksums a released folder is compared with."""
    (folder / CHECKSUMS).write_text(json.dumps(checksums(folder), indent=1) + "\n", encoding="utf-8")
