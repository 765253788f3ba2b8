"""Cuts the workloads' fonts down to the characters they draw and gives them names of their own.

    python tools/fonts.py FOLDER    # FOLDER holds the original .ttf/.otf files, at any depth

The licences (looseleaf/workloads/fonts/LICENSES.md) allow changed copies, some only under another name.
"""

import sys
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont

OUT = Path(__file__).parent.parent / "looseleaf" / "workloads" / "fonts"
CHARACTERS = "".join(chr(code) for code in range(32, 127))
FONTS = {
    "trained": [
        "Lato-Regular", "Lato-Bold", "Roboto-Regular", "Roboto-Bold", "OpenSans-Regular", "OpenSans-Semibold",
        "Caladea-Regular", "Caladea-Bold", "Vollkorn-Medium", "Carlito-Bold", "Quicksand-Bold", "JetBrainsMono-Medium",
        "FiraCode-Medium", "Cabin-Medium", "Gentium-R", "LiberationSans-Regular",
    ],
    "held-out": ["Inter-Medium", "LiberationSerif-Bold", "Hack-Regular", "Cantarell-Bold"],
}  # fmt: skip


def main(source: Path) -> None:
    """Write every font of FONTS as `trained-00.ttf` …, subset and renamed."""
    found = {path.stem: path for path in sorted(source.rglob("*")) if path.suffix in (".ttf", ".otf")}
    for group, names in FONTS.items():
        for number, name in enumerate(names):
            font = TTFont(found[name])
            options = subset.Options(layout_features=[], hinting=False, name_IDs=[1, 2, 4, 6, 13, 14])
            cutter = subset.Subsetter(options)
            cutter.populate(text=CHARACTERS)
            cutter.subset(font)
            for record in font["name"].names:
                if record.nameID in (1, 4, 6):
                    record.string = f"Looseleaf-{group}-{number:02d}"
            font.save(OUT / f"{group}-{number:02d}{found[name].suffix}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
