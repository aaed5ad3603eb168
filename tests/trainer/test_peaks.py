"""The denominators of MFU: the right row by name, nothing for a card without one, and numbers that two sources agree on."""

from __future__ import annotations

import pytest

from trainer.peaks import PEAKS, peak_flops, peak_flops_at


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", 181.05),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
    ],
)
def test_known_cards_are_found_by_their_driver_name(name: str, tflops: float) -> None:
    assert peak_flops(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "GPU",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA A10G",
        "NVIDIA H20",
        "Tesla T4",
        "Tesla V100-SXM2-16GB",
        "NVIDIA GB10",
        "Quadro RTX 6000",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 50900",
        "NVIDIA A40-48Q",
        "GRID A100-1-5C",
        "NVIDIA A100-SXM-64GB",
    ],
)
def test_a_card_without_a_row_is_unknown_not_guessed(name: str) -> None:
    assert peak_flops(name) is None


def test_reported_mfu_of_a_5090_becomes_true() -> None:
    peak = peak_flops("NVIDIA GeForce RTX 5090")
    assert peak is not None
    assert 8.40 * 989.5e12 / peak == pytest.approx(39.7, abs=0.05)


def test_every_row_has_a_source_and_agrees_with_its_units_and_clock() -> None:
    assert len({row.name for row in PEAKS}) == len(PEAKS)
    for row in PEAKS:
        assert len(row.source) > 10, row.name
        if row.units and row.boost_ghz and row.flop_per_clock:
            assert row.units * row.boost_ghz * row.flop_per_clock / 1e3 == pytest.approx(row.tflops, rel=0.004), row.name


def test_geforce_rows_hold_the_float32_accumulate_rate() -> None:
    assert all(
        row.flop_per_clock == 512
        for row in PEAKS
        if row.name.startswith("RTX") and row.name.split()[1].isdigit() and int(row.name.split()[1]) < 6000
    )


def test_the_peak_at_the_clock_a_capped_card_has() -> None:
    assert peak_flops_at("NVIDIA H200", 1830) == pytest.approx(989.4e12, rel=1e-3)
    assert peak_flops_at("NVIDIA H200", 1665) == pytest.approx(900.2e12, rel=1e-3)
    assert peak_flops_at("NVIDIA B200", 1665) is None and peak_flops_at("Tesla T4", 1665) is None
    assert peak_flops_at("NVIDIA H200", 0) is None
