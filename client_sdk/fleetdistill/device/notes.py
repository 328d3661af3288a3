"""The counts that a handler notes about an answer (`Answer.notes`), in words for the app."""

from __future__ import annotations

from collections.abc import Mapping

_WORDS = {
    "classes_too_small": "none of the {} classes here has min_samples samples, so nothing of these rows is sent",
    "closed_form_instead": "this device answers in closed form instead of training a predictor",
    "dkd_batch_clipped_to": "the mini-batch has {} samples, all that there are",
    "own_statistics_kept": "the personal answer is of the device's own statistics, which are better",
    "participations_differ": "server and device count its participations differently",
    "personal_undone": "the training of the personal predictor diverged and was undone",
    "rows_clipped": "{} rows of features were clipped to clip_norm",
    "unknown_ids": "{} sample ids from the server are not known here",
}


def in_words(step: str, notes: Mapping[str, int]) -> str:
    """A sentence of the notes that are not 0."""
    said = [_WORDS.get(name, name.replace("_", " ") + ": {}").format(count) for name, count in notes.items() if count]
    return f"step {step!r}: {'; '.join(said)}"
