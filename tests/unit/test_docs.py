"""What the pages say is there: links, commands, settings and blocks. `make bench NAME=docs` runs the commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.docs import DIRECTIVES, LANGUAGES, ROOT, Block, blocks_of, commands_of, pages
from benchmarks.gallery import LARGEST_BYTES, Terminal
from orchestrator.cli.commands import app as orchestrator
from orchestrator.config.load import resolve
from orchestrator.config.schema import FIELDS, SECTIONS
from workers.__main__ import app as worker

PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]
PROSE = {page: re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL) for page, text in PAGES.items()}
FILES = "secret address password sock log conf bin py toml lua json jsonl safetensors state example"
"""Ends of names of files and hosts, and of keys of the status, that begin as a section of the settings does."""


def where(block: Block) -> str:
    return f"{block.page}:{block.line}"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def test_links_and_anchors_lead_somewhere():
    lost: list[str] = []
    for page, text in PROSE.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            to = (ROOT / page).parent / path if path else ROOT / page
            headings = (
                re.findall(r"^#+ (.*)$", to.read_text(), re.MULTILINE) if to.suffix == ".md" and to.exists() else []
            )
            if not to.exists() or (anchor and anchor not in map(slug, headings)):
                lost.append(f"{page}: {target}")
    assert lost == []


def test_blocks_say_what_they_are_and_how_they_are_tried():
    wrong = [
        f"{where(block)}: {why}"
        for block in BLOCKS
        for why, holds in {
            f"its language is none of {LANGUAGES}": block.language not in LANGUAGES,
            "it shows commands without a prompt, and does not say sh": block.language == "text"
            and re.search(r"^(make|streamrl-\w+|\.venv/|docker|curl|pip) ", block.text, re.MULTILINE),
            f"a directive is none of {DIRECTIVES}": any(kind not in DIRECTIVES for kind, _ in block.directives),
            "it says skip without a reason": "" in block.all("skip"),
        }.items()
        if holds
    ]
    assert wrong == []
    for block in BLOCKS:
        block.tried({})  # or ValueError: what it swaps is not there any more
    comments = sum(text.count("<!-- docs:") for text in PAGES.values())
    assert comments == sum(len(block.directives) for block in BLOCKS), "a directive stands before no block"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=where)
def test_configurations_are_read(block: Block, tmp_path: Path):
    (tmp_path / "example.toml").write_text(block.text)
    resolve("tiny", [tmp_path / "example.toml"], [], {})


def test_targets_benchmarks_commands_and_settings_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    benchmarks = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    commands = {"orchestrator": names(orchestrator), "worker": names(worker)}
    known = {*FIELDS, *SECTIONS}
    sections = "|".join(sorted(SECTIONS, key=len, reverse=True))  # the longest name that fits is the one meant
    typed = {page: " ; ".join(re.findall(r"`([^`]+)`", text)) for page, text in PROSE.items()}
    typed["CHANGELOG.md"] = ""  # it names what there was
    for block in BLOCKS:
        typed[block.page] += " ; " + block.text if block.language == "sh" else ""
    lost: list[str] = []
    for page, text in typed.items():
        lost += [f"{page}: make {name}" for name in re.findall(r"\bmake ([a-z][\w-]*)", text) if name not in targets]
        lost += [f"{page}: NAME={name}" for name in re.findall(r"bench NAME=(\w+)", text) if name not in benchmarks]
        lost += [
            f"{page}: streamrl-{program} {command}"
            for program, command in re.findall(r"\bstreamrl-(orchestrator|worker) ([a-z][\w-]*)", text)
            if command not in commands[program]
        ]
        lost += [
            f"{page}: {section}.{name}"
            for section, name in re.findall(rf"(?<![\w./-])({sections})\.([a-z]\w*)\b(?![(/])", text)
            if f"{section}.{name}" not in known and name not in FILES.split()
        ]
    assert lost == []


def names(app) -> set[str]:
    groups = {group.name for group in app.registered_groups}
    return groups | {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}


REFERENCES = {
    "broker", "figures", "glossary", "learning", "life-of-a-sample", "metrics", "models", "models-and-machines",
    "security", "settings", "waits",
}  # fmt: skip
"""Pages that are looked things up in. Every other page of docs is about a feature, and tries it."""


def test_every_page_is_reached_from_the_readme_and_every_feature_has_a_command_that_is_run():
    reached = set(re.findall(r"\]\(docs/([\w-]+)\.md", PAGES["README.md"]))
    there = {Path(page).stem for page in PAGES if page.startswith("docs/")}
    assert reached == there
    tried = {Path(block.page).stem for block in BLOCKS if block.language == "sh" and not block.all("skip")}
    assert there - REFERENCES - {"sglang", "vllm"} <= tried  # of those two servers, every block needs one


def test_a_command_may_go_on_over_lines():
    script = "cd a # here\n\nfor n in 1 2; do\n  echo $n \\\n    too\ndone\ncat <<X\nmake\nX\necho 'one\ntwo'\n"
    assert [command.splitlines()[0] for _, command in commands_of(script)] == [
        "cd a # here",
        "for n in 1 2; do",
        "cat <<X",
        "echo 'one",
    ]
    scripts = [block.text for block in BLOCKS if block.language == "sh"]
    checked = subprocess.run(["bash", "-n"], input="\n".join(scripts), capture_output=True, text=True, check=False)
    assert not checked.stderr


def test_comments_before_a_block_are_its_directives_and_swap_what_is_there():
    text = "text\n<!-- docs: swap: a => b -->\n<!-- docs: terminals -->\n```sh\nmake a\n```\n"
    text += "<!-- docs: skip: far from it -->\n\n```text\n```\n"
    first, second = blocks_of("page.md", text)
    assert first.directives == (("swap", "a => b"), ("terminals", ""))
    assert (first.line, first.tried({"b": "c"}), second.directives) == (5, "mbke b\n", ())
    with pytest.raises(ValueError, match=r"page\.md:5: nothing to swap for 'no => b'"):
        Block(page="page.md", line=5, language="sh", text="x", directives=(("swap", "no => b"),)).tried({})


def test_a_terminal_is_drawn_as_it_stands_after_a_live_table():
    terminal = Terminal()
    terminal.write(
        "one\r\n\x1b[31mred\x1b[0m too\r\nlive 1\r\nlive 2\r\n\x1b[1A\x1b[2K\x1b[1A\x1b[2K\x1b[1mlive\x1b[0m 3\r\n"
    )
    shown = terminal.shown()
    assert shown.plain == "one\nred too\nlive 3"
    assert {shown.plain[span.start] for span in shown.spans} == set("redliv")


def test_pictures_are_small():
    pictures = list((ROOT / "docs" / "gallery").iterdir())
    assert pictures
    assert not [path.name for path in pictures if path.suffix != ".webp" or path.stat().st_size > LARGEST_BYTES]
