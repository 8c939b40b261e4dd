"""Tables of names: what a model's tensors are called, and how they lie, in Hugging Face's libraries."""

from plait.models.hugging_face.table import HuggingFace, Layout, Neighbours, Rule

__all__ = ["HuggingFace", "Layout", "Neighbours", "Rule"]
