"""Properties of a model that decide whether its prompts are cut, and whether its texts are written together."""

from __future__ import annotations

import json
from typing import Any


def positions_depend_on_length(model: Any) -> bool:
    """Return whether a model's position tables depend on the present length of the text."""
    text = json.dumps(model.config.to_dict(), default=str)
    return any(f'"rope_type": "{kind}"' in text for kind in ("dynamic", "longrope"))


def has_own_prompt(model: Any) -> bool:
    """Return whether peft puts soft tokens before each prompt of this model, or of peft's model around it."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return True
    # During its `generate`, peft's model replaces this method of the inner model by its own bound method.
    outer = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    return outer is not None and outer is not model and has_own_prompt(outer)
