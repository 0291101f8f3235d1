"""Which requests run: jobs wait, are admitted, computed in steps, preempted and finished. No tensors here."""
