"""Tables of names: the names and layouts of models' tensors in Hugging Face's libraries."""

from plait.models.hugging_face.table import Conversion, HuggingFace, Neighbours, Rule

__all__ = ["Conversion", "HuggingFace", "Neighbours", "Rule"]
