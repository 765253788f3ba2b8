"""`looseleaf store ls | show | verify | gc`: a store's folder, looked at and tidied without a model."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from typing import Any

from rich.console import Console

from looseleaf.bench.report import print_rows
from looseleaf.checks import check_whole
from looseleaf.doing import Doing
from looseleaf.errors import ConfigError, LooseleafError
from looseleaf.store.disk import DiskStore
from looseleaf.store.format import DamagedError, read_manifest
from looseleaf.store.opening import folder_of

MOST = 2**62
"""A budget that nothing exceeds: looking at a folder must not empty it."""


def add_store(commands: Any) -> None:
    """The command and its actions."""
    store = commands.add_parser(
        "store", help="look at a store's folder, check it, tidy it",
        description="A folder that `--store` or Config(store=…) keeps records in. Nothing here needs a model; a folder "
        "may be in use meanwhile.",
    )  # fmt: skip
    actions = store.add_subparsers(required=True, metavar="ACTION")
    for name, run, words in (
        ("ls", _store_ls, "list what is stored, least recently used first"),
        ("show", _store_show, "what one file says of itself"),
        ("verify", _store_verify, "read every file, put damaged ones aside, mend the index"),
        ("gc", _store_gc, "drop what has expired, what writers left half done, and what is beyond the budget"),
    ):
        action = actions.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
        action.add_argument("folder", help="the store's folder")
        action.set_defaults(run=run)
        if name == "show":
            action.add_argument("identity", help="of the record, or how it begins")
        if name == "gc":
            action.add_argument("--disk-bytes", type=int, help="keep at most so much (default: no limit)")
        if name in ("ls", "show", "verify"):
            action.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")


def _folder(options: argparse.Namespace, budget_bytes: int = MOST) -> DiskStore:
    if options.folder.startswith("memory:"):
        raise ConfigError("a store in memory has no folder to look at")
    folder = folder_of(options.folder)
    if not (folder / "records").is_dir():
        raise ConfigError(f"{options.folder!r} is no store: it has no folder named records")
    return DiskStore(folder, budget_bytes)


def _store_ls(options: argparse.Namespace) -> None:
    store = _folder(options)
    rows: list[dict[str, Any]] = [
        {
            "identity": entry.key.identity, "part": entry.key.part, "kind": entry.kind, "bytes": entry.size_bytes,
            "stored": _when(entry.created_s), "until": _when(entry.expires_s),
        }
        for entry in store.entries()
    ]  # fmt: skip
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    if rows:
        print_rows([row | {"identity": f"{row['identity'][:16]}…"} for row in rows])
    print(f"{len(rows)} records, {sum(entry.size_bytes for entry in store.entries()):,} bytes")


def _store_show(options: argparse.Namespace) -> None:
    store = _folder(options)
    found = [one for one in store.entries() if one.key.identity.startswith(options.identity)]
    if not found:
        raise ConfigError(f"nothing in {options.folder!r} has an identity that begins with {options.identity!r}")
    for entry in found:
        path = store.path(entry.key)
        try:
            with path.open("rb") as file:
                manifest = read_manifest(file)
        except (DamagedError, OSError) as error:
            raise LooseleafError(
                f"{path} cannot be read ({error}); `looseleaf store verify` mends the store"
            ) from error
        said = {
            "identity": manifest.key.identity, "part": manifest.key.part, "kind": manifest.kind, **manifest.facts,
            "stored": _when(manifest.created_s), "until": _when(manifest.expires_s), "file": str(path),
            "tensors": {name: [str(dtype), *shape] for name, (dtype, shape, *_) in manifest.tensors.items()},
        }  # fmt: skip
        print(json.dumps(said) if options.json else json.dumps(said, indent=2))


def _store_verify(options: argparse.Namespace) -> int:
    store = _folder(options)
    with Doing(Console(stderr=True)) as doing:
        found = store.verify(doing)
    said = {
        "good": found.good, "damaged": {str(path): why for path, why in found.damaged.items()},
        "unreadable": {str(path): why for path, why in found.unreadable.items()},
        "missing": [f"{key.part} of {key.identity}" for key in found.missing], "adopted": len(found.adopted),
        "unfinished": found.unfinished,
    }  # fmt: skip
    if options.json:
        print(json.dumps(said))
    else:
        for path, why in found.damaged.items():
            print(f"damaged: {path}: {why}; it now lies in {store.folder / 'damaged'}")
        for path, why in found.unreadable.items():
            print(f"unreadable: {path}: {why}; left as it is")
        for missing in found.missing:
            print(f"missing: {missing.part} of {missing.identity}; taken out of the index")
        print(f"{found.good} good, {len(found.damaged)} damaged, {len(found.missing)} missing, {len(found.adopted)} "
              f"entered in the index again, {found.unfinished} unfinished removed")  # fmt: skip
    return 1 if found.damaged or found.unreadable or found.missing else 0


def _store_gc(options: argparse.Namespace) -> None:
    if options.disk_bytes is not None:
        check_whole("--disk-bytes", options.disk_bytes, low=0)
    store = _folder(options, MOST if options.disk_bytes is None else options.disk_bytes)
    gone = store.collect()
    print(f"{gone} records dropped; {store.stats().records} left, {store.stats().size_bytes:,} bytes")


def _when(seconds: float | None) -> str:
    """A time as people write it; nothing for none."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # after the year 9999
        return f"{seconds:.0f} s after 1970"
