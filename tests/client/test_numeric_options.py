"""Every option of every command that is a number refuses nonsense by its name, before anything is started."""

import argparse
from collections.abc import Iterator
from importlib import import_module

import pytest

from pagecast import cluster, llm
from pagecast.cli import bench, options, quantities, roles
from pagecast.cli.main import COMMANDS
from pagecast.cli.parser import Parser
from pagecast.errors import StartError

NUMBERS = ("0", "-1", "1", "nan", "inf", "-inf", "1e300", "9" * 30, "0.5")
READS_NO_NUMBER = {"_text", "_pair", "str", "Names", "assignment"}
LISTS = {"_bias": "7={}", "_ids": "{},7", "numbers": "{},7", "repetitions_of": "decode={}"}


def parsers() -> Iterator[tuple[str, Parser]]:
    for command in COMMANDS:
        parser = Parser(f"pagecast {command}")
        if command in (*options.ROLES, options.GATEWAY):
            roles.add_arguments(parser, command)
        else:
            import_module(f"pagecast.cli.{command.replace('-', '_')}").add_arguments(parser)
        yield command, parser
    for name in bench.names():
        parser = Parser(f"pagecast bench {name}")
        import_module(f"pagecast.cli.bench_{name}").add_arguments(parser)
        yield f"bench {name}", parser


def numbers(parser: Parser) -> Iterator[tuple[argparse.Action, str]]:
    """Options that take numbers, and how one is written. Fails for a type that this test does not know."""
    for action in parser._actions:
        if isinstance(action.type, quantities.Whole | quantities.Number):
            yield action, "{}"
        elif (kind := getattr(action.type, "__name__", type(action.type).__name__ if action.type else "str")) in LISTS:
            yield action, LISTS[kind]
        else:
            assert kind in READS_NO_NUMBER, f"{parser.prog} {action.option_strings}: numbers are of pagecast.cli.quantities, not {kind}"
            default = action.default[0] if isinstance(action.default, list) and action.default else action.default
            assert isinstance(default, bool) or not isinstance(default, int | float), f"{parser.prog} {action.option_strings}"


def needed(parser: Parser) -> list[str]:
    """Words for what must be given."""
    words: list[str] = []
    for action in parser._actions:
        if action.required and action.option_strings:
            words += [action.option_strings[0], str(next(iter(action.choices))) if action.choices else "x"]
        elif not action.option_strings and action.nargs in (None, "+"):
            words.append(str(next(iter(action.choices))) if action.choices else "x")
    return words


CASES = [(command, parser, action, form) for command, parser in parsers() for action, form in numbers(parser)]


def test_there_are_such_options() -> None:
    assert len(CASES) > 150
    assert {command for command, *_ in CASES} >= {"serve", "worker", "scheduler", "frontend", "gateway", "generate", "bench kernels"}


@pytest.mark.parametrize(("command", "parser", "action", "form"), CASES, ids=[f"{case[0]}{case[2].option_strings[0]}" for case in CASES])
def test_nonsense_is_refused_by_name(
    command: str, parser: Parser, action: argparse.Action, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = action.option_strings[0]
    for number in NUMBERS:
        try:
            args = parser.parse_args([*needed(parser), f"{flag}={form.format(number)}"])
            refused = configured(command, args)
        except SystemExit as end:
            assert end.code == 2
            refused = capsys.readouterr().err
            assert len(refused.splitlines()) == 1
        assert not refused or flag in refused, refused
        if number in ("nan", "inf", "-inf", "1e300", "9" * 30):
            assert refused, number


def configured(command: str, args: argparse.Namespace) -> str:
    """What the roles' configurations say to the values that a cluster is started with; "" if nothing."""
    if command in (options.SERVE, "batch", "perplexity"):
        given = {option.name: getattr(args, option.name) for option in options.of(options.SERVE) if hasattr(args, option.name)}
        values = cluster.settings(executor="oracle") | given | {"model": "oracle", "executor": "oracle"}
        try:
            cluster.check(values)
        except StartError as error:
            assert error.exit_code == 2
            return options.flagged(str(error))
    elif command in (*options.ROLES, options.GATEWAY):
        try:
            roles.configuration(command, options.values(args, command))
        except ValueError as error:
            return options.flagged(str(error))
    return ""


@pytest.mark.parametrize("option", [o for o in options.of(options.SERVE) if o.kind is float], ids=lambda o: o.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_a_program_that_embeds_a_cluster_meets_the_ranges_too(option: options.Option, value: float) -> None:
    chosen = cluster.settings(executor="oracle") | {option.name: value}
    with pytest.raises(StartError, match=option.name):
        cluster.check(chosen)


@pytest.mark.parametrize(("option", "value", "said"), [
    ("max_num_seqs", "16", "max_num_seqs must be a whole number, not '16'"), ("enforce_eager", 1, "enforce_eager must be True or False"),
    ("max_num_seqs", True, "max_num_seqs must be a whole number"), ("cpu_kv_gib", "1", "cpu_kv_gib must be a number"),
    ("device", 0, "device must be a text"),
])
def test_a_program_that_gives_another_kind_of_value_is_told_which(option: str, value: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        cluster.settings(executor="oracle", **{option: value})


def test_a_configurations_words_name_flags() -> None:
    said = "max_num_batched_tokens must be at least max_num_seqs (256), not 3"
    assert options.flagged(said) == "--max-num-batched-tokens must be at least --max-num-seqs (256), not 3"
    assert options.flagged("port must be 0 to 65535") == "--port must be 0 to 65535"
    said = "cannot listen on host /srv/run_dir: the port is in use"
    assert options.flagged(said) == said


def test_what_a_programs_own_cluster_is_given_is_in_range() -> None:
    cluster.check(cluster.settings(executor="oracle", **llm._PRIVATE))
