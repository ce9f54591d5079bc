"""The documents say what is there: packages, commands, options."""

import re
from pathlib import Path

from architecture.source_tree import PACKAGES, ROOT

from pagecast.cli import bench, options
from pagecast.cli.main import COMMANDS

README = (ROOT / "README.md").read_text()


def test_architecture_lists_every_package_and_no_other() -> None:
    listed = re.findall(r"^- `([\w/]+)` — ", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    there = {str(path.parent.relative_to(ROOT)) for folder in PACKAGES.values() for path in folder.rglob("__init__.py")}
    assert sorted(listed) == sorted(there)


def test_kernels_lists_every_module_and_no_other() -> None:
    named = re.findall(r"`(\w+\.py)`", (ROOT / "kernels/README.md").read_text())
    scripts = {path.name for path in (ROOT / "kernels").glob("*.py")}
    assert set(named) - scripts == {path.name for path in PACKAGES["pagecast_kernels"].glob("*.py")} - {"__init__.py"}


def test_files_named_in_the_reading_order_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## Reading order")[1].split("##")[0]
    folder = ROOT
    for name in re.findall(r"`([\w/]+\.py)`", text):
        path = ROOT / name if "/" in name else folder / name
        assert path.is_file(), name
        folder = path.parent


def test_readme_has_the_table_of_options() -> None:
    assert options.markdown() in README


def test_readme_names_commands_that_exist() -> None:
    used = re.findall(r"^pagecast ([\w-]+)", README, re.M)
    assert used and set(used) <= set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", README + (ROOT / "CONTRIBUTING.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for name in re.findall(r"pagecast bench (\w+)", makefile):
        assert name in bench.names(), name


def test_readme_python_compiles_and_its_names_are_public() -> None:
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        compile(block, "README.md", "exec")
        for line in re.findall(r"^from pagecast.*", block, re.M):
            exec(line, {})


def test_readme_leads_to_every_document() -> None:
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"](docs/{path.name})" not in README] == []


def test_links_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
            assert (Path(path.parent) / target).exists(), target
