"""The benchmarks run: on the smallest sizes, for what they say, not for their figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hf_fixtures import save_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dev"))

import bench
import bench_compare
import bench_engine
import bench_hook
import bench_plan
import bench_report
import bench_score
import bench_seal

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def once(monkeypatch):
    for module in (bench_compare, bench_engine, bench_hook, bench_plan, bench_report, bench_score, bench_seal):
        monkeypatch.setattr(module, "TURNS", 1)
    monkeypatch.setattr(bench_compare, "TOKENS", 40_000)
    monkeypatch.setattr(bench_score, "RESPONSE_TOKENS", 2)
    monkeypatch.setattr(bench_hook, "BATCHES", ((4, 64),))
    monkeypatch.setattr(bench_report, "CASES", 2)
    monkeypatch.setattr(bench_report, "TOKENS", 2000)
    monkeypatch.delenv("XD_PYTHON_VLLM", raising=False)


def test_tools_are_measured_beside_their_references(tmp_path):
    compared = bench_compare.attempt(tmp_path, bench_compare.TOKENS)
    results = [bench_plan.measure(tmp_path), *bench_compare.measure(tmp_path, compared), bench_seal.measure(compared)]
    results += [bench_hook.beside_writing(tmp_path), bench_report.measure(tmp_path)]
    results += bench_score.measure(tmp_path)
    *measured, not_run = results
    assert all(result.ratio > 0 for result in measured)
    assert not_run.ratio is None and not not_run.failed and "XD_PYTHON_VLLM" in not_run.detail
    assert len(bench.table(results)) == 1 + len(results)


def test_an_engine_is_measured_beside_a_bare_loop(tmp_path):
    save_model(tmp_path / "tiny")
    for result in bench_engine.measure(tmp_path / "tiny", sequences=4, tokens=8, batch=2):
        assert result.ratio > 0 and "s" in result.detail
