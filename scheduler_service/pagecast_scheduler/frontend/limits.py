"""The one table of limits: the validator enforces it, GetModel publishes it."""

from dataclasses import dataclass

from pagecast.v1 import model_pb2
from pagecast_scheduler.frontend.chat import MAX_RENDERED_CHARS
from pagecast_wire.intake import EngineLimits, ModelFacts
from pagecast_wire.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit on a request. The first four come from the model, the engine and the configuration; the rest are ours.

    max_pool_tokens: tokens that all usable blocks hold (block 0 is never allocated). Lengths of texts are UTF-8 bytes.
    """

    vocab_size: int
    max_model_len: int
    max_pool_tokens: int
    max_message_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    max_stop_texts: int = 16
    max_stop_text_bytes: int = 1024
    max_stop_token_ids: int = 128
    max_request_id_length: int = 128
    max_temperature: float = 100.0
    max_penalty: float = 2.0
    max_repetition_penalty: float = 10.0
    max_num_sequences: int = 64
    max_logit_bias_tokens: int = 1024
    max_logit_bias: float = 100.0
    max_allowed_token_ids: int = 8192
    max_bad_sequences: int = MAX_BAD_WORDS
    max_bad_sequence_tokens: int = MAX_BAD_WORD_TOKENS
    max_logprobs: int = MAX_LOGPROBS
    max_prompt_logprobs_tokens: int = 8192
    max_constraint_bytes: int = 1 << 17
    max_constraint_depth: int = 64
    max_choices: int = 1024
    max_tools: int = 128
    max_tools_bytes: int = 1 << 17
    max_template_kwargs_bytes: int = 1 << 14
    max_rendered_chars: int = MAX_RENDERED_CHARS
    max_chat_messages: int = 1024
    max_role_length: int = 64
    max_cache_scope_length: int = 128
    max_duration_s: int = 7 * 24 * 3600
    max_labels: int = 16
    max_label_key_length: int = 64
    max_label_value_length: int = 512
    max_credit_tokens: int = 65_536
    min_progress_s: float = 1.0
    max_progress_s: float = 60.0

    @property
    def max_request_tokens(self) -> int:
        """Most tokens, prompt and output together, that one request can ever hold."""
        return min(self.max_model_len, self.max_pool_tokens)

    def to_proto(self) -> model_pb2.ModelLimits:
        """The table as GetModel shows it."""
        names = [f.name for f in model_pb2.ModelLimits.DESCRIPTOR.fields]
        return model_pb2.ModelLimits(**{name: getattr(self, name) for name in names})


def limits_of(model: ModelFacts, engine: EngineLimits, max_message_bytes: int) -> Limits:
    """The table for a running engine."""
    return Limits(
        vocab_size=model.vocab_size,
        max_model_len=engine.max_model_len,
        max_pool_tokens=max(engine.num_blocks - 1, 0) * engine.block_size,
        max_message_bytes=max_message_bytes,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
    )
