"""The plan: for each span of a prompt, what is read and what is computed. Pure: no tensors, printable, in the logs.

Goes in: a prompt's spans, what the store has for them, a policy, the number of layers. Comes out: a Plan. The rules of
exactness live here: a row is exact when it was computed in this very context or is stored for it, and everything behind
an approximate row is approximate.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from looseleaf.errors import PolicyError
from looseleaf.link.policies import PatchForm, Policy, Select, policy_name
from looseleaf.prompt.chunks import Canonical, Prompt, Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What the store has for one chunk of the prompt."""

    kv: bool = False
    features: bool = False
    patch: str = ""
    """The best there is of the policy's form: `exact`, for this very antecedent, a drift it differs by, or none."""
    held: str = ""
    """What a window holds of it: rows computed right here (`exact`), behind something else (`kept`), or it wants the
    chunk as it is stored (`clean`)."""
    states: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """What the store has for a prompt: exact tokens from its start, and parts of each chunk's record, in order."""

    prefix_tokens: int = 0
    chunks: tuple[Known, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows that start or go on computing at `layer`: fixed slots, or a selection among the reused ones."""

    layer: int
    slots: tuple[range, ...]
    select: Select | None = None
    from_states: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What happens to one span. `stored` says whether a reused chunk's KV is in the store or must be computed first."""

    start: int
    stop: int
    what: str
    """text, image, clip or document."""
    use: str
    """exact (stored rows of this context), reuse (a chunk's own rows, bound here) or compute."""
    stored: bool = False
    exact: bool = True
    recomputed: int = 0
    """Of a reused chunk's tokens, how many are computed in context in at least one layer (selections: about)."""
    kept: bool = False
    """Whether a reused chunk's rows are a window's, not the store's."""
    patched: str = ""
    """Whose patch a reused chunk gets: `exact`, that of an antecedent that differs by a drift, or none."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is read, computed, and in which order, for one prompt under one policy."""

    policy: str
    tokens: int
    prefix_tokens: int
    pieces: tuple[Piece, ...]
    rows: tuple[Rows, ...]
    relocate: bool = True
    keys_rank: int | None = None
    patch: PatchForm | None = None
    drifts: tuple[str, ...] = ()
    later: bool = False
    """Whether patches that are missing are to be made once nobody waits."""
    two_step: bool = False
    exact_tokens: int = 0
    """Tokens before this one have exact rows; all behind are approximate."""
    missing: tuple[int, ...] = field(default=())
    """Chunks (by their place among the prompt's chunks) whose KV must be computed in the canonical context first."""

    @property
    def approximate(self) -> bool:
        """Whether the answer rests on approximate rows."""
        return self.exact_tokens < self.tokens

    @property
    def splittable(self) -> bool:
        """Whether its rows may be computed in several passes, in order; selections need them all at once."""
        return all(rows.select is None for rows in self.rows)

    @property
    def needs_oracle(self) -> bool:
        """Whether a full prefill comes first (offline controls)."""
        return self.keys_rank is not None or any(r.select is not None and r.select.by == "attention" for r in self.rows)

    def count(self) -> Count:
        """Tokens by what happens to them."""
        exact = self.prefix_tokens
        relocated = kept = patched = recomputed = fresh = 0
        for piece in self.pieces:
            size = piece.stop - max(piece.start, min(piece.stop, self.prefix_tokens))
            if piece.use == "compute" or (piece.use == "reuse" and not piece.stored):
                fresh += size
            elif piece.use == "reuse":
                recomputed += piece.recomputed
                if piece.exact:
                    exact += size - piece.recomputed
                elif piece.kept:
                    kept += size
                elif piece.patched:
                    patched += size
                else:
                    relocated += size - piece.recomputed
        return Count(exact=exact, relocated=relocated, kept=kept, patched=patched, recomputed=recomputed, fresh=fresh)

    def __str__(self) -> str:
        count = self.count()
        lines = [
            f"{self.policy}: {self.tokens} tokens = {count.exact} exact + {count.relocated} relocated + "
            + (f"{count.kept} kept + " if count.kept else "")
            + (f"{count.patched} patched + " if count.patched else "")
            + f"{count.recomputed} recomputed + {count.fresh} fresh"
            + (f"; approximate from token {self.exact_tokens}" if self.approximate else "; exact")
        ]
        for piece in self.pieces:
            doing = piece.use if piece.use != "reuse" else ("reuse" if piece.stored else "compute alone, then reuse")
            if piece.start < self.prefix_tokens < piece.stop:
                doing = f"exact to {self.prefix_tokens}, then compute"
            if piece.recomputed:
                doing += f", {piece.recomputed} tokens in context"
            if piece.kept:
                doing = "kept by the window"
            if piece.patched:
                doing += ", patched" + ("" if piece.patched == "exact" else f" (close: {piece.patched})")
            lines.append(
                f"  [{piece.start:>6}, {piece.stop:>6})  {piece.what:<8}  {doing}{'' if piece.exact else '  ~'}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """A prompt's tokens by what happens to them."""

    exact: int = 0
    relocated: int = 0
    kept: int = 0
    patched: int = 0
    recomputed: int = 0
    fresh: int = 0


def plan_link(prompt: Prompt, lookup: Lookup, policy: Policy, *, layers: int, canonical: Canonical) -> Plan:
    """Turn what is known and a policy into a plan."""
    # the last token is always computed: its output is the answer's first token
    prefix = min(lookup.prefix_tokens, len(prompt) - 1) if policy.uses_prefix else 0
    if policy.reuses_chunks:  # what a window has of a chunk goes before a prefix
        wanted = zip(prompt.chunks, lookup.chunks, strict=True)
        prefix = min((prefix, *(span.start for span, one in wanted if one.held in ("kept", "clean"))))
    if policy.patch is not None and policy.patch.from_layer >= layers:
        raise PolicyError(f"{policy_name(policy)}: from_layer must be below the model's {layers} layers")
    known = dict(zip((id(span) for span in prompt.chunks), lookup.chunks, strict=True))
    rebuild = policy.patch is not None and policy.rebuild and not _all_patched(prompt, lookup, prefix, canonical)
    pieces: list[Piece] = []
    reused: list[Span] = []
    for span in prompt.spans:
        what = span.chunk.kind if span.chunk else "text"
        reusable = span.chunk is not None and policy.reuses_chunks and span.stop < len(prompt)
        begun = span.start < prefix < span.stop  # a prefix ends in it: the rest is computed, which is exact
        if span.stop <= prefix:
            pieces.append(Piece(start=span.start, stop=span.stop, what=what, use="exact", stored=True))
        elif reusable and _bound(known[id(span)], span, policy, prompt, canonical, layers, rebuild=rebuild or begun):
            reused.append(span)
            pieces.append(_reuse(span, known[id(span)], policy, prompt, canonical, layers))
        else:
            pieces.append(Piece(start=span.start, stop=span.stop, what=what, use="compute"))
    exact_tokens = min((piece.start for piece in pieces if not piece.exact), default=len(prompt))
    pieces = [replace(piece, exact=piece.stop <= exact_tokens) for piece in pieces]
    places = {id(span): place for place, span in enumerate(prompt.chunks)}
    by_start = {piece.start: piece for piece in pieces}
    return Plan(
        policy=policy_name(policy),
        tokens=len(prompt),
        prefix_tokens=prefix,
        pieces=tuple(pieces),
        rows=_rows(pieces, reused, known, policy, layers, prefix),
        relocate=policy.relocate,
        keys_rank=policy.keys_rank,
        patch=policy.patch,
        drifts=policy.drifts,
        later=policy.later,
        two_step=policy.two_step,
        exact_tokens=exact_tokens,
        missing=tuple(
            places[id(span)]
            for span, piece in ((span, by_start[span.start]) for span in reused)
            if policy.keys_rank is None and not piece.stored
        ),
    )


def _bound(
    known: Known, span: Span, policy: Policy, prompt: Prompt, canonical: Canonical, layers: int, *, rebuild: bool
) -> bool:
    """Whether a chunk's rows are read from somewhere; else it is computed."""
    if known.held:
        return True
    kept = known.patch != "" or _reuses(policy, span, layers)
    return kept and (not rebuild or _at_home(span, prompt, canonical))


def _reuses(policy: Policy, span: Span, layers: int) -> bool:
    """Whether anything of a chunk's stored rows would be left; else it is simply computed."""
    stages = policy.stages(len(span), layers)
    return not (len(stages) == 1 and stages[0].layer == 0 and stages[0].rows == range(len(span)))


def _all_patched(prompt: Prompt, lookup: Lookup, prefix: int, canonical: Canonical) -> bool:
    """Whether every chunk that needs a patch has one.

    If a single one lacks it, all are computed: behind a patched chunk its rows would not be exact, and no patch could
    ever be made of them.
    """
    return all(
        known.patch != "" or known.held != "" or span.start < prefix or _at_home(span, prompt, canonical)
        for span, known in zip(prompt.chunks, lookup.chunks, strict=True)
    )


def _at_home(span: Span, prompt: Prompt, canonical: Canonical) -> bool:
    """Whether a chunk stands right behind the canonical context, as when it was computed: its rows are exact there."""
    return prompt.ids[: span.start] == canonical.ids and span.start_pos == len(canonical.ids)


def _reuse(span: Span, known: Known, policy: Policy, prompt: Prompt, canonical: Canonical, layers: int) -> Piece:
    home = _at_home(span, prompt, canonical)
    kept = known.held in ("exact", "kept")
    patch = "" if home or known.held else known.patch
    recomputed = 0
    if not home and not known.held and not patch:
        for stage in policy.stages(len(span), layers):
            rows = stage.rows
            recomputed = max(recomputed, round(rows.share * len(span)) if isinstance(rows, Select) else len(rows))
    assert span.chunk is not None
    exact = known.held == "exact" if known.held else home and policy.keys_rank is None
    return Piece(
        start=span.start, stop=span.stop, what=span.chunk.kind, use="reuse", stored=known.kv or kept, exact=exact,
        recomputed=recomputed, kept=kept, patched=patch,
    )  # fmt: skip


def _rows(
    pieces: Sequence[Piece],
    reused: Sequence[Span],
    known: Mapping[int, Known],
    policy: Policy,
    layers: int,
    prefix: int,
) -> tuple[Rows, ...]:
    """Row sets by layer: computed spans everywhere, and of reused chunks what the policy's stages say."""
    base = [range(max(one.start, prefix), one.stop) for one in pieces if one.use == "compute"]
    ready = {piece.start for piece in pieces if piece.use == "reuse" and (piece.exact or piece.patched)}
    ready |= {span.start for span in reused if known[id(span)].held}
    stages = {span.start: policy.stages(len(span), layers) for span in reused if span.start not in ready}
    rows = []
    for layer in sorted({0, *(stage.layer for each in stages.values() for stage in each)}):
        if layer >= layers:
            continue
        slots, select, from_states = list(base), None, False
        for start, each in stages.items():
            stage = next((one for one in reversed(each) if one.layer <= layer), None)
            if stage is None:
                continue
            if isinstance(stage.rows, Select):
                select = stage.rows
            else:
                slots.append(range(start + stage.rows.start, start + stage.rows.stop))
                from_states = from_states or (stage.from_states and stage.layer == layer)
        rows.append(Rows(layer=layer, slots=merge(slots), select=select, from_states=from_states))
    return tuple(rows)


def merge(slots: Sequence[range]) -> tuple[range, ...]:
    """Ascending, touching ranges joined, empty ones gone."""
    merged: list[range] = []
    for one in sorted((one for one in slots if len(one)), key=lambda one: one.start):
        if merged and merged[-1].stop >= one.start:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, one.stop))
        else:
            merged.append(one)
    return tuple(merged)


def compute_instead(plan: Plan, starts: Collection[int]) -> Plan:
    """The plan with the reused chunks that begin at these slots computed in context instead."""
    pieces = tuple(
        replace(piece, use="compute", stored=False, patched="") if piece.start in starts else piece
        for piece in plan.pieces
    )
    (rows,) = plan.rows  # plans with patches compute whole spans through all layers
    more = [range(piece.start, piece.stop) for piece in plan.pieces if piece.start in starts]
    return replace(plan, pieces=pieces, rows=(replace(rows, slots=merge([*rows.slots, *more])),))


def flatten(slots: Sequence[range]) -> list[int]:
    """The slots one by one."""
    return list(itertools.chain.from_iterable(slots))
