"""Rollouts: a candidate engine gets a share of the traffic and is promoted or rolled back."""
