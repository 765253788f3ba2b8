"""The command line: `looseleaf ask | bench | calibrate | demo | doctor | store`. Parses, shows progress, prints."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from looseleaf.bench.calibrate import COUNT, calibrate, rows_of
from looseleaf.bench.report import BenchOptions, print_rows
from looseleaf.checks import check_whole
from looseleaf.cli_store import add_store
from looseleaf.config import Config
from looseleaf.demo import DemoOptions, run_demo
from looseleaf.doing import Doing
from looseleaf.engine.request import Answer, Usage
from looseleaf.errors import ConfigError, LooseleafError, PromptError
from looseleaf.link.calibration import cached_at
from looseleaf.link.policies import POLICIES
from looseleaf.prompt.segments import Document, Image, Segment
from looseleaf.store.opening import MEMORY
from looseleaf.system import DEFAULT_MODEL, Looseleaf
from looseleaf.version import VERSION

BENCHES = {"exact": "does reuse machinery change anything when it must not?",
           "ttft": "what does each policy save, and how far is it from the floor?",
           "reuse": "what does each policy cost in accuracy?",
           "rank": "how does recovery grow with rank, depth, basis and tokens?",
           "reorder": "does one orbit patch serve every order?",
           "envelope": "how far may an antecedent drift before a patch harms?",
           "window": "what do a window's survivors and returning pages need?",
           "amortize": "after how many reuses is a patch paid?",
           "segment": "how fast is a stored segment bound, beside computing it?",
           "store": "what does a store's read cost, and does loading go on beside computing?",
           "faults": "does any fault of a store turn into a wrong record or lose one?"}  # fmt: skip
COUNTING = ("reuse", "rank", "reorder", "envelope", "window")
"""Benches that ask questions of trained models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors of ours become one line and exit code 2."""
    transformers.logging.disable_progress_bar()
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except LooseleafError as error:
        print(f"looseleaf: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("looseleaf: stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="looseleaf",
        description="A vision-language model looks at an image once and uses what it computed anywhere.",
    )
    parser.add_argument("--version", action="version", version=f"looseleaf {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_ask(commands)
    _add_bench(commands)
    _add_calibrate(commands)
    demo = commands.add_parser("demo", help="show looseleaf at work, with a picture and a plot")
    demo.add_argument("--model", default=DEFAULT_MODEL, help="one trained on the drawings (default: %(default)s)")
    demo.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for what it saves (%(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of the drawings and questions")
    demo.add_argument("--quick", action="store_true", help="two albums a task instead of sixteen")
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser("doctor", help="check this machine and, with --model, a model")
    _add_model(doctor)
    doctor.set_defaults(run=_doctor)
    add_store(commands)
    return parser


def _add_calibrate(commands: Any) -> None:
    calibrate = commands.add_parser(
        "calibrate", help="measure what reuse costs on a model, and save it for the engine",
        description="What reuse loses on one model and dtype: blind, with patches of several sizes and depths "
        "and with patches made behind other words, orders and images. Opening the model finds the report; policy auto "
        "goes by it. Some minutes on two cores for a small model.",
    )  # fmt: skip
    calibrate.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for ask --model (default: %(default)s)")
    calibrate.add_argument("--count", type=int, default=COUNT, help="questions of each kind (default: %(default)s)")
    calibrate.add_argument("--seed", type=int, default=0, help="of the drawings and questions")
    calibrate.add_argument("--out", type=Path, help="where to save it (default: the user's cache)")
    _add_opening(calibrate)
    calibrate.set_defaults(run=_calibrate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="folder, hub id, embedded:NAME or tiny:FAMILY (default: %(default)s)"
    )
    _add_opening(parser)


def _add_opening(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, … (default: %(default)s)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the checkpoint's)")
    parser.add_argument("--revision", help="of a hub model")
    parser.add_argument("--max-length", type=int, help="longest prompt with its answer, in tokens")
    parser.add_argument("--store", default=MEMORY, help="a folder that keeps what is computed (default: %(default)s)")


def _add_ask(commands: Any) -> None:
    ask = commands.add_parser(
        "ask", help="ask a question about images and documents",
        description="Ask a question. Images and documents come before it in the order given; write {1}, {2} … in the "
        "question to put them somewhere else.",
        epilog=f"policies: {', '.join(POLICIES)}; fields follow a colon, as in first-k:32 or full-reuse:relocate=false",
    )  # fmt: skip
    ask.add_argument("question", help="what to ask; {1}, {2} … stand for the files given")
    ask.add_argument("--image", action=_Attach, dest="attached", metavar="FILE", help="an image; repeat for more")
    ask.add_argument("--document", action=_Attach, dest="attached", metavar="FILE", help="a text file used as a chunk")
    ask.add_argument("--policy", help="what to reuse (default: prefix-cache, which is exact)")
    ask.add_argument("--max-tokens", type=int, default=128, help="longest answer (default: %(default)s)")
    ask.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    ask.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this mass")
    ask.add_argument("--top-k", type=int, default=0, help="sample from this many of the likeliest tokens; 0: all")
    ask.add_argument("--seed", type=int, help="sample the same answer each time")
    ask.add_argument("--stop", action="append", default=[], help="end the answer at this text; repeat for more")
    ask.add_argument("--plan", action="store_true", help="print what would be read and computed, and stop")
    ask.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    _add_model(ask)
    ask.set_defaults(run=_ask)


def _add_bench(commands: Any) -> None:
    listed = "\n".join(f"  {name:<8} {question}" for name, question in BENCHES.items())
    bench = commands.add_parser(
        "bench", help="measure: a table, then one line of JSON", description=f"Benches:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    bench.add_argument("name", choices=list(BENCHES), help="which question to answer")
    bench.add_argument(
        "--model", action="append", default=[], dest="models", metavar="MODEL",
        help="instead of the bench's own: a family (exact), a model folder (ttft, amortize), or an embedded model's "
        "name, tiny:FAMILY or a folder (all others); those and exact take several: --model A --model B",
    )  # fmt: skip
    bench.add_argument("--device", default="cpu", help="cpu, cuda, … (default: %(default)s)")
    bench.add_argument("--seed", type=int, default=0, help="of prompts, images and weights")
    bench.add_argument("--quick", action="store_true", help="within a minute or two on two cores, coarser")
    bench.add_argument(
        "--count",
        type=int,
        help="reuse, rank, reorder, envelope, window: questions of each kind (default: 500, 200, 100, 100, 100); "
        "faults: all of them (2400)",
    )
    bench.add_argument(
        "--dtype", help="reuse, rank, reorder, envelope, window: float32, bfloat16 or float16 (default: float32)"
    )
    bench.add_argument(
        "--workers", type=int,
        help="reuse, rank, reorder, envelope, window: processes that share the questions, each with the model open (1)",
    )  # fmt: skip
    bench.add_argument(
        "--analyse", type=Path, metavar="FILE", help="reuse: also measure the shape of what reuse loses; drawn here"
    )
    bench.add_argument("--plot", type=Path, help="save a plot here")
    bench.add_argument("--save", type=Path, help="also write the JSON line to this file")
    bench.set_defaults(run=_bench)


class _Attach(argparse.Action):
    """Collects --image and --document in the order they were given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        held = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*held, (option, values)])


def _open(options: argparse.Namespace, doing: Doing) -> Looseleaf:
    return Looseleaf.open(
        options.model, device=options.device, dtype=options.dtype, revision=options.revision,
        max_length=options.max_length, config=Config(store=options.store), tell=doing,
    )  # fmt: skip


def _ask(options: argparse.Namespace) -> None:
    prompt = _segments(options.question, options.attached or [])
    sampling = {
        "max_tokens": options.max_tokens, "temperature": options.temperature, "top_p": options.top_p,
        "top_k": options.top_k, "seed": options.seed, "stop": tuple(options.stop),
    }  # fmt: skip
    with Doing(Console(stderr=True)) as doing, _open(options, doing) as ll:
        doing("preparing the prompt")
        if options.plan:
            plan = ll.plan(prompt, policy=options.policy, **sampling)
            print(json.dumps(dataclasses.asdict(plan), default=_plain) if options.json else plan)
            return
        reply = ll.submit(prompt, policy=options.policy, **sampling)
        for progress in reply.progress():
            if progress.text and not options.json:
                doing.stop()
                print(progress.text, end="", flush=True)
            elif progress.stage and not progress.text:
                doing(progress.stage)
        doing.stop()
        answer = reply.result()
        if options.json:
            print(json.dumps(_as_dict(answer)))
        else:
            print()
            print(answer.usage, file=sys.stderr)
        if options.store != MEMORY:
            doing("making patches for the next time")
            ll.settle()


def _plain(value: Any) -> Any:
    """Ranges as [start, stop]."""
    return [value.start, value.stop] if isinstance(value, range) else str(value)


def _as_dict(answer: Answer) -> dict[str, Any]:
    usage: Usage = answer.usage
    return {
        "text": answer.text, "finish_reason": answer.finish_reason, "policy": answer.plan.policy,
        "usage": dataclasses.asdict(usage),
    }  # fmt: skip


def _segments(question: str, attached: Sequence[tuple[str, str]]) -> list[Segment]:
    """Attached files and the words between them: in front, or where the question says {1}, {2} …"""
    files: list[Segment] = [_file(option, name) for option, name in attached]
    parts = re.split(r"\{(\d+)\}", question)
    if len(parts) == 1:
        return [*files, question]
    segments: list[Segment] = []
    unnamed = [number for number in range(1, len(files) + 1) if str(number) not in parts[1::2]]
    if unnamed:
        raise PromptError(f"the question names some files but not {{{unnamed[0]}}}; name all of them or none")
    for at, part in enumerate(parts):
        if at % 2 == 0:
            segments += [part] if part.strip() else []
        elif 1 <= int(part) <= len(files):
            segments.append(files[int(part) - 1])
        else:
            raise PromptError(f"the question names {{{part}}}, but {len(files)} files were given")
    return segments


def _file(option: str, name: str) -> Segment:
    if option == "--image":
        return Image(name)
    try:
        return Document(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"document {name!r} cannot be read as text: {error}") from error


def _bench(options: argparse.Namespace) -> None:
    takers = {"count": (*COUNTING, "faults"), "dtype": COUNTING, "workers": COUNTING, "analyse": ("reuse",)}
    for name, benches in takers.items():
        if getattr(options, name) is not None and options.name not in benches:
            raise ConfigError(f"bench {options.name} takes no --{name}; bench {' and '.join(benches)} do")
    if options.name in ("segment", "store", "faults") and options.models:
        raise ConfigError(f"bench {options.name} makes its own model and takes no --model")
    if options.name in ("ttft", "amortize") and len(options.models) > 1:
        raise ConfigError(f"bench {options.name} times one model, got {len(options.models)}")
    bench = importlib.import_module(f"looseleaf.bench.{options.name}")
    given = BenchOptions(
        models=tuple(options.models), device=options.device, seed=options.seed, quick=options.quick,
        plot=options.plot, count=options.count, analyse=options.analyse, dtype=options.dtype,
        workers=1 if options.workers is None else options.workers,
    )  # fmt: skip
    with Doing(Console(stderr=True)) as doing:
        report = bench.run(given, doing)
    report.print()
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(report.json() + "\n", encoding="utf-8")
    if options.plot is not None:
        bench.plot(report, options.plot)


def _calibrate(options: argparse.Namespace) -> None:
    check_whole("--count", options.count, low=1)
    if options.out is not None and options.out.is_dir():
        raise ConfigError(f"--out {options.out} is a folder; name a file in it")
    with Doing(Console(stderr=True)) as doing, _open(options, doing) as ll:
        found = calibrate(ll, count=options.count, seed=options.seed, tell=doing)
        path = options.out or cached_at(found.fingerprint, found.dtype, found.canonical)
    found.save(path)
    print_rows(rows_of(found))
    print(f"noise: {found.noise_kl:.1e} nats; auto uses patches of {found.share:.0%} of a page's bytes from layer "
          f"{found.from_layer} on, close ones by: {found.close}; rows kept when an image in front is gone "
          f"{'need' if found.removal else 'need no'} removal patch")  # fmt: skip
    print(f"saved: {path}")


def _demo(options: argparse.Namespace) -> None:
    run_demo(DemoOptions(model=options.model, out=options.out, seed=options.seed, quick=options.quick))


def _doctor(options: argparse.Namespace) -> None:
    print(f"looseleaf {VERSION}, Python {platform.python_version()}, torch {torch.__version__}, "
          f"transformers {transformers.__version__}")  # fmt: skip
    gpus = ", ".join(torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())) or "none"
    print(f"{torch.get_num_threads()} threads; GPUs: {gpus}")
    with Doing(Console(stderr=True)) as doing, _open(options, doing) as ll:
        adapter = ll.adapter
        layer = adapter.layout.layers[0]
        kind = "latent (MLA)" if layer.latent else f"{layer.keys.heads} KV heads of {layer.keys.dim}"
        print(f"model {adapter.name}: {len(adapter.layout.layers)} layers, {kind}, {adapter.layout.dtype}, "
              f"{adapter.layout.row_bytes:,} bytes a token, up to {adapter.max_length:,} tokens")  # fmt: skip
        print(f"rotary: {adapter.decoder.form.order.value}, {adapter.axes} axes; keys are "
              f"{'taken before the rotary' if adapter.decoder.shows_keys else 'turned back in fp32'}")  # fmt: skip
        started = time.perf_counter()
        if adapter.sees_images:
            ll.reference.check_images()
            print("images: a prompt with an image and a reused image equal the model's own forward")
        print(f"fine ({time.perf_counter() - started:.1f} s)")


if __name__ == "__main__":
    sys.exit(main())
