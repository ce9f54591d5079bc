"""The documents say what is there: packages, commands, options."""

import argparse
import re
import tomllib
from importlib import import_module
from pathlib import Path

from architecture.source_tree import PACKAGES, ROOT

from pagecast.cli import bench, options, roles
from pagecast.cli.main import COMMANDS
from pagecast.cli.parser import Parser

README = (ROOT / "README.md").read_text()
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), ROOT / "docker-compose.yml"]
SAID = [*COMMANDS, *(f"bench {name}" for name in bench.names())]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


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
    folder, names = ROOT, re.findall(r"`([\w/]+\.py)`", text)
    assert len(names) > 5
    for name in names:
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


def parser_of(command: str) -> Parser:
    """What reads the words after `pagecast COMMAND`."""
    parser = Parser(f"pagecast {command}")
    if command in (*options.ROLES, options.GATEWAY):
        roles.add_arguments(parser, command)
    else:
        import_module(f"pagecast.cli.{command.replace('-', '_').replace(' ', '_')}").add_arguments(parser)
    return parser


def test_every_option_has_a_help_that_tells_its_default() -> None:
    for command in SAID:
        parser = parser_of(command)
        for action in parser._actions:
            told = parser._get_formatter()._get_help_string(action)
            assert action.help and told, f"{command} {action.dest}"
            is_value = isinstance(action.default, int | float | str) and action.default not in ("", argparse.SUPPRESS)
            if action.option_strings and is_value and not isinstance(action.default, bool):
                assert "(default" in told, f"{command} {action.dest}"
    assert parser_of("bench latency").parse_args([]).unnamed == "single"
    assert parser_of("bench latency").parse_args(["--workload", "chat"]).workload == ["chat"]


def test_documents_give_commands_the_flags_that_they_have() -> None:
    known = {command: {flag for action in parser_of(command)._actions for flag in action.option_strings} for command in SAID}
    wrong, found = [], 0
    for path in DOCUMENTS:
        for command, rest in re.findall(r"\bpagecast (bench [a-z_]+|[a-z-]+)((?:\\\n|[^\n`#])*)", path.read_text()):
            found += command in known
            wrong += [f"{path.name}: {command} {flag}" for flag in FLAG.findall(rest) if flag not in known.get(command, set())]
    assert found > 60 and wrong == []


def test_documents_install_extras_that_there_are_and_keep_a_clone_editable() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = [(line, extra) for path in DOCUMENTS for line, extra in re.findall(r"(pip install [^\n`]*\[([a-z]+)\])", path.read_text())]
    assert told and [line for line, extra in told if extra not in extras or " -e " not in line] == []


def test_readme_python_compiles_and_its_names_are_public() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) > 3
    for block in blocks:
        compile(block, "README.md", "exec")
        for line in re.findall(r"^from pagecast.*", block, re.M):
            exec(line, {})


def test_the_family_that_is_shown_is_the_one_that_is_there() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding-a-model.md").read_text(), re.S)
    assert shown[0] == (PACKAGES["pagecast_worker"] / "models/qwen3.py").read_text()


def test_readme_leads_to_every_document() -> None:
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"](docs/{path.name})" not in README] == []


def headings(path: Path) -> set[str]:
    """What links to parts of a document are made of."""
    return {re.sub(r"[^\w -]", "", found.lower()).replace(" ", "-") for found in re.findall(r"^#+ (.*)$", path.read_text(), re.M)}


def test_links_lead_somewhere() -> None:
    found = 0
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]:
        for target, heading in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
            meant = path.parent / target if target else path
            assert meant.exists(), target
            assert not heading or heading in headings(meant), f"{path.name}: {target}#{heading}"
            found += 1
    assert found > 20


def test_kept_results_name_no_folder_of_one_machine() -> None:
    tables = (ROOT / "kernels/pagecast_kernels/tables").glob("*.json")
    files = [ROOT / "benchmarks/targets.toml", *(ROOT / "benchmarks").rglob("*.json"), *tables]
    commands = [(path.name, found) for path in files for found in re.findall(r'command"? ?[:=] "(pagecast [^"]*)"', path.read_text())]
    assert len(commands) > 20 and [told for told in commands if re.search(r"[ =]/", told[1])] == []
