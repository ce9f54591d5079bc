"""Who may do what: from a token or a client certificate to a principal, and from a method to the role it needs.

One instance stands before every method of a listener. It knows nothing of gRPC, so that every door of the front end can ask it.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog

from pagecast_scheduler.frontend import auth_file
from pagecast_scheduler.frontend.errors import Reason, Refusal
from pagecast_scheduler.frontend.principals import ANONYMOUS, Principal, Role, of_certificate
from pagecast_scheduler.frontend.reloading import Reloading
from pagecast_wire.intake import Priority

log = structlog.get_logger("pagecast.frontend")

ROLES: dict[str, frozenset[Role]] = {
    "pagecast.v1.GenerationService": frozenset({Role.INFER}),
    "pagecast.v1.TokenizerService": frozenset({Role.INFER}),
    "pagecast.v1.ModelService": frozenset({Role.INFER, Role.OBSERVE}),
    "pagecast.v1.RuntimeService": frozenset({Role.OBSERVE}),
    "pagecast.v1.AdminService": frozenset({Role.ADMIN}),
    "xds.service.orca.v3.OpenRcaService": frozenset({Role.OBSERVE}),
    "vllm.grpc.engine.VllmEngine": frozenset({Role.INFER}),
    "inference.GRPCInferenceService": frozenset(Role),
    "grpc.channelz.v1.Channelz": frozenset({Role.ADMIN}),
    "grpc.health.v1.Health": frozenset(Role),
    "grpc.reflection.v1.ServerReflection": frozenset(Role),
    "grpc.reflection.v1alpha.ServerReflection": frozenset(Role),
}
"""Service to the roles of which one is enough. A service without a row needs ADMIN: what nobody thought of is closed."""


def roles_for(method: str) -> frozenset[Role]:
    """The roles of which one opens a method, named "/package.Service/Method"."""
    return ROLES.get(method.strip("/").partition("/")[0], frozenset({Role.ADMIN}))


class Authorizer:
    """table: the principals' file, or None. has_client_ca: certificates are checked by TLS before a call is heard of.

    With neither, every caller is ANONYMOUS.
    """

    def __init__(self, table: Reloading[auth_file.AuthTable] | None, has_client_ca: bool) -> None:
        self._table = table
        self.has_client_ca = has_client_ca
        if table is not None and table.value.sans and not has_client_ca:
            log.warning("the auth file's names of certificates count for nothing: no client shows one without --tls-client-ca")

    def refresh(self) -> int:
        """Takes a changed file over. Returns how often one could not be."""
        if self._table is None:
            return 0
        _ = self._table.value
        return self._table.num_failures

    def identify(self, authorization: str | None, sans: Sequence[str] = ()) -> Principal:
        """The caller. authorization: the header's value; sans: subject alternative names of a certificate that TLS has checked.

        A token decides where one is given. Raises Refusal with UNAUTHENTICATED.
        """
        table = None if self._table is None else self._table.value
        if table is None and not self.has_client_ca:
            return ANONYMOUS
        if authorization is not None and table is not None:
            scheme, _, token = authorization.partition(" ")
            if scheme.lower() != "bearer" or not token:
                raise Refusal(Reason.TOKEN_INVALID, message="the authorization metadata must be `Bearer TOKEN`")
            return table.of_token(token.strip(), datetime.now(UTC))
        if table is not None:
            known = [table.sans[san] for san in sans if san in table.sans]
            if not known:
                raise Refusal(Reason.TOKEN_MISSING, message="" if self.has_client_ca else "a bearer token that is known here is needed")
            return known[0]
        if not sans:
            raise Refusal(Reason.TOKEN_MISSING, message="a client certificate with a subject alternative name is needed")
        return of_certificate(sans[0])

    def allow(self, principal: Principal, method: str) -> None:
        """Raises Refusal with PERMISSION_DENIED unless one of the principal's roles opens the method."""
        needed = roles_for(method)
        if not needed & principal.roles:
            names = sorted(role.value for role in needed)
            raise Refusal(Reason.ROLE_MISSING, message=f"this method needs the role {' or '.join(names)}")


def allow_model(principal: Principal, model: str) -> None:
    """Raises Refusal unless the principal may use the model served under this name."""
    if principal.models and model not in principal.models:
        raise Refusal(Reason.MODEL_NOT_ALLOWED, resource=("pagecast.v1.Model", model[:128]))


def allow_priority(principal: Principal, priority: int) -> None:
    """Raises Refusal for a class above the principal's highest. Lower numbers are more urgent."""
    if priority < principal.max_priority:
        highest = principal.max_priority.name.lower()
        text = f"the caller's highest priority is {highest}, not {Priority(priority).name.lower()}"
        raise Refusal(Reason.PRIORITY_NOT_ALLOWED, message=text)


def watch_auth_file(path: str | None) -> Reloading[auth_file.AuthTable] | None:
    """The principals' file, followed as it changes. Raises auth_file.AuthFileError."""
    if path is None:
        return None
    try:
        return Reloading("auth file", [Path(path)], lambda: auth_file.read(Path(path)))
    except OSError as error:
        raise auth_file.AuthFileError(f"cannot read the auth file {path}: {error.strerror}") from None
