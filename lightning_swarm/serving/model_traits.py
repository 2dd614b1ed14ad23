"""Properties of a model by which its prompts are cut, and its texts written together or apart."""

from __future__ import annotations

import json
from typing import Any


def positions_depend_on_length(model: Any) -> bool:
    """Return whether a model's position tables depend on the present length of the text."""
    text = json.dumps(model.config.to_dict(), default=str)
    return any(f'"rope_type": "{kind}"' in text for kind in ("dynamic", "longrope"))


def has_own_prompt(model: Any) -> bool:
    """Return whether peft puts tokens of its own before each prompt of a model, or of the model around it."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return True
    # During its own `generate`, peft replaces the inner model's method by one of its own.
    around = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    return around is not None and around is not model and has_own_prompt(around)
