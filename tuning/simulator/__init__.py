"""Replays a trace through instances, a prefix cache in tiers and their queues, and says what each request would have
seen."""
