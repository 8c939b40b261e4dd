"""Decoders of Hugging Face's `transformers` as models of Plait, each with a spec that is derived from the model."""
