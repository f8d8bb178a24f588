"""Copies of a checkout, for what must not change the checkout itself or be changed with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


class CheckoutError(Exception):
    """A directory is no checkout of StreamRL that can be copied; the message says why."""


def copy_files(tree: Path, target: Path) -> None:
    """Copy the files of a checkout as they are now: those that git knows or would add. Raises CheckoutError."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, cwd=tree, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError) as error:
        raise CheckoutError(f"{tree} is no git checkout, or git is not installed: {error}") from error
    for name in filter(None, dict.fromkeys(names)):
        if (source := tree / name).is_file():  # not one that was deleted and is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def environment_of(tree: Path) -> Path:
    """Virtual environment of a checkout; this one's where it has none. Raises CheckoutError: neither has one."""
    found = [venv for venv in (tree / ".venv", Path(sys.prefix)) if (venv / "pyvenv.cfg").is_file()]
    if not found:
        raise CheckoutError(f"there is no environment in {tree}/.venv: run `make setup` there")
    return found[0]


def make_environment(venv: Path, root: Path) -> Path:
    """Make ``root``/.venv: the product from ``root``, libraries and programs from ``venv``. Returns its interpreter."""
    made = root / ".venv"
    (site,) = venv.glob("lib/python3*/site-packages")
    own_site = made / site.relative_to(venv)
    own_site.mkdir(parents=True)
    shutil.copy2(venv / "pyvenv.cfg", made / "pyvenv.cfg")
    # Names in order: the product comes before the libraries, and those before what their own .pth files import.
    (own_site / "00_checkout.pth").write_text(f"{root}\n{site}\n")
    for path in site.glob("*.pth"):
        if not path.name.startswith("__editable__"):  # it would find the product in the checkout
            shutil.copy2(path, own_site / path.name)
    (made / "bin").mkdir()
    for path in (venv / "bin").iterdir():
        target = made / "bin" / path.name
        if path.is_symlink():
            target.symlink_to(os.readlink(path))
        elif path.stat().st_size < 10_000 and (text := path.read_bytes()).startswith(f"#!{venv}/".encode()):
            target.write_bytes(text.replace(f"#!{venv}/".encode(), f"#!{made}/".encode(), 1))
            target.chmod(0o755)
        else:
            target.symlink_to(path)
    for mark in (".ready-run", ".ready-dev"):
        (made / mark).touch()
    return made / "bin" / "python"
