"""Arguments that the client commands share: where the server is, how to get in, and how to sample."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from pagecast import channel
from pagecast.access import tls_from
from pagecast.cli.quantities import ANY_COUNT, COUNT, SECONDS, TOKEN_ID, Number, Whole
from pagecast.errors import DeadlineExceeded, RpcError, Unavailable, WrongAccess
from pagecast.requests import RequestOptions
from pagecast.sampling import SamplingParams
from pagecast.sync import Client

TOKEN_VARIABLE = "PAGECAST_TOKEN"
REACH_S = 20.0
"""How long a server may take to say whether it is there."""


def add_target(parser: argparse.ArgumentParser, timeout: float | None = None) -> None:
    """timeout: seconds, unless another is given; None waits for ever."""
    add_server(parser)
    default = "never" if timeout is None else f"{timeout:g}"
    parser.add_argument("--timeout", type=SECONDS, default=timeout, metavar="SECONDS", help=f"give up after so long (default: {default})")


def add_server(parser: argparse.ArgumentParser, target: str | None = channel.DEFAULT_TARGET, said: str = "server to ask") -> None:
    """Where the server is and how to get in, for a command that waits as long as it takes. target: its default; said: its help."""
    parser.add_argument("--target", default=target, metavar="HOST:PORT", help=said)
    parser.add_argument("--tls", action="store_true", help="encrypt, and trust the system's authorities")
    parser.add_argument("--ca", metavar="FILE", help="PEM file of the authority to trust instead; means --tls")
    parser.add_argument("--cert", metavar="FILE", help="PEM file of a client certificate to show; means --tls")
    parser.add_argument("--key", metavar="FILE", help="PEM file of the client certificate's key")
    parser.add_argument("--server-name", metavar="NAME", help="name to expect in the server's certificate")
    parser.add_argument("--token-file", metavar="FILE", help=f"file with a bearer token (default: the variable {TOKEN_VARIABLE})")


def access(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of a client. Raises WrongAccess."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if args.token_file is not None:
        try:
            token = Path(args.token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise WrongAccess(f"cannot read the token file {args.token_file}: {getattr(error, 'strerror', 'not text')}") from None
    return {"tls": tls_from(args.tls, args.ca, args.cert, args.key, args.server_name), "token": token}


def connect(args: argparse.Namespace) -> Client:
    """A client of the server that the arguments name. Raises WrongAccess."""
    return Client(args.target, **access(args))


def reach(client: Client, timeout: float | None) -> None:
    """Before a call that goes on through the loss of its server, and would wait for one that was never there. Raises Unavailable or
    DeadlineExceeded where none answers."""
    try:
        client.health(timeout=REACH_S if timeout is None else min(timeout, REACH_S))
    except RpcError as error:
        if isinstance(error, Unavailable | DeadlineExceeded) and not error.reason:
            raise


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """What is not given is left to the server."""
    parser.add_argument("--n", type=COUNT, metavar="N", help="answers to give; they share the prompt")
    parser.add_argument("--max-tokens", type=COUNT, metavar="N", help="output tokens at most (default: what fits the model's length)")
    parser.add_argument("--min-tokens", type=ANY_COUNT, metavar="N", help="no end before so many output tokens")
    parser.add_argument("--temperature", type=Number(least=0), metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=Whole(-1), metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    parser.add_argument("--top-p", type=Number(above=0, most=1), metavar="P", help="keep the likeliest tokens that make up this share")
    parser.add_argument("--min-p", type=Number(least=0, most=1), metavar="P", help="keep tokens so likely beside the likeliest")
    parser.add_argument("--presence-penalty", type=Number(), metavar="X", help="against tokens that the answer holds, -2 to 2")
    parser.add_argument("--frequency-penalty", type=Number(), metavar="X", help="the same for each time that it holds them, -2 to 2")
    parser.add_argument("--repetition-penalty", type=Number(above=0), metavar="X", help="against tokens of prompt and answer; 1 is off")
    parser.add_argument("--seed", type=Whole(0, 2**64 - 1), metavar="N", help="same seed, same answer")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    parser.add_argument("--stop-token-id", type=TOKEN_ID, action="append", metavar="ID", help="end with this token; again for more")
    parser.add_argument("--include-stop", action="store_true", default=None, help="show the stop text that ended an answer")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end token")
    parser.add_argument("--time-budget", type=SECONDS, metavar="SECONDS", help="end well, with what there is, after so long")
    _add_token_rules(parser)
    _add_output(parser)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json-schema", type=_text, metavar="JSON", help="the answer fits this JSON Schema; @FILE reads it")
    kinds.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    kinds.add_argument("--regex", metavar="REGEX", help="the answer matches this regular expression")
    kinds.add_argument("--choice", action="append", metavar="TEXT", help="the answer is one of these texts; give it several times")
    kinds.add_argument("--grammar", type=_text, metavar="LARK", help="the answer is of this Lark grammar; @FILE reads it")


def _add_token_rules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logit-bias", type=_bias, action="append", metavar="ID=X", help="add X to this token's logit; again for more")
    parser.add_argument("--allowed-token-id", type=TOKEN_ID, action="append", metavar="ID", help="choose of these tokens alone")
    parser.add_argument("--bad-word", action="append", metavar="TEXT", help="this must not appear; again for more")
    parser.add_argument("--bad-tokens", type=_ids, action="append", metavar="ID,ID", help="nor these tokens in a row; again for more")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logprobs", type=ANY_COUNT, metavar="N", help="show each token's log-probability, and the N likeliest (0 to 20)")
    parser.add_argument("--prompt-logprobs", type=ANY_COUNT, metavar="N", help="the same for the tokens of the prompt")
    parser.add_argument("--special-tokens", action="store_true", help="show special tokens in the text")
    parser.add_argument(
        "--parse-reasoning", action=argparse.BooleanOptionalAction, default=None,
        help="tell a model's reasoning from its answer, which alone a constraint is about (default: in a chat)",
    )  # fmt: skip
    parser.add_argument(
        "--template-arg", type=_pair, action="append", metavar="NAME=JSON", help="in a chat, a value for the template; again for more"
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return TOKEN_ID(token), Number()(value)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be a token id, = and a number, not {text!r}") from None


def _ids(text: str) -> list[int]:
    try:
        return [TOKEN_ID(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be token ids with commas between, not {text!r}") from None


def _pair(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        raise argparse.ArgumentTypeError(f"must be a name, = and JSON (a text in quotes), not {text!r}") from None


def _text(value: str) -> str:
    """An argument's text, or that of the file it names after an @."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {value[1:]}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from None


def sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed, max_tokens=args.max_tokens,
        stop=args.stop, presence_penalty=args.presence_penalty, frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty, ignore_eos=args.ignore_eos, json_schema=args.json_schema,
        json_object=args.json_object, regex=args.regex, choices=args.choice, grammar=args.grammar, n=args.n, min_tokens=args.min_tokens,
        stop_token_ids=args.stop_token_id, include_stop_str_in_output=args.include_stop, logit_bias=dict(args.logit_bias or ()) or None,
        allowed_token_ids=args.allowed_token_id, bad_words=args.bad_word, bad_token_sequences=args.bad_tokens, logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs, parse_reasoning=args.parse_reasoning,
        skip_special_tokens=False if args.special_tokens else None,
    )


def request_options(args: argparse.Namespace) -> RequestOptions:
    """What is said about a request besides its sampling."""
    options: RequestOptions = {}
    if args.timeout is not None:
        options["timeout"] = args.timeout
    if args.time_budget is not None:
        options["time_budget"] = args.time_budget
    if args.template_arg:
        options["template_kwargs"] = dict(args.template_arg)
    return options
