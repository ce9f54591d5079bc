"""What all services of a front end share: the engine link, the tokenizer, names, limits, and whether it still takes requests."""

import asyncio
from dataclasses import dataclass, field

from pagecast_scheduler.frontend.config import FrontendConfig
from pagecast_scheduler.frontend.constraint_checker import ConstraintChecker
from pagecast_scheduler.frontend.engine_client import EngineClient
from pagecast_scheduler.frontend.errors import Reason, Refusal, model_unknown
from pagecast_scheduler.frontend.limits import Limits, limits_of
from pagecast_scheduler.frontend.prompts import PromptMaker
from pagecast_wire.intake import FrontendWelcome, ServingState


@dataclass(slots=True)
class ServiceState:
    """Shared by the servicers of one process."""

    config: FrontendConfig
    engine: EngineClient
    prompts: PromptMaker
    namespace_key: bytes
    constraints: ConstraintChecker = field(default_factory=ConstraintChecker)
    is_announcing_end: bool = False  # health says NOT_SERVING, requests are still taken
    is_draining: bool = False  # requests are refused
    _limits: tuple[FrontendWelcome, FrontendConfig, Limits] | None = field(default=None, init=False)  # of this welcome and configuration
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # streams without an end of their own end now

    @property
    def model_name(self) -> str:
        """The name clients use."""
        welcome = self.engine.welcome
        return self.config.served_model_name or (welcome.model.name if welcome is not None else "")

    @property
    def serving_state(self) -> ServingState:
        """State as shown to clients and routers."""
        return ServingState.DRAINING if self.is_announcing_end else self.engine.state

    def limits(self) -> Limits:
        """The table of limits. Raises Refusal before the engine is known."""
        welcome = self.engine.welcome
        if welcome is None:
            raise Refusal(Reason.STARTING)
        known = self._limits
        if known is None or known[0] is not welcome or known[1] is not self.config:
            known = self._limits = (welcome, self.config, limits_of(welcome.model, welcome.limits, self.config.max_message_bytes))
        return known[2]

    def check_model(self, name: str) -> None:
        """Raises Refusal unless the name is empty or that of the served model, or while the engine is unknown."""
        if self.engine.welcome is None:
            raise Refusal(Reason.STARTING)
        if name and name != self.model_name:
            raise model_unknown(name, self.model_name)
