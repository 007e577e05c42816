"""Constrains answers: to a form, allowed tokens, bad words, a budget for reasoning.
Its modules:

    one answer's masks          guide, guidance, restrictions
    forms as grammars           grammars
    in a process of its own     process
"""

from milepost.engine.constraints.grammars import (
    JSON_OPTIONS,
    CompiledForm,
    Forms,
    vocabulary_of,
    without_unknown_formats,
)
from milepost.engine.constraints.guidance import FormGuide, Mask, form_masks
from milepost.engine.constraints.guide import Guide, masks, masks_along
from milepost.engine.constraints.process import FormChecks
from milepost.engine.constraints.restrictions import (
    Restriction,
    RuleBook,
    Rules,
    has,
    think_ids,
    without,
)

__all__ = [
    "JSON_OPTIONS",
    "CompiledForm",
    "FormChecks",
    "FormGuide",
    "Forms",
    "Guide",
    "Mask",
    "Restriction",
    "RuleBook",
    "Rules",
    "form_masks",
    "has",
    "masks",
    "masks_along",
    "think_ids",
    "vocabulary_of",
    "without",
    "without_unknown_formats",
]
