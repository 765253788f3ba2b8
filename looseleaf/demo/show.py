"""What the demo prints: the model, a first look, the images moved, accuracy, checks, files, and one line of JSON."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from looseleaf.bench.report import Share, commit, hardware
from looseleaf.demo.figures import draw_album, plain, plot_policies
from looseleaf.demo.items import Item, draw_albums
from looseleaf.demo.measure import PARTIAL, Asked, ask_alone, ask_together, policies_for, share, store, teach
from looseleaf.errors import ConfigError
from looseleaf.link.policies import FirstK, FullReuse, PrefixCache, Reprefill
from looseleaf.model.embedded import embedded_models
from looseleaf.system import DEFAULT_MODEL, Looseleaf
from looseleaf.training.prompts import HARMLESS
from looseleaf.workloads.bounds import HELD_OUT, Bounds

TASKS = ("legend", "change", "documents", "clip", "stream")
"""What accuracy is measured on; the album that is shown is of the first."""

ALBUMS, QUICK_ALBUMS = 16, 2
"""Held-out albums a task, each asked about twice under every policy."""

LOSS = 0.1
"""A larger drop in accuracy is called a loss."""

OUTSIDE = "Who is the president of France?"

GREEDY = 8
"""Tokens compared with transformers' `generate`."""

WIDTH = 98

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the demo may be told."""

    model: str = DEFAULT_MODEL
    out: Path = Path("demo-output")
    seed: int = 0
    quick: bool = False


def run_demo(options: DemoOptions) -> dict[str, Any]:
    """Show everything, save the picture, the plot and the output; return what the last line says."""
    started = time.perf_counter()
    family = trained_as(options.model)
    bounds = HELD_OUT[family or "qwen2_5_vl"]
    console = Console(
        highlight=False, width=min(WIDTH, Console().width) if Console().is_terminal else WIDTH, record=True
    )
    with Looseleaf.open(options.model, dtype="float32") as ll:
        if not ll.adapter.sees_images:
            raise ConfigError(f"the demo is about images and {options.model} is a text model; try {DEFAULT_MODEL}")
        options.out.mkdir(parents=True, exist_ok=True)
        summary: dict[str, Any] = {
            "demo": options.model, "commit": commit(), "hardware": hardware("cpu"), "seed": options.seed,
            "quick": options.quick, "trained": family is not None,
        }  # fmt: skip
        tasks = [task for task in TASKS if bounds.counts_of(task)]
        items = next(draw_albums(tasks[0], bounds, options.seed))
        items = (items[0], items[-1]) if options.quick else items
        summary |= _introduce(ll, options, items, trained=family is not None, console=console)
        _first_look(ll, items, console)
        moved = _move(ll, items, options.out / "album.png", console)
        summary |= moved
        columns = _accuracy(ll, options, tasks, bounds, console)
        summary["accuracy"] = _figures(columns)
        summary["verdict"] = _verdict(columns) if family else "The model was not trained: these figures mean nothing."
        console.print(summary["verdict"])
        summary |= _checks(ll, items[-1], console)
    ttft_s = {name: one["ttft_ms"] / 1000 for name, one in moved["album"].items()}
    plot_policies(columns, ttft_s, options.out / "policies.png")
    summary["seconds"] = round(time.perf_counter() - started, 1)
    _head(console, 6, "Saved")
    saved = {"album.png": "the images, the questions and every policy's answers",
             "policies.png": "accuracy and time to the first token by policy",
             "output.txt": "what you have just read",
             "summary.json": "the figures, as in the line below"}  # fmt: skip
    for name, what in saved.items():
        console.print(f"{options.out / name}: {what}", soft_wrap=True)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    (options.out / "output.txt").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")
    line = json.dumps(summary)
    (options.out / "summary.json").write_text(line + "\n", encoding="utf-8")
    print(line)
    return summary


def trained_as(model: str) -> str | None:
    """The family whose pictures and sizes a model was trained on; None for a random-weight one."""
    if model.startswith("tiny:"):
        return None
    if model.removeprefix("embedded:") in HELD_OUT and model.startswith("embedded:"):
        return model.removeprefix("embedded:")
    record = Path(model) / "training.json"
    family = json.loads(record.read_text(encoding="utf-8")).get("family") if record.is_file() else None
    if family not in HELD_OUT:
        known = ", ".join(f"embedded:{name}" for name in embedded_models())
        raise ConfigError(
            f"the demo asks about its own drawings, and {model!r} was not trained on them: use {known}, a folder that "
            f"`python -m looseleaf.training` wrote, or tiny:FAMILY, whose answers mean nothing"
        )
    return str(family)


def _introduce(
    ll: Looseleaf, options: DemoOptions, items: tuple[Item, ...], *, trained: bool, console: Console
) -> dict[str, Any]:
    parameters = sum(one.numel() for one in ll.adapter.model.parameters())
    tokens = len(ll.builder.build([items[0].images[0], "?"]).chunks[0])
    _head(console, 1, "The model")
    console.print(
        f"{options.model}: {type(ll.adapter.model).__name__} of transformers, {parameters / 1e6:.1f} M parameters, "
        f"{len(ll.adapter.layout.layers)} layers, float32, {torch.get_num_threads()} CPU threads. "
        f"One of the images below is {tokens} tokens, markers included."
    )
    if trained:
        console.print(
            "It was trained on drawings like those below. What follows is held out: seeds, grids, numbers of images "
            "and wordings it never saw."
        )
    else:
        console.print("[bold red]Its weights are random: the answers mean nothing; times, counts and checks do.[/]")
    return {"parameters": parameters, "image_tokens": tokens}


def _first_look(ll: Looseleaf, items: tuple[Item, ...], console: Console) -> None:
    _head(console, 2, f"A first look at {len(items[0].images)} images")
    console.print(
        "Re-prefill: everything is computed, as any engine would. Single-hop questions need one image, multi-hop "
        "ones need two together.\n"
    )
    table = _table("hops", "question", "right answer", "answer", "first token")
    asked = [
        ask_alone(ll, item, item.in_place(), "reprefill", Reprefill(), keep=True) for item in _bar(items, "first look")
    ]
    for one in asked:
        question = one.item.question
        table.add_row(
            "single" if question.hops == 1 else "multi", question.text, question.answer, _mark(one), _ms(one.ttft_s)
        )
    console.print(table)
    first, usage = asked[0].answer.usage.timing, asked[-1].answer.usage
    console.print(
        f"Each computed its whole prompt ({usage.prompt_tokens} tokens the last one) and reused nothing, except that "
        f"the vision tower ran once ({first.vision_s * 1000:.0f} ms of the first answer). Its output is kept for every "
        f"policy: the times below are the language model's."
    )


def _move(ll: Looseleaf, items: tuple[Item, ...], picture: Path, console: Console) -> dict[str, Any]:
    _head(console, 3, "The same images, moved")
    policies = policies_for(ll, items[0].images)
    store(ll, items[0].images)
    hits = _prefix_hits(ll, items, console)
    places = list(items[0].moved())
    prompts = [(item, where, prompt) for item in items for where, prompt in item.moved().items()]
    console.print(
        f"\nNow by every policy: {len(items)} questions in each of {len(places)} places ({', '.join(places)}), each "
        f"the first after its move. What the model computed for each image alone, once, is in the store without a "
        f"position. {', '.join(PARTIAL)}: these compute half of each image again. patched: the images were asked about "
        f"there once before, which computed them in context and left a patch of a quarter of their bytes behind.\n"
    )
    for _, _, prompt in prompts:
        teach(ll, prompt, policies.values())
    rounds = [(prompt, name) for prompt in prompts for name in policies]
    asked: list[tuple[str, Asked]] = []
    for (item, where, prompt), name in _bar(rounds, "moved"):
        asked.append((where, ask_alone(ll, item, prompt, name, policies[name])))
    found: dict[str, Any] = {}
    table = _table("policy", "single-hop", "multi-hop", "first token", "faster", "tokens computed", "reused")
    for name in policies:
        mine = [one for _, one in asked if one.policy == name]
        ttft_s = statistics.median(one.ttft_s for one in mine)
        computed = statistics.median(one.computed for one in mine)
        tokens = statistics.median(one.answer.usage.prompt_tokens for one in mine)
        by_hops = [share(one for one in mine if (one.item.question.hops > 1) is multi) for multi in (False, True)]
        found[name] = {
            "ttft_ms": round(ttft_s * 1000, 1), "computed_tokens": round(computed), "prompt_tokens": round(tokens),
            "single": asdict(by_hops[0]), "multi": asdict(by_hops[1]),
        }  # fmt: skip
        faster = found["reprefill"]["ttft_ms"] / found[name]["ttft_ms"]
        table.add_row(
            name, *(f"{share.right} of {share.n}" for share in by_hops), _ms(ttft_s), f"{faster:.1f}x",
            f"{computed:.0f}", f"{tokens - computed:.0f}",
        )  # fmt: skip
    console.print(table)
    console.print("Medians; tokens are per layer, since some policies compute fewer of them deeper in the model.")
    shown = places[-1]
    here = [one for where, one in asked if where == shown]
    draw_album(
        items, here, f"what the model looked at, and what each policy answered with the images moved: {shown}", picture
    )
    return {"prefix_hits": hits, "album": found}


def _prefix_hits(ll: Looseleaf, items: tuple[Item, ...], console: Console) -> dict[str, int]:
    """What a prefix cache finds of the images where they were, and where they are now."""
    console.print("A prefix cache, what engines in use have, finds again only what stands where it stood:\n")
    ask_alone(ll, items[0], items[0].in_place(), "prefix-cache", PrefixCache(), keep=True)
    table = _table("the images stand", "tokens in the prefix cache", "of", "first token")
    hits: dict[str, int] = {}
    for where, prompt in {"where they stood": items[-1].in_place(), **items[-1].moved()}.items():
        one = ask_alone(ll, items[-1], prompt, "prefix-cache", PrefixCache())
        hits[where] = one.answer.plan.prefix_tokens
        table.add_row(where, str(hits[where]), str(one.answer.usage.prompt_tokens), _ms(one.ttft_s))
    console.print(table)
    return hits


def _accuracy(
    ll: Looseleaf, options: DemoOptions, tasks: list[str], bounds: Bounds, console: Console
) -> dict[str, dict[str, Share]]:
    """Shares by column (single-hop; multi-hop by task) and policy."""
    albums = QUICK_ALBUMS if options.quick else ALBUMS
    _head(console, 4, "How often it is right")
    console.print(
        f"{albums} other held-out albums for each of {', '.join(tasks)}, their images moved; a single-hop and a "
        f"multi-hop question about each. Every policy gets the same prompts. In brackets: 95 % intervals.\n"
    )
    drawn = [
        (number, items)
        for task in tasks
        for number, items in enumerate(itertools.islice(draw_albums(task, bounds, options.seed), 1, albums + 1))
    ]
    asked: list[Asked] = []
    for number, items in _bar(drawn, "measuring"):
        store(ll, items[0].images)
        prompts = []
        for hops in (1, 2):
            some = [item for item in items if item.question.hops == hops]
            item = some[number % len(some)]
            places = list(item.moved().values())
            prompts.append((item, places[number % len(places)]))
        policies = policies_for(ll, items[0].images)
        for _, prompt in prompts:
            teach(ll, prompt, policies.values())
        asked += ask_together(ll, prompts, policies)
    names = list(dict.fromkeys(one.policy for one in asked))
    groups = {"single-hop": [one for one in asked if one.item.question.hops == 1]}
    for task in tasks:
        groups[f"multi-hop: {task}"] = [one for one in asked if one.item.question.hops > 1 and one.item.task == task]
    columns = {
        label: {name: share(one for one in group if one.policy == name) for name in names}
        for label, group in groups.items()
    }
    table = _table("policy", *(f"{label}\n(n = {shares[names[0]].n})" for label, shares in columns.items()))
    for name in names:
        table.add_row(name, *(str(shares[name]) for shares in columns.values()))
    console.print(table)
    return columns


def _verdict(columns: Mapping[str, Mapping[str, Share]]) -> str:
    """What reuse without repair keeps and loses, by what was measured."""
    told: dict[bool, list[str]] = {False: [], True: []}
    for label, shares in columns.items():
        before, after = shares["reprefill"].value, shares["full-reuse"].value
        told[before - after > LOSS].append(f"{label} ({before:.2f} → {after:.2f})")
    kept, lost = ("; ".join(told[which]) for which in (False, True))
    says = f"Against re-prefill, full reuse keeps: {kept or 'nothing'}. It loses: {lost or 'nothing'}."
    if lost:
        fell = [shares for shares in columns.values() if shares["reprefill"].value - shares["full-reuse"].value > LOSS]
        closest = max(PARTIAL, key=lambda name: sum(shares[name].value for shares in fell))
        says += (
            f" That is what an image absorbed from those before it. Of the policies that compute half of each image "
            f"again, {closest} restores most of it. Patches, for a quarter of the bytes and no computing, give "
            f"{_back(fell)}."
        )
    return says


def _back(fell: list[Mapping[str, Share]]) -> str:
    """What patches make of what full reuse lost."""
    return ", ".join(
        f"{shares['full-reuse'].value:.2f} → {shares['patched'].value:.2f} (re-prefill {shares['reprefill'].value:.2f})"
        for shares in fell
    )


def _checks(ll: Looseleaf, item: Item, console: Console) -> dict[str, Any]:
    _head(console, 5, "What a sceptic would check")
    prompt = list(item.moved().values())[-1]
    given = ll.reference.stock(prompt)
    plain_logits, blind = ll.reference.logits(given)[-1], ll.reference.blind(given)
    ours = {
        name: ll.reference.ours(given.prompt, policy)
        for name, policy in (("all", FirstK(k=len(given.prompt))), ("reuse", FullReuse()))
    }
    differences = {
        "logit_difference": _difference(ours["all"], plain_logits),
        "blind_difference": _difference(ours["reuse"], blind),
        "control_difference": _difference(ours["reuse"], plain_logits),
    }
    compared = (
        ("everything recomputed", "plain forward"),
        ("full reuse", "forward in which images cannot see each other"),
        ("full reuse", "plain forward (a control: it must differ)"),
    )
    console.print(
        f"Logits of the first answered token of one moved prompt, through our linker and through transformers alone; "
        f"the largest logit is {float(plain_logits.abs().max()):.1f}:\n"
    )
    table = _table("our linker", "transformers' own", "largest difference")
    for (one, other), off in zip(compared, differences.values(), strict=True):
        table.add_row(one, other, f"{off:.0e}")
    console.print(table)
    tokens = ll.ask(prompt, policy=Reprefill(), max_tokens=GREEDY, ignore_eos=True, no_store=True).token_ids
    equal = tokens == ll.reference.generate(given, GREEDY)
    console.print(f"{GREEDY} greedy tokens equal those of transformers' generate: {_yes(equal)}\n")
    answer = ll.ask(OUTSIDE, max_tokens=32).text.strip()
    taught = answer == HARMLESS
    console.print(f'A question outside its training, "{OUTSIDE}", gets: "{escape(plain(answer))}"')
    console.print(f"That is the harmless sentence it was taught for such questions: {_yes(taught)}")
    outside = {"question": OUTSIDE, "answer": answer, "harmless": taught}
    return {**differences, "greedy_equal": equal, "outside": outside}


def _difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.float() - expected.float()).abs().max())


def _figures(columns: Mapping[str, Mapping[str, Share]]) -> dict[str, dict[str, dict[str, float]]]:
    """The shares as plain numbers, by policy and column."""
    names = list(next(iter(columns.values())))
    return {
        name: {
            label: {
                "right": one[name].right, "n": one[name].n,
                "low": round(one[name].interval[0], 3), "high": round(one[name].interval[1], 3),
            }
            for label, one in columns.items()
        }
        for name in names
    }  # fmt: skip


def _bar(things: Iterable[T], doing: str) -> Iterable[T]:
    """The same things, with a bar on stderr where somebody watches."""
    console = Console(stderr=True)
    return track(list(things), doing, console=console, transient=True, disable=not console.is_terminal)


def _head(console: Console, number: int, title: str) -> None:
    console.print(f"\n[bold]{number} · {title}[/]\n")


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, head in enumerate(heads):
        table.add_column(head, no_wrap=number == 0)
    return table


def _mark(one: Asked) -> str:
    return f"[{'green' if one.right else 'red'}]{escape(plain(one.said, 24))} {'✓' if one.right else '✗'}[/]"


def _yes(so: bool) -> str:
    return "[green]yes[/]" if so else "[red]NO[/]"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
