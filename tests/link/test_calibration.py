"""A calibration: measured, saved, found again for what it was measured on, and gone by."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from looseleaf import Auto, ConfigError, FirstK, FullReuse, Looseleaf, PrefixCache
from looseleaf.bench import exact
from looseleaf.bench.calibrate import SHARES, _allowed, _from_layer, _of_share, calibrate, rows_of
from looseleaf.cli import main
from looseleaf.link.calibration import Calibration, Loss, cached_at, file_name, read_calibration
from looseleaf.model.embedded import FOLDER, embedded_models

Open = Callable[..., Looseleaf]


def made(ll: Looseleaf) -> Calibration:
    nothing = Loss(n=4, kl=0.1, changed=1, flips=2, restored=1, eta=0.9)
    return Calibration(
        model=ll.adapter.name, fingerprint=ll.adapter.fingerprint, dtype=ll.dtype,
        canonical=ll.builder.canonical.identity, seed=0, commit="abc", noise_kl=1e-9, ways={"full-reuse": nothing},
        drifts={"exchanged": nothing}, survivors=None, share=0.06, from_layer=1, close="words+order", removal=False,
    )  # fmt: skip


def test_a_small_model_is_measured_and_auto_goes_by_it(opened: Open, tmp_path: Path) -> None:
    ll = opened("qwen2_5_vl")
    told: list[str] = []
    found = calibrate(ll, count=1, seed=2, tell=told.append)
    assert found.noise_kl < 1e-6
    assert found.ways["full-reuse"].eta in (0, None)
    assert found.ways["patch 100%"].kl < 1e-6
    assert found.share in SHARES
    assert found.survivors is not None
    assert any("drifts" in one for one in told)
    assert {row["way"] for row in rows_of(found)} >= {"full-reuse", "patch 100%", "drift: replaced"}
    found.save(tmp_path / "deep" / "one.json")
    assert read_calibration(tmp_path / "deep" / "one.json") == found
    tuned = found.tune(Auto(mode="fast"))
    assert isinstance(tuned, Auto)
    assert (tuned.mode, tuned.share, tuned.from_layer, tuned.close) == (
        "fast", found.share, found.from_layer, found.close,
    )  # fmt: skip
    assert found.tune(Auto(share=0.5, close="none")) == replace(tuned, mode="balanced", share=0.5, close="none")
    assert found.tune(FirstK()) == FirstK()


def test_it_is_found_beside_the_model_in_the_cache_or_where_it_is_told(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ll = opened("qwen2_5_vl")
    assert ll.calibration is None
    one = made(ll)
    one.save(cached_at(one.fingerprint, one.dtype, one.canonical))
    again = opened("qwen2_5_vl")
    assert again.calibration == one
    assert again.request(["Hello"], policy="auto").policy == one.tune(Auto())
    assert opened("qwen2_5_vl", canonical="none").calibration is None  # measured behind the preamble
    cached_at(one.fingerprint, one.dtype, one.canonical).unlink()
    beside = Path(ll.adapter.model.name_or_path) / file_name(one.dtype)
    try:
        one.save(beside)
        assert opened("qwen2_5_vl").calibration == one
    finally:
        beside.unlink()
    one.save(tmp_path / "given.json")
    assert opened("qwen2_5_vl", calibration=tmp_path / "given.json").calibration == one
    replace(one, fingerprint="another").save(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="not on this model"):
        opened("qwen2_5_vl", calibration=tmp_path / "other.json")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": 99}', '{"version": 1, "ways": {}}'])
def test_what_is_no_calibration_is_not_gone_by(
    text: str, opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ll = opened("qwen2")
    path = cached_at(ll.adapter.fingerprint, ll.dtype, ll.builder.canonical.identity)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert opened("qwen2").calibration is None
    assert str(path) in caplog.text
    with pytest.raises(ConfigError, match="calibration"):
        opened("qwen2", calibration=path)


def test_reuse_without_one_is_said_aloud_and_in_the_answer(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    ll = opened("qwen2_5_vl")
    prompt = exact.make_prompts(ll, seed=3, count=1)[0]
    with caplog.at_level(logging.WARNING):
        assert ll.ask(prompt, policy=PrefixCache(), max_tokens=1).usage.calibrated  # exact: nothing to measure
        assert not caplog.records
        usage = ll.ask(prompt, policy=FullReuse(), max_tokens=1).usage
        ll.ask(prompt, policy=FullReuse(), max_tokens=1)
    assert not usage.calibrated
    assert "approximate, not calibrated" in str(usage)
    assert len([one for one in caplog.records if "calibrat" in one.message]) == 1


def loss(eta: float | None, *, n: int = 100, restored: int = 50) -> Loss:
    return Loss(n=n, kl=0.0, changed=0, flips=50, restored=restored, eta=eta)


def test_drifts_are_allowed_by_what_they_close_and_harm() -> None:
    drifts = {"other words": loss(0.99), "many words": loss(0.95), "exchanged": loss(0.8), "one fewer": loss(0.99)}
    drifts |= {"one twice": loss(None), "replaced": loss(0.99)}
    harmed = dict.fromkeys(drifts, 0) | {"one fewer": 3}
    assert _allowed(drifts, harmed) == "words+again"
    assert _allowed(drifts | {"many words": loss(0.5)}, harmed) == "none"
    assert _allowed({}, {}) == "none"


def test_shallow_layers_are_left_alone_when_that_costs_nothing() -> None:
    ways = {_of_share(0.25): loss(0.99), _of_share(0.25, 0.25): loss(0.99), _of_share(0.25, 0.5): loss(0.985)}
    ways[_of_share(0.25, 0.75)] = loss(0.7)
    assert _from_layer(ways, 0.25, 8) == 4
    ways[_of_share(0.25, 0.5)] = loss(0.985, restored=40)
    assert _from_layer(ways, 0.25, 8) == 2


def test_the_command_saves_and_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["calibrate", "tiny:qwen2", "--count", "1"]) == 0
    out = capsys.readouterr().out
    assert "patch 100%" in out
    (path,) = tmp_path.rglob("*.json")
    assert f"saved: {path}" in out
    assert json.loads(path.read_text())["dtype"] == "float32"
    assert main(["calibrate", "tiny:qwen2", "--count", "0"]) == 2


@pytest.mark.parametrize("name", embedded_models())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedded_models_come_with_theirs(name: str, dtype: str) -> None:
    found = read_calibration(FOLDER / name / file_name(dtype))
    assert (found.model, found.dtype) == (name, dtype)
    assert "+" not in found.commit  # measured on a commit, not on somebody's changes
    assert "words" in found.close
    assert not found.removal
