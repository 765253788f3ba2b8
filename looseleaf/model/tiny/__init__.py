"""Small random-weight models of the real transformers classes, built offline for tests and benches.

`build_tiny("qwen2_5_vl", folder)` writes a checkpoint folder in a moment: the family's real model, tokenizer and
processor classes at a small size. Read in this order: configs (sizes), vocabulary (tokenizers), templates (chat),
families (the table), weights (random values that make mistakes visible), build (the folder). These models answer
nothing sensible; the ones that do are embedded models.
"""

from looseleaf.model.tiny.build import FAMILIES, build_tiny

__all__ = ["FAMILIES", "build_tiny"]
