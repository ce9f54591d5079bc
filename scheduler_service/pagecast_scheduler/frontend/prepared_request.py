"""A valid request before it is sent: what a front end made of it, and the empty sequences that its output will fill."""

from dataclasses import dataclass, field

from pagecast_scheduler.frontend.answer_parser import AnswerParser, AnswerPlan
from pagecast_scheduler.frontend.detokenizer import Detokenizer
from pagecast_scheduler.frontend.output_sequence import OutputSequence
from pagecast_scheduler.frontend.principals import ANONYMOUS, Principal
from pagecast_scheduler.frontend.prompt_logprobs import PromptRecords
from pagecast_scheduler.frontend.tokenizer import Tokenizer
from pagecast_scheduler.frontend.validation import CheckedSpec
from pagecast_wire.intake import Submit


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request, tokenized. `submit` bears no key yet; the engine client gives one. deadline: monotonic seconds, or None.
    answer: the forms that its output is read with."""

    request_id: str
    model: str
    model_digest: str
    spec: CheckedSpec
    submit: Submit
    num_prompt_tokens: int
    deadline: float | None
    principal: Principal = ANONYMOUS
    answer: AnswerPlan = field(default_factory=AnswerPlan)


def prompt_records_of(request: PreparedRequest) -> PromptRecords | None:
    """Where the prompt's log-probabilities gather, if they were asked for."""
    if request.submit.sampling.num_prompt_logprobs < 0:
        return None
    return PromptRecords(request.submit, request.spec.max_prompt_positions)


def output_sequences(request: PreparedRequest, tokenizer: Tokenizer) -> list[OutputSequence]:
    """The sequences of a request, empty."""
    spec, answer = request.spec, request.answer
    eager = bool(spec.stop_texts)
    shown = {} if spec.skip_special_tokens else tokenizer.special_bytes()
    if spec.skip_special_tokens and answer.shown_specials:
        names = {name.encode() for name in answer.shown_specials}
        shown = {token_id: name for token_id, name in tokenizer.special_bytes().items() if name in names}
    made = []
    for index in range(request.submit.num_sequences):
        detokenizer = None
        if spec.want_text or eager:
            detokenizer = Detokenizer(
                tokenizer, spec.stop_texts, spec.min_output_tokens, include_stop=spec.include_stop, shown=shown
            )
        parser = None if answer.is_plain else AnswerParser(answer, request.request_id, index)
        made.append(OutputSequence(index, detokenizer, eager, parser))
    return made
