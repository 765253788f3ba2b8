"""`python -m looseleaf.training`: train an embedded model and measure it."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

from looseleaf.model.embedded import seal
from looseleaf.training.card import write_card
from looseleaf.training.evaluate import evaluate
from looseleaf.training.loop import DIETS, train


def main() -> None:
    """Read the arguments, train, evaluate, write what was found beside the weights."""
    parser = argparse.ArgumentParser(prog="python -m looseleaf.training", description=__doc__)
    parser.add_argument("--family", choices=sorted(DIETS), default="qwen2_5_vl")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training, compilation included")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--count", type=int, default=512, help="questions per figure")
    given = parser.parse_args()
    tell = partial(print, flush=True)
    started = time.perf_counter()
    _, writer, forward = train(
        given.family, given.out, seed=given.seed, minutes=given.minutes, device=given.device, workers=given.workers,
        rate=given.rate, tell=tell,
    )  # fmt: skip
    tell(f"trained after {time.perf_counter() - started:.0f} s")
    diet = DIETS[given.family]
    rows = evaluate(given.family, forward, writer, diet, count=given.count, workers=given.workers, tell=tell)
    (given.out / "accuracy.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_card(given.out)
    seal(given.out)
    tell(f"measured after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
