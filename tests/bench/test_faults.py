"""The faults bench finds nothing wrong, and would."""

import pytest

from looseleaf.bench import faults
from looseleaf.bench.report import BenchOptions
from looseleaf.store import format as files
from looseleaf.store.medium import READ_FAULTS, WRITE_FAULTS


def test_no_fault_makes_a_record_wrong_or_loses_one() -> None:
    report = faults.run(BenchOptions(quick=True, count=60, seed=5))
    assert {row["fault"] for row in report.rows} > {*READ_FAULTS, *WRITE_FAULTS, faults.KILLED}
    assert report.summary["kinds"] >= 20
    assert (report.summary["wrong"], report.summary["lost"]) == (0, 0)
    assert report.summary["killed"] >= 3
    assert sum(row["quarantined"] for row in report.rows) >= 7, "faults that did nothing prove nothing"


def test_a_store_that_does_not_compare_checksums_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fits", lambda data, checksum: True)
    monkeypatch.setattr(faults, "KINDS", {one: faults.KINDS[one] for one in ("bit flipped in a block", faults.KILLED)})
    assert faults.run(BenchOptions(count=40)).summary["wrong"] > 0
