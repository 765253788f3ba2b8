"""Writes the generated parts of README.md: the folder tree from module docstrings, figures from bench/results, the
trained models from their accuracy, what the demo showed from docs/demo (`looseleaf demo --out docs/demo` renews it).

`python tools/readme.py` rewrites them, `--check` fails when they are stale. Generated parts stand between
`<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
DEMO = ROOT / "docs" / "demo"
EMBEDDED = ROOT / "looseleaf" / "model" / "embedded"


def layers() -> list[str]:
    """The package's parts from the top down, as the import contract lists them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    names = [name for line in contract["layers"] for name in line.split(" | ")]
    return [name if (ROOT / "looseleaf" / name).is_dir() else f"{name}.py" for name in names]


def tree() -> str:
    """The package as a request passes it, top to bottom, with what each file is for."""
    lines = ["```", "looseleaf/"]
    for name in layers():
        path = ROOT / "looseleaf" / name
        if path.is_file():
            lines.append(_line(path, 2))
            continue
        lines.append(_line(path / "__init__.py", 2, shown=f"{name}/"))
        for file in sorted(path.iterdir()):
            if file.suffix == ".py" and file.name != "__init__.py":
                lines.append(_line(file, 4))
            elif (file / "__init__.py").exists():
                lines.append(_line(file / "__init__.py", 4, shown=f"{file.name}/"))
    return "\n".join([*lines, "```"])


def _line(path: Path, indent: int, shown: str | None = None) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = doc.split("\n\n")[0].replace("\n", " ").strip()
    return f"{' ' * indent}{shown or path.name:<{24 - indent}}{re.sub(r'[.:]$', '', first)}"


def demo() -> str:
    """What the demo showed last: its picture, its figures as one table, and what it made of them."""
    one = json.loads((DEMO / "summary.json").read_text(encoding="utf-8"))
    columns = list(one["accuracy"]["reprefill"])
    heads = ["policy", "first token", "faster", "tokens computed", *columns]
    rows = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for name, timed in one["album"].items():
        faster = one["album"]["reprefill"]["ttft_ms"] / timed["ttft_ms"]
        shares = (one["accuracy"][name][column] for column in columns)
        cells = [
            f"`{name}`", f"{timed['ttft_ms']:.0f} ms", f"{faster:.1f}x", str(timed["computed_tokens"]),
            *(f"{share['right']}/{share['n']}" for share in shares),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return (
        f"![Five images, the questions about them and every policy's answers](docs/demo/album.png)\n\n"
        f"Times of one album, right answers over held-out albums, with the images moved ({one['hardware']}; commit "
        f"`{one['commit']}`; [a plot](docs/demo/policies.png), [the whole output](docs/demo/output.txt)):\n\n"
        + "\n".join(rows)
        + f"\n\n{one['verdict']}\n\n"
        f"Recomputing everything through the linker differs from transformers' own forward by "
        f"{one['logit_difference']:.0e}; greedy answers equal `generate`: {'yes' if one['greedy_equal'] else 'NO'}."
    )


def models() -> str:
    """The trained models that come with the package: what they answer, and what is left when images are blind."""
    found = {path.parent.name: path.parent for path in sorted(EMBEDDED.glob("*/accuracy.json"))}
    cells: dict[str, dict[tuple[str, str, int], float]] = {}
    for name, folder in found.items():
        rows = json.loads((folder / "accuracy.json").read_text(encoding="utf-8"))
        cells[name] = {(row["setting"], row["task"], row["hops"]): row["right"] for row in rows if "hops" in row}
    tasks = list(dict.fromkeys(task for one in cells.values() for setting, task, hops in one if hops == 2))
    heads = ["model", "single-hop, worst task", *(f"multi-hop: {task}" for task in tasks)]
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for name, one in cells.items():
        worst = min(right for (setting, _, hops), right in one.items() if setting == "reprefill" and hops == 1)
        both = [
            f"{one['reprefill', task, 2]:.3f} ({one['blind', task, 2]:.2f})" if ("reprefill", task, 2) in one else ""
            for task in tasks
        ]
        card = f"[`embedded:{name}`](looseleaf/model/embedded/{name}/README.md)"
        lines.append("| " + " | ".join([card, f"{worst:.3f}", *both]) + " |")
    return "\n".join(lines)


def figures() -> str:
    """The measured figures, each with the commit and the machine that printed it."""
    parts = []
    exact, ttft = _result("exact-cpu"), _result("ttft-cpu")
    if exact:
        one = exact["summary"]
        parts.append(
            f"**Exact** ([bench/results/exact-cpu.json](bench/results/exact-cpu.json), commit `{exact['commit']}`, "
            f"{one['models']} model families in fp32): recomputing everything differs from a plain transformers "
            f"forward by at most {one['logit_err_max']:.0e} of the largest logit; greedy answers equal `generate`: "
            f"{'yes' if one['greedy_equal'] else 'NO'}; blind reuse differs from one masked stock forward by at most "
            f"{one['mask_oracle_err_max']:.0e}; relocated keys by {one['relocate_pair_ulp_max']:.0f} ulp; packed "
            f"requests by {one['packed_err_max']:.0e}; planted mistakes caught: {one['negative_controls_caught']}."
        )
    if ttft:
        parts.append(_ttft(ttft))
    return "\n\n".join(parts) or "No results yet: run `make bench`."


def _ttft(result: dict[str, Any]) -> str:
    one = result["summary"]
    rows = [
        "| | fp32 | bf16 |", "| --- | --- | --- |",
        *(
            f"| {text} | {one[key]['float32']:.2f}x | {one[key]['bfloat16']:.2f}x |"
            for key, text in (
                ("full_reuse_speedup", "FullReuse, faster to the first token than re-prefill"),
                ("first_k_speedup", "FirstK(32), faster to the first token than re-prefill"),
                ("reuse_over_floor", "FullReuse over its floor (stock forward of the same rows + one copy of the KV)"),
                ("first_k_over_floor", "FirstK(32) over its floor"),
                ("reprefill_over_transformers", "our re-prefill over transformers' own"),
                ("decode_over_transformers", "our decoding over `generate`, alone"),
                ("decode8_over_transformers", "our decoding over `generate`, eight at once"),
            )
        ),
    ]  # fmt: skip
    tokens = one["tokens"]["float32"]
    return (
        f"**Fast** ([bench/results/ttft-cpu.json](bench/results/ttft-cpu.json), commit `{result['commit']}`, "
        f"{result['hardware']}): a random-weight Qwen2.5-VL of SmolLM size, {tokens['reused']} tokens of four images "
        f"moved to new places, {tokens['text']} rows of text; vision apart.\n\n" + "\n".join(rows)
    )


def _result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def generated(text: str) -> str:
    """README.md with its generated parts as they should be."""
    for name, content in (("demo", demo()), ("tree", tree()), ("models", models()), ("figures", figures())):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(
            pattern, lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text, flags=re.S
        )
        assert count == 1, f"README.md has no part {name}"
    return text


def main() -> int:
    """Rewrite, or with --check compare."""
    old = README.read_text(encoding="utf-8")
    new = generated(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            print("README.md is stale: run `make readme`", file=sys.stderr)
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
