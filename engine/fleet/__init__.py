"""Several engines behind one endpoint: replicas, models made of models, and rolling out."""
