"""Training of the model: data, losses, optimisers, stages and the loop. Imports the model, never the engine."""
