"""Every wrong layer is seen to fail the verdict it should, with its fault named."""

from dataclasses import replace

import pytest
from mutants import BELOW_THE_GATES, MUTANTS, Mutant, bench, verdict

from megamoe.errors import Mismatch

# The gates of the field, as its own tests state them.
COSINE_GATE = 0.997  # FlashInfer, SM90 push FP8
RELATIVE_GATE = 0.05  # FlashInfer, MXFP8 activations on MXFP4 weights


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_fails_and_is_named(mutant: Mutant) -> None:  # K72
    report = verdict(mutant)
    assert not getattr(report, mutant.wrong), report
    if mutant.wrong == "recipe":
        assert report.right, report
    for words in mutant.says:
        assert words in report.message, report
    with pytest.raises(Mismatch, match=r"rank 0"):
        report.raise_if_wrong()


@pytest.mark.parametrize("rig", sorted({m.rig for m in MUTANTS}))
def test_what_they_are_made_from_passes(rig: str) -> None:
    yard = bench(rig)
    report = yard.judge(yard.emulated)
    assert report.right
    assert report.recipe
    assert report.message == ""


def test_names_are_unique() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(("name", "gates"), BELOW_THE_GATES, ids=lambda p: str(p))
def test_the_fields_gates_would_have_passed(name: str, gates: str) -> None:  # K72
    """Cosine similarity and a global relative error see nothing wrong in these."""
    (mutant,) = (m for m in MUTANTS if m.name == name)
    report = verdict(mutant)
    assert not report.right
    if "cosine" in gates:
        assert report.cosine > COSINE_GATE
    if "relative" in gates:
        assert report.relative_error < RELATIVE_GATE


def test_parity_alone_may_ask_for_rightness_only() -> None:
    (mutant,) = (m for m in MUTANTS if m.name == "term not rounded")
    report = verdict(mutant)
    report.raise_if_wrong(recipe=False)
    assert "right: yes" in str(report)
    assert "NO" in str(report)
    assert replace(report, message="x").message == "x"
