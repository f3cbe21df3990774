"""tools/bench_gpu.py with models of no size on the CPU: every part runs, failures are shown and counted, kernels are sorted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench_gpu import CASES, main
from tools.gpu_facts import kernel_kind, kernel_shares, peak_tflops

TINY = ["--device", "cpu", "--tiny", "--steps", "3"]


def test_cases_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--only", "8b-slice-4096", "gpt2-124m-1024", "--peak-tflops", "1", "--output", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["holds"] and found["ceiling_tflops"] > 0
    for row in found["cases"]:
        assert row["status"] == "ok" and row["steps"] == 3
        assert row["attention"] == ["flash (CPU)"]
        assert row["tokens_per_s"] == pytest.approx(2 * 16 / (row["step_ms"] / 1e3), rel=0.01)
        assert 0 < row["mfu_causal"] <= row["mfu"] or row["mfu"] == 0
        assert sum(row["kernel_shares"].values()) == pytest.approx(1, abs=0.001)
        assert row["kernel_shares"]["matmul"] > 0 and row["kernel_shares"]["optimizer"] > 0
        assert row["predicted_gib"] > 0 and row["memory_gib"] is None
    written = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert written["cases"] == found["cases"]
    table = (tmp_path / "bench_gpu.md").read_text()
    assert "8b-slice-4096" in table and found["date"] in table and found["torch"] in table


def test_a_case_that_fails_is_shown_and_the_next_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--only", "1.3b-2048", "1.3b-8192", "--tp", "2"]) == 1
    output = capsys.readouterr()
    rows = json.loads(output.out.splitlines()[-1])["cases"]
    assert [(row["status"], row["failed"]) for row in rows] == [("failed", True)] * 2
    assert "ConfigError" in rows[0]["error"] and "Traceback" in output.err


def test_without_time_nothing_runs_and_that_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--budget-minutes", "0"]) == 1
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert [row["case"] for row in rows] == list(CASES) and {row["status"] for row in rows} == {"not run"}


@pytest.mark.parametrize("name", CASES)
def test_full_sizes_are_valid(name: str) -> None:
    config = CASES[name].config((), "cpu", tiny=False)
    size = {"1.3b": (1.30e9, 1.36e9), "8b-slice": (2.7e9, 2.9e9), "gpt2-124m": (1.24e8, 1.26e8)}[name.rpartition("-")[0]]
    assert size[0] < config.model.num_parameters() < size[1]
    assert config.data.seq_length == int(name.rpartition("-")[2])
    assert config.num_microbatches(1) == 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128", "attention"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "memory, copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "memory, copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>", "elementwise, norm"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_mm_3", "elementwise, norm"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("a_kernel_of_next_year", "other"),
    ],
)
def test_kernels_are_sorted_by_name(name: str, kind: str) -> None:
    assert kernel_kind(name) == kind


def test_shares_and_peaks() -> None:
    assert kernel_shares({"aten::mm": 3.0, "aten::add": 1.0})["matmul"] == 0.75
    assert kernel_shares({}) == {}
    assert (peak_tflops("NVIDIA H100 PCIe"), peak_tflops("NVIDIA H200"), peak_tflops("another")) == (756.0, 989.4, None)
