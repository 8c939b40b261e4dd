"""From a model on meta to one that runs in parallel. Imports `strategies` and what is below."""
