"""What an inference server finds of ours: the loader's packages, and nothing that would take the place of its own."""

from __future__ import annotations

from pathlib import Path

from workers.generation.server.upkeep import PACKAGES, link_packages


def test_the_server_finds_our_packages_alone_also_after_a_restart(tmp_path: Path):
    for _ in range(2):
        directory = link_packages(tmp_path / "logs" / "server-packages")
    assert sorted(path.name for path in directory.iterdir()) == ["transport", "workers"]
    assert (directory / "workers" / "generation" / "server" / "loader.py").samefile(
        PACKAGES / "workers" / "generation" / "server" / "loader.py"
    )
