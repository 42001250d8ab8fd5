"""The environment: every accepted value, every refused one, and that nothing is remembered."""

import dataclasses
from pathlib import Path

import pytest

from megamoe import settings
from megamoe.settings import Settings


def test_empty_environment_is_the_defaults() -> None:
    assert settings.read({}) == Settings()
    assert Settings() == Settings(
        force_reference="off", parity_every=0, dump_dir=None, kernel=None, tuning="workspaces",
        cache_dir=None,
    )  # fmt: skip


def test_empty_values_mean_unset() -> None:
    names = ("FORCE_REFERENCE", "PARITY", "DUMP", "KERNEL", "TUNING", "CACHE_DIR")
    assert settings.read({f"MEGAMOE_{name}": "" for name in names}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MEGAMOE_FORCE_REFERENCE", "0", Settings()),
        ("MEGAMOE_FORCE_REFERENCE", "1", Settings(force_reference="family")),
        ("MEGAMOE_FORCE_REFERENCE", "emulate", Settings(force_reference="emulate")),
        ("MEGAMOE_PARITY", "0", Settings()),
        ("MEGAMOE_PARITY", "1", Settings(parity_every=1)),
        ("MEGAMOE_PARITY", "0250", Settings(parity_every=250)),
        ("MEGAMOE_DUMP", "some/dir", Settings(dump_dir=Path("some/dir"))),
        ("MEGAMOE_KERNEL", "torch_grouped", Settings(kernel="torch_grouped")),
        ("MEGAMOE_TUNING", "on", Settings(tuning="on")),
        ("MEGAMOE_TUNING", "workspaces", Settings()),
        ("MEGAMOE_TUNING", "cached", Settings(tuning="cached")),
        ("MEGAMOE_TUNING", "off", Settings(tuning="off")),
        ("MEGAMOE_CACHE_DIR", "some/dir", Settings(cache_dir=Path("some/dir"))),
        ("XDG_CACHE_HOME", "/caches", Settings(cache_dir=Path("/caches/megamoe"))),
        ("XDG_CACHE_HOME", "relative", Settings()),
        ("HOME", "/home/me", Settings(cache_dir=Path("/home/me/.cache/megamoe"))),
        ("UNRELATED", "1", Settings()),
    ],
)
def test_accepted(variable: str, value: str, expected: Settings) -> None:
    assert settings.read({variable: value}) == expected


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("MEGAMOE_FORCE_REFERENCE", value) for value in ("2", "true", "EMULATE", " 1", "off")),
        *(("MEGAMOE_PARITY", value) for value in ("-1", "1.5", "1_000", "+1", " 1", "all", "٣")),
        *(("MEGAMOE_TUNING", value) for value in ("1", "0", "ON", "skip", " on")),
    ],
)
def test_refused_in_one_line(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{variable}=") as caught:
        settings.read({variable: value})
    message = str(caught.value)
    assert message.startswith(f"{variable}={value!r} is not ")
    assert "\n" not in message
    assert "unset it" in message


def test_the_cache_is_where_it_was_asked_for_first() -> None:
    environ = {"HOME": "/home/me"}
    assert settings.read(environ).cache_dir == Path("/home/me/.cache/megamoe")
    environ["XDG_CACHE_HOME"] = "/caches"
    assert settings.read(environ).cache_dir == Path("/caches/megamoe")
    environ["MEGAMOE_CACHE_DIR"] = "here"
    assert settings.read(environ).cache_dir == Path("here")


def test_reads_the_process_environment_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAMOE_PARITY", "3")
    assert settings.read().parity_every == 3
    monkeypatch.setenv("MEGAMOE_PARITY", "4")
    assert settings.read().parity_every == 4


def test_frozen_and_slotted() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().kernel = "reference"  # type: ignore[misc]
    assert not hasattr(Settings(), "__dict__")
