"""The ways in which training code runs a model under a policy: the rows of ``docs/setups.md``, which errors name."""

from __future__ import annotations

from enum import Enum

PAGE = "docs/setups.md"


class TrainingSetup(Enum):
    """By the anchors of the page."""

    HF_TRAINER = "hugging-face-trainer"
    FSDP2_EAGER = "fsdp2-in-eager"
    FSDP2_BLOCKS = "fsdp2-with-compiled-blocks"
    WHOLE_MODEL = "the-whole-model-compiled"
    TRACED = "a-traced-step"
    TORCHTITAN_EAGER = "torchtitan-eager"
    TORCHTITAN_GRAPH = "torchtitan-graph-trainer"
    AUTOPARALLEL = "autoparallel"

    @property
    def link(self) -> str:
        """As messages name it."""
        return f"{PAGE}#{self.value}"


WHAT_FSDP_MEANS = f"{PAGE}#what-fsdp-means"
