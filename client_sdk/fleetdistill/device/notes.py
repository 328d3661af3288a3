"""Texts for the app about the counts that a handler adds to an answer (`Answer.notes`)."""

from __future__ import annotations

from collections.abc import Mapping

_TEXTS = {
    "classes_too_small": "none of the device's {} classes has min_samples samples, so no statistics are sent",
    "closed_form_instead": "this device uses the closed form instead of training a predictor",
    "dkd_batch_clipped_to": "the mini-batch has only {} samples, all of the device's data",
    "own_statistics_kept": "the personal model uses the device's own statistics, which are more accurate",
    "participations_differ": "server and device count the device's participations differently",
    "personal_undone": "the training of the personal predictor diverged and was rolled back",
    "rows_clipped": "{} rows of features were clipped to clip_norm",
    "unknown_ids": "{} sample ids from the server are unknown to this device",
}


def notes_text(step: str, notes: Mapping[str, int]) -> str:
    """Returns one sentence with all notes that are not 0."""
    texts = [_TEXTS.get(name, name.replace("_", " ") + ": {}").format(count) for name, count in notes.items() if count]
    return f"step {step!r}: {'; '.join(texts)}"
