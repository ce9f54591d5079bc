"""`pagecast admin`: drain a replica, see why requests wait, end them, forget the prefix cache, check the scheduler's laws."""

import argparse
from collections.abc import Callable
from typing import Any

import grpc

from pagecast.cli import arguments
from pagecast.errors import from_rpc
from pagecast.v1 import admin_pb2 as pb
from pagecast.v1 import admin_pb2_grpc

ACTIONS = {
    "drain": "no new requests; running ones go on",
    "undrain": "take requests again",
    "requests": "open requests, and why each waits",
    "cancel": "end requests by id, or all with --all",
    "reset-cache": "forget every cached block",
    "check": "check the scheduler's laws now; exit code 1 if one does not hold",
}
TIMEOUT_S = 30.0
PAGE = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_target(parser, timeout=TIMEOUT_S)
    parser.add_argument("--run-dir", metavar="FOLDER", help="operate the cluster of this run directory, through its operators' socket")
    parser.add_argument("action", choices=ACTIONS, help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("request_id", nargs="*", help="for cancel")
    parser.add_argument("--all", action="store_true", help="for cancel: every open request")


def run(args: argparse.Namespace) -> int:
    """Raises RpcError where the server refuses."""
    if args.run_dir is not None:
        args.target = f"unix:{args.run_dir}/admin-0.sock"
    with arguments.connect(args) as client:
        stub: Any = admin_pb2_grpc.AdminServiceStub(client.grpc_channel)

        def ask(method: str, request: Any) -> Any:
            try:
                return getattr(stub, method)(request, timeout=args.timeout, metadata=client.metadata)
            except grpc.RpcError as error:
                raise from_rpc(error) from None

        return _ACTS[args.action](ask, args)


Ask = Callable[[str, Any], Any]


def _drain(ask: Ask, args: argparse.Namespace) -> int:
    print(f"draining, {ask('Drain', pb.DrainRequest()).num_open} requests open")
    return 0


def _undrain(ask: Ask, args: argparse.Namespace) -> int:
    print(f"serving, {ask('Undrain', pb.UndrainRequest()).num_open} requests open")
    return 0


def _requests(ask: Ask, args: argparse.Namespace) -> int:
    token, total = "", 0
    while True:
        page = ask("ListRequests", pb.ListRequestsRequest(page_size=PAGE, page_token=token))
        for info in page.requests:
            print(_line(info))
        token, total = page.next_page_token, page.total_size
        if not token:
            break
    print(f"{total} open")
    return 0


def _line(info: pb.RequestInfo) -> str:
    from pagecast.v1 import generation_pb2

    phase = generation_pb2.Phase.Name(info.phase).removeprefix("PHASE_").lower()
    age = info.age.seconds + info.age.nanos / 1e9
    why = f": {info.waiting.explanation}" if info.HasField("waiting") else ""
    return f"{info.request_id}  {phase}  {age:.1f} s  {info.computed_tokens}/{info.prompt_tokens} prompt, {info.output_tokens} output{why}"


def _cancel(ask: Ask, args: argparse.Namespace) -> int:
    told = ask("CancelRequests", pb.CancelRequestsRequest(request_ids=args.request_id, all=args.all))
    print(f"{len(told.cancelled_request_ids)} ended, {len(told.finished_request_ids)} had ended, {len(told.unknown_request_ids)} unknown")
    return 1 if told.unknown_request_ids else 0


def _reset_cache(ask: Ask, args: argparse.Namespace) -> int:
    print(f"{ask('ResetPrefixCache', pb.ResetPrefixCacheRequest()).num_blocks} blocks forgotten")
    return 0


def _check(ask: Ask, args: argparse.Namespace) -> int:
    told = ask("CheckInvariants", pb.CheckInvariantsRequest())
    print("all laws hold" if told.ok else f"broken: {told.violation}")
    print(f"{told.num_blocks} blocks: {told.num_clean} clean, {told.num_cached} cached, {told.num_referenced} in use")
    return 0 if told.ok else 1


_ACTS: dict[str, Callable[[Ask, argparse.Namespace], int]] = {
    "drain": _drain, "undrain": _undrain, "requests": _requests, "cancel": _cancel, "reset-cache": _reset_cache, "check": _check,
}
