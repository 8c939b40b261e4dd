"""From a command's overrides to ranks that live: composing, checking, resuming, starting, watching."""
