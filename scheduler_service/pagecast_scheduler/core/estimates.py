"""How fast the engine is going, from the results it has applied: what refusals by time and retry hints rest on."""

FEWEST_MEASURED = 16
"""Plans whose times must be known before anybody is refused for them: the first ones after a start can be many times slower."""


class Estimates:
    """The least of the first FEWEST_MEASURED plans, exponential averages from there; 0 until something was measured."""

    def __init__(self) -> None:
        self.step_us = 0.0  # one step, one token of a decoding row
        self.us_per_token = 0.0  # engine time per token computed, all requests together
        self._last_applied = 0
        self._num_measured = 0

    def applied(self, planned_at: int, num_steps: int, num_tokens: int, now: int) -> None:
        """A plan of num_steps steps and num_tokens computed tokens completed now."""
        elapsed = max(0, now - max(planned_at, self._last_applied))
        self._last_applied = now
        self._num_measured += 1
        of_step, of_token = elapsed / num_steps, elapsed / max(1, num_tokens)
        if self._num_measured > FEWEST_MEASURED:
            self.step_us += 0.05 * (of_step - self.step_us)
            self.us_per_token += 0.05 * (of_token - self.us_per_token)
        elif elapsed:  # an average that began with one of these would remember it for hundreds of steps
            self.step_us = min(self.step_us or of_step, of_step)
            self.us_per_token = min(self.us_per_token or of_token, of_token)

    def finish_us(self, prefill_tokens: int, output_tokens: int, max_num_batched_tokens: int) -> int:
        """Least time from admission until so many tokens are out, if nobody else took a share. 0: too little is known."""
        if self._num_measured < FEWEST_MEASURED:
            return 0
        return int(self.step_us * (-(-prefill_tokens // max_num_batched_tokens) + max(0, output_tokens - 1)))

    def queue_us(self, queued_tokens: int) -> int:
        """Time to compute the prompts that wait. 0: too little is known."""
        return int(self.us_per_token * queued_tokens) if self._num_measured >= FEWEST_MEASURED else 0

    def retry_after_ms(self, queued_tokens: int) -> int:
        """When a refused client may try again: half of the queue's time, between 0.1 and 30 seconds."""
        wait = int(self.us_per_token * queued_tokens) // 2000 if self.us_per_token else 1000
        return min(30_000, max(100, wait))
