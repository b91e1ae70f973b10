"""Serving: the service, the swap that always puts the old model back, and the evaluation of a served model."""
