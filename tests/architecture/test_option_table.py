"""The table of options and the roles' configuration classes say the same."""

from dataclasses import MISSING, fields
from typing import Any

import pytest

from pagecast.cli import options, roles


def test_the_gateways_options_are_its_configuration() -> None:
    kind = type(roles.configuration(options.GATEWAY, {"target": "localhost:1"}))
    expected = {field.name: field.default for field in fields(kind) if field.name != "target"}
    assert {option.name: option.default for option in options.of(options.GATEWAY) if option.name != "target"} == expected


@pytest.mark.parametrize("role", options.ROLES)
def test_the_table_holds_every_field_of_a_role_with_its_default(role: str) -> None:
    kind = type(roles.configuration(role, {"run_dir": "/run/x", "model": "m"} if role != options.SCHEDULER else {"run_dir": "/run/x"}))
    expected: dict[str, Any] = {field.name: None if field.default is MISSING else field.default for field in fields(kind)}
    table = {option.name: option.default for option in options.of(role)}
    # The command line gives a model where a configuration has to be told one.
    expected.pop("model", None), table.pop("model", None)
    assert table == expected


def test_one_name_is_one_option() -> None:
    names = [option.name for option in options.OPTIONS]
    assert len(names) == len(set(names))
    assert [option.name for option in options.OPTIONS if not option.help or not option.takers] == []


def test_every_option_of_a_role_but_its_place_can_be_given_to_serve() -> None:
    kept = {option.name for role in options.ROLES for option in options.of(role)} - {option.name for option in options.of(options.SERVE)}
    assert kept == {"run_dir", "model", "rank", "index", "reuse_port", "gateway_socket"}
