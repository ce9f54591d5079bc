"""A caller's notes on a request: checked, and carried along for logs, spans and operators. They change nothing."""

import string
from collections.abc import Mapping

from pagecast_scheduler.frontend.findings import Findings, shown
from pagecast_scheduler.frontend.limits import Limits

_KEY_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-./")


def check_labels(labels: Mapping[str, str], limits: Limits, found: Findings) -> None:
    """Names each label that cannot be, by its key."""
    if not found.count("spec.labels", len(labels), 0, limits.max_labels, "labels"):
        return
    for key, value in labels.items():
        path = f"spec.labels[{shown(key)}]"
        if not 0 < len(key) <= limits.max_label_key_length or not _KEY_CHARACTERS.issuperset(key):
            found.add(path, f"must have a key of 1 to {limits.max_label_key_length} of A-Z a-z 0-9 _ - . / characters")
        if len(value) > limits.max_label_value_length or not value.isprintable():
            found.add(path, f"must be at most {limits.max_label_value_length} printable characters")
