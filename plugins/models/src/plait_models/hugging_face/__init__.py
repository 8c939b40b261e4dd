"""Tables of names: the names and layouts of the shipped models' tensors in Hugging Face's libraries."""
