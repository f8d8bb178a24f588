"""Secrets of the environment, the user's own, and the keys that are made of them."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.config.load import render, resolve
from orchestrator.errors import ConfigError
from transport.errors import SecretError
from transport.process.secret import (
    BROKER_PASSWORD,
    MIN_CHARACTERS,
    SHARED_SECRET,
    Purpose,
    derive,
    own_secret,
    read_secret,
)

HUSH = "hush, nobody hears us"


def test_a_file_holds_the_secret_as_well_as_a_variable(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text(f"{HUSH}\n")
    from_file = {f"{SHARED_SECRET}_FILE": str(file)}
    assert read_secret({}, SHARED_SECRET) == ""
    assert read_secret({SHARED_SECRET: HUSH}, SHARED_SECRET) == HUSH
    assert read_secret(from_file, SHARED_SECRET) == HUSH
    assert read_secret({**from_file, SHARED_SECRET: HUSH}, SHARED_SECRET) == HUSH
    resolved = resolve(None, [], ["api.host=0.0.0.0"], from_file)
    assert resolved.settings.api.secret == HUSH
    assert HUSH not in render(resolved)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), ("", "is empty"), ("\n", "is empty"), ("other", "differ")]
)
def test_what_is_wrong_with_a_secrets_file_is_said(tmp_path: Path, content: str | None, reason: str):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SecretError, match=reason) as caught:
        read_secret({f"{SHARED_SECRET}_FILE": str(file), SHARED_SECRET: HUSH}, SHARED_SECRET)
    assert HUSH not in str(caught.value)
    assert "other" not in str(caught.value)


def test_a_short_secret_is_refused_wherever_it_was_set(tmp_path: Path):
    short, enough = (MIN_CHARACTERS - 1) * "s", MIN_CHARACTERS * "s"
    file = tmp_path / "secret"
    file.write_text(f" {short}\n")
    for environ in ({SHARED_SECRET: short}, {f"{SHARED_SECRET}_FILE": str(file)}):
        with pytest.raises(SecretError, match=r"STREAMRL_SECRET has 15 characters.*token_urlsafe") as caught:
            read_secret(environ, SHARED_SECRET)
        assert short not in str(caught.value)
    with pytest.raises(ConfigError, match=r"api\.secret must be 16 characters or more.*token_urlsafe") as refused:
        resolve(None, [], [f"api.secret={short}"], {})
    assert short not in str(refused.value)
    assert resolve(None, [], [f"api.secret={enough}"], {}).settings.api.secret == enough
    assert read_secret({BROKER_PASSWORD: "x"}, BROKER_PASSWORD) == "x", "a foreign broker's is not ours to judge"


def test_each_purpose_has_a_key_of_its_own_that_openssl_can_make_too():
    keys = {purpose: derive(HUSH, purpose) for purpose in Purpose}
    assert len(set(keys.values())) == len(Purpose)
    assert keys[Purpose.HTTP] == derive(HUSH.encode(), Purpose.HTTP) != derive(HUSH + ".", Purpose.HTTP)
    assert keys[Purpose.HTTP] == "gB7udWxnK-T2P-nyHyU_LxpVQB1BzlSp3Wa3i_lzLE0", "what openssl makes, see derive"


# --- the user's own ---------------------------------------------------------------------------------------------------


def test_a_users_own_secret_is_made_once_for_its_owner_alone(tmp_path: Path):
    directories = [tmp_path / "state" / "streamrl"]
    with ThreadPoolExecutor(8) as threads:
        made = set(threads.map(lambda _: own_secret(directories), range(8)))
    assert len(made) == 1, "several processes that need one at once have the same"
    assert len(made.pop()) >= 32
    (file,) = directories[0].iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_secret_that_others_may_have_read_or_written_is_not_used(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text(HUSH)
    file.chmod(0o644)
    with pytest.raises(SecretError, match=r"this user alone.*STREAMRL_SECRET"):
        own_secret([tmp_path])
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(SecretError, match="secret is not a plain file"):
        own_secret([tmp_path])
    file.unlink()
    (tmp_path / "elsewhere").write_text(HUSH)
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SecretError, match="set STREAMRL_SECRET instead"):
        own_secret([tmp_path])


def test_no_secret_is_put_where_another_may_take_it_away(tmp_path: Path):
    """Anyone may have made the directory in /dev/shm."""
    foreign, mine = tmp_path / "foreign", tmp_path / "mine"
    if os.geteuid() == 0:
        foreign.mkdir()
        os.chown(foreign, 12345, 12345)
    else:
        foreign.symlink_to("/tmp")
    with pytest.raises(SecretError, match=r"foreign (belongs to user 12345|is no directory)"):
        own_secret([foreign])
    assert not (foreign / "secret").exists()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SecretError, match="link is no directory"):
        own_secret([tmp_path / "link"])
    assert not (tmp_path / "secret").exists()
    mine.mkdir(mode=0o755)
    own_secret([foreign, mine])
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700


def test_a_home_that_cannot_be_written_to_leaves_the_next_place(tmp_path: Path):
    (tmp_path / "file").touch()
    there = own_secret([tmp_path / "file" / "streamrl", tmp_path / "shm"])
    assert there == own_secret([tmp_path / "shm"])
    with pytest.raises(SecretError, match=r"Not a directory.*set STREAMRL_SECRET instead"):
        own_secret([tmp_path / "file" / "streamrl"])
