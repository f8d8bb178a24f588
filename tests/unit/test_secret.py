"""Secrets of the environment: from a variable, or from the file that a container engine puts there."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config import render, resolve
from transport.errors import SecretError
from transport.secret import SHARED_SECRET, read_secret


def test_a_file_holds_the_secret_as_well_as_a_variable(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("hush\n")
    from_file = {f"{SHARED_SECRET}_FILE": str(file)}
    assert read_secret({}, SHARED_SECRET) == ""
    assert read_secret({SHARED_SECRET: "hush"}, SHARED_SECRET) == "hush"
    assert read_secret(from_file, SHARED_SECRET) == "hush"
    assert read_secret({**from_file, SHARED_SECRET: "hush"}, SHARED_SECRET) == "hush"
    resolved = resolve(None, [], ["api.host=0.0.0.0"], from_file)
    assert resolved.settings.api.secret == "hush"
    assert "hush" not in render(resolved)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), ("", "is empty"), ("\n", "is empty"), ("other", "differ")]
)
def test_what_is_wrong_with_a_secrets_file_is_said(tmp_path: Path, content: str | None, reason: str):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SecretError, match=reason) as caught:
        read_secret({f"{SHARED_SECRET}_FILE": str(file), SHARED_SECRET: "hush"}, SHARED_SECRET)
    assert "hush" not in str(caught.value)
    assert "other" not in str(caught.value)
