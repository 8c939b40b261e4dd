"""Settings before a rank starts: what the user wrote, and whether a run can be meant by it. No step is run here."""
